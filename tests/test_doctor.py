"""The doctor finds what is wrong, is silent where nothing is, and says of what it cannot read that it does not know."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from agentserve.doctor import host
from agentserve.doctor.facts import EngineFacts, Facts, ProcessFacts
from agentserve.doctor.launch import as_json, find, options
from agentserve.doctor.offload import quantile
from agentserve.doctor.plugin import eviction_plugin
from agentserve.doctor.read import Where, read
from agentserve.doctor.table import DOCTOR_CHECKS, examine, is_healthy
from agentserve.doctor.verdict import State
from agentserve.engines.plugin.options import PluginOptions, scheduler_args, transfer_config
from agentserve.engines.plugin.wire import PluginState
from agentserve.engines.vllm_command import EmbeddedOptions
from agentserve.errors import SetupError
from benchmarks.doctor_plants import PLANTS, Plant, doctor_score, healthy
from tests.real_engine import CACHE_FOLDER, RealEngine, real_engine
from tests.serving import Served, chat, serving
from tests.upstream import FormatRenderer, KvModel, Upstream, in_thread


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_each_plant_is_found_by_its_check_and_by_no_other(plant: Plant) -> None:
    verdicts = examine(plant.change(healthy()))
    assert {name for name, verdict in verdicts.items() if verdict.state is State.FOUND} == {plant.check}
    assert verdicts[plant.check].fix


def test_a_healthy_deployment_is_fine_in_every_check() -> None:
    verdicts = examine(healthy())
    assert {verdict.state for verdict in verdicts.values()} == {State.FINE}
    assert is_healthy(verdicts)
    assert doctor_score().doctor_found == len(PLANTS) >= 10


def test_every_check_has_a_plant() -> None:
    assert {plant.check for plant in PLANTS} == set(DOCTOR_CHECKS)


def test_what_cannot_be_read_is_unknown_and_never_fine() -> None:
    verdicts = examine(Facts([EngineFacts("http://far-away:8000")]))
    assert {verdict.state for verdict in verdicts.values()} == {State.UNKNOWN}
    assert all(verdict.fix for verdict in verdicts.values())
    blind = replace(healthy(), engines=[replace(healthy().engine, process=None)])
    assert examine(blind)["fast_path"].state is State.UNKNOWN


def test_a_fast_path_that_nothing_shows_is_unknown() -> None:
    engine = healthy().engine
    assert engine.process is not None
    words = (*engine.process.arguments, "--hf-overrides", '{"text_config": {"use_index_cache": true}}')
    facts = replace(healthy(), engines=[replace(engine, process=replace(engine.process, arguments=words))])
    assert examine(facts)["fast_path"].state is State.UNKNOWN


def test_a_development_server_tells_its_options_over_http() -> None:
    config = {
        "parallel_config": {"tensor_parallel_size": 4},
        "kv_transfer_config": {"kv_connector": "X"},
        "model_config": {"hf_overrides": {"a": 1}},
    }
    engine = EngineFacts("http://far-away:8000", config=config)
    assert engine.told("tensor-parallel-size", "1") == "4"
    assert engine.told_json("hf-overrides") == {"a": 1}
    assert engine.told_json("speculative-config") == {}
    assert engine.connectors == [{"kv_connector": "X"}]


def test_a_command_line_is_read_as_vllm_reads_it() -> None:
    words = [
        "vllm",
        "serve",
        "M",
        "--port",
        "9",
        "--max_model_len=5",
        "--no-enable-prefix-caching",
        "--trust-remote-code",
        "--kv",
        '{"a": {"b": 1}}',
    ]
    read_options = options(words)
    assert read_options == {
        "port": "9",
        "max-model-len": "5",
        "enable-prefix-caching": "false",
        "trust-remote-code": "true",
        "kv": '{"a": {"b": 1}}',
    }
    assert find(as_json(read_options["kv"]), "b") == 1
    assert as_json("[1]") == as_json("{") == as_json(None) == {}


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def write_process(proc: Path, pid: int, parent: int, arguments: list[str], environment: Mapping[str, str]) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join(arguments).encode() + b"\0")
    (folder / "environ").write_bytes("".join(f"{name}={value}\0" for name, value in environment.items()).encode())
    (folder / "limits").write_text(
        "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096                 files\n"
    )
    (folder / "stat").write_text(f"{pid} (python (x)) S {parent} 1 1")


def test_processes_are_found_by_their_port_and_their_secrets_left_alone(tmp_path: Path) -> None:
    command = ["python", "-m", "vllm.entrypoints.openai.api_server", "--port", "8123"]
    write_process(tmp_path, 10, 1, ["python", "guard.py", *command], {"PYTHONHASHSEED": "of the guard"})
    write_process(tmp_path, 11, 10, command, {"PYTHONHASHSEED": "7", "HF_TOKEN": "secret"})
    write_process(tmp_path, 12, 1, ["/usr/bin/python", "/usr/bin/lmcache", "server", "--chunk-size", "128"], {})
    write_process(tmp_path, 13, 1, ["bash", "-c", "vllm serve"], {})
    found = host.vllm_process("http://127.0.0.1:8123", tmp_path)
    assert found is not None
    assert (found.pid, found.environment, found.open_files) == (11, {"PYTHONHASHSEED": "7"}, 1024)
    assert host.vllm_process("http://127.0.0.1:8124", tmp_path) is None
    assert host.vllm_process("http://elsewhere:8123", tmp_path) is None
    assert [one.options["chunk-size"] for one in host.lmcache_processes(tmp_path)] == ["128"]
    assert host.lmcache_process("http://localhost:8080", tmp_path) is not None


@contextmanager
def lmcache_server(config: Mapping[str, Any]) -> Iterator[str]:
    """GET /config as LMCache's server answers it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/config" else 404)
            self.end_headers()
            self.wfile.write(msgspec.json.encode(config))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the checks by name."""
    command = [sys.executable, "-m", "agentserve", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    answer = msgspec.json.decode(done.stdout)
    assert answer["found"] == sum(check["state"] == "found" for check in answer["checks"])
    return done.returncode, {check["check"]: check for check in answer["checks"]}


def found(checks: Mapping[str, Mapping[str, str]]) -> set[str]:
    return {name for name, check in checks.items() if check["state"] == "found"}


async def play(served: Served, text: str = "word " * 40) -> None:
    messages = [{"role": "user", "content": text}]
    for _ in range(3):
        reply = await chat(served.url, messages, stream=False, max_tokens=8)
        assert reply.status == 200
        messages += [reply.message, {"role": "user", "content": "on"}]


def events_of(upstream: Upstream) -> dict[str, str]:
    assert upstream.engine.events is not None
    return {"engine_events": upstream.engine.events.endpoint, "engine_events_replay": upstream.engine.events.replay_endpoint}


@pytest.mark.anyio
async def test_over_http_a_sound_server_is_fine_and_a_wrong_lmcache_is_found(upstream: Upstream, model_folder: Path) -> None:
    folder = ("--model-folder", str(model_folder))
    with serving(upstream.url, model_folder, **events_of(upstream)) as served:
        await play(served)
        code, checks = doctor("--url", served.url, *folder)
        assert (code, found(checks)) == (0, set())
        known = {name for name, check in checks.items() if check["state"] == "fine"}
        assert known >= {
            "prefix_caching",
            "events",
            "token_details",
            "token_route",
            "max_length",
            "kv_capacity",
            "block_and_chunk",
            "tokenizer",
        }
        with lmcache_server({"mp": {"chunk_size": 48}, "storage_manager": {"l1": {"read_ttl_seconds": 0}}}) as url:
            code, checks = doctor("--url", served.url, "--lmcache-url", url, *folder)
        assert (code, found(checks)) == (1, {"block_and_chunk", "read_ttl"})


@pytest.mark.anyio
async def test_over_http_plants_in_the_engine_are_found(renderer: FormatRenderer, model_folder: Path) -> None:
    where = ("--model-folder", str(model_folder))
    with in_thread(Upstream(renderer=renderer)) as blind, serving(blind.url, model_folder) as served:
        await play(served)
        (session,) = served.server.namespaces.of(None).sessions.values()
        assert session.tip is not None
        blind.max_model_len = session.tip.end + 8
        _, checks = doctor("--url", served.url, *where)
        assert found(checks) == {"events", "token_details", "max_length"}
    small = KvModel(num_blocks=64, block_size=16)
    with in_thread(Upstream(renderer=renderer, kv=small)) as crowded, serving(crowded.url, model_folder) as served:
        for number in range(3):
            await play(served, f"{number} " * 200)
        _, checks = doctor("--url", served.url, *where)
        assert found(checks) == {"events", "kv_capacity"}
        assert "does not follow" in checks["events"]["finding"]
    with in_thread(Upstream(kv=small)) as foreign:
        _, checks = doctor("--url", "http://127.0.0.1:9", "--engine-url", foreign.url, *where, "--concurrency", "90000000")
        assert found(checks) == {"tokenizer", "open_files"}


def test_without_an_engine_the_doctor_says_how_to_name_one() -> None:
    with pytest.raises(SetupError, match="--engine-url"):
        read(Where("http://127.0.0.1:9"))
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:9"):
        read(Where("http://127.0.0.1:9", ("http://127.0.0.1:9",)))


@pytest.mark.anyio
@pytest.mark.engine
async def test_a_real_embedded_engine_is_sound(engine: RealEngine) -> None:
    events = {"engine_events": engine.events_endpoint, "engine_events_replay": engine.replay_endpoint}
    with serving(engine.url, engine.model_folder, **events) as served:
        await play(served)
        code, checks = doctor("--url", served.url)
    assert (code, found(checks)) == (0, set())
    assert {name for name, check in checks.items() if check["state"] == "unknown"} == set(), checks


@pytest.mark.engine
def test_plants_in_a_real_engine_are_found() -> None:
    wrong = (
        "--no-enable-prefix-caching",
        "--no-enable-prompt-tokens-details",
        "--no-enable-scale-out",
        "--kv-events-config",
        '{"enable_kv_cache_events": false}',
    )
    with real_engine(EmbeddedOptions(CACHE_FOLDER, kv_tokens=8192, extra_args=wrong)) as running:
        _, checks = doctor("--url", "http://127.0.0.1:9", "--engine-url", running.url)
    assert found(checks) == {"prefix_caching", "events", "token_details", "token_route"}


def with_tier(**state: Any) -> Facts:
    """A deployment whose offload tier is the plugin's own, of 512 blocks of 128 tokens."""
    counts = dict.fromkeys((name for name in PluginState.__dataclass_fields__ if name.startswith("num_")), 0)
    shown = {
        "policy": "class_hazard",
        "parameters": {},
        "is_ordering": True,
        **counts,
        "num_tier_blocks": 512,
        "num_kept_blocks": 9,
        **state,
    }
    words = ("vllm", "--kv-transfer-config", transfer_config(PluginOptions(tier_bytes=1 << 20)))
    facts = healthy()
    engine = replace(facts.engine, process=ProcessFacts(1, words, {"PYTHONHASHSEED": "0"}, 65_536), plugin=PluginState(**shown))
    return replace(facts, engines=[engine], lmcache=[])


def test_the_plugins_own_tier_is_room_and_needs_no_connector() -> None:
    facts = with_tier()
    capacity, tier = facts.engine.capacity_tokens, 512 * 128
    assert capacity is not None
    assert facts.server is not None
    verdicts = {
        live: examine(replace(facts, server=replace(facts.server, live_tokens=capacity + live)))["kv_capacity"] for live in (tier, tier + 1)
    }
    assert [verdict.state for verdict in verdicts.values()] == [State.FINE, State.FOUND]
    assert all(f"its exclusive tier {tier:,}" in verdict.finding for verdict in verdicts.values())
    assert "or an offload tier" not in verdicts[tier + 1].fix
    found = examine(facts)
    assert "keeps 9 of 512 blocks" in found["eviction_plugin"].finding
    for check in ("read_ttl", "rank_lookup", "decode_stored"):
        assert (found[check].state, "no KV connector" in found[check].finding) == (State.APART, False)


@pytest.mark.parametrize(
    ("offload", "state", "said"),
    [
        (None, State.FOUND, "does not know of the exclusive tier"),
        ({"kind": "exclusive", "announced_tokens": 9 * 128}, State.FINE, "1,152 tokens by its events"),
        ({"kind": "exclusive", "announced_tokens": None}, State.FINE, "keeps 9 of 512 blocks"),
    ],
)
def test_a_server_in_front_of_the_plugins_own_tier_has_to_know_of_it(offload: dict[str, Any] | None, state: State, said: str) -> None:
    facts = with_tier()
    assert facts.server is not None
    told = [{**engine, "offload": offload} for engine in facts.server.cache["engines"]]
    verdict = examine(replace(facts, server=replace(facts.server, cache={**facts.server.cache, "engines": told})))["eviction_plugin"]
    assert (verdict.state, said in verdict.finding) == (state, True)


@pytest.mark.parametrize(
    ("state", "finding"),
    [
        ({"is_ordering": False, "off_because": "ValueError: x"}, "fell back to plain LRU: ValueError: x"),
        ({"tier_off_because": "no more memory", "num_tier_blocks": 0}, "the exclusive tier is off: no more memory"),
    ],
)
def test_a_plugin_that_turned_itself_off_is_found(state: dict[str, Any], finding: str) -> None:
    verdict = examine(with_tier(**state))["eviction_plugin"]
    assert (verdict.state, finding in verdict.finding) == (State.FOUND, True)
    assert with_tier(**state).engine.tier_tokens == (0 if "tier_off_because" in state else 512 * 128)


def test_the_plugin_is_seen_whichever_carries_it() -> None:
    lazy = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": {"lmcache.mp.lazy_offload": True}}

    def state(lookahead: int) -> State:
        words = (*scheduler_args(PluginOptions(lookahead_blocks=lookahead)), "--kv-transfer-config", msgspec.json.encode(lazy).decode())
        engine = EngineFacts("http://127.0.0.1:1", process=ProcessFacts(1, words))
        return eviction_plugin(Facts([engine])).state

    assert state(0) is State.FOUND
    assert state(512) is State.FINE
