"""The LMCache server's command line and what vLLM is told of it."""

from __future__ import annotations

import asyncio
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.lmcache import SHARED_MEMORY, remove_orphans
from agentserve.engines.lmcache_command import LmcacheOptions, connector_args, lmcache_command
from agentserve.engines.plugin.options import transfer_config
from agentserve.errors import SetupError
from agentserve.settings import load
from agentserve.starting import follow_offload, make_engines
from prefix_cache.mirror import Mirror


def test_a_chunk_that_is_no_multiple_of_the_block_is_refused_with_one_that_is() -> None:
    with pytest.raises(SetupError, match="--offload-chunk-tokens 256"):
        LmcacheOptions(1 << 30, chunk_tokens=300, block_size=128)
    with pytest.raises(SetupError, match="multiple of the engine's block of 128"):
        follow_offload(load({("offload", "tier"): "lmcache", ("offload", "chunk_tokens"): 64}), Mirror(128), None)


@pytest.mark.parametrize("url", ["rediss://h:1", "redis://", "redis://h/3", "h:6379"])
def test_a_second_level_that_lmcache_cannot_reach_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="--offload-url"):
        LmcacheOptions(1 << 30, url=url)


def test_the_second_level_is_named_and_its_password_is_not_among_the_arguments() -> None:
    options = LmcacheOptions(512 << 20, url="redis://me:se%20cret@host:7000/0")
    command = lmcache_command(options, 1, 2, Path("/run/password"))
    values = dict(pairwise(command))
    assert msgspec.json.decode(values["--l2-adapter"]) == {"type": "resp", "host": "host", "port": 7000, "num_workers": 2}
    assert (values["--l1-size-gb"], values["--port"], values["--http-port"]) == ("0.5", "1", "2")
    assert options.password == "se cret"
    assert not any("cret" in word for word in command)
    assert "LMCACHE_RESP_USERNAME=me" in command


@pytest.mark.case("KVM-13")
def test_generated_tokens_are_kept_and_a_failed_load_is_computed() -> None:
    flag, text = connector_args(5555)
    config = msgspec.json.decode(text)
    assert flag == "--kv-transfer-config"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["lmcache.mp.save_decode_cache"] is True
    assert config["kv_connector_extra_config"]["lmcache.mp.port"] == 5555


def test_an_exclusive_tier_is_kept_by_the_plugin_and_needs_one(tmp_path: Path) -> None:
    asked: dict[tuple[str, ...], Any] = {("offload", "tier"): "exclusive", ("offload", "bytes"): 1 << 21}
    with pytest.raises(SetupError, match="--engine-plugin"):
        make_engines(load(asked), print)
    (made,) = make_engines(load(asked | {("engine", "plugin"): "class_hazard", ("cache_folder",): tmp_path}), print)
    assert isinstance(made.engine, EmbeddedEngine)
    plugin = made.engine._options.plugin
    assert plugin is not None
    assert msgspec.json.decode(transfer_config(plugin))["kv_connector_extra_config"] == {"tier_bytes": 1 << 21}


def test_shared_memory_of_ranks_that_end_a_moment_later_is_removed_and_that_of_others_stays() -> None:
    with subprocess.Popen(["sleep", "0.6"]) as rank, subprocess.Popen(["sleep", "60"]) as other:
        segments = {process: SHARED_MEMORY / f"lmcache_kv_{process.pid}_0" for process in (rank, other)}
        for segment in segments.values():
            segment.touch()
        try:
            asyncio.run(remove_orphans(set(segments.values()), seconds=2))
            assert [segment.exists() for segment in segments.values()] == [False, True]
        finally:
            other.kill()
            segments[other].unlink(missing_ok=True)
