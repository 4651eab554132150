"""What was computed again of the turn before, judged from outside: it needs no account by the server, so it compares any two servers.

A turn whose prompt continues another's could hit that prompt and its answer, in whole blocks. What it did not hit lay in the answer
(sent back in other tokens than were generated) or before it (the history changed, or had been evicted).
"""

from __future__ import annotations

from collections.abc import Iterable

from replays.records import Record


def recomputed_tokens(records: Iterable[Record], block_size: int) -> dict[str, int] | None:
    """{"answer": tokens, "history": tokens} over all turns that continue one of `records`; None where no turn with a hit count does."""
    known = {(record.session, record.play, record.number): record for record in records if record.error is None}
    total = {"answer": 0, "history": 0}
    counted = False
    for record in known.values():
        before = known.get((record.session, record.play, record.follows)) if record.follows is not None else None
        if before is None or before.num_prompt_tokens is None or record.num_prompt_tokens is None or record.num_cached_tokens is None:
            continue
        counted = True
        most = record.num_prompt_tokens - 1
        prompt = _whole(min(before.num_prompt_tokens, most), block_size)
        # The last sampled token has no KV.
        both = _whole(min(before.num_prompt_tokens + (before.num_output_tokens or 1) - 1, most), block_size)
        total["answer"] += both - min(both, max(prompt, record.num_cached_tokens))
        total["history"] += prompt - min(prompt, record.num_cached_tokens)
    return total if counted else None


def _whole(num_tokens: int, block_size: int) -> int:
    return num_tokens // block_size * block_size
