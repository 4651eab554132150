"""Mixture of experts: sigmoid router with a correction bias, SwiGLU-OAI experts, and the shared expert apart or as one more slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """Routing and activation; defaults are the checkpoint's."""

    top_k: int = 4
    routed_scale: float = 2.0
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """router: [experts, hidden]; bias: [experts]; gate_up: [experts, 2 · width, hidden], gate first; down: [experts, hidden, width].

    The shared expert has gate_up [2 · width, hidden] and down [hidden, width].
    """

    router: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor


def swiglu_oai(gate: Tensor, up: Tensor, rule: ExpertRule) -> Tensor:
    """gate · sigmoid(alpha · gate) · (up + beta), with the gate cut above and up cut on both sides, in fp32."""
    gate = gate.float().clamp(max=rule.limit)
    up = up.float().clamp(-rule.limit, rule.limit)
    return gate * torch.sigmoid(rule.alpha * gate) * (up + rule.beta)


def router_scores(hidden: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """How much each expert would count, and by what it is ranked: [tokens, experts] each."""
    scores = torch.sigmoid(hidden.float() @ weights.router.float().T)
    return scores, scores + weights.bias.float()


def route(hidden: Tensor, weights: ExpertWeights, rule: ExpertRule, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chosen experts and their weights: [tokens, top k] each. The bias decides who is chosen, not how much they count.

    `chosen`: experts that are to be taken instead of the best.
    """
    scores, ranked = router_scores(hidden, weights)
    chosen = ranked.topk(rule.top_k, -1).indices if chosen is None else chosen
    shares = scores.gather(-1, chosen)
    return chosen, shares / shares.sum(-1, keepdim=True) * rule.routed_scale


def experts(hidden: Tensor, weights: ExpertWeights, rule: ExpertRule, chosen: Tensor | None = None) -> Tensor:
    """Routed experts plus the shared one as a layer of its own: [tokens, hidden]. `chosen`: as in `route`."""
    chosen, shares = route(hidden, weights, rule, chosen)
    routed = _mix(hidden, chosen, shares, weights.gate_up, weights.down, rule)
    return (routed + _expert(hidden, weights.shared_gate_up, weights.shared_down, rule)).to(hidden.dtype)


def experts_shared_fused(hidden: Tensor, weights: ExpertWeights, rule: ExpertRule) -> Tensor:
    """The shared expert as one more slot that every token takes with weight 1: one grouped product instead of two layers."""
    chosen, shares = route(hidden, weights, rule)
    slot = weights.gate_up.shape[0]
    chosen = torch.nn.functional.pad(chosen, (0, 1), value=slot)
    shares = torch.nn.functional.pad(shares, (0, 1), value=1.0)
    gate_up = torch.cat([weights.gate_up, weights.shared_gate_up[None]])
    down = torch.cat([weights.down, weights.shared_down[None]])
    return _mix(hidden, chosen, shares, gate_up, down, rule).to(hidden.dtype)


def _mix(hidden: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, rule: ExpertRule) -> Tensor:
    mixed = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in range(gate_up.shape[0]):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        if tokens.numel():
            mixed.index_add_(0, tokens, _expert(hidden[tokens], gate_up[expert], down[expert], rule) * shares[tokens, places, None])
    return mixed


def _expert(hidden: Tensor, gate_up: Tensor, down: Tensor, rule: ExpertRule) -> Tensor:
    gate, up = (hidden.float() @ gate_up.float().T).chunk(2, -1)
    return swiglu_oai(gate, up, rule) @ down.float().T
