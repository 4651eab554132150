"""Which sessions are tuned on, and which are held back to judge the winner."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from replays.simulator.scripts import Script

_PARTS = 10_000


def split(scripts: Sequence[Script], held_back_share: float) -> tuple[list[Script], list[Script]]:
    """(tuned on, held back). Which side a session is on depends on what was recorded alone: one that a corpus holds twice, under two
    names, is never on both."""
    tuned: list[Script] = []
    held_back: list[Script] = []
    for script in scripts:
        recorded = [(round(call.request.start_seconds, 3), call.request.num_prompt_tokens) for call in script.plan.calls]
        is_held_back = crc32(repr(recorded).encode()) % _PARTS < held_back_share * _PARTS
        (held_back if is_held_back else tuned).append(script)
    return tuned, held_back
