"""The correctness gate that stands beside every performance figure: same answer, or the figure does not count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What still counts as the same. The defaults are for bf16 kernels against a wider reference; index reuse has its own."""

    least_cosine: float = 0.999
    """Of any single row, not of their mean: one broken request among many hides in a mean."""
    largest_relative_error: float = 0.05
    """‖actual − expected‖ / ‖expected‖ of any single row: a wrong scale keeps every direction and every first place."""
    least_top1: float = 0.99
    """Share of rows whose largest logit is the same token, ties within `tie` aside."""
    tie: float = 1e-2
    """Two largest logits closer than this share of the row's spread may change places."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed`, and the figures it stands on."""

    passed: bool
    least_cosine: float
    top1_share: float
    largest_relative_error: float

    def __str__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        figures = f"cosine ≥ {self.least_cosine:.6f}, top-1 {100 * self.top1_share:.2f} %"
        return f"{word}: {figures}, relative error ≤ {self.largest_relative_error:.3g}"


def compare(actual: Tensor, expected: Tensor, thresholds: Thresholds | None = None) -> Verdict:
    """Rows of logits (or hidden states) against the reference's: [rows, size] both. Not-a-number never passes."""
    limits = thresholds or Thresholds()
    assert actual.shape == expected.shape
    ours, theirs = actual.double(), expected.double()
    if not bool(torch.isfinite(ours).all()):
        return Verdict(False, 0.0, 0.0, float("inf"))
    least_cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min().item()
    best = theirs.max(-1).values
    ours_there = theirs.gather(-1, ours.argmax(-1, keepdim=True))[:, 0]
    slack = limits.tie * theirs.std(-1)
    top1 = (ours_there >= best - slack).double().mean().item()
    largest = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-30)).max().item()
    passed = least_cosine >= limits.least_cosine and top1 >= limits.least_top1 and largest <= limits.largest_relative_error
    return Verdict(passed, least_cosine, top1, largest)
