"""Cross-layer index reuse: which sparse layers choose blocks, which read another's choice, and what the readers no longer do.

The switch and its meaning are vLLM's on ROCm: `use_index_cache`, `index_topk_freq`, `index_skip_topk_offset`. It changes the amount of work
and, slightly, the answers: results with and without it are never put side by side without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.m3.config import M3Config
from model.m3.dtypes import Dtype

GUARD_THRESHOLDS = tuple(share / 20 for share in range(8, 20))
"""Least overlaps that a guarded plan tries: 0.40 to 0.95."""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """`leaders[i]` is the ordinal of the sparse layer whose choice sparse layer i reads; its own where it chooses itself."""

    leaders: tuple[int, ...]

    def __post_init__(self) -> None:
        for ordinal, leader in enumerate(self.leaders):
            if not 0 <= leader <= ordinal or self.leaders[leader] != leader:
                raise ValueError(f"sparse layer {ordinal} cannot read the choice of {leader}: only of itself or of an earlier leader")

    @property
    def num_leaders(self) -> int:
        return len(set(self.leaders))

    @property
    def is_off(self) -> bool:
        return self.num_leaders == len(self.leaders)

    def leads(self, ordinal: int) -> bool:
        return self.leaders[ordinal] == ordinal


def fixed_plan(num_sparse_layers: int, freq: int = 1, offset: int = 0) -> ReusePlan:
    """One of every `freq` sparse layers leads, counted from `offset`; those before it all lead. `freq` 1: no reuse.

    Raises ValueError for a frequency under 1 or a negative offset.
    """
    if freq < 1 or offset < 0:
        raise ValueError(f"index_topk_freq {freq} with offset {offset}: at least 1 and 0 are needed")
    leaders, leader = [], 0
    for ordinal in range(num_sparse_layers):
        if max(ordinal - offset, 0) % freq == 0:
            leader = ordinal
        leaders.append(leader)
    return ReusePlan(tuple(leaders))


def measured_plan(overlap: Sequence[Sequence[float]], least_overlap: float, longest: int) -> ReusePlan:
    """Leaders by measured overlap: a layer reads its leader while the two choose at least `least_overlap` (0 to 1) of the same blocks.

    `overlap[i][j]`, j <= i: mean share of layer i's blocks that layer j chose too. At most `longest` layers follow one leader. Raises
    ValueError where the table is no lower triangle of shares.
    """
    leaders: list[int] = []
    for ordinal, row in enumerate(overlap):
        if len(row) <= ordinal or not all(0 <= share <= 1 for share in row[: ordinal + 1]):
            raise ValueError(f"row {ordinal} of the overlap table needs {ordinal + 1} shares from 0 to 1")
        leader = leaders[-1] if leaders else ordinal
        follows = leaders and ordinal - leader <= longest and row[leader] >= least_overlap
        leaders.append(leader if follows else ordinal)
    return ReusePlan(tuple(leaders))


def guarded_plan(
    overlap: Sequence[Sequence[float]],
    longest: int,
    is_accurate: Callable[[ReusePlan], bool],
    thresholds: Sequence[float] = GUARD_THRESHOLDS,
) -> ReusePlan:
    """The most reuse by measured overlap that `is_accurate` lets pass: thresholds are tried from the loosest on. None does: no reuse.

    `is_accurate` runs the model under a plan and compares its answers with those of no reuse: overlap alone says nothing of them.
    """
    tried: set[ReusePlan] = set()
    for threshold in sorted(thresholds):
        plan = measured_plan(overlap, threshold, longest)
        if plan not in tried and (plan.is_off or is_accurate(plan)):
            return plan
        tried.add(plan)
    return fixed_plan(len(overlap))


@dataclass(frozen=True, slots=True)
class IndexWork:
    """Work of the indexers of one rank in one forward pass."""

    flops: float
    """Scores only: one multiply-add for each index head, dimension and key. Projections are in `model.m3.shapes`."""
    read_bytes: int
    """Index keys read to score them, once a request."""
    write_bytes: int
    """Index keys written for new tokens."""


def index_work(
    config: M3Config,
    plan: ReusePlan,
    *,
    num_index_heads: int,
    query_tokens: Sequence[int],
    context_tokens: Sequence[int],
    dtype: Dtype = Dtype.BF16,
    followers_write: bool = True,
) -> IndexWork:
    """Of a batch in which request i has `query_tokens[i]` new tokens that look at `context_tokens[i]` tokens (its own included).

    `followers_write` False: a layer that never scores does not store its index keys either, as the ROCm path does it; then its choice can
    not be recomputed later from the cache. A query sees on average half of its own request's new tokens.
    """
    key_bytes = dtype.bytes_of(config.index_dim)
    seen = sum(queries * (context - (queries - 1) / 2) for queries, context in zip(query_tokens, context_tokens, strict=True))
    writers = len(plan.leaders) if followers_write else plan.num_leaders
    return IndexWork(
        flops=2.0 * num_index_heads * config.index_dim * seen * plan.num_leaders,
        read_bytes=sum(context_tokens) * key_bytes * plan.num_leaders,
        write_bytes=sum(query_tokens) * key_bytes * writers,
    )
