"""JSON that means the same in other characters: keys in any order, white space, ASCII escapes, other spellings of the same float."""

from __future__ import annotations

import json
import random

from model.conversation import Json


def respelled(value: Json, rng: random.Random) -> str:
    """`value` as some JSON library might write it. Integers stay integers, and floats floats."""
    ascii_only = rng.random() < 0.5
    gap = rng.choice(("", " ", "\n  "))
    return _written(value, rng, ascii_only, gap)


def _written(value: Json, rng: random.Random, ascii_only: bool, gap: str) -> str:
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        pairs = (f"{json.dumps(name, ensure_ascii=ascii_only)}:{gap}{_written(value[name], rng, ascii_only, gap)}" for name in names)
        return "{" + gap + f",{gap}".join(pairs) + gap + "}"
    if isinstance(value, list):
        return "[" + f",{gap}".join(_written(part, rng, ascii_only, gap) for part in value) + "]"
    if isinstance(value, float):
        return rng.choice((repr, _with_zero, _with_exponent))(value)
    return json.dumps(value, ensure_ascii=ascii_only)


def _with_zero(value: float) -> str:
    text = repr(value)
    return text if "e" in text else text + "0"


def _with_exponent(value: float) -> str:
    text = repr(value)
    return text if "e" in text else text + "E+0"
