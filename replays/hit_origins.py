"""Whose hits they were: of a head that other sessions share, or of the session's own history. Judged from the requests alone.

The first request of a play has no history of its own, so what it hits was computed for others: that much of the front of each prompt of the
play is its shared head. Hits behind that are the session's own: its earlier prompts and answers, those of its sub-agents among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replays.records import Record


@dataclass(frozen=True, slots=True)
class HitOrigins:
    """Tokens that were hits."""

    shared_head: int = 0
    own_history: int = 0

    @property
    def shared_head_share(self) -> float | None:
        """Of all these hits; None where there is none."""
        return self._share(self.shared_head)

    @property
    def own_history_share(self) -> float | None:
        return self._share(self.own_history)

    def _share(self, part: int) -> float | None:
        total = self.shared_head + self.own_history
        return part / total if total else None


def hit_origins(all_records: Iterable[Record], counted: Iterable[Record]) -> HitOrigins:
    """The hits of `counted`, split. `all_records` of the run say what each play began with, its warm-up included.

    Left out are requests whose hits nobody said, and plays whose first request failed or did not say.
    """
    first: dict[tuple[str, int], Record] = {}
    for record in all_records:
        before = first.setdefault((record.session, record.play), record)
        if record.started < before.started:
            first[record.session, record.play] = record
    shared = own = 0
    for record in counted:
        head = first[record.session, record.play]
        if record.num_cached_tokens is None or head.num_cached_tokens is None or head.error is not None:
            continue
        of_head = min(record.num_cached_tokens, head.num_cached_tokens)
        shared += of_head
        own += record.num_cached_tokens - of_head
    return HitOrigins(shared, own)
