"""The offload tier: what it forgets, whom it asks, and whether it is asked at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agentserve.doctor.facts import EngineFacts, Facts
from agentserve.doctor.launch import find
from agentserve.doctor.verdict import WHERE_TO_ASK, Check, Verdict, apart, fine, found, unknown

_MP = "LMCacheMPConnector"
_IN_PROCESS = "LMCacheConnectorV1"
_NATIVE = "OffloadingConnector"


def _none(facts: Facts) -> Verdict | None:
    """The verdict where there is no tier, or nobody says whether there is."""
    if facts.engine.connectors:
        return None
    if facts.engine.connectors is None:
        return unknown("vLLM does not say over HTTP whether it has a KV connector", WHERE_TO_ASK)
    if facts.engine.tier_tokens:
        return apart("the tier is the plugin's own: its ranks hold the same, answers too, and nothing in it expires")
    return apart("the engine has no KV connector")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def read_ttl(facts: Facts) -> Verdict:
    """A read lock that expires while its turn waits loses the chunks that were promised to it."""
    if not facts.lmcache:
        return _none(facts) or apart("no LMCache server")
    told = [one.told("read_ttl_seconds", "l1-read-ttl-seconds", "300") for one in facts.lmcache]
    ttls = [float(one) for one in told if one is not None]
    if len(ttls) < len(told):
        return unknown("LMCache does not say its read TTL", "name its HTTP address with --lmcache-url")
    gaps = facts.server.return_gaps if facts.server else ()
    if not gaps:
        return unknown(f"read TTL {min(ttls):.0f} s; no return gaps are known", "name an agentserve that has served turns with --url")
    gap = quantile(gaps, 0.99)
    if min(ttls) < gap:
        return found(
            f"read TTL {min(ttls):.0f} s, but 1 % of turns return after {gap:.0f} s or more", "--l1-read-ttl-seconds 7200 for LMCache"
        )
    return fine(f"read TTL {min(ttls):.0f} s, 99 % of turns return within {gap:.0f} s")


def rank_lookup(facts: Facts) -> Verdict:
    """A chunk is a hit only if every rank has it, so every rank must be asked."""
    none = _none(facts)
    if none is not None:
        return none
    told = facts.engine.told("tensor-parallel-size", "1")
    if told is None:
        return unknown("vLLM does not say over HTTP how many ranks it has", WHERE_TO_ASK)
    ranks = int(told)
    if ranks == 1:
        return apart("one rank")
    asked = _asked_ranks(facts.engine)
    if asked is not None and asked < ranks:
        return found(
            f"LMCache is looked up for {asked} of {ranks} ranks",
            "leave lookup_server_worker_ids empty; name one server a rank, or one for all",
        )
    return fine(f"all {ranks} ranks are looked up")


def _asked_ranks(engine: EngineFacts) -> int | None:
    """How many ranks a lookup asks, where a setting narrows it."""
    extra = [one.get("kv_connector_extra_config") or {} for one in engine.connectors or ()]
    environment = (engine.process.environment if engine.process else None) or {}
    listed = [_listed(one, "lookup_server_worker_ids") for one in extra]
    listed.append(environment.get("LMCACHE_LOOKUP_SERVER_WORKER_IDS", ""))
    servers = [_listed(one, "server_urls") for one in extra]
    narrow = [len(ids.split(",")) for ids in listed if ids] + [len(urls.split(",")) for urls in servers if "," in urls]
    return min(narrow, default=None)


def _listed(extra: dict[str, Any], name: str) -> str:
    for prefix in ("lmcache.mp.", "lmcache.", ""):
        value = extra.get(prefix + name)
        if value is not None:
            return ",".join(map(str, value)) if isinstance(value, list) else str(value).strip("[] ")
    return ""


def decode_stored(facts: Facts) -> Verdict:
    """Answers become history: a tier that keeps prompts only brings back no answer, and nothing behind it."""
    none = _none(facts)
    if none is not None:
        return none
    for one in facts.engine.connectors or ():
        extra, kind = one.get("kv_connector_extra_config") or {}, one["kv_connector"]
        if kind in (_MP, _IN_PROCESS) and _listed(extra, "save_decode_cache").lower() != "true" and not _in_environment(facts.engine):
            name = "lmcache.mp.save_decode_cache" if kind == _MP else "lmcache.save_decode_cache"
            return found("generated tokens are not stored in the tier", f'"{name}": true in kv_connector_extra_config')
        if kind == _NATIVE and str(find(extra, "offload_prompt_only")).lower() != "false":
            return found("generated tokens are not stored in the tier", '"offload_prompt_only": false in kv_connector_extra_config')
    return fine("generated tokens are stored too")


def _in_environment(engine: EngineFacts) -> bool:
    environment = (engine.process.environment if engine.process else None) or {}
    return environment.get("LMCACHE_SAVE_DECODE_CACHE", "").lower() == "true"


CHECKS = (
    Check("read_ttl", "LMCache's read TTL, return gaps of the server's sessions", read_ttl),
    Check("rank_lookup", "ranks, lookup workers, LMCache servers", rank_lookup),
    Check("decode_stored", "the connector's extra config", decode_stored),
)
