"""Norms and rotary embedding, as the checkpoint has them: Gemma's RMS norm for each head, rotary on the first part of it (NeoX halves)."""

from __future__ import annotations

import torch
from torch import Tensor


def gemma_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last dimension in fp32, scaled by 1 + `weight`. x: [..., dim], weight: [dim]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, rotary_dim: int, theta: float = 5e6) -> Tensor:
    """Rotary embedding of the first `rotary_dim` of each head; the rest passes. x: [tokens, heads, dim], positions: [tokens]."""
    half = rotary_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half].float(), x[..., half:rotary_dim].float()
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., rotary_dim:]], -1)
