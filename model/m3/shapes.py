"""Local matrix shapes of one rank, as its kernels see them: M tokens by K inputs by N outputs.

Compute tensors only. What persists is in `model.m3.kv`, what ranks exchange in `model.m3.exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.m3.sharding import Shard


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """One linear layer on one rank: [M, K] x [K, N]. `num_layers` layers have it, `num_matrices` times each (experts)."""

    name: str
    n: int
    k: int
    num_layers: int
    num_matrices: int = 1
    rows_per_token: float = 1.0
    """Rows of M that one token of the batch gives each matrix, on average; under 1 for routed experts."""
    how: str = "column"
    """column: N is cut. row: K is cut, and the result is summed over ranks. replicated: every rank computes it whole."""

    sampled_only: bool = False
    """Only positions whose next token is asked for reach it: one a sequence in prefill, all of a decode batch."""

    def m(self, num_tokens: int) -> float:
        """Average rows for a batch of `num_tokens` that reach it."""
        return num_tokens * self.rows_per_token

    def flops(self, num_tokens: int) -> float:
        """Floating-point operations of all its layers for one batch: two for each multiply-add."""
        return 2.0 * self.m(num_tokens) * self.n * self.k * self.num_matrices * self.num_layers

    @property
    def num_parameters(self) -> int:
        return self.n * self.k * self.num_matrices * self.num_layers


def local_shapes(shard: Shard, *, fuse_shared_expert: bool = False) -> tuple[MatrixShape, ...]:
    """Every linear layer of one rank. With `fuse_shared_expert` the shared expert is one more slot that every token takes."""
    config = shard.config
    hidden, dense, sparse = config.hidden_size, config.num_dense_layers, config.num_sparse_layers
    qkv = shard.query_size + 2 * shard.kv_size
    index = shard.index_query_size + config.index_dim
    return (
        MatrixShape("attention qkv", qkv, hidden, dense),
        MatrixShape("sparse attention qkv + index", qkv + index, hidden, sparse),
        MatrixShape("attention output", hidden, shard.query_size, config.num_hidden_layers, how="row"),
        MatrixShape("dense gate and up", 2 * shard.dense_size, hidden, dense),
        MatrixShape("dense down", hidden, shard.dense_size, dense, how="row"),
        MatrixShape("router", config.num_local_experts, hidden, sparse, how="replicated"),
        *_expert_shapes(shard, fuse_shared_expert),
        MatrixShape("output head", shard.vocab_size, hidden, 1, sampled_only=True),
    )


def _expert_shapes(shard: Shard, fuse_shared_expert: bool) -> tuple[MatrixShape, ...]:
    config = shard.config
    hidden, sparse = config.hidden_size, config.num_sparse_layers
    per_expert = config.num_experts_per_tok / config.num_local_experts
    if fuse_shared_expert and config.num_shared_experts:
        if shard.expert_parallel:
            raise ValueError("the shared expert cannot be a routed slot under expert parallelism: each rank needs it whole")
        slots = shard.num_experts + config.num_shared_experts
        per_slot = (config.num_experts_per_tok + config.num_shared_experts) / slots
        return (
            MatrixShape("expert gate and up, shared fused", 2 * shard.expert_size, hidden, sparse, slots, per_slot),
            MatrixShape("expert down, shared fused", hidden, shard.expert_size, sparse, slots, per_slot, "row"),
        )
    routed = (
        MatrixShape("expert gate and up", 2 * shard.expert_size, hidden, sparse, shard.num_experts, per_expert),
        MatrixShape("expert down", hidden, shard.expert_size, sparse, shard.num_experts, per_expert, "row"),
    )
    if not config.num_shared_experts:
        return routed
    return (
        *routed,
        MatrixShape("shared expert gate and up", 2 * shard.shared_expert_size, hidden, sparse),
        MatrixShape("shared expert down", hidden, shard.shared_expert_size, sparse, how="row"),
    )
