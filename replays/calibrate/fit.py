"""The linear cost model fitted to measured points: non-negative least squares of relative errors, a third of the points held back.

A prefill as the client sees it takes r + t·(prompt) + a0·(steps) + a3·n + a4·Σ n·L, a decode step a0 + a1·n + a2·ΣL. A prefill that joins
b others waits for half a step of theirs, shares its own steps with them, and takes b·(a constant) more outside of steps; one that finds the
engine idle takes another constant more, for waking it. Each subset of the nine constants is solved exactly, and the best one
without a negative member is taken: no starting point, no iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from replays.simulator.profile_file import Constants, Measured

_NUM_CONSTANTS = 9
_HELD_BACK_EVERY = 3
_DAMPING = 1e-9
Row: TypeAlias = "tuple[float, ...]"


def hold_back(points: Sequence[Measured]) -> list[Measured]:
    """The same points, every third of each kind held back; never the first or the last, so that predictions lie between what was fitted."""
    marked: list[Measured] = []
    for _, group in itertools.groupby(points, key=lambda point: point.kind):
        rows = list(group)
        for number, point in enumerate(rows):
            inner = 0 < number < len(rows) - 1
            marked.append(msgspec.structs.replace(point, held_back=inner and number % _HELD_BACK_EVERY == 1))
    return marked


def fit(points: Sequence[Measured], max_num_batched_tokens: int) -> tuple[Constants, list[Measured]]:
    """The constants, and the points with what is predicted for each. Raises ValueError where there is too little to fit."""
    fitted = [point for point in points if not point.held_back]
    if len(fitted) < _NUM_CONSTANTS:
        raise ValueError(f"{len(fitted)} points are too few to fit {_NUM_CONSTANTS} constants")
    rows = np.array([_row(point, max_num_batched_tokens) for point in fitted])
    seconds = np.array([point.seconds for point in fitted])
    solution = _non_negative(rows / seconds[:, None])
    predicted = [float(np.dot(_row(point, max_num_batched_tokens), solution)) for point in points]
    return Constants(*map(float, solution)), [
        msgspec.structs.replace(point, predicted_seconds=value) for point, value in zip(points, predicted, strict=True)
    ]


def _row(point: Measured, budget: int) -> Row:
    """What each constant is multiplied by."""
    if point.kind == "decode":
        return (1.0, point.num_sequences, point.num_sequences * point.context, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    others, cached = (point.num_sequences, 0) if point.kind == "joined" else (0, point.context)
    chunks = [(start, min(budget - others, point.num_new - start)) for start in range(0, point.num_new, budget - others)]
    product = sum(n * (2 * (cached + start) + n) // 2 for start, n in chunks)
    steps = len(chunks) + (0.5 if others else 0.0)
    decoded = (steps, steps * others, steps * others * point.context)
    return (*decoded, point.num_new, product, 1.0, cached + point.num_new, others, 0.0 if others else 1.0)


def _non_negative(rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """x ≥ 0 with least |rows·x − 1|."""
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled, target = rows / scale, np.ones(len(rows))
    best, least = np.zeros(rows.shape[1]), float("inf")
    for size in range(1, rows.shape[1] + 1):
        for chosen in itertools.combinations(range(rows.shape[1]), size):
            part = scaled[:, chosen]
            found = np.linalg.solve(part.T @ part + _DAMPING * np.eye(size), part.T @ target)
            loss = float(((part @ found - target) ** 2).sum())
            if (found >= 0).all() and loss < least:
                best = np.zeros(rows.shape[1])
                best[list(chosen)] = found / scale[list(chosen)]
                least = loss
    return best
