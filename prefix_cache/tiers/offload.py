"""What the tiers behind the GPU will add to a request's hit, from what they announce and what requests find there.

The memory (DRAM) is followed by KV events of its medium: chunks stored, and chunks evicted where the cache server says so. Those events
carry no cache salt, so the chunks of salted prompts are followed by the requests that stored them. The remote tier holds all that was
ever stored until a request proves otherwise; after a run of such proofs it counts as gone, until a hit that only it explains.

The rules of the lookup are those of LMCache's connector (integration/vllm/lmcache_mp_connector.py, get_num_new_matched_tokens): whole
chunks from the first token on, whatever the GPU holds of them; what they reach beyond the GPU's hit is loaded; never the last token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from prefix_cache.blocks import BlockHash, chain_hashes, root_hash
from prefix_cache.events import BlockRemoved, BlockStored, EngineHash, EventBatch
from prefix_cache.tiers import Tier
from prefix_cache.tiers.chunks import ChunkSet, Watermark, chunk_keys
from prefix_cache.tiers.external import Ends, ExternalHit
from prefix_cache.tiers.ranks import RankLookups

_NUM_WRONG_TO_DISTRUST = 3
"""So many requests in a row that the remote tier should have served and did not, and it counts as gone."""


class Offload:
    """The tiers behind one engine. `block_size` and `chunk_tokens` in tokens; a chunk is a whole number of blocks.

    `memory` is the watermark of a cache server that does not announce what it evicts, `has_remote` whether a second level stands behind it.
    """

    def __init__(
        self,
        block_size: int,
        chunk_tokens: int = 256,
        *,
        has_remote: bool = False,
        memory: Watermark | None = None,
        medium: str = "CPU",
        max_chunks: int = 1_000_000,
    ) -> None:
        assert chunk_tokens % block_size == 0
        self.block_size = block_size
        self.chunk_tokens = chunk_tokens
        self.dram = ChunkSet(max_chunks=max_chunks, watermark=memory)
        self.remote = ChunkSet(max_chunks=max_chunks) if has_remote else None
        self.is_up = True
        """False between `stopped` and `started`: nothing can be found then."""
        self.is_connected = True
        """False from `stopped` until the engine is seen to use the server again: it finds a new one by a heartbeat, seconds later."""
        self.num_unresolved_chunks = 0
        """Announced chunks whose prefix is not known, or of another size; they never match."""
        self.num_wrong = 0
        """Requests that found less than was predicted, from the last one back to the last hit."""
        self.ranks: RankLookups | None = None
        """How often the engine's ranks differ in what they hold; None: nobody counts it."""
        self._given = ChunkSet(max_chunks=max_chunks)
        self._names: dict[EngineHash, BlockHash] = {}
        """Our keys by the cache server's own hash of a chunk; kept after it left, since chunks that come later hang below it."""
        self._medium = medium
        self._max_names = 2 * max_chunks

    @property
    def num_resident_tokens(self) -> int:
        """In memory, whole on every rank."""
        return self.dram.num_chunks * self.chunk_tokens

    def stopped(self) -> None:
        """The cache server is known not to run: nothing can be found, and what it had in memory is lost."""
        self.is_up = self.is_connected = False
        self.dram.clear()

    def started(self) -> None:
        """The cache server runs again, with an empty memory. What the second level has can be found from the engine's first store on."""
        self.is_up = True
        self.num_wrong = 0
        self.dram.clear()  # the engine's last announcements of the old one may have come after its end

    def apply(self, batch: EventBatch) -> None:
        """Take one batch of the engine's KV events, in their order; those of other media are let pass."""
        for event in batch.events:
            if isinstance(event, BlockStored) and event.medium == self._medium:
                self.is_connected = self.is_up
                self._store(event)
            elif isinstance(event, BlockRemoved) and event.medium == self._medium:
                self.dram.remove(self._names[name] for name in event.block_hashes if name in self._names)

    def predict(self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_gpu_tokens: int) -> ExternalHit:
        """The hit beyond the first `num_gpu_tokens`, which the GPU holds. `hashes` of the prompt's whole blocks."""
        keys = self._keys(hashes, num_prompt_tokens)
        num_given = self._given.match(keys)
        num_in_memory = self.dram.match(keys) if self.is_connected else 0
        num_found = self._match(keys, num_in_memory) if self.is_connected else 0
        beyond = self._beyond(num_found, num_prompt_tokens, num_gpu_tokens)
        tier = (Tier.REMOTE if num_found > num_in_memory else Tier.DRAM) if beyond else None
        given = self._beyond(max(num_given, num_found), num_prompt_tokens, num_gpu_tokens)
        return ExternalHit(beyond, given, tier, max(num_gpu_tokens, num_in_memory * self.chunk_tokens), num_gpu_tokens)

    def ends(self, hashes: Sequence[BlockHash], num_cached_tokens: int, expected: ExternalHit) -> Ends:
        """What was given is the tiers' to account for, wherever the hit ended: they keep what the GPU has too."""
        return Ends(given=expected.num_gpu_tokens + expected.num_given_tokens if expected.num_given_tokens else 0)

    def learn(self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_cached_tokens: int, expected: ExternalHit) -> None:
        """Correct the guess by a finished request: `num_cached_tokens` of its prompt were found, on the GPU and behind it.

        What it did not find it has computed and stored again, so no chunk is struck off; but a remote tier that fails in a row is gone.
        """
        self.dram.touch(self._keys(hashes, num_prompt_tokens)[: num_cached_tokens // self.chunk_tokens])
        if num_cached_tokens > expected.num_explained_tokens:
            self.num_wrong = 0  # only the remote tier explains it
            self.is_connected = self.is_up
        elif expected.tier is Tier.REMOTE:
            self.num_wrong += 1

    def computed(self, hashes: Sequence[BlockHash], num_tokens: int, *, salted: bool) -> None:
        """A request has computed or loaded its first `num_tokens`: their whole chunks were given to the tiers."""
        if not self.is_connected:
            return
        keys = chunk_keys(
            hashes, self.chunk_tokens // self.block_size, num_tokens // self.chunk_tokens * self.chunk_tokens // self.block_size
        )
        self._give(keys)
        if salted:
            self.dram.store(keys)

    def _give(self, keys: Sequence[BlockHash]) -> None:
        self._given.store(keys)
        if self.remote is not None:
            self.remote.store(keys)

    def _keys(self, hashes: Sequence[BlockHash], num_prompt_tokens: int) -> Sequence[BlockHash]:
        return chunk_keys(hashes, self.chunk_tokens // self.block_size, num_prompt_tokens // self.block_size)

    def _match(self, keys: Sequence[BlockHash], num_in_memory: int) -> int:
        """Leading chunks that some tier holds."""
        remote = self.remote
        if remote is None or self.num_wrong >= _NUM_WRONG_TO_DISTRUST:
            return num_in_memory
        num_found = num_in_memory
        while num_found < len(keys) and (keys[num_found] in remote or keys[num_found] in self.dram):
            num_found += 1
        return num_found

    def _beyond(self, num_chunks: int, num_prompt_tokens: int, num_gpu_tokens: int) -> int:
        return max(0, min(num_chunks * self.chunk_tokens, num_prompt_tokens - 1) - num_gpu_tokens)

    def _store(self, event: BlockStored) -> None:
        parent = root_hash() if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None or event.block_size != self.chunk_tokens:
            self.num_unresolved_chunks += len(event.block_hashes)
            return
        blocks = chain_hashes(parent, array("I", event.token_ids).tobytes(), self.block_size)
        keys = chunk_keys(blocks, self.chunk_tokens // self.block_size)
        self._names.update(zip(event.block_hashes, keys, strict=False))
        while len(self._names) > self._max_names:
            del self._names[next(iter(self._names))]
        self.dram.store(keys)
        self._give(keys)
