"""What the engine tells its front: without it, predictions and accounts are blind."""

from __future__ import annotations

from agentserve.doctor.facts import Facts
from agentserve.doctor.verdict import WHERE_TO_ASK, Check, Verdict, fine, found, unknown

_EVENTS = '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":…,"replay_endpoint":…,"topic":"kv-events"}\''


def events(facts: Facts) -> Verdict:
    """KV events, with a replay, and taken up by the server."""
    told = facts.engine.events
    source = next(iter(told.values()), {}) if told is not None else facts.engine.told_json("kv-events-config")
    if source is None:
        return unknown("vLLM does not say whether it publishes KV events (no /kv_event_sources)", WHERE_TO_ASK)
    if not source.get("enable_kv_cache_events"):
        return found("KV events are off: hits cannot be predicted, and misses have no cause", _EVENTS)
    if not source.get("replay_endpoint"):
        return found("KV events have no replay: each lost one empties the mirror", '"replay_endpoint" in --kv-events-config')
    if facts.server is not None and facts.server.mirror is None:
        return found(
            "the server does not follow the KV events",
            f"--engine-events {source.get('endpoint')} and --engine-events-replay for agentserve",
        )
    return fine("KV events are on, with a replay")


def token_details(facts: Facts) -> Verdict:
    """Cached tokens in each answer's usage."""
    coverage = facts.server.cache.get("hits", {}).get("coverage") if facts.server else None
    told = facts.engine.told("enable-prompt-tokens-details", "false")
    fix = "--enable-prompt-tokens-details for vLLM"
    if coverage == 0 or (told == "false" and not coverage):
        return found("answers do not say how many tokens came from the cache", fix)
    if coverage or told == "true":
        return fine("answers say how many tokens came from the cache")
    return unknown(
        "nobody has seen an answer's usage, and vLLM does not say over HTTP", "name an agentserve that has served turns with --url"
    )


def prefix_caching(facts: Facts) -> Verdict:
    """Without it there are no hits."""
    told = facts.engine.told("enable-prefix-caching", "true")
    if told is None:
        return unknown("the engine does not say whether it caches prefixes", "check that /metrics is served (vllm:cache_config_info)")
    if told == "false":
        return found("prefix caching is off", "--enable-prefix-caching for vLLM")
    return fine("prefix caching is on")


def token_route(facts: Facts) -> Verdict:
    """Token ids in and out without decoding text that nobody reads."""
    if facts.engine.has_token_route is None:
        return unknown("the engine did not answer", "check its address")
    if not facts.engine.has_token_route:
        return found("no /inference/v1/generate: the slower route by /v1/completions is used", "--enable-scale-out for vLLM")
    return fine("/inference/v1/generate is there")


CHECKS = (
    Check("prefix_caching", "/metrics", prefix_caching),
    Check("events", "/kv_event_sources, the server's mirror", events),
    Check("token_details", "the server's account, launch options", token_details),
    Check("token_route", "/inference/v1/generate", token_route),
)
