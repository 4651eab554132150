"""Idle times of recorded sessions by return class: the prior of `admission.returns`.

Written by `python -m replays.return_prior TRACES` from 247 sessions of the public kv-cache-tester traces (Apache-2.0).
"""

from __future__ import annotations

# fmt: off
RETURN_PRIOR: dict[str, tuple[tuple[int, ...], int]] = {
    "root/end_turn": ((
        2, 0, 0, 0, 0, 0, 0, 1, 7, 21, 30, 20, 18, 12, 12, 10, 15, 18, 19, 30, 36, 42, 51,
        65, 49, 53, 45, 50, 24, 36, 34, 40, 20, 26, 14, 8, 5, 6, 6, 5, 2, 3, 2, 1, 4, 0,
    ), 123),
    "root/tool": ((
        46, 6, 3, 9, 17, 8, 3, 9, 87, 493, 1486, 2017, 1990, 1475, 1205, 941, 710, 446, 383, 227, 299, 226, 355,
        195, 115, 175, 76, 48, 141, 23, 22, 13, 12, 19, 3, 2, 4, 1, 1, 0, 0, 0, 1, 0, 0, 0,
    ), 110),
    "root/unknown": ((
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 40, 169, 357, 290, 180, 119, 92, 69, 59, 64, 55, 60,
        22, 20, 17, 2, 5, 18, 3, 7, 1, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ), 14),
    "sub/end_turn": ((
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ), 11),
    "sub/tool": ((
        0, 0, 0, 0, 0, 0, 0, 1, 15, 31, 25, 20, 7, 3, 1, 1, 3, 3, 3, 0, 1, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ), 0),
}
# fmt: on
"""Class → (returns per age bin, idle times that never ended)."""
