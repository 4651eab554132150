"""What one rank holds after tensor parallelism: heads sharded where there are enough, replicated where there are not."""

from __future__ import annotations

from dataclasses import dataclass

from model.m3.config import M3Config


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of `config` at tensor-parallel size `tp`. With `expert_parallel` a rank holds whole experts, a tp-th of them.

    Raises ValueError where the model cannot be cut that way.
    """

    config: M3Config
    tp: int
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        config, tp = self.config, self.tp
        if tp < 1:
            raise ValueError(f"tensor-parallel size {tp}: at least 1 is needed")
        if config.num_attention_heads % tp:
            raise ValueError(f"{config.num_attention_heads} query heads do not divide by {tp} ranks")
        more, fewer = max(config.num_key_value_heads, tp), min(config.num_key_value_heads, tp)
        if more % fewer:
            raise ValueError(f"{config.num_key_value_heads} KV heads can be neither cut nor copied over {tp} ranks")
        if self.expert_parallel and config.num_local_experts % tp:
            raise ValueError(f"{config.num_local_experts} experts do not divide by {tp} ranks")

    @property
    def num_query_heads(self) -> int:
        return self.config.num_attention_heads // self.tp

    @property
    def num_kv_heads(self) -> int:
        """Never below one: with more ranks than KV heads each head lies on several ranks."""
        return max(1, self.config.num_key_value_heads // self.tp)

    @property
    def kv_replication(self) -> int:
        """On how many ranks the same KV head lies."""
        return max(1, self.tp // self.config.num_key_value_heads)

    @property
    def num_index_heads(self) -> int:
        """Index query heads; sharded and replicated as KV heads are, one to each."""
        return max(1, self.config.num_index_heads // self.tp)

    @property
    def query_size(self) -> int:
        return self.num_query_heads * self.config.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.config.head_dim

    @property
    def index_query_size(self) -> int:
        return self.num_index_heads * self.config.index_dim

    @property
    def num_experts(self) -> int:
        return self.config.num_local_experts // self.tp if self.expert_parallel else self.config.num_local_experts

    @property
    def expert_size(self) -> int:
        """Intermediate width of a routed expert on this rank."""
        return self.config.expert_intermediate_size if self.expert_parallel else _split(self.config.expert_intermediate_size, self.tp)

    @property
    def shared_expert_size(self) -> int:
        return _split(self.config.expert_intermediate_size * self.config.num_shared_experts, self.tp)

    @property
    def dense_size(self) -> int:
        return _split(self.config.dense_intermediate_size, self.tp)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding and of the output head, padded to `VOCAB_PADDING` as vLLM does before it cuts."""
        return _round_up(self.config.vocab_size, VOCAB_PADDING * self.tp) // self.tp


VOCAB_PADDING = 64
MX_GROUP = 32
"""Elements that share a scale in MXFP4 and MXFP8; local widths are padded to it."""


def _split(size: int, parts: int) -> int:
    return _round_up(-(-size // parts), MX_GROUP)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
