"""Launch profiles: what they print is what vLLM takes, and their conditions are looked at before anything starts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentserve.cli import build_cli
from agentserve.engine_evidence import parse_flags
from agentserve.errors import SetupError
from model.m3.launch import LAUNCH_PROFILES, Draft, Finding, Offload, arguments, check_launch, engine_flags, environment, offload_flags


@pytest.fixture(scope="module")
def vllm_parser() -> Any:
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM itself imports
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize("name", LAUNCH_PROFILES)
def test_vllm_parses_every_profile(name: str, vllm_parser: Any) -> None:
    profile = LAUNCH_PROFILES[name]
    flags = engine_flags(profile, max_num_seqs=56, kv_events_endpoint="tcp://*:5557")
    parsed = vllm_parser.parse_args(["--model", profile.model, *arguments(flags)])
    assert parsed.tensor_parallel_size == profile.tp
    assert parsed.block_size == 128
    assert parsed.enable_prefix_caching is True
    assert parsed.kv_events_config.enable_kv_cache_events is True
    reuse = (parsed.hf_overrides or {}).get("text_config", {}).get("index_topk_freq", 1)
    assert reuse == profile.index_topk_freq
    assert (parsed.speculative_config is not None) == (profile.draft is not None)


@pytest.mark.parametrize("name", LAUNCH_PROFILES)
def test_arguments_are_read_back_as_the_flags_they_came_from(name: str) -> None:
    flags = engine_flags(LAUNCH_PROFILES[name], max_num_seqs=56, kv_events_endpoint="tcp://*:5557")
    read = parse_flags(arguments(flags))
    assert read == {key: value if isinstance(value, dict) or value is True else str(value) for key, value in flags.items()}


def _fatal(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.fatal]


@pytest.mark.parametrize("name", LAUNCH_PROFILES)
def test_every_profile_may_start(name: str) -> None:
    assert _fatal(check_launch(LAUNCH_PROFILES[name], concurrency=28)) == []


def test_two_kv_heads_a_rank_are_named_as_what_paged_sparse_attention_lacks() -> None:
    assert any("2 and falls back" in finding.what for finding in check_launch(LAUNCH_PROFILES["mxfp4-tp2"], concurrency=8))
    assert not any("paged sparse" in finding.what for finding in check_launch(LAUNCH_PROFILES["mxfp4-tp4"], concurrency=8))


def test_index_reuse_is_refused_where_shapes_are_fixed() -> None:
    profile = replace(LAUNCH_PROFILES["mxfp4-tp4"], index_topk_freq=4)
    assert ["index reuse" in finding.what for finding in _fatal(check_launch(profile, concurrency=8))] == [True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft": Draft("d", 3, attention_backend=None)}, "does not reach the draft"),
        ({"quantization": "mxfp8"}, "emulated MXFP8"),
        ({"offload": Offload(1 << 30, chunk_tokens=200)}, "no multiple"),
        ({"offload": Offload(1 << 30, read_ttl_seconds=300)}, "sessions pause longer"),
    ],
)
def test_conditions_that_cost_weeks_are_found(change: dict[str, Any], words: str) -> None:
    profile = replace(LAUNCH_PROFILES["agentx-mxfp4-tp4"], **change)
    assert any(words in finding.what for finding in check_launch(profile, concurrency=128))
    assert not any(words in finding.what for finding in check_launch(LAUNCH_PROFILES["agentx-mxfp4-tp4"], concurrency=28))


def test_each_rank_has_its_own_offload_server_and_no_port_is_taken_twice() -> None:
    profile = LAUNCH_PROFILES["agentx-mxfp4-tp4-lmcache"]
    servers = offload_flags(profile)
    ports = [port for server in servers for port in (server["port"], server["http-port"])]
    assert len(servers) == profile.tp
    assert len({*ports, 5557, 8001}) == 2 * profile.tp + 2
    urls = engine_flags(profile, max_num_seqs=8)["kv-transfer-config"]["kv_connector_extra_config"]["lmcache.mp.server_urls"]
    assert urls.split(",") == [f"tcp://127.0.0.1:{server['port']}" for server in servers]
    assert environment(profile)["PYTHONHASHSEED"] == "0"


def _printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        build_cli()(words)
    assert not ended.value.code
    return capsys.readouterr().out


def test_the_command_line_prints_what_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    printed = _printed(["model", "launch", "agentx-mxfp4-tp4-lmcache", "--concurrency", "32"], capsys)
    lines = printed.splitlines()
    assert "export VLLM_ROCM_USE_AITER=1" in lines
    assert sum(line.startswith("lmcache server ") and line.endswith(" &") for line in lines) == 4
    assert lines[-1].startswith("vllm serve amd/MiniMax-M3-MXFP4 --port 8001 ")
    assert "--max-num-seqs 64" in lines[-1]


def test_an_unknown_profile_is_answered_with_those_there_are() -> None:
    with pytest.raises(SetupError, match="agentx-mxfp4-tp4"):
        build_cli()(["model", "launch", "nothing"])


def test_the_audit_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    log.write_text("INFO Graph capturing finished in 12 secs, took 1.00 GiB\n")
    printed = msgspec.json.decode(_printed(["model", "audit", "--log", str(log), "--json"], capsys))
    words = {row.pop("fast path"): row for row in printed["fast paths"]}
    assert words["graph capture"] == {"eligible": "yes", "configured": "not shown", "executed": "yes"}
    assert words["prefix caching"]["executed"] == "not shown"
    with pytest.raises(SetupError, match="nothing to look at"):
        build_cli()(["model", "audit"])
