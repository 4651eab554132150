"""Misconfigurations planted one by one in the facts of a healthy deployment: which of them the doctor finds, and what it finds besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from agentserve.doctor.facts import EngineFacts, Facts, LmcacheFacts, ModelFacts, ProcessFacts, ServerFacts
from agentserve.doctor.table import examine
from agentserve.doctor.verdict import State

_BLOCK = 128
_EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}
_SERVERS = "tcp://127.0.0.1:5555,tcp://127.0.0.1:5556"
_CONNECTOR = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_extra_config": {"lmcache.mp.server_urls": _SERVERS, "lmcache.mp.save_decode_cache": True},
}
_PLUGIN = {"kv_connector": "AgentserveConnector", "kv_connector_extra_config": {"policy": "class_hazard"}}


def _both(connector: Mapping[str, Any]) -> str:
    """The eviction plugin and LMCache, as vLLM is told of them."""
    extra = {"connectors": [_PLUGIN, connector]}
    return msgspec.json.encode({"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}).decode()


_VLLM: Mapping[str, str] = {
    "tensor-parallel-size": "2",
    "kv-transfer-config": _both(_CONNECTOR),
    "enable-prompt-tokens-details": "true",
    "speculative-config": '{"method": "eagle3"}',
    "generation-config": "auto",
}


def _process(pid: int, options: Mapping[str, str], open_files: int = 65_536) -> ProcessFacts:
    words = tuple(word for name, value in options.items() for word in (f"--{name}", value))
    return ProcessFacts(pid, words, {"PYTHONHASHSEED": "0"}, open_files)


def _metrics(**labels: str) -> bytes:
    named = {"block_size": str(_BLOCK), "num_gpu_blocks": "8001", "enable_prefix_caching": "True", "prefix_caching_hash_algo": "sha256"}
    config = ",".join(f'{name}="{value}"' for name, value in {**named, **labels}.items())
    counters = {"generation_tokens": 9_000, "spec_decode_num_drafts": 3_000, "external_prefix_cache_queries": 80_000}
    lines = [f"vllm:cache_config_info{{{config}}} 1.0", *(f"vllm:{name}_total {value}" for name, value in counters.items())]
    return "\n".join(lines).encode()


def healthy() -> Facts:
    """A deployment of two ranks with LMCache, in which nothing is wrong."""
    engine = EngineFacts("http://127.0.0.1:8100", 262_144, _metrics(), {"0": _EVENTS}, True, None, _process(10, _VLLM), (1, 2, 3))
    lmcache = {"mp": {"chunk_size": 256, "hash_algorithm": "blake3"}, "storage_manager": {"read_ttl_seconds": 7200}}
    cache = {"hits": {"coverage": 1.0}, "engines": [{"mirror": {"event_block_size": _BLOCK}}]}
    return Facts(
        [engine],
        [LmcacheFacts(lmcache, _process(20 + rank, {})) for rank in range(2)],
        ServerFacts(cache, [40_000, 90_000], 130_000, [3.0] * 98 + [400.0, 700.0]),
        ModelFacts({"text_config": {"eos_token_id": 7}}, {"eos_token_id": [7]}, (1, 2, 3), (7,)),
        concurrency=1024,
        open_files=65_536,
    )


@dataclass(frozen=True, slots=True)
class Plant:
    """What is wrong, in words, the check that must find it, and how the healthy deployment is changed."""

    name: str
    check: str
    change: Callable[[Facts], Facts]


def _engine(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, engines=[replace(facts.engine, **changes)])


def _started(open_files: int = 65_536, **options: str | None) -> Callable[[Facts], Facts]:
    """The engine started with other options; None leaves one out."""
    changed = {**_VLLM, **{name.replace("_", "-"): value for name, value in options.items()}}
    return _engine(process=_process(10, {name: value for name, value in changed.items() if value is not None}, open_files))


def _connector(**extra: Any) -> Callable[[Facts], Facts]:
    config = {**_CONNECTOR["kv_connector_extra_config"], **{f"lmcache.{name}": value for name, value in extra.items()}}  # type: ignore[dict-item]  # a literal of two kinds of values
    return _started(kv_transfer_config=_both({**_CONNECTOR, "kv_connector_extra_config": config}))


def _lmcache(**settings: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, lmcache=[replace(one, config={**(one.config or {}), **settings}) for one in facts.lmcache])


def _server(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, server=replace(facts.server, **changes) if facts.server else None)


def _model(**changes: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, model=replace(facts.model, **changes) if facts.model else None)


def _other_seed(facts: Facts) -> Facts:
    process = facts.lmcache[1].process
    assert process is not None
    return replace(facts, lmcache=[facts.lmcache[0], replace(facts.lmcache[1], process=replace(process, environment={}))])


def _no_seed(facts: Facts) -> Facts:
    lmcache = [replace(one, process=replace(one.process, environment={})) for one in facts.lmcache if one.process is not None]
    assert facts.engine.process is not None
    engine = replace(
        facts.engine, metrics=_metrics(prefix_caching_hash_algo="xxhash"), process=replace(facts.engine.process, environment={})
    )
    return replace(facts, engines=[engine], lmcache=lmcache)


def _other_lmcache_algorithm(facts: Facts) -> Facts:
    other = {"mp": {"chunk_size": 256, "hash_algorithm": "sha256_cbor"}, "storage_manager": {"read_ttl_seconds": 7200}}
    return replace(facts, lmcache=[facts.lmcache[0], replace(facts.lmcache[1], config=other)])


def _other_algorithm(facts: Facts) -> Facts:
    return replace(facts, engines=[facts.engine, replace(facts.engine, metrics=_metrics(prefix_caching_hash_algo="sha256_cbor"))])


def _without(metric: bytes) -> bytes:
    return b"\n".join(line for line in _metrics().splitlines() if metric not in line)


PLANTS: tuple[Plant, ...] = (
    Plant("another hash seed in one process", "hash_seed", _other_seed),
    Plant("random hash seeds", "hash_seed", _no_seed),
    Plant("another hash algorithm in one engine", "hash_seed", _other_algorithm),
    Plant("another hash algorithm in one LMCache", "hash_seed", _other_lmcache_algorithm),
    Plant("a chunk of one and a half blocks", "block_and_chunk", _lmcache(mp={"chunk_size": 192})),
    Plant(
        "events of other blocks",
        "block_and_chunk",
        _server(cache={"hits": {"coverage": 1.0}, "engines": [{"mirror": {"event_block_size": 16}}]}),
    ),
    Plant("a read TTL below the return gaps", "read_ttl", _lmcache(storage_manager={"read_ttl_seconds": 300})),
    Plant("lookup on rank 0 only", "rank_lookup", _connector(lookup_server_worker_ids=[0])),
    Plant("generated tokens are not offloaded", "decode_stored", _connector(**{"mp.save_decode_cache": False})),
    Plant("a lazy offload that sees no victims", "eviction_plugin", _connector(**{"mp.lazy_offload": True})),
    Plant("KV events off", "events", _engine(events={})),
    Plant("KV events without a replay", "events", _engine(events={"0": {**_EVENTS, "replay_endpoint": None}})),
    Plant("KV events that nobody follows", "events", _server(cache={"hits": {"coverage": 1.0}, "engines": [{"mirror": None}]})),
    Plant(
        "prompt-token details off",
        "token_details",
        lambda facts: _server(cache={"hits": {"coverage": 0.0}, "engines": [{"mirror": {"event_block_size": _BLOCK}}]})(
            _started(enable_prompt_tokens_details=None)(facts)
        ),
    ),
    Plant("no route for token ids", "token_route", _engine(has_token_route=False)),
    Plant("prefix caching off", "prefix_caching", _engine(metrics=_metrics(enable_prefix_caching="False"))),
    Plant("sessions that outgrow the context", "max_length", _engine(max_model_len=98_304)),
    Plant("more live sessions than KV memory", "kv_capacity", _server(live_tokens=3_000_000)),
    Plant("too few open files on the host", "open_files", lambda facts: replace(facts, open_files=1024)),
    Plant("too few open files in the engine", "open_files", _started(open_files=1024)),
    Plant("another model's tokenizer", "tokenizer", _model(probe_ids=(1, 2, 4))),
    Plant("answers cut by the model folder", "generation_config", _model(generation_config={"eos_token_id": 7, "max_new_tokens": 2048})),
    Plant("a turn's end that ends no answer", "generation_config", _model(generation_config={"eos_token_id": 6})),
    Plant("an override that is not read", "fast_path", _started(hf_overrides='{"use_index_cache": true}')),
    Plant("speculative decoding that never drafts", "fast_path", _engine(metrics=_without(b"drafts"))),
    Plant("a connector that is never asked", "fast_path", _engine(metrics=_without(b"external"))),
)


@dataclass(frozen=True, slots=True)
class DoctorScore:
    """Plants found by the check that must find them, plants, and findings where nothing is wrong: in the healthy deployment and beside."""

    doctor_found: int
    doctor_planted: int
    doctor_false: int


def doctor_score() -> DoctorScore:
    """Examine the healthy deployment, and each plant."""
    num_found = num_false = 0
    num_false += len(findings(healthy()))
    for plant in PLANTS:
        named = findings(plant.change(healthy()))
        num_found += plant.check in named
        num_false += len(named - {plant.check})
    return DoctorScore(num_found, len(PLANTS), num_false)


def findings(facts: Facts) -> set[str]:
    """The checks that find something."""
    return {name for name, verdict in examine(facts).items() if verdict.state is State.FOUND}
