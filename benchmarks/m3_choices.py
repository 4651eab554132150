"""Whether what was recorded as an engine's choices can be its choices: of experts and of blocks, for each token of one prompt.

The gate computes along them, and what was read from the wrong place in memory gives figures that look like bad arithmetic. So each row is
checked for what holds of every sound choice, and an error says what was found instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class ChoicesBroken(RuntimeError):
    """What was recorded is not a choice that M3's indexer or router can make; the message shows the first row that is not."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of `num_tokens`, computed in one pass, and how blocks are chosen."""

    num_tokens: int
    num_heads: int
    block_size: int
    topk: int
    num_init_blocks: int = 0
    num_local_blocks: int = 1

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)


def as_mask(rows: Tensor, num_blocks: int) -> Tensor:
    """Block ids [tokens, heads, top k], −1 where there are fewer, as bool [heads, tokens, blocks]."""
    ids = rows.long().masked_fill(rows < 0, num_blocks)
    mask = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=ids.device).scatter_(-1, ids, True)
    return mask[..., :num_blocks].transpose(0, 1)


def check_blocks(rows: Tensor, asked: Asked, ordinal: int) -> None:
    """rows: [tokens, heads, top k], as sparse layer `ordinal` left them. Raises ChoicesBroken.

    Every query chooses as many blocks as it may, each once, none that it cannot see, and those that it must (its own among them).
    """
    shape = (asked.num_tokens, asked.num_heads, asked.topk)
    if tuple(rows.shape) != shape or rows.is_floating_point():
        raise ChoicesBroken(f"sparse layer {ordinal} left {rows.dtype} of shape {tuple(rows.shape)} and not whole numbers of {shape}")
    visible = (torch.arange(asked.num_tokens, device=rows.device) // asked.block_size + 1)[:, None]
    outside = ((rows < -1) | (rows >= visible[..., None])).any(-1)
    mask = as_mask(rows.masked_fill(outside[..., None], -1), asked.num_blocks).transpose(0, 1)
    blocks = torch.arange(asked.num_blocks, device=rows.device)
    due = ((blocks < asked.num_init_blocks) | (blocks >= visible - asked.num_local_blocks)) & (blocks < visible)
    faults = {
        "a block that it cannot see": outside,
        "a block twice": ~outside & (mask.sum(-1) != (rows >= 0).sum(-1)),
        "too few or too many blocks": ~outside & ((rows >= 0).sum(-1) != visible.clamp(max=asked.topk)),
        "not its own block": ~outside & (due[:, None] & ~mask).any(-1),
    }
    found = {what: bad for what, bad in faults.items() if bool(bad.any())}
    if found:
        raise ChoicesBroken(f"sparse layer {ordinal}: " + "; ".join(_describe(what, bad, rows) for what, bad in found.items()))


def _describe(what: str, bad: Tensor, rows: Tensor) -> str:
    token, head = (int(place) for place in bad.nonzero()[0])
    chosen = rows[token, head].tolist()
    return f"{int(bad.sum())} of {bad.numel()} choices have {what}, first token {token} of head {head}: {chosen}"


def check_experts(routed: Sequence[Tensor], num_layers: int, num_tokens: int, num_experts: int) -> None:
    """routed: of each expert layer, [tokens, top k] expert ids. Raises ChoicesBroken: several passes, or padded rows."""
    shapes = [tuple(rows.shape) for rows in routed]
    if len(shapes) != num_layers or any(length != num_tokens for length, _ in shapes):
        counts = sorted({length for length, _ in shapes})
        raise ChoicesBroken(f"{len(shapes)} routers of {counts} tokens ran for {num_layers} layers of {num_tokens}")
    if any(bool((rows >= num_experts).any()) for rows in routed):
        raise ChoicesBroken(f"a router chose an expert beyond {num_experts - 1}")
