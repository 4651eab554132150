"""How far bf16 drifts from fp32 over M3's layers, and why: by the reference alone, at any width, on any device that PyTorch knows.

    python -m benchmarks.m3_growth --layers 15 --experts 16 --device cuda --out FILE.json

Routers and indexers choose. In bf16 a near tie may fall either way; the row then takes another expert or block, and everything behind it
differs, though nothing is wrong. Along the same choices what is left is rounding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from model.m3.config import MINIMAX_M3, M3Config
from model.m3.index_reuse import ReusePlan, fixed_plan
from model.reference.causal import Forced, Trace, Weights, run_backbone

Row = dict[str, float]


def error_growth(config: M3Config, weights: Weights, tokens: Tensor, plan: ReusePlan) -> list[Row]:
    """After each layer, bf16 against fp32: each choosing freely, fp32 with bf16's experts, and with its experts and blocks."""
    narrow = run_backbone(config, weights, tokens, plan, dtype=torch.bfloat16)

    def wide(forced: Forced | None) -> Trace:
        return run_backbone(config, weights, tokens, plan, dtype=torch.float32, forced=forced)

    free = wide(None)
    traces = {"free": free, "same experts": wide(Forced(narrow.experts, free.blocks)), "same experts and blocks": wide(narrow.choices)}
    return [_growth(layer, narrow, traces) for layer in range(len(narrow.after_layers))]


def _growth(layer: int, narrow: Trace, wide: dict[str, Trace]) -> Row:
    row: Row = {"layer": layer}
    for name, trace in wide.items():
        cosine = cosine_similarity(narrow.after_layers[layer].float(), trace.after_layers[layer], dim=-1)
        row |= {f"{name}: least cosine": cosine.min().item(), f"{name}: median": cosine.median().item()}
    number = layer - (len(narrow.after_layers) - len(narrow.experts))
    if number >= 0:
        row["rows that took another expert"] = share_that_differs([narrow.experts[number]], [wide["free"].experts[number]])
    return row


def share_that_differs(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Of rows that took another set of experts in any of the layers. Each: [tokens, top k]."""
    differs = [(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in zip(ours, theirs, strict=True)]
    return float(torch.stack(differs).any(0).float().mean())


def random_weights(config: M3Config, device: str, seed: int = 0) -> dict[str, Tensor]:
    """By vLLM's names, bf16, drawn so that activations keep their size; router biases are wide, so that few experts are near ties."""
    draw = torch.Generator(device).manual_seed(seed)
    hidden, dim, width, count = config.hidden_size, config.head_dim, config.expert_intermediate_size, config.num_local_experts
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    index = config.num_index_heads * config.index_dim + config.index_dim

    def normal(*size: int, std: float | None = None) -> Tensor:
        deviation = size[-1] ** -0.5 if std is None else std
        return torch.empty(*size, device=device, dtype=torch.bfloat16).normal_(0, deviation, generator=draw)

    held = {"embed_tokens.weight": normal(config.vocab_size, hidden, std=1.0), "norm.weight": normal(hidden, std=0.1)}
    for layer in range(config.num_hidden_layers):
        is_sparse = layer >= config.num_dense_layers
        parts = {
            "input_layernorm.weight": normal(hidden, std=0.1),
            "post_attention_layernorm.weight": normal(hidden, std=0.1),
            "self_attn.qkv_proj.weight": normal(queries + 2 * keys + is_sparse * index, hidden),
            "self_attn.o_proj.weight": normal(hidden, queries),
        }
        parts |= {f"self_attn.{name}.weight": normal(dim, std=0.1) for name in ("q_norm", "k_norm", "index_q_norm", "index_k_norm")}
        if is_sparse:
            parts |= {
                "block_sparse_moe.gate.weight": normal(count, hidden),
                "block_sparse_moe.e_score_correction_bias": normal(count, std=1.0),
                "block_sparse_moe.experts.w13_weight": normal(count, 2 * width, hidden),
                "block_sparse_moe.experts.w2_weight": normal(count, hidden, width),
                "block_sparse_moe.shared_experts.gate_up_proj.weight": normal(2 * width, hidden),
                "block_sparse_moe.shared_experts.down_proj.weight": normal(hidden, width),
            }
        else:
            parts |= {
                "mlp.gate_up_proj.weight": normal(2 * config.dense_intermediate_size, hidden),
                "mlp.down_proj.weight": normal(hidden, config.dense_intermediate_size),
            }
        held |= {f"layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return held


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=3_200)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    config = replace(MINIMAX_M3, num_hidden_layers=options.layers, num_local_experts=options.experts)
    draw = torch.Generator(options.device).manual_seed(1)
    tokens = torch.randint(10, 200_000, (options.tokens,), device=options.device, generator=draw)
    with torch.inference_mode():
        rows = error_growth(config, random_weights(config, options.device), tokens, fixed_plan(config.num_sparse_layers))
    options.out.write_text(json.dumps(rows, indent=1))
    for row in rows:
        print(json.dumps({name: round(value, 6) for name, value in row.items()}))


if __name__ == "__main__":
    main()
