"""MiniMax-M3's sizes, read from a checkpoint's configuration or as published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class M3Config:
    """The text backbone. Defaults are those of vLLM's MiniMaxM3TextConfig, which mirror the published checkpoint."""

    hidden_size: int = 6144
    num_hidden_layers: int = 60
    num_dense_layers: int = 3
    """Layers at the head with dense attention and a dense MLP; the others have sparse attention and experts."""
    num_attention_heads: int = 64
    num_key_value_heads: int = 4
    head_dim: int = 128
    rotary_dim: int = 64
    num_index_heads: int = 4
    index_dim: int = 128
    block_size: int = 128
    """Tokens of a block that the indexer scores; the KV cache's block as well."""
    topk_blocks: int = 16
    num_init_blocks: int = 0
    num_local_blocks: int = 1
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    num_shared_experts: int = 1
    expert_intermediate_size: int = 3072
    dense_intermediate_size: int = 12288
    vocab_size: int = 200_064

    @property
    def num_sparse_layers(self) -> int:
        return self.num_hidden_layers - self.num_dense_layers

    @property
    def query_heads_per_kv_head(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads


MINIMAX_M3 = M3Config()

_NAMES = {
    "intermediate_size": "expert_intermediate_size",
    "n_shared_experts": "num_shared_experts",
}
_SPARSE_NAMES = {
    "sparse_num_index_heads": "num_index_heads",
    "sparse_index_dim": "index_dim",
    "sparse_block_size": "block_size",
    "sparse_topk_blocks": "topk_blocks",
    "sparse_init_block": "num_init_blocks",
    "sparse_local_block": "num_local_blocks",
}


def config_from_json(parsed: Mapping[str, Any]) -> M3Config:
    """Read a checkpoint's config.json, parsed; what it leaves out has the published value.

    The text backbone may be nested under `text_config`, as the image-and-text checkpoint has it.
    Raises ValueError where dense layers do not come first or a size is no positive number.
    """
    text = parsed.get("text_config") or parsed
    known = {field.name for field in fields(M3Config)}
    sizes = {_NAMES.get(name, name): value for name, value in text.items()}
    sparse = text.get("sparse_attention_config") or {}
    sizes |= {_SPARSE_NAMES[name]: value for name, value in sparse.items() if name in _SPARSE_NAMES}
    frequencies = sparse.get("sparse_attention_freq") or text.get("moe_layer_freq")
    if frequencies is not None:
        sizes["num_dense_layers"] = _num_dense(frequencies)
    config = replace(MINIMAX_M3, **{name: value for name, value in sizes.items() if name in known})
    for field in fields(M3Config):
        size = getattr(config, field.name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"{field.name} is {size!r}; a whole number is needed")
    return config


def config_to_json(shape: M3Config, max_model_len: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """A config.json of these sizes, as the checkpoint has it: the text backbone inside the configuration of the model that also sees."""
    frequencies = [0] * shape.num_dense_layers + [1] * shape.num_sparse_layers
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_text",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.expert_intermediate_size,
        "dense_intermediate_size": shape.dense_intermediate_size,
        "shared_intermediate_size": shape.expert_intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rotary_dim": shape.rotary_dim,
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-6,
        "num_local_experts": shape.num_local_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "n_shared_experts": shape.num_shared_experts,
        "moe_layer_freq": frequencies,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": shape.index_dim,
            "sparse_num_index_heads": shape.num_index_heads,
            "sparse_topk_blocks": shape.topk_blocks,
            "sparse_block_size": shape.block_size,
            "sparse_disable_index_value": frequencies,
            "sparse_score_type": "max",
            "sparse_init_block": shape.num_init_blocks,
            "sparse_local_block": shape.num_local_blocks,
            "sparse_attention_freq": frequencies,
        },
        "dtype": dtype,
    }
    return {"architectures": text["architectures"], "model_type": "minimax_m3_vl", "text_config": text, "dtype": dtype}


def _num_dense(frequencies: list[int]) -> int:
    num_dense = len(frequencies) - sum(map(bool, frequencies))
    if any(frequencies[:num_dense]):
        raise ValueError(f"dense layers have to come first, but the layer frequencies are {frequencies!r}")
    return num_dense
