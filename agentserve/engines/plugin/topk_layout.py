"""The buffer in which M3's layers share their choice of blocks, laid out as its readers and writers take it.

vLLM's NVIDIA model allocates it [tokens, index heads, top k], for the kernels of SM100. Elsewhere (Hopper, Ampere) the Triton path runs,
and up to vLLM 0.26 that path takes the same memory for [index heads, tokens, top k]: what head h chose for token n then lies where head
h - 1 writes for token n + 4 (with four heads a rank), so that heads overwrite each other's choice and a query attends to another's blocks.
Later versions hand their kernels a transposed view (vllm-project/vllm pull request 49149); `turn_choice_buffers` does so for those that do
not.
"""

from __future__ import annotations

from inspect import getsource
from typing import Any

_TURN = "transpose(0, 1)"
"""What the source of a kernel's caller has where it turns the buffer itself."""


def turn_choice_buffers(attention: Any) -> None:
    """Patch the class of M3's sparse attention layers so that each layer built from now on has its kernels read the buffer as it lies.

    Indexer and attention are looked at one by one; where a kernel reads it rightly, nothing changes.
    """
    build = attention.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if getattr(self, "topk_indices_buffer", None) is not None:
            _turn(self, self.impl, self.indexer.num_index_heads)
            _turn(self.indexer.impl, self.indexer.impl, self.indexer.num_index_heads)

    attention.__init__ = built


def _turn(holder: Any, kernel: Any, num_index_heads: int) -> None:
    """Of `holder`'s buffer, which `kernel` reads or writes."""
    buffer = holder.topk_indices_buffer
    if _is_token_major(buffer, num_index_heads) and _TURN not in getsource(type(kernel).forward):
        holder.topk_indices_buffer = buffer.transpose(0, 1)


def choices_of(buffer: Any, num_index_heads: int) -> Any:
    """The buffer as [tokens, index heads, top k], whichever way it lies: a view."""
    return buffer if _is_token_major(buffer, num_index_heads) else buffer.transpose(0, 1)


def _is_token_major(buffer: Any, num_index_heads: int) -> bool:
    return bool(buffer.shape[1] == num_index_heads)
