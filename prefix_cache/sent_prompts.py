"""Prompts that this server has sent, so that an engine's events about them need neither decoding nor hashing.

An event carries the ids of its blocks: to decode and hash them costs several times what all else does, and mostly they are known. Whether
they are is seen from the event's bytes: where each id would stand in them follows from the ids, so all can be compared at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefix_cache.blocks import BlockHash

MAX_IDS = 4_000_000
"""Of all prompts that are kept, 4 bytes each. The oldest prompts go first."""
_MIN_IDS = 1024
"""Fewer are decoded sooner than compared."""
_COUNT_BYTES = {0xDC: 2, 0xDD: 4}
"""Of the length of a msgpack array, behind its first byte; arrays of at most 15 items begin otherwise."""
_MARKER = 0xCB
_MAX_WIDTH = 5
_PIECE_IDS = 16_384
"""As many are compared at once as leave their tables in a core's cache."""


class SentBlocks(array):  # type: ignore[type-arg]  # of ints
    """Ids of whole blocks that an event announced, and their hashes below `parent`."""

    parent: BlockHash
    hashes: Sequence[BlockHash]


@dataclass(slots=True)
class _Sent:
    ids: array[int]
    hashes: Sequence[BlockHash]
    parent: BlockHash
    num_announced: int = 0
    """Of `hashes`."""


class SentPrompts:
    """The last prompt of each session, from the first block on that the engine has to compute. `block_size` in tokens."""

    def __init__(self, block_size: int, *, max_ids: int = MAX_IDS) -> None:
        self.num_ids = 0
        self.num_known_events = 0
        """Events that were not decoded."""
        self._block_size = block_size
        self._max_ids = max_ids
        self._sent: dict[str, _Sent] = {}

    def add(self, session_id: str, ids: array[int], hashes: Sequence[BlockHash], start: int, stop: int, root: BlockHash) -> None:
        """Blocks `start` up to `stop` of a prompt are sent, to be computed; `hashes` are those of its blocks, below `root`."""
        self._drop(session_id)
        size, stop = self._block_size, min(stop, len(hashes))
        if (stop - start) * size < _MIN_IDS:
            return
        sent = _Sent(ids[start * size : stop * size], hashes[start:stop], hashes[start - 1] if start else root)
        self._sent[session_id] = sent
        self.num_ids += len(sent.ids)
        while self.num_ids > self._max_ids:
            self._drop(next(iter(self._sent)))

    def announced(self, session_id: str | None, packed: memoryview) -> SentBlocks | None:
        """The blocks of an event, if they are the next ones that the session has sent. `packed` is the msgpack array of their ids."""
        sent = self._sent.get(session_id) if session_id is not None else None
        header = 1 + _COUNT_BYTES.get(packed[0], 0)
        num_ids = int.from_bytes(packed[1:header], "big")
        if sent is None or num_ids < _MIN_IDS or num_ids % self._block_size:
            return None
        start, stop = sent.num_announced, sent.num_announced + num_ids // self._block_size
        blocks = SentBlocks("I", sent.ids[start * self._block_size : stop * self._block_size].tobytes())
        if len(blocks) != num_ids or not _is_packed(np.frombuffer(blocks, np.uint32), packed[header:]):
            return None
        blocks.hashes = sent.hashes[start:stop]
        blocks.parent = sent.hashes[start - 1] if start else sent.parent
        sent.num_announced = stop
        self.num_known_events += 1
        return blocks

    def _drop(self, session_id: str) -> None:
        sent = self._sent.pop(session_id, None)
        if sent is not None:
            self.num_ids -= len(sent.ids)


def _is_packed(ids: npt.NDArray[np.uint32], items: memoryview) -> bool:
    """Whether `items` are the msgpack integers `ids`, each in its shortest form, one behind the other."""
    at = 0
    for start in range(0, len(ids), _PIECE_IDS):
        num_bytes = _num_packed(ids[start : start + _PIECE_IDS], items[at:])
        if not num_bytes:
            return False
        at += num_bytes
    return at == len(items)


def _num_packed(ids: npt.NDArray[np.uint32], items: memoryview) -> int:
    """Bytes that `ids` take up at the head of `items`; 0 if something else is there.

    An integer is itself in a byte, or a marker (0xCC, 0xCD, 0xCE) and 1, 2 or 4 bytes, the highest first.
    """
    is_long = (ids > 0xFFFF).view(np.uint8)
    kinds = (ids > 0x7F).view(np.uint8) + (ids > 0xFF).view(np.uint8) + is_long
    widths = kinds + is_long + np.uint8(1)
    ends = np.cumsum(widths, dtype=np.int64)
    num_bytes = int(ends[-1])
    if num_bytes > len(items):
        return 0
    padded = np.frombuffer(bytes(_MAX_WIDTH) + items[:num_bytes], np.uint8)  # an item that ends at `end` has its last byte at `end + 4`
    same = (padded[_MAX_WIDTH:][ends - widths] == kinds + np.uint8(_MARKER)) | (kinds == 0)
    for place, least in enumerate((0, 2, 3, 3)):
        digits = (ids >> np.uint32(8 * place)).astype(np.uint8)
        same &= (padded[_MAX_WIDTH - 1 - place :][ends] == digits) | (kinds < least)
    return num_bytes if same.all() else 0
