"""The upstream's engine: when a request may start, how long it takes, what it hits, and the counters of /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.upstream.cache import Allocation, BlockCache, KvModel
from tests.upstream.events import KvEventPublisher


@dataclass(slots=True)
class Counters:
    """What /metrics counts, in tokens and requests."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """One request to the engine. `num_output_tokens` is what it will generate."""

    prompt_ids: tuple[int, ...]
    num_output_tokens: int
    cache_salt: str | None
    session_id: str | None


class ScriptedEngine:
    """Without a `KvModel` every request starts at once and says nothing of cached tokens."""

    def __init__(self, kv: KvModel | None) -> None:
        self.counters = Counters()
        self.cache = BlockCache(kv) if kv else None
        self.events = KvEventPublisher() if kv else None

    async def start(self) -> None:
        self._turn, self._freed = asyncio.Lock(), asyncio.Condition()
        if self.events:
            await self.events.start()

    async def close(self) -> None:
        if self.events:
            await self.events.close()

    @asynccontextmanager
    async def run(self, work: Work) -> AsyncIterator[Allocation | None]:
        """Hold `work`'s blocks; its prefill is done when this is entered. None without a KV model.

        Raises:
            NoRoom: the pool is too small for it.
        """
        allocation = None if self.cache is None else await self._admit(self.cache, work)
        self.counters.num_prompt_tokens += len(work.prompt_ids)
        self.counters.num_running += 1
        try:
            if allocation is not None and self.cache is not None:
                self.counters.num_cached_tokens += allocation.num_cached_tokens
                await self._prefill(self.cache, allocation)
            yield allocation
        finally:
            self.counters.num_running -= 1
            if allocation is not None and self.cache is not None:
                self.cache.free(allocation)
                async with self._freed:
                    self._freed.notify_all()

    async def decode(self, allocation: Allocation | None, ids: tuple[int, ...]) -> None:
        """Generate `ids`."""
        self.counters.num_generated_tokens += len(ids)
        if allocation is not None and self.cache is not None:
            await asyncio.sleep(len(ids) / self.cache.model.decode_tokens_per_second)
            self.cache.append(allocation, ids)
            await self._publish(self.cache)

    async def preempt(self, allocation: Allocation, num_output_tokens: int, *, keep_blocks: bool = False) -> None:
        """Take the request's blocks away, and let it compute them again. Its count of cached tokens stays that of its first run.

        With `keep_blocks` nobody else needs them: its second run hits its own, and the engine's counters take that for a hit of a prompt.
        """
        if self.cache is None:
            return
        self.counters.num_preemptions += 1
        num_cached, ids = allocation.num_cached_tokens, tuple(allocation.ids)
        if keep_blocks:
            self.cache.free(allocation)
        else:
            self.cache.drop(allocation)
        await self._publish(self.cache)
        again = await self._admit(self.cache, Work(ids, num_output_tokens, allocation.salt, allocation.session_id))
        allocation.blocks, allocation.hashes = again.blocks, again.hashes
        allocation.num_stored_blocks, allocation.num_cached_tokens = again.num_stored_blocks, again.num_cached_tokens
        self.counters.num_prompt_tokens += len(ids) if keep_blocks else 0
        self.counters.num_cached_tokens += again.num_cached_tokens if keep_blocks else 0
        await self._prefill(self.cache, allocation)
        allocation.num_cached_tokens = num_cached

    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks and announce it."""
        if self.cache is not None:
            self.cache.clear()
            await self._publish(self.cache)

    async def _admit(self, cache: BlockCache, work: Work) -> Allocation:
        self.counters.num_waiting += 1
        try:
            async with self._freed:
                while True:
                    allocation = cache.allocate(work.prompt_ids, work.num_output_tokens, work.cache_salt, work.session_id)
                    if allocation is not None:
                        return allocation
                    await self._freed.wait()
        finally:
            self.counters.num_waiting -= 1

    async def _prefill(self, cache: BlockCache, allocation: Allocation) -> None:
        """Steps of `max_num_batched_tokens`, in turn with other prefills; a step's blocks are announced as it is scheduled."""
        model, num_computed, num_prompt = cache.model, allocation.num_cached_tokens, len(allocation.ids)
        while num_computed < num_prompt:
            async with self._turn:
                step = min(model.max_num_batched_tokens, num_prompt - num_computed)
                num_computed += step
                cache.store(allocation, num_computed)
                await self._publish(cache)
                await asyncio.sleep(step / model.prefill_tokens_per_second)

    async def _publish(self, cache: BlockCache) -> None:
        assert self.events is not None
        await self.events.publish(cache.take_events())

    def metrics_text(self, model: str) -> str:
        """Prometheus text under vLLM's names."""
        counters = self.counters
        cached, computed = counters.num_cached_tokens, counters.num_prompt_tokens - counters.num_cached_tokens
        labels = f'engine="0",model_name="{model}"'
        source = "vllm:prompt_tokens_by_source_total"
        samples: list[tuple[str, str, str, float]] = [
            ("counter", "vllm:prefix_cache_queries_total", labels, counters.num_prompt_tokens),
            ("counter", "vllm:prefix_cache_hits_total", labels, cached),
            ("counter", "vllm:external_prefix_cache_queries_total", labels, 0),
            ("counter", "vllm:external_prefix_cache_hits_total", labels, 0),
            ("counter", "vllm:prompt_tokens_total", labels, counters.num_prompt_tokens),
            ("counter", "vllm:generation_tokens_total", labels, counters.num_generated_tokens),
            ("counter", source, f'{labels},source="local_compute"', computed),
            ("counter", source, f'{labels},source="local_cache_hit"', cached),
            ("counter", source, f'{labels},source="external_kv_transfer"', 0),
            ("counter", "vllm:num_preemptions_total", labels, counters.num_preemptions),
            ("gauge", "vllm:num_requests_running", labels, counters.num_running),
            ("gauge", "vllm:num_requests_waiting", labels, counters.num_waiting),
            ("gauge", "vllm:kv_cache_usage_perc", labels, self.cache.usage if self.cache else 0.0),
        ]
        if self.cache:
            kv = self.cache.model
            # vLLM counts its null block too.
            config = f'block_size="{kv.block_size}",enable_prefix_caching="True",engine="0",num_gpu_blocks="{kv.num_blocks + 1}"'
            config += f',prefix_caching_hash_algo="{kv.hash_algorithm}"'
            samples.append(("gauge", "vllm:cache_config_info", config, 1.0))
        return _exposition(samples)


def _exposition(samples: list[tuple[str, str, str, float]]) -> str:
    """(type, name, labels, value) as classic Prometheus text."""
    text, last = "", ""
    for kind, name, labels, value in samples:
        text += "" if name == last else f"# HELP {name} As the engine counts it.\n# TYPE {name} {kind}\n"
        text, last = f"{text}{name}{{{labels}}} {float(value)}\n", name
    return text
