"""What the exclusive tier holds, told by vLLM's own KV events: its blocks by name, in the medium CPU.

The tier never sees a block's tokens. Who follows the events knows a block by its name from when it stood on the GPU. In a batch, vLLM puts
what a connector tells behind what the block pool tells: a name leaves the GPU before it comes to the tier, and is back on the GPU before
it leaves the tier. The form is that of vLLM's OffloadingConnector without tokens, which others pass over: its block size is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from agentserve.engines.plugin.nodes import Key
from agentserve.engines.plugin.supported import check_fields

_MEDIUM: Final = "CPU"
_STORED: Final[dict[str, Any]] = {
    "parent_block_hash": None,
    "token_ids": [],
    "block_size": 0,
    "lora_id": None,
    "medium": _MEDIUM,
    "lora_name": None,
}
_REMOVED: Final[dict[str, Any]] = {"medium": _MEDIUM}


def check_events() -> None:
    """Raises PluginUnsupported where vLLM's events are not as they are made here."""
    check_fields(BlockStored, {"block_hashes", *_STORED})
    check_fields(BlockRemoved, {"block_hashes", *_REMOVED})


def tier_events(came: Sequence[Key], gone: Sequence[Key]) -> Sequence[Any]:
    """Up to two events, however many blocks."""
    events: list[Any] = []
    if gone:
        events.append(BlockRemoved(block_hashes=_names(gone), **_REMOVED))
    if came:
        events.append(BlockStored(block_hashes=_names(came), **_STORED))
    return events


def _names(keys: Sequence[Key]) -> list[Any]:
    return [maybe_convert_block_hash(key) for key in keys]
