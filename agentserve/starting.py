"""The engines that the settings name: made, started, and what hears their events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentserve.engines import Engine
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.hints import EngineHints, NoHints, engine_hints
from agentserve.engines.kv_events import KvEventSubscriber
from agentserve.engines.lmcache import LmcacheServer
from agentserve.engines.lmcache_command import LmcacheOptions
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions, plugin_options
from agentserve.errors import SetupError
from agentserve.settings import Settings
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.chunks import Watermark
from prefix_cache.tiers.exclusive import ExclusiveOffload
from prefix_cache.tiers.external import ExternalTiers
from prefix_cache.tiers.offload import Offload


@dataclass(frozen=True, slots=True)
class Made:
    """An engine that is not started yet, the ZMQ endpoints of its KV events and their replay, and the embedded engine's model folder."""

    engine: Engine
    events: str | None = None
    replay: str | None = None
    nano: Path | None = None


@dataclass(frozen=True, slots=True)
class Followed:
    """A started engine, and what hears its events."""

    engine: Engine
    mirror: Mirror | None = None
    offload: ExternalTiers | None = None
    hints: EngineHints = field(default_factory=NoHints)
    """Its plugin, where it has one."""


async def follow(settings: Settings, made: Made, tier: LmcacheServer | None, stack: AsyncExitStack) -> Followed:
    """Follow the KV events of an engine that has started, and find its plugin."""
    engine = made.engine
    hints = await start_hints(settings, engine, stack)
    if made.events is None or engine.info.block_size is None:
        return Followed(engine, hints=hints)
    mirror = Mirror(engine.info.block_size)
    offload = follow_offload(settings, mirror, tier)
    subscriber = KvEventSubscriber(made.events, made.replay, settings.engine.events_topic, mirror)
    stack.push_async_callback(subscriber.close)
    await subscriber.start()
    await subscriber.caught_up()  # else the first predictions would not know an older engine's blocks
    if isinstance(engine, EmbeddedEngine):
        engine.on_restart = partial(restarted, mirror, hints)
    return Followed(engine, mirror, offload, hints)


async def restarted(mirror: Mirror, hints: EngineHints) -> None:
    """The engine has been started again: nothing is resident, and its plugin has the policy of the start."""
    mirror.restarted()
    await hints.restarted()


async def start_hints(settings: Settings, engine: Engine, stack: AsyncExitStack) -> EngineHints:
    """The way to the engine's plugin, where the settings say that it has one."""
    options = settings.engine
    key = options.api_key.get_secret_value() if options.url is not None and options.api_key is not None else None
    hints = engine_hints(options.plugin, engine.url, key)
    stack.push_async_callback(hints.close)
    await hints.start()
    return hints


def check_alike(first: Engine, others: Iterable[Engine]) -> None:
    """Raise SetupError for engines that do not serve the same: a session may go on at any of them."""
    for other in others:
        for name in ("model", "max_model_len", "block_size"):
            ours, theirs = getattr(first.info, name), getattr(other.info, name)
            if ours != theirs:
                raise SetupError(f"the engines at {first.url} and {other.url} differ in {name}: {ours!r} and {theirs!r}; start them alike")


async def start_offload(settings: Settings, progress: Callable[[str], None], stack: AsyncExitStack) -> LmcacheServer | None:
    """The cache server beside the embedded engine, if the settings ask for one. Raises SetupError."""
    options = settings.offload
    if options.tier != "lmcache" or settings.engine.url is not None:
        return None
    url = options.url.get_secret_value() if options.url else None
    tier = LmcacheServer(LmcacheOptions(options.bytes, options.chunk_tokens, settings.engine.block_size, url), progress=progress)
    stack.push_async_callback(tier.close)
    await tier.start()
    return tier


def follow_offload(settings: Settings, mirror: Mirror, tier: LmcacheServer | None) -> ExternalTiers | None:
    """The books of the tiers behind the engine, fed by what the mirror hears. Raises SetupError."""
    options = settings.offload
    if options.tier == "exclusive":
        return ExclusiveOffload(mirror)
    if options.tier == "off":
        return None
    if options.chunk_tokens % mirror.block_size:
        raise SetupError(f"--offload-chunk-tokens must be a multiple of the engine's block of {mirror.block_size} tokens")
    memory = None if options.capacity_tokens is None else Watermark(options.capacity_tokens // options.chunk_tokens)
    offload = Offload(mirror.block_size, options.chunk_tokens, has_remote=options.url is not None, memory=memory)
    mirror.on_batch = offload.apply
    if tier is not None:
        offload.ranks = tier.ranks.lookups
        tier.on_change = lambda is_up: offload.started() if is_up else offload.stopped()
    return offload


def make_engines(settings: Settings, progress: Callable[[str], None], tier: LmcacheServer | None = None) -> list[Made]:
    """The engines that the settings name, or the embedded one. Raises SetupError."""
    options = settings.engine
    if options.url is not None:
        key = options.api_key.get_secret_value() if options.api_key else None
        urls = options.url.replace(",", " ").split()
        events = _one_each("--engine-events", options.events, len(urls))
        replays = _one_each("--engine-events-replay", options.events_replay, len(urls))
        engines = [VllmEngine(url, api_key=key, start_timeout_seconds=options.start_seconds, progress=progress) for url in urls]
        return [Made(*each) for each in zip(engines, events, replays, strict=True)]
    embedded = EmbeddedEngine(
        EmbeddedOptions(
            cache_folder=settings.cache_folder,
            model=settings.embedded_model,
            index_topk_freq=settings.embedded_index_topk_freq,
            kv_tokens=options.kv_tokens,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            tensor_parallel=options.tensor_parallel,
            plugin=plugin_options(options.plugin, settings.offload.bytes if settings.offload.tier == "exclusive" else 0),
            plugin_carrier=options.plugin_carrier,
            start_timeout_seconds=options.start_seconds,
            extra_args=tier.engine_args if tier is not None else (),
        ),
        progress=progress,
    )
    return [Made(embedded, embedded.events_endpoint, embedded.replay_endpoint, embedded.model_folder)]


def _one_each(name: str, endpoints: str | None, num_engines: int) -> list[str | None]:
    """The endpoints of the engines, in their order."""
    if endpoints is None:
        return [None] * num_engines
    found: list[str | None] = [*endpoints.replace(",", " ").split()]
    if len(found) != num_engines:
        raise SetupError(f"{name} names {len(found)} endpoints for {num_engines} engines: name one for each, in the order of --engine-url")
    return found
