"""Launch profiles of MiniMax-M3 on MI355X as data, and the command lines, environment and conditions that follow from them.

Source of the recipes: InferenceX `benchmarks/single_node/agentic/minimaxm3_fp4_mi355x_mtp.sh` (commit 73bd8e200) and the published
optimisation report; what a recipe leaves to the engine's default is left to it here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model.m3.config import MINIMAX_M3
from model.m3.sharding import Shard


@dataclass(frozen=True, slots=True)
class Draft:
    """An EAGLE3 draft. Its attention backend has to be said: the target's does not reach it."""

    model: str
    num_tokens: int
    attention_backend: str | None = "TRITON_ATTN"
    synthetic_acceptance_length: float | None = None
    """Benchmarks that replay recorded answers fix how many tokens a step yields; None in production."""


@dataclass(frozen=True, slots=True)
class Offload:
    """LMCache in its multiprocess form, one server a rank."""

    bytes_per_rank: int
    chunk_tokens: int = 256
    read_ttl_seconds: int = 7200
    first_port: int = 6555
    """Of the first rank's server. Not 5555 and up: the engine announces its blocks at 5557."""
    first_http_port: int = 8180


@dataclass(frozen=True, slots=True)
class LaunchProfile:
    """One way to start the engine. `role`: both, prefill or decode, for prefill and decode apart."""

    name: str
    summary: str
    model: str
    tp: int
    quantization: str
    """mxfp4 or mxfp8: the checkpoint's, stated for the conditions below."""
    max_num_batched_tokens: int = 32_768
    gpu_memory_utilization: float = 0.85
    kv_cache_dtype: str = "fp8"
    attention_backend: str = "TRITON_ATTN"
    index_topk_freq: int = 1
    """1: every sparse layer chooses its own blocks."""
    expert_parallel: bool = False
    draft: Draft | None = None
    offload: Offload | None = None
    role: str = "both"
    fixed_shape: bool = False
    """A fixed-shape comparison (8K/1K and the like), where work must not be left out."""
    environment: Mapping[str, str] = field(default_factory=dict)


_EAGLE = Draft("Inferact/MiniMax-M3-EAGLE3-GQA", 3)
_GIB = 1 << 30
_MXFP4, _MXFP8 = "amd/MiniMax-M3-MXFP4", "amd/MiniMax-M3-MXFP8"

LAUNCH_PROFILES: dict[str, LaunchProfile] = {
    profile.name: profile
    for profile in (
        LaunchProfile(
            "agentx-mxfp4-tp4",
            "agent sessions, GPU-resident: the published point at 28 sessions",
            _MXFP4,
            4,
            "mxfp4",
            index_topk_freq=4,
            draft=_EAGLE,
        ),
        LaunchProfile(
            "agentx-mxfp4-tp4-lmcache",
            "agent sessions past the knee: with a CPU tier",
            _MXFP4,
            4,
            "mxfp4",
            index_topk_freq=4,
            draft=_EAGLE,
            offload=Offload(74 * _GIB),
        ),
        LaunchProfile(
            "agentx-mxfp4-tp2",
            "agent sessions on two GPUs, few at a time",
            _MXFP4,
            2,
            "mxfp4",
            index_topk_freq=4,
            draft=_EAGLE,
            environment={"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "0"},
        ),
        LaunchProfile("mxfp4-tp4", "fixed shapes, MXFP4 on four GPUs", _MXFP4, 4, "mxfp4", fixed_shape=True),
        LaunchProfile("mxfp4-tp4-eagle3", "fixed shapes with an EAGLE3 draft", _MXFP4, 4, "mxfp4", draft=_EAGLE, fixed_shape=True),
        LaunchProfile("mxfp4-tp2", "fixed shapes, MXFP4 on two GPUs", _MXFP4, 2, "mxfp4", fixed_shape=True),
        LaunchProfile("mxfp8-tp4", "fixed shapes, MXFP8 on four GPUs", _MXFP8, 4, "mxfp8", fixed_shape=True),
        LaunchProfile("pd-prefill-tp4", "prefill worker; start two of them", _MXFP4, 4, "mxfp4", role="prefill"),
        LaunchProfile("pd-decode-tp4", "decode worker for two prefill workers", _MXFP4, 4, "mxfp4", role="decode"),
    )
}

_ROCM_ENVIRONMENT = {
    "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_USE_AITER_MOE": "1",
    "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": "1",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": "0",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": "256",
    "PYTHONNOUSERSITE": "1",
    "PYTHONHASHSEED": "0",  # offload and several engines hash alike only with one seed
}


def environment(profile: LaunchProfile) -> dict[str, str]:
    """Environment variables of the engine's processes."""
    return {**_ROCM_ENVIRONMENT, **profile.environment}


def engine_flags(profile: LaunchProfile, *, max_num_seqs: int, kv_events_endpoint: str | None = None) -> dict[str, Any]:
    """Flags of `vllm serve`, without dashes: True for a bare flag, a mapping for one that takes JSON.

    `max_num_seqs`: running requests at once; twice the sessions leaves room for their sub-agents. With `kv_events_endpoint` (ZMQ) the
    engine announces its blocks, which agentserve's mirror reads.
    """
    flags: dict[str, Any] = {
        "tensor-parallel-size": profile.tp,
        "trust-remote-code": True,
        "block-size": MINIMAX_M3.block_size,
        "gpu-memory-utilization": profile.gpu_memory_utilization,
        "enable-chunked-prefill": True,
        "max-num-batched-tokens": profile.max_num_batched_tokens,
        "max-num-seqs": max_num_seqs,
        "language-model-only": True,
        "enable-prefix-caching": True,
        "enable-prompt-tokens-details": True,
        "attention-backend": profile.attention_backend,
        "moe-backend": "aiter",
        "kv-cache-dtype": profile.kv_cache_dtype,
    }
    if profile.expert_parallel:
        flags["enable-expert-parallel"] = True
    if profile.index_topk_freq > 1:
        # Nested: at the top level the image-and-text checkpoint does not pass it on to its text backbone, without a word.
        flags["hf-overrides"] = {"text_config": {"use_index_cache": True, "index_topk_freq": profile.index_topk_freq}}
    if profile.draft is not None:
        flags["speculative-config"] = _speculative(profile.draft)
    if profile.offload is not None:
        flags["kv-transfer-config"] = _lmcache_connector(profile, profile.offload)
    elif profile.role != "both":
        role = "kv_producer" if profile.role == "prefill" else "kv_consumer"
        flags["kv-transfer-config"] = {"kv_connector": "NixlConnector", "kv_role": role}
    if kv_events_endpoint is not None:
        flags["kv-events-config"] = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": kv_events_endpoint}
    return flags


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """Flags as a command line's arguments; an object becomes compact JSON."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if isinstance(value, Mapping):
            words.append(json.dumps(value, separators=(",", ":")))
        elif value is not True:
            words.append(str(value))
    return words


def _speculative(draft: Draft) -> dict[str, Any]:
    config: dict[str, Any] = {"method": "eagle3", "model": draft.model, "num_speculative_tokens": draft.num_tokens}
    if draft.attention_backend is not None:
        config["attention_backend"] = draft.attention_backend
    if draft.synthetic_acceptance_length is not None:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": draft.synthetic_acceptance_length}
    return config


def _lmcache_connector(profile: LaunchProfile, offload: Offload) -> dict[str, Any]:
    urls = ",".join(f"tcp://127.0.0.1:{offload.first_port + rank}" for rank in range(profile.tp))
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.server_urls": urls, "lmcache.mp.mq_timeout": 6000.0},
    }


def offload_flags(profile: LaunchProfile) -> list[dict[str, Any]]:
    """Flags of `lmcache server`, one mapping for each rank's server; empty without a CPU tier."""
    offload = profile.offload
    if offload is None:
        return []
    gigabytes = round(offload.bytes_per_rank / _GIB)
    return [
        {
            "port": offload.first_port + rank,
            "http-port": offload.first_http_port + rank,
            "l1-size-gb": gigabytes,
            "l1-init-size-gb": min(10, gigabytes),
            "l1-read-ttl-seconds": offload.read_ttl_seconds,
            "chunk-size": offload.chunk_tokens,
            "max-workers": 2,
            "eviction-policy": "LRU",
            "supported-transfer-mode": "lmcache_driven",
        }
        for rank in range(profile.tp)
    ]


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that a launch does not meet. `fatal`: it must not start like that."""

    what: str
    fix: str
    fatal: bool = False


def check_launch(profile: LaunchProfile, *, concurrency: int) -> list[Finding]:
    """Conditions of the fast paths and of fair comparison, looked at before anything starts."""
    shard = Shard(MINIMAX_M3, profile.tp, profile.expert_parallel)
    findings = []
    if shard.num_kv_heads != 1:
        findings.append(
            Finding(
                f"paged sparse attention needs one KV head a rank; TP{profile.tp} has {shard.num_kv_heads} and falls back",
                f"use TP{MINIMAX_M3.num_key_value_heads} or more, or expect the Triton path",
            )
        )
    if profile.fixed_shape and profile.index_topk_freq > 1:
        findings.append(
            Finding(
                "index reuse leaves out work, so a fixed-shape comparison with it compares different work",
                "set index_topk_freq to 1 for this comparison",
                fatal=True,
            )
        )
    if profile.draft is not None and profile.draft.attention_backend is None:
        findings.append(
            Finding("the target's attention backend does not reach the draft model", "name attention_backend in the speculative config")
        )
    if profile.quantization == "mxfp8" and concurrency >= 64:
        findings.append(
            Finding(
                f"at {concurrency} sequences and 8K inputs the emulated MXFP8 linear was faster than the native one (from 64 on)",
                "measure both; below 64 the native one wins",
            )
        )
    if profile.offload is not None and profile.offload.chunk_tokens % MINIMAX_M3.block_size:
        findings.append(
            Finding(
                f"an offload chunk of {profile.offload.chunk_tokens} tokens is no multiple of the {MINIMAX_M3.block_size}-token block",
                f"use a multiple of {MINIMAX_M3.block_size}",
                fatal=True,
            )
        )
    if profile.offload is not None and profile.offload.read_ttl_seconds < 600:
        findings.append(
            Finding(
                f"stored chunks may not be read for longer than {profile.offload.read_ttl_seconds} s; sessions pause longer",
                "set the read TTL to hours: 7200",
            )
        )
    return findings
