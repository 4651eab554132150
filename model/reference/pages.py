"""A block of 128 tokens seen as eight pages of 16, without moving a byte; and caches read through a block table or a page table."""

from __future__ import annotations

import torch
from torch import Tensor

PAGE_TOKENS = 16


def as_pages(cache: Tensor, page_tokens: int = PAGE_TOKENS) -> Tensor:
    """[blocks, block tokens, ...] as [pages, page tokens, ...], sharing its memory. Raises ValueError where that cannot be."""
    block_tokens = cache.shape[1]
    if block_tokens % page_tokens:
        raise ValueError(f"a block of {block_tokens} tokens is not made of pages of {page_tokens}")
    if not cache.is_contiguous():
        raise ValueError("the cache is not contiguous: a page view would have to copy it")
    return cache.view(cache.shape[0] * (block_tokens // page_tokens), page_tokens, *cache.shape[2:])


def page_table(block_table: Tensor, pages_per_block: int) -> Tensor:
    """Page ids for block ids, in order: [requests, blocks] as [requests, blocks · pages]."""
    pages = torch.arange(pages_per_block, device=block_table.device)
    return (block_table[..., None] * pages_per_block + pages).flatten(-2)


def gather(cache: Tensor, table: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` tokens of one request: [num_tokens, ...]. `table`: [blocks] ids into `cache`, of blocks or of pages."""
    return cache[table].flatten(0, 1)[:num_tokens]
