"""Whether engines that share an offload tier name blocks alike: checked before the server is ready, since else nothing is found there.

Two ways, each where it can be gone. Launch options and processes of this host tell hash algorithms and seeds (the doctor's `hash_seed`).
And the engines' own events tell what they named: each one computes the same block of random tokens, and the names must be equal.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from agentserve.doctor import host
from agentserve.doctor.facts import EngineFacts, Facts, LmcacheFacts
from agentserve.doctor.hashing import SAME_ALGORITHM, SAME_SEED, hash_seed
from agentserve.doctor.told import launch_facts
from agentserve.doctor.verdict import State
from agentserve.engines import Engine, GenerateRequest
from agentserve.errors import EngineError, SetupError
from agentserve.settings import Settings
from agentserve.starting import Followed
from prefix_cache.event_names import block_name
from prefix_cache.events import BlockStored, EventBatch

PROBE_SECONDS: Final = 10.0
"""Longest wait for an engine's event of the block that it has computed."""
_NUM_PROBE_IDS: Final = 200
"""Token ids below this are in every vocabulary."""
_LMCACHE_PORT: Final = "5555"
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")

_log = structlog.get_logger(__name__)


async def check_block_names(settings: Settings, followed: Sequence[Followed]) -> None:
    """Raise SetupError where engines behind one tier, or that tier's server, name content differently. What cannot be read is logged.

    The embedded engine and its tier are started by this process, alike.
    """
    if settings.offload.tier != "lmcache" or settings.engine.url is None:
        return
    key = settings.engine.api_key.get_secret_value() if settings.engine.api_key else None
    facts = await asyncio.to_thread(name_facts, [each.engine.url for each in followed], key)
    verdict = hash_seed(facts)
    if verdict.state is State.FOUND:
        raise SetupError(f"what stands before or behind one offload tier has to name content alike: {verdict.finding}; {verdict.fix}")
    unheard = await compare_names(followed) if len(followed) > 1 else []
    if unheard and verdict.state is State.UNKNOWN:
        _log.warning("block names are not compared", engines=unheard, why=verdict.finding, cure=f"--engine-events, or {verdict.fix}")
    else:
        _log.info("block names are alike", engines=len(followed), by="processes" if unheard or len(followed) == 1 else "events")


def name_facts(urls: Iterable[str], api_key: str | None) -> Facts:
    """What is known of how engines, and the LMCache servers of this host that they use, name blocks."""
    engines = [launch_facts(url, api_key) for url in urls]
    ports = {port for engine in engines for port in _lmcache_ports(engine)}
    used = [process for process in host.lmcache_processes() if process.options.get("port", _LMCACHE_PORT) in ports]
    return Facts(engines, [LmcacheFacts(None, process) for process in used])


def _lmcache_ports(engine: EngineFacts) -> Iterable[str]:
    """Ports on this host at which the engine's connector looks for LMCache servers."""
    for connector in engine.connectors or ():
        if connector["kv_connector"] != "LMCacheMPConnector":
            continue
        extra: dict[str, Any] = connector.get("kv_connector_extra_config") or {}
        one = f"{extra.get('lmcache.mp.host', 'tcp://localhost')}:{extra.get('lmcache.mp.port', _LMCACHE_PORT)}"
        for url in str(extra.get("lmcache.mp.server_urls", one)).split(","):
            where = urlsplit(url.strip())
            if where.hostname in _LOCAL and where.port:
                yield str(where.port)


async def compare_names(followed: Sequence[Followed]) -> list[str]:
    """The engines whose name of a block could not be heard. Raises SetupError for two that name it differently."""
    block_size = followed[0].engine.info.block_size or 0
    ids = [secrets.randbelow(_NUM_PROBE_IDS) for _ in range(block_size + 1)]  # the last is computed and not yet part of a block
    names = await asyncio.gather(*(_name(each, ids) for each in followed))
    heard = [(each.engine.url, name) for each, name in zip(followed, names, strict=True) if name is not None]
    for url, name in heard[1:]:
        if name != heard[0][1]:
            raise SetupError(
                f"the engines at {heard[0][0]} and {url} share an offload tier and give the same block different names: "
                f"{SAME_SEED}, and {SAME_ALGORITHM}"
            )
    return [each.engine.url for each, name in zip(followed, names, strict=True) if name is None]


async def _name(each: Followed, ids: Sequence[int]) -> int | None:
    """The engine's own name of the whole block in `ids`, in 64 bits; None: no event tells."""
    mirror = each.mirror
    if mirror is None:
        return None
    heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    before = mirror.on_batch

    def listen(batch: EventBatch) -> None:
        if before is not None:
            before(batch)
        for event in batch.events:
            if isinstance(event, BlockStored) and list(event.token_ids) == list(ids[:-1]) and not heard.done():
                heard.set_result(block_name(event.block_hashes[0]))

    mirror.on_batch = listen
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await _compute(each.engine, ids)
            return await heard
    except (TimeoutError, EngineError) as error:
        _log.warning("an engine was not heard of", url=each.engine.url, reason=str(error) or "no event of a block that it has computed")
        return None
    finally:
        mirror.on_batch = before


async def _compute(engine: Engine, ids: Sequence[int]) -> None:
    request = GenerateRequest(
        f"block-names-{secrets.token_hex(8)}", (",".join(map(str, ids)).encode(),), len(ids), 1, {"temperature": 0.0, "ignore_eos": True}
    )
    async with aclosing(engine.generate(request)) as chunks:
        async for _ in chunks:
            pass
