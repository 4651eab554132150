"""A small model folder of MiniMax-M3's own architecture: dense and sparse layers, indexer, routed and shared experts; random weights.

Tokenizer, chat template and the behaviour of the output are those of `model.nano`; the weights reach it by what M3 has. It has no biases,
so the constant that `lm_head` reads comes from the last layer's shared expert: a gate that is always past SwiGLU-OAI's limit gives one.
Such gates also pass the normed input on. Blocks have M3's 128 tokens; four are chosen, so that short sessions leave some out already.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from model.chat import minimax_m3 as chat
from model.m3.config import M3Config, config_to_json
from model.nano import Model, write_folder
from model.nano_weights import (
    AMPLIFICATION,
    ATTENTION_SHARPNESS,
    ATTENTION_VARIANCE,
    CONSTANT,
    MLP_VARIANCE,
    Array,
    last_norm,
    lm_head,
)
from model.vocabulary import Vocabulary

FOLDER = "nano-m3"
SHAPE = M3Config(
    hidden_size=64,
    num_hidden_layers=6,
    num_dense_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rotary_dim=16,
    num_index_heads=2,
    index_dim=32,
    topk_blocks=4,
    num_local_experts=8,
    num_experts_per_tok=2,
    expert_intermediate_size=80,
    dense_intermediate_size=128,
    vocab_size=8192,
)
LIMIT = 7.0
"""Where SwiGLU-OAI cuts its gate; its sigmoid is 1 there to six digits."""
_OPEN = 1000.0
"""A gate's weight for dimension 0, which is 1 before the last layer: far past the limit."""
_ATTENTION_PASSES, _MLP_PASSES = 0.75, 0.6
"""The share of variance that is left after attention has averaged values, and after SwiGLU-OAI."""
_FORMAT = 1


def make_nano_m3(folder: Path, *, shape: M3Config = SHAPE, max_model_len: int = 131_072, seed: int = 0) -> None:
    """Write the folder, or leave a complete one of these arguments as it is. Raises as `model.nano.make_nano`."""
    made = {"m3_format": _FORMAT, "seed": seed, "m3": asdict(shape), "max_model_len": max_model_len}

    def model(vocabulary: Vocabulary) -> Model:
        return config_to_json(shape, max_model_len, dtype="float32"), _Draw(shape, np.random.default_rng(seed)).weights(vocabulary)

    write_folder(folder, made, shape.vocab_size, max_model_len, model)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Random tensors by their names in the checkpoint; linear weights are [out, in]. Only the last layer writes dimension 0."""

    shape: M3Config
    rng: np.random.Generator

    def weights(self, vocabulary: Vocabulary) -> dict[str, Array]:
        shape = self.shape
        into = 1 / math.sqrt(shape.hidden_size - 1)
        embedding = self.normal(shape.vocab_size, shape.hidden_size, std=1.0)
        embedding[:, 0] = 1.0
        tensors = {"model.embed_tokens.weight": embedding}
        for layer in range(shape.num_hidden_layers):
            parts = self.attention(is_sparse=layer >= shape.num_dense_layers)
            parts |= self.experts(is_last=layer == shape.num_hidden_layers - 1) if layer >= shape.num_dense_layers else self.dense()
            tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
        variance = 1 + shape.num_hidden_layers * ATTENTION_VARIANCE + (shape.num_hidden_layers - 1) * MLP_VARIANCE
        tensors["model.norm.weight"] = last_norm(shape.hidden_size, math.sqrt(variance)) - np.float32(1)
        tensors["lm_head.weight"] = lm_head(vocabulary, chat.END, self.normal(shape.vocab_size, shape.hidden_size, std=into))
        return tensors

    def normal(self, *size: int, std: float) -> Array:
        return (self.rng.standard_normal(size) * std).astype(np.float32)

    def reading(self, size: int) -> Array:
        """A matrix that keeps the variance of the normed hidden state and does not see dimension 0."""
        weight = self.normal(size, self.shape.hidden_size, std=1 / math.sqrt(self.shape.hidden_size - 1))
        weight[:, 0] = 0.0
        return weight

    def writing(self, fan_in: int, variance: float) -> Array:
        weight = self.normal(self.shape.hidden_size, fan_in, std=math.sqrt(variance / fan_in))
        weight[0] = 0.0
        return weight

    def attention(self, is_sparse: bool) -> dict[str, Array]:
        """Norms of each head give scores a deviation of ATTENTION_SHARPNESS, whatever the length; the indexer's likewise."""
        shape = self.shape
        keys = shape.num_key_value_heads * shape.head_dim
        queries = shape.num_attention_heads * shape.head_dim
        sharp = np.full(shape.head_dim, math.sqrt(ATTENTION_SHARPNESS) - 1, dtype=np.float32)
        flat = np.zeros(shape.hidden_size, dtype=np.float32)
        parts = {
            "input_layernorm.weight": flat,
            "post_attention_layernorm.weight": flat,
            "self_attn.q_proj.weight": self.reading(queries),
            "self_attn.k_proj.weight": self.reading(keys),
            "self_attn.v_proj.weight": self.reading(keys),
            "self_attn.o_proj.weight": self.writing(queries, ATTENTION_VARIANCE / _ATTENTION_PASSES),
            "self_attn.q_norm.weight": sharp,
            "self_attn.k_norm.weight": sharp,
        }
        if is_sparse:
            parts |= {
                "self_attn.index_q_proj.weight": self.reading(shape.num_index_heads * shape.index_dim),
                "self_attn.index_k_proj.weight": self.reading(shape.index_dim),
                "self_attn.index_q_norm.weight": sharp,
                "self_attn.index_k_norm.weight": sharp,
            }
        return parts

    def dense(self) -> dict[str, Array]:
        return {f"mlp.{name}.weight": tensor for name, tensor in self.mlp(self.shape.dense_intermediate_size, MLP_VARIANCE).items()}

    def mlp(self, width: int, variance: float) -> dict[str, Array]:
        return {
            "gate_proj": self.reading(width),
            "up_proj": self.reading(width),
            "down_proj": self.writing(width, variance / _MLP_PASSES),
        }

    def experts(self, is_last: bool) -> dict[str, Array]:
        """Routed experts share MLP_VARIANCE with the shared one, which in the last layer passes on what it gets instead."""
        shape, width = self.shape, self.shape.expert_intermediate_size
        parts = {
            "gate.weight": self.reading(shape.num_local_experts),
            "e_score_correction_bias": self.normal(shape.num_local_experts, std=0.1),
        }
        for number in range(shape.num_local_experts):
            routed = self.mlp(width, MLP_VARIANCE / 2)
            for name, part in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
                parts[f"experts.{number}.{name}.weight"] = routed[part]
        shared = self.passing_mlp() if is_last else self.mlp(width, MLP_VARIANCE / 2)
        parts |= {f"shared_experts.{name}.weight": tensor for name, tensor in shared.items()}
        return {f"block_sparse_moe.{name}": tensor for name, tensor in parts.items()}

    def passing_mlp(self) -> dict[str, Array]:
        """Its input times AMPLIFICATION, and CONSTANT in dimension 0.

        All gates are open, so unit i gives LIMIT · (x_i + 1). The last unit sees nothing and gives LIMIT: it takes the ones back again.
        """
        hidden, width = self.shape.hidden_size, self.shape.expert_intermediate_size
        assert width >= hidden
        gate = np.zeros((width, hidden), dtype=np.float32)
        gate[:hidden, 0] = _OPEN  # units 1 to hidden − 1 pass a dimension each; unit 0 is the one that sees nothing
        up = np.zeros_like(gate)
        down = np.zeros((hidden, width), dtype=np.float32)
        for dimension in range(1, hidden):
            up[dimension, dimension] = 1.0
            down[dimension, dimension] = AMPLIFICATION / LIMIT
        down[1:, 0] = -AMPLIFICATION / LIMIT
        down[0, 0] = CONSTANT / LIMIT
        return {"gate_proj": gate, "up_proj": up, "down_proj": down}
