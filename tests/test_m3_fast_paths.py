"""Eligible, configured and executed are three words, and none of them is said without evidence."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentserve.engine_evidence import parse_flags, process_evidence, read_kernels
from agentserve.errors import SetupError
from model.m3.config import MINIMAX_M3
from model.m3.fast_paths import FAST_PATHS, Dispatch, EngineFacts, audit
from model.m3.launch import LAUNCH_PROFILES, engine_flags, environment
from model.m3.sharding import Shard

AGENTX = LAUNCH_PROFILES["agentx-mxfp4-tp4"]
CONFIGURED = EngineFacts(
    shard=Shard(MINIMAX_M3, 4),
    flags=engine_flags(AGENTX, max_num_seqs=56),
    environment=environment(AGENTX),
    decode_tokens=128,
    quantization="mxfp4",
)


def _row(facts: EngineFacts, name: str) -> Dispatch:
    return next(each for each in audit(facts) if each.name.startswith(name))


def test_without_evidence_nothing_is_claimed() -> None:
    for each in audit(EngineFacts()):
        assert each.configured.holds is None, each
        assert each.executed.holds is None, each


def test_configuration_alone_never_shows_execution() -> None:
    assert [each.name for each in audit(CONFIGURED) if each.executed.holds is not None] == []


def test_quick_reduce_is_configured_and_cannot_run_below_its_table() -> None:
    """BF16 at TP4 with INT4 starts at 16 MiB, and a decode step of 128 rows reduces 1.5 MiB."""
    row = _row(CONFIGURED, "compressed all-reduce")
    assert (row.eligible.holds, row.configured.holds, row.executed.holds) == (False, True, None)
    assert "1.5 MiB" in row.eligible.why
    assert "16 MiB" in row.eligible.why
    assert row.is_contradiction
    many = replace(CONFIGURED, decode_tokens=2048)
    assert _row(many, "compressed all-reduce").eligible.holds is True
    lowered = replace(CONFIGURED, environment={**environment(AGENTX), "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "1"})
    assert _row(lowered, "compressed all-reduce").eligible.holds is True
    assert _row(replace(CONFIGURED, kernels={"gemm": 3}), "compressed all-reduce").executed.holds is False
    assert _row(replace(CONFIGURED, kernels={"quickreduce::allreduce_twoshot": 3}), "compressed all-reduce").executed.holds is True


def test_paged_sparse_attention_needs_one_kv_head_a_rank() -> None:
    assert _row(CONFIGURED, "paged sparse").eligible.holds is True
    assert _row(replace(CONFIGURED, shard=Shard(MINIMAX_M3, 2)), "paged sparse").eligible.holds is False


@pytest.mark.parametrize(
    ("overrides", "configured"),
    [
        ({"text_config": {"use_index_cache": True, "index_topk_freq": 4}}, True),
        ({"use_index_cache": True, "index_topk_freq": 4}, False),
        ({"text_config": {"use_index_cache": True, "index_topk_freq": 1}}, False),
        ({"text_config": {"index_topk_freq": 4}}, False),
        ({}, False),
    ],
)
def test_index_reuse_counts_as_configured_only_where_the_text_backbone_sees_it(overrides: dict[str, Any], configured: bool) -> None:
    facts = replace(CONFIGURED, flags={"hf-overrides": overrides})
    word = _row(facts, "cross-layer").configured
    assert word.holds is configured
    assert ("nest it" in word.why) == ("use_index_cache" in overrides)


def test_index_reuse_is_shown_by_fewer_indexer_launches_than_attention_launches() -> None:
    attention = {"minimax_m3_sparse_decode_kernel": 57}
    assert _row(replace(CONFIGURED, kernels={**attention, "index_score_kernel": 15}), "cross-layer").executed.holds is True
    assert _row(replace(CONFIGURED, kernels={**attention, "index_score_kernel": 57}), "cross-layer").executed.holds is False
    assert _row(replace(CONFIGURED, kernels={"gemm": 9}), "cross-layer").executed.holds is None


@pytest.mark.parametrize(
    ("name", "line", "executed"),
    [
        ("AITER indexer", "MiniMax M3 indexer: selected AITER (fp8 MFMA score + top-k) [topk_blocks=16]", True),
        ("AITER indexer", "MiniMax M3 indexer: AITER unavailable (index keys are bf16)", False),
        ("AITER indexer", "MiniMax M3 indexer: selected Triton (no fmha_sm100) [topk_blocks=16]", False),
        ("paged sparse", "MiniMax M3 sparse attention selected MiniMaxM3SparseAiterImpl (kv_cache_dtype=fp8)", True),
        ("paged sparse", "MiniMax M3 sparse attention selected TRITON (kv_cache_dtype=fp8, topk_blocks=16)", False),
        ("fused MoE", "Using 'AITER' Mxfp4 MoE backend.", True),
        ("fused MoE", "Using 'TRITON' MxFp8 MoE backend.", False),
        ("native MXFP8", "Using AiterMxfp8LinearKernel for MXFP8 GEMM", True),
        ("native MXFP8", "Using EmulationMxfp8LinearKernel for MXFP8 GEMM", False),
        ("graph capture", "Graph capturing finished in 31 secs, took 2.10 GiB", True),
    ],
)
def test_the_engines_own_log_lines_are_evidence(name: str, line: str, executed: bool) -> None:
    word = _row(EngineFacts(log=f"INFO 01-01 first line\nINFO 01-01 {line}\n"), name).executed
    assert word.holds is executed
    assert word.why in line


def test_counters_are_evidence_once_something_was_generated() -> None:
    hits = "vllm:prefix_cache_hits_total"
    assert _row(EngineFacts(metrics={hits: 0}), "prefix caching").executed.holds is None
    assert _row(EngineFacts(metrics={hits: 0, "vllm:generation_tokens_total": 9}), "prefix caching").executed.holds is False
    assert _row(EngineFacts(metrics={hits: 128}), "prefix caching").executed.holds is True


def test_every_row_has_its_own_name() -> None:
    names = [path.name for path in FAST_PATHS]
    assert len(names) == len(set(names))


def test_flags_are_read_as_vllm_reads_them() -> None:
    words = [
        "vllm",
        "serve",
        "m",
        "--tensor-parallel-size=4",
        "--enable_prefix_caching",
        "--hf-overrides",
        '{"a": 1}',
        "--x",
        "{broken",
        "--last",
    ]
    assert parse_flags(words) == {
        "tensor-parallel-size": "4",
        "enable-prefix-caching": True,
        "hf-overrides": {"a": 1},
        "x": "{broken",
        "last": True,
    }


def test_a_process_that_is_gone_is_said() -> None:
    with pytest.raises(SetupError, match="cannot read process"):
        process_evidence(2**22 + 7)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_kernels_are_counted_from_a_profilers_trace(tmp_path: Path, name: str) -> None:
    events = [{"name": "a", "cat": "kernel", "dur": 3}, {"name": "a", "cat": "kernel"}, {"name": "b", "cat": "cpu_op"}, {"ph": "M"}]
    content = msgspec.json.encode({"schemaVersion": 1, "traceEvents": events})
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_kernels(path) == {"a": 2}
    path.write_bytes(b"{")
    with pytest.raises(SetupError, match="profiler trace"):
        read_kernels(path)


def test_the_plugins_own_line_shows_that_index_reuse_ran() -> None:
    switch = {"text_config": {"use_index_cache": True, "index_topk_leaders": [0, 0, 2, 2]}}
    facts = replace(CONFIGURED, flags={"hf-overrides": switch}, log="INFO index reuse ran: 2 of 4 sparse layers chose, index keys left out")
    row = _row(facts, "cross-layer index reuse")
    assert (row.configured.holds, row.configured.why) == (True, "2 of 4 sparse layers choose")
    assert row.executed.holds
    assert _row(replace(facts, log="INFO nothing of it"), "cross-layer index reuse").executed.holds is None
