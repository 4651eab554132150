"""MiniMax-M3's own architecture on the real engine, index reuse off and on: exact turns, full hits, and the gate against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch  # decides whether this file runs
from safetensors.torch import load_file

from agentserve.engines.plugin.index_reuse import RAN
from agentserve.engines.vllm_command import NANO_M3, EmbeddedOptions
from agentserve.errors import SetupError
from benchmarks.m3_nano import complete, judge
from model.m3.config import config_from_json
from model.m3.index_reuse import fixed_plan
from model.nano_m3 import SHAPE, make_nano_m3
from model.reference.causal import fused, run_backbone
from tests.real_engine import CACHE_FOLDER, RealEngine, real_engine
from tests.serving import Served, chat, serving

TEXT = "def total(items):\n    return sum(item.price * item.count for item in items)\n"
REUSE = 4


@pytest.fixture(scope="module", params=[1, REUSE], ids=["each layer chooses", "one of four chooses"])
def freq(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def m3_engine(freq: int) -> Iterator[RealEngine]:
    with real_engine(EmbeddedOptions(CACHE_FOLDER, model=NANO_M3, index_topk_freq=freq, kv_tokens=32_768)) as running:
        yield running


@pytest.fixture(scope="module")
def m3_served(m3_engine: RealEngine) -> Iterator[Served]:
    events = {"engine_events": m3_engine.events_endpoint, "engine_events_replay": m3_engine.replay_endpoint}
    with serving(m3_engine.url, m3_engine.model_folder, **events) as running:
        yield running


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.anyio
async def test_sessions_are_exact_hit_their_ceiling_and_pass_the_gate(m3_served: Served, m3_engine: RealEngine, freq: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Period {freq}. " + TEXT * 60}]
    kinds = []
    for number in range(6):
        reply = await chat(m3_served.url, messages, stream=bool(number % 2), max_tokens=40, temperature=0)
        messages += [reply.message, {"role": "user", "content": f"And file {number}? " + TEXT * 8}]
        kinds.append(reply.turn)
        assert reply.usage is not None
        got = reply.usage["agentserve"]
        cached = reply.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == got["ceiling_block_tokens"] == got["predicted_tokens"]
        assert set(got["missed_tokens"]) <= {"new", "tail"}
    assert kinds == ["first", *["exact"] * 5]
    (session,) = m3_served.server.namespaces.of(None).sessions.values()
    ids = list(session.prompt.ids)
    assert len(ids) > 2 * SHAPE.topk_blocks * SHAPE.block_size, "blocks are left out"
    answer = await complete(m3_engine.url, ids, 24)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * len(ids)
    verdict = judge(m3_engine.model_folder, ids, answer, freq)
    assert verdict.passed, verdict
    other = judge(m3_engine.model_folder, ids, answer, 1 if freq == REUSE else REUSE)
    assert not other.passed, "with random weights layers do not agree, so the gate tells the two apart"
    log = m3_engine.log_path.read_text()
    assert (f"{RAN}: 2 of 5 sparse layers chose" in log) == (freq == REUSE)


def test_the_folder_is_a_real_checkpoint_of_m3(tmp_path: Path) -> None:
    make_nano_m3(tmp_path / "m3", max_model_len=4096)
    parsed = msgspec.json.decode((tmp_path / "m3" / "config.json").read_bytes())
    assert config_from_json(parsed) == SHAPE
    tensors = load_file(tmp_path / "m3" / "model.safetensors")
    held = fused(tensors)
    assert held["layers.1.self_attn.qkv_proj.weight"].shape == (4 * 32 + 2 * 2 * 32 + 2 * 32 + 32, 64)
    assert held["layers.0.self_attn.qkv_proj.weight"].shape == (4 * 32 + 2 * 2 * 32, 64)
    assert held["layers.5.block_sparse_moe.experts.w13_weight"].shape == (8, 160, 64)
    assert sum(map(torch.numel, tensors.values())) == sum(map(torch.numel, held.values())), "nothing is lost or doubled"
    trace = run_backbone(SHAPE, held, torch.arange(300, 900), fixed_plan(5))
    assert torch.allclose(trace.hidden[:, 0], torch.ones(600), atol=0.01), "what lm_head reads as its bias"
    assert 0.9 < float(trace.hidden[:, 1:].std()) < 1.1


def test_reuse_without_an_indexer_unknown_models_and_several_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="one rank only"):
        EmbeddedOptions(tmp_path, model=NANO_M3, tensor_parallel=2)
    with pytest.raises(SetupError, match="needs a model with an indexer"):
        EmbeddedOptions(tmp_path, index_topk_freq=4)
    with pytest.raises(SetupError, match="there are: nano, nano-m3"):
        EmbeddedOptions(tmp_path, model="m3")
