"""MiniMax-M3 on MI355X and on an H200 as profiles: geometry from `model.m3`, limits from data sheets, constants fitted to published points.

What each was fitted to, what was held back and how far off it is, is in `replays.simulator.published`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from model.m3.config import MINIMAX_M3
from model.m3.dtypes import Dtype
from model.m3.memory import WeightFormat, implied_other_bytes, plan_memory
from model.m3.sharding import Shard
from replays.simulator.cost import Profile
from replays.simulator.geometry import H200, MI355X, Build, Device, Efficiency, GeometryCost
from replays.simulator.handover import plan_reads
from replays.simulator.options import EngineOptions

PUBLISHED_CAPACITY_TOKENS = 6_264_960
"""Of MXFP4 at TP4 with 0.85 of the memory."""
_UTILIZATION = 0.85
_MAX_BATCHED_TOKENS = 32_768
_FRONT_TOKEN_SECONDS = 2.2e-6
"""What an engine's own front spends on text, per prompt token: 220 ms for 100,000 tokens were measured on an MI300X machine. Only the
AgentX profile has it: that recipe sends text, and this server sends ids."""
_ACCEPTANCE = 2.78
"""InferenceX's golden acceptance length of the EAGLE3-GQA draft at three draft tokens, thinking on."""
_NUM_DRAFTS = 3

_STEP_SECONDS, _MEMORY_SHARE, _ATTENTION_SHARE = 0.0044, 0.888, 0.294
_COMPUTE_SHARE = {Dtype.MXFP8: 0.142, Dtype.MXFP4: 0.211}
_PREFILL_ATTENTION_SHARE = 0.25
"""Taken over from the H200's fit: at 8K inputs it hardly shows."""
_AGENTX_STEP_SECONDS = 0.081
_EARLY_PD = Efficiency(0.0138, 0.888, 0.0565, 0.294, _PREFILL_ATTENTION_SHARE)
_H200 = Efficiency(0.00052, 0.715, 0.70, 1.0, _PREFILL_ATTENTION_SHARE)


def _weights(dtype: Dtype) -> WeightFormat:
    """MXFP8 checkpoints quantise the other linear layers too; MXFP4 ones leave them in bf16."""
    return WeightFormat(dtype, Dtype.MXFP8 if dtype is Dtype.MXFP8 else Dtype.BF16)


def _efficiency(dtype: Dtype) -> Efficiency:
    return Efficiency(_STEP_SECONDS, _MEMORY_SHARE, _COMPUTE_SHARE[dtype], _ATTENTION_SHARE, _PREFILL_ATTENTION_SHARE)


def capacity_tokens(dtype: Dtype, tp: int) -> int | None:
    """What fits beside the weights, with as much for everything else as the published capacity leaves; None where nothing does."""
    published = Build(Shard(MINIMAX_M3, 4), _weights(Dtype.MXFP4))
    device = MI355X.memory_bytes
    other = implied_other_bytes(
        published.cache, published.weights, device_bytes=device, utilization=_UTILIZATION, tokens=PUBLISHED_CAPACITY_TOKENS
    )
    build = Build(Shard(MINIMAX_M3, tp), _weights(dtype))
    try:
        plan = plan_memory(build.cache, build.weights, device_bytes=device, utilization=_UTILIZATION, other_bytes=other)
    except ValueError:
        return None
    return plan.capacity_tokens


def _profile(name: str, build: Build, efficiency: Efficiency, capacity: int, about: str, device: Device = MI355X) -> Profile:
    drafts = build.num_drafts
    engine = EngineOptions(
        num_blocks=0,
        block_size=build.shard.config.block_size,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        num_speculative_tokens=drafts,
        acceptance_length=_ACCEPTANCE if drafts else 1.0,
        drops_last_block=bool(drafts),
    )
    return Profile(
        name=name,
        capacity_tokens=capacity,
        engine=engine,
        cost=GeometryCost(build, device, efficiency),
        num_gpus=build.shard.tp,
        kv_bytes_per_token=build.cache.bytes_per_token,
        about=about,
    )


def _plain() -> Iterator[Profile]:
    for dtype in (Dtype.MXFP4, Dtype.MXFP8):
        for tp in (2, 4, 8):
            capacity = capacity_tokens(dtype, tp)
            if capacity is None:
                continue
            for drafts in (0, _NUM_DRAFTS):
                for freq in (1, 4):
                    name = f"m3-mi355x-{dtype}-tp{tp}{'-eagle3' if drafts else ''}{f'-reuse{freq}' if freq > 1 else ''}"
                    build = Build(Shard(MINIMAX_M3, tp), _weights(dtype), index_topk_freq=freq, num_drafts=drafts)
                    about = f"{dtype.upper()} on {tp} GPUs{', EAGLE3' if drafts else ''}{', one indexer in four' if freq > 1 else ''}"
                    yield _profile(name, build, _efficiency(dtype), capacity, about)


def _agentx() -> Profile:
    """The recipe of the published AgentX point. Its software steps slower than that of the fixed-shape points: its step is fitted apart."""
    build = Build(Shard(MINIMAX_M3, 4), _weights(Dtype.MXFP4), index_topk_freq=4, num_drafts=_NUM_DRAFTS)
    efficiency = replace(_efficiency(Dtype.MXFP4), step_seconds=_AGENTX_STEP_SECONDS)
    about = "the published AgentX recipe: MXFP4, TP4, EAGLE3, index reuse"
    return replace(_profile("m3-mi355x-agentx", build, efficiency, PUBLISHED_CAPACITY_TOKENS, about), token_seconds=_FRONT_TOKEN_SECONDS)


def _apart(name: str, tp: int, num_prefill: int, efficiency: Efficiency, about: str) -> Profile:
    """Prefill and decode apart, MXFP4, with engines of the same size."""
    capacity = capacity_tokens(Dtype.MXFP4, tp)
    assert capacity is not None
    build = Build(Shard(MINIMAX_M3, tp), _weights(Dtype.MXFP4))
    one = _profile(name, build, efficiency, capacity, about)
    reads = plan_reads(build.cache, build.cache)
    return replace(one, prefill=one, num_prefill=num_prefill, reads=reads, num_gpus=tp * (num_prefill + 1))


def _h200(freq: int) -> Profile:
    """15 of M3's layers with 16 experts, bf16: what one H200 holds, and what was measured there with vLLM 0.26."""
    build = Build(
        Shard(replace(MINIMAX_M3, num_hidden_layers=15, num_local_experts=16), 1),
        WeightFormat(Dtype.BF16, Dtype.BF16),
        kv_dtype=Dtype.BF16,
        index_topk_freq=freq,
    )
    name = f"m3-15-layers-h200{f'-reuse{freq}' if freq > 1 else ''}"
    one = _profile(name, build, _H200, 2_690_000 // 128 * 128, "15 layers at full width, 16 experts, bf16", H200)
    return replace(one, engine=replace(one.engine, max_num_batched_tokens=16_384))


def m3_profiles() -> dict[str, Profile]:
    """All of them, by name."""
    profiles = [
        *_plain(),
        _agentx(),
        _apart("m3-mi355x-mxfp4-pd-2tp4-tp4", 4, 2, _efficiency(Dtype.MXFP4), "two TP4 engines prefill for one that decodes"),
        _apart("m3-mi355x-mxfp4-pd-tp8-tp8-early", 8, 1, _EARLY_PD, "one TP8 engine prefills for another, with the first software"),
        _h200(1),
        _h200(4),
    ]
    return {profile.name: profile for profile in profiles}
