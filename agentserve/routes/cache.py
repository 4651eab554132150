"""GET /v1/cache, and the turns of a session: what the cache did, and why it missed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from agentserve.cache import CacheBooks
from agentserve.dialects.account import describe_divergence, describe_head_break
from agentserve.engines.hints import PluginState
from agentserve.errors import InvalidRequest
from agentserve.headers import json_response
from agentserve.records import TurnRecord
from agentserve.replicas import Replica
from agentserve.routes.sessions import describe_totals, find
from agentserve.server import Server
from agentserve.sessions import Namespace
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.exclusive import ExclusiveOffload
from prefix_cache.tiers.offload import Offload

DEFAULT_TURNS = 100
MAX_TURNS = 1000


def router(server: Server) -> APIRouter:
    """The routes that explain hits and misses; each caller sees its own namespace only."""
    routes = APIRouter()

    @routes.get("/v1/cache")
    async def cache(request: Request) -> Response:
        namespace = server.namespace(request.headers)
        asked = [replica for replica in server.replicas if replica.books.has_exclusive_tier]
        states = await asyncio.gather(*(replica.hints.state() for replica in asked))
        return json_response(describe_cache(server, namespace, dict(zip(asked, states, strict=True))))

    @routes.get("/v1/sessions/{session_id:path}/turns")
    async def turns(request: Request, session_id: str) -> Response:
        kept = server.turns.commits.log.of(find(server, request, session_id))
        limit, before = _number(request, "limit", DEFAULT_TURNS, MAX_TURNS), _number(request, "before", None, None)
        page = [record for record in kept if before is None or record.number < before]
        shown = page[-limit:] if limit is not None else page
        data = [describe_turn(record) for record in shown]
        return json_response({"object": "list", "data": data, "has_more": len(page) > len(shown)})

    return routes


def describe_cache(server: Server, namespace: Namespace, plugins: Mapping[Replica, PluginState | None]) -> dict[str, Any]:
    """What the cache did for a caller, who may start, and the engines; `plugins`: what those say whose tier only they know."""
    engines = [describe_engine(replica, plugins.get(replica)) for replica in server.replicas]
    admission = server.policies.describe_admission()
    return {"object": "cache", "hits": describe_totals(namespace.totals), "admission": admission, "engines": engines}


def describe_turn(record: TurnRecord) -> dict[str, Any]:
    """A turn as JSON; what is not known is null."""
    hits = record.hits
    return {
        "object": "session.turn",
        "number": record.number,
        "kind": record.kind,
        "ended_at": datetime.fromtimestamp(record.ended_at, UTC).isoformat(timespec="milliseconds"),
        "seconds": round(record.seconds, 4),
        "queue_seconds": round(record.queue_seconds, 4),
        "first_token_seconds": None if record.first_token_seconds is None else round(record.first_token_seconds, 4),
        "finish_reason": record.finish_reason,
        "prompt_tokens": hits.num_prompt_tokens,
        "generated_tokens": record.num_generated_tokens,
        "encoded_tokens": record.num_encoded_tokens,
        "ceiling_tokens": hits.ceiling,
        "ceiling_block_tokens": hits.ceiling_blocks,
        "predicted_tokens": hits.predicted,
        "cached_tokens": hits.actual,
        "external_predicted_tokens": hits.external_predicted,
        "external_tokens": hits.external,
        "missed_tokens": hits.missed,
        "recomputed_tokens": hits.num_recomputed_tokens,
        "divergence": describe_divergence(record.divergence),
        "head_break": describe_head_break(record.head_break),
    }


def describe_engine(replica: Replica, plugin: PluginState | None) -> dict[str, Any]:
    """An engine's cache as JSON; what is not known is null."""
    info, books = replica.engine.info, replica.books
    return {
        "engine": info.name,
        "url": replica.engine.url,
        "open": replica.is_open,
        "running_turns": replica.num_running,
        "block_size": info.block_size,
        "capacity_tokens": info.kv_capacity_tokens,
        "max_model_len": info.max_model_len,
        "computing_blocks": len(books.in_flight),
        "ceiling_index_tokens": books.tree.num_tokens,
        "mirror": _mirror(books),
        "offload": _exclusive(info.block_size, plugin, books) if books.has_exclusive_tier else _offload(books),
    }


def _mirror(books: CacheBooks) -> dict[str, Any] | None:
    mirror: Mirror | None = books.mirror
    if mirror is None:
        return None
    return {
        "resident_tokens": mirror.num_resident_tokens,
        "event_block_size": mirror.event_block_size,
        "suspect": mirror.is_suspect,
        "applied_batches": mirror.num_applied_batches,
        "lost_batches": mirror.num_lost_batches,
        "ignored_events": mirror.num_ignored_events,
        "restarts": mirror.num_restarts,
        "clears": mirror.num_clears,
        "under_predictions": mirror.num_under_predictions,
        "over_predictions": mirror.num_over_predictions,
        "contradictions": mirror.num_contradictions,
    }


def _offload(books: CacheBooks) -> dict[str, Any] | None:
    offload = books.offload
    if not isinstance(offload, Offload):
        return None
    return {
        "kind": "lmcache",
        "up": offload.is_up,
        "off_because": None,
        "capacity_tokens": None,
        "resident_tokens": offload.num_resident_tokens,
        "announced_tokens": offload.num_resident_tokens,
        "declining": None,
        "chunk_tokens": offload.chunk_tokens,
        "second_level": offload.remote is not None,
        "unresolved_chunks": offload.num_unresolved_chunks,
        "wrong_in_a_row": offload.num_wrong,
    }


def _exclusive(block_size: int | None, plugin: PluginState | None, books: CacheBooks) -> dict[str, Any]:
    """The plugin's own tier, whose blocks are kept one by one: what the plugin says, and beside it what its events have told."""
    followed = books.offload if isinstance(books.offload, ExclusiveOffload) else None

    def tokens(num_blocks: int) -> int | None:
        return None if block_size is None else num_blocks * block_size

    return {
        "kind": "exclusive",
        "up": None if plugin is None else not plugin.tier_off_because,
        "off_because": None if plugin is None else plugin.tier_off_because or None,
        "capacity_tokens": None if plugin is None else tokens(plugin.num_tier_blocks),
        "resident_tokens": None if plugin is None else tokens(plugin.num_kept_blocks),
        "announced_tokens": None if followed is None else followed.num_resident_tokens,
        "declining": None if followed is None else followed.is_declining,
        "chunk_tokens": block_size,
        "second_level": False,
        "unresolved_chunks": None if followed is None else followed.num_blocks_unknown,
        "wrong_in_a_row": None,
    }


def _number(request: Request, name: str, default: int | None, largest: int | None) -> int | None:
    """A query parameter of at least 1. Raises InvalidRequest."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1 or (largest is not None and int(text) > largest):
        top = "" if largest is None else f" and at most {largest}"
        raise InvalidRequest(f"{name} must be a number of at least 1{top}, not {text!r}", param=name)
    return int(text)
