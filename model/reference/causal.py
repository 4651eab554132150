"""The whole text backbone over one prompt, with an engine's own weights: what the engine's hidden states are compared with.

Weights come under vLLM's names ("layers.3.self_attn.qkv_proj.weight"), straight from a running engine or, by `fused`, from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.m3.config import M3Config
from model.m3.index_reuse import ReusePlan
from model.reference.experts import ExpertRule, ExpertWeights, experts, route, router_scores, swiglu_oai
from model.reference.norms import gemma_norm, rotate
from model.reference.sparse_attention import SparseRule, attend, block_scores, choose_blocks

QUERY_TILE = 400
"""Queries whose attention scores exist at a time."""
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Forced:
    """Choices that a run takes over from another: what then still differs is arithmetic alone."""

    experts: Sequence[Tensor]
    blocks: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Trace:
    """One pass. `hidden`: [tokens, hidden], after the last norm; `after_layers`: before it, after each layer.

    `experts`: of each expert layer, [tokens, top k]; `blocks`: of each sparse layer, bool [index heads, tokens, blocks]; `margins`:
    [tokens], the least distance over all layers between the last expert that was chosen and the first that was not. With forced choices,
    `expert_regret` and `block_regret`: [tokens], the most by which a choice that was taken over ranks below the best of its layer, in
    router scores and in deviations of the row's block scores; 0 where it is the best.
    """

    hidden: Tensor
    after_layers: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]
    margins: Tensor
    expert_regret: Tensor
    block_regret: Tensor

    @property
    def choices(self) -> Forced:
        return Forced(self.experts, self.blocks)


def run_backbone(
    config: M3Config, weights: Weights, ids: Tensor, plan: ReusePlan, *, dtype: torch.dtype | None = None, forced: Forced | None = None
) -> Trace:
    """All layers over the tokens `ids`. `dtype`: of activations and products, by default that of the weights."""
    run = _Run(config, weights, plan, torch.arange(len(ids), device=ids.device), dtype, forced)
    hidden = run.weight("embed_tokens.weight")[ids]
    after = []
    for layer in range(config.num_hidden_layers):
        hidden = run.layer(layer, hidden)
        after.append(hidden)
    last = gemma_norm(hidden, run.weight("norm.weight"))
    return Trace(last, tuple(after), tuple(run.experts), tuple(run.blocks), run.margins, run.expert_regret, run.block_regret)


class _Run:
    def __init__(
        self, config: M3Config, weights: Weights, plan: ReusePlan, positions: Tensor, dtype: torch.dtype | None, forced: Forced | None
    ) -> None:
        self.config, self._weights, self._plan, self._dtype, self._forced = config, weights, plan, dtype, forced
        self._positions = positions
        self._rule = SparseRule(config.block_size, config.topk_blocks, config.num_init_blocks, config.num_local_blocks)
        self._expert_rule = ExpertRule(top_k=config.num_experts_per_tok)
        self.experts: list[Tensor] = []
        self.blocks: list[Tensor] = []
        self.margins = torch.full((len(positions),), float("inf"), device=positions.device)
        self.expert_regret = torch.zeros(len(positions), device=positions.device)
        self.block_regret = torch.zeros(len(positions), device=positions.device)

    def weight(self, *words: str) -> Tensor:
        """The first tensor whose name has all `words`; a whole name first of all."""
        found = self._weights.get(words[0]) if len(words) == 1 else None
        if found is None:
            found = next(tensor for name, tensor in self._weights.items() if all(word in name for word in words))
        return found if self._dtype is None else found.to(self._dtype)

    def layer(self, number: int, hidden: Tensor) -> Tensor:
        prefix, is_sparse = f"layers.{number}.", number >= self.config.num_dense_layers
        hidden = hidden + self._attention(prefix, gemma_norm(hidden, self.weight(f"{prefix}input_layernorm.weight")), is_sparse)
        normed = gemma_norm(hidden, self.weight(f"{prefix}post_attention_layernorm.weight"))
        return hidden + (self._experts(prefix, normed) if is_sparse else self._mlp(prefix, normed))

    def _attention(self, prefix: str, normed: Tensor, is_sparse: bool) -> Tensor:
        config = self.config
        keys = config.num_key_value_heads * config.head_dim
        sizes = [config.num_attention_heads * config.head_dim, keys, keys]
        if is_sparse:
            sizes += [config.num_index_heads * config.index_dim, config.index_dim]
        parts = (normed @ self.weight(f"{prefix}self_attn.qkv_proj.weight").T).split(sizes, -1)
        query, key = self._heads(prefix, parts[0], "q_norm"), self._heads(prefix, parts[1], "k_norm")
        value = parts[2].unflatten(-1, (-1, config.head_dim))
        chosen = self._choose(prefix, parts[3], parts[4]) if is_sparse else None
        tiles = []
        for start in range(0, len(normed), QUERY_TILE):
            rows = slice(start, start + QUERY_TILE)
            picked = None if chosen is None else chosen[:, rows]
            tiles.append(attend(query[rows], key, value, self._positions[rows], picked, config.block_size))
        return torch.cat(tiles).flatten(1) @ self.weight(f"{prefix}self_attn.o_proj.weight").T

    def _heads(self, prefix: str, x: Tensor, norm: str) -> Tensor:
        normed = gemma_norm(x.unflatten(-1, (-1, self.config.head_dim)), self.weight(f"{prefix}self_attn.{norm}.weight"))
        return rotate(normed, self._positions, self.config.rotary_dim)

    def _choose(self, prefix: str, index_query: Tensor, index_key: Tensor) -> Tensor:
        ordinal = len(self.blocks)
        leader = self._plan.leaders[ordinal]
        if leader != ordinal:
            chosen = self.blocks[leader]
        else:
            query = self._heads(prefix, index_query, "index_q_norm").to(torch.bfloat16)  # as the index cache keeps them
            key = self._heads(prefix, index_key, "index_k_norm")[:, 0].to(torch.bfloat16)
            scores = block_scores(query, key, self._positions, self._rule)
            chosen = choose_blocks(scores, self._positions, self._rule)
            if self._forced is not None:
                taken = self._forced.blocks[ordinal]
                self.block_regret = torch.maximum(self.block_regret, _block_regret(scores, chosen, taken))
                chosen = taken
        self.blocks.append(chosen)
        return chosen

    def _mlp(self, prefix: str, normed: Tensor) -> Tensor:
        gate, up = (normed @ self.weight(prefix, "mlp", "gate_up").T).chunk(2, -1)
        return swiglu_oai(gate, up, self._expert_rule).to(normed.dtype) @ self.weight(prefix, "mlp", "down").T

    def _experts(self, prefix: str, normed: Tensor) -> Tensor:
        weights = ExpertWeights(
            router=self.weight(prefix, "moe.gate", "weight"),
            bias=self.weight(prefix, "correction_bias"),
            gate_up=self.weight(prefix, "w13_weight"),
            down=self.weight(prefix, "w2_weight"),
            shared_gate_up=self.weight(prefix, "shared", "gate_up"),
            shared_down=self.weight(prefix, "shared", "down"),
        )
        ranked = router_scores(normed, weights)[1]
        best = ranked.topk(self._expert_rule.top_k + 1, -1).values
        self.margins = torch.minimum(self.margins, best[:, -2] - best[:, -1])
        forced = None if self._forced is None else self._forced.experts[len(self.experts)]
        if forced is not None:
            self.expert_regret = torch.maximum(self.expert_regret, best[:, -2] - ranked.gather(-1, forced).amin(-1))
        chosen, _ = route(normed, weights, self._expert_rule, forced)
        self.experts.append(chosen)
        return experts(normed, weights, self._expert_rule, chosen)


def _block_regret(scores: Tensor, best: Tensor, taken: Tensor) -> Tensor:
    """By how much the best block that was left out beats the worst that was taken in its place, in deviations of the row: [queries]."""
    seen = scores > float("-inf")
    mean = scores.masked_fill(~seen, 0).sum(-1) / seen.sum(-1)
    spread = (scores.masked_fill(~seen, 0) - mean[..., None]).masked_fill(~seen, 0).norm(dim=-1) / seen.sum(-1).sqrt()
    missed = scores.masked_fill(~(best & ~taken), float("-inf")).amax(-1)
    instead = scores.masked_fill(~(taken & ~best), float("inf")).amin(-1)
    return ((missed - instead) / spread.clamp(min=1e-6)).clamp(min=0).nan_to_num(0, 0, 0).amax(0)


def fused(checkpoint: Weights) -> dict[str, Tensor]:
    """A checkpoint's tensors as vLLM's M3 holds them on one rank: projections side by side, experts stacked; without "model."."""
    held: dict[str, Tensor] = {}
    stacked: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in checkpoint.items():
        name = name.removeprefix("model.")
        layer, inside, part = name.rpartition(".experts.")
        if inside:
            number, which, _ = part.split(".")
            stacked.setdefault(layer, {}).setdefault(int(number), {})[which] = tensor
        else:
            held[name] = tensor
    for layer, experts_of in stacked.items():
        rows = [experts_of[number] for number in sorted(experts_of)]
        held[f"{layer}.experts.w13_weight"] = torch.stack([torch.cat([row["w1"], row["w3"]]) for row in rows])
        held[f"{layer}.experts.w2_weight"] = torch.stack([row["w2"] for row in rows])
    for first, others, whole in _SIDE_BY_SIDE:
        for name in [name for name in held if name.endswith(first)]:
            parts = [name, *(name.removesuffix(first) + other for other in others)]
            held[name.removesuffix(first) + whole] = torch.cat([held.pop(part) for part in parts if part in held])
    return held


_SIDE_BY_SIDE = (
    (
        "self_attn.q_proj.weight",
        tuple(f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "index_q_proj", "index_k_proj")),
        "self_attn.qkv_proj.weight",
    ),
    ("gate_proj.weight", ("up_proj.weight",), "gate_up_proj.weight"),
)
