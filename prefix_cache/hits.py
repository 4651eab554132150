"""Hit accounting: what a prompt could have had, what it had, and why the rest was missed. All in tokens of the prompt.

ceiling          longest prefix already computed by any request of this deployment (unlimited cache, exact tokens)
ceiling_blocks   the same in whole blocks, at most num_prompt_tokens − 1 (an engine always computes the last token)
predicted        what the mirror says is resident; None without a mirror
actual           the engine's num_cached_tokens, from the GPU and from offload tiers; None where the engine does not say
external         of actual, what came from an offload tier; None where that cannot be told

missed = num_prompt_tokens − actual, split into causes that add up to it exactly. Rates are sums over sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import TypeAlias


class Cause(StrEnum):
    """Why a token of a prompt was computed again, or for the first time."""

    NEW = "new"
    """Never seen before."""
    CLIENT_EDIT = "client_edit"
    """The client changed its history; these tokens would have been a hit without the change."""
    VOLATILE = "volatile"
    """A difference that the canonicaliser knows and was told to pass."""
    TAIL = "tail"
    """Computed before, but in no whole block; the last token of a prompt always."""
    IN_FLIGHT = "in_flight"
    """Another request was still computing it."""
    EVICTED = "evicted"
    """It was resident and its removal was announced."""
    OFFLOAD_MISSING = "offload_missing"
    """Given to an offload tier, but not there any more, or not on every rank."""
    OFFLOAD_DECLINED = "offload_declined"
    """An offload tier has it and did not load it, as computing it was quicker."""
    OTHER_REPLICA = "other_replica"
    """Resident on a replica that did not get the request."""
    ISOLATION = "isolation"
    """Resident under another salt."""
    RECOMPUTED = "recomputed"
    """Dropped by a preemption of this very request."""
    UNKNOWN = "unknown"


Claims: TypeAlias = Iterable[tuple[Cause, int | None]]
"""Causes with the tokens that each would explain, the first claim first."""


@dataclass(frozen=True, slots=True)
class TurnHits:
    """One request's account, in tokens. None is unknown, not zero. `missed` holds the causes above zero."""

    num_prompt_tokens: int
    ceiling: int
    ceiling_blocks: int | None
    predicted: int | None
    actual: int | None
    missed: Mapping[Cause, int] | None
    num_clamped_tokens: int = 0
    """By how much the engine's count lay outside 0 to num_prompt_tokens; seen after preemption, and never passed on."""
    num_recomputed_tokens: int = 0
    """Computed once more by this very request after a preemption. On top of `missed`, where the engine counts its first run only."""
    external_predicted: int | None = None
    """What offload tiers were expected to add to `predicted`; None without a tier that is followed."""
    external: int | None = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """How much of a prompt's beginning was somewhere else when the prompt was sent, in tokens; 0: none of it, or nobody knows."""

    in_flight: int = 0
    """Computed, or being computed by a running request."""
    isolation: int = 0
    """Computed under another salt."""
    offload: int = 0
    """Given to an offload tier, or expected to come from one."""
    declined: int = 0
    """In an offload tier, which would not load it."""
    other_replica: int = 0
    """Resident at another engine of the deployment."""


NOWHERE = Elsewhere()


def account(
    *,
    num_prompt_tokens: int,
    ceiling: int,
    block_size: int | None,
    actual: int | None = None,
    predicted: int | None = None,
    history_tokens: int = 0,
    shared_tokens: int = 0,
    volatile_tokens: int = 0,
    confirmed_evicted: int | None = None,
    in_flight: int | None = None,
    elsewhere: Elsewhere = NOWHERE,
    recomputed_tokens: int = 0,
    recomputed_in_gap: bool = False,
    external_predicted: int | None = None,
    external: int | None = None,
) -> TurnHits:
    """Book one request.

    `history_tokens` of this session had been computed, and this prompt left them after `shared_tokens` (equal where nothing was edited);
    `volatile_tokens` of what follows differ only by something canonicalisable. `confirmed_evicted` and `in_flight` are what is known of
    the gap between ceiling and hit; `elsewhere` is cut to the whole blocks that could have been hits. `recomputed_tokens` were computed
    twice by this request; with `recomputed_in_gap` the engine's count is of its last run, so that they explain the gap. Claims larger than
    their part of the prompt are cut, so that the causes always add up.
    """
    num_clamped_tokens = 0
    if actual is not None:
        clamped = min(max(actual, 0), num_prompt_tokens)
        num_clamped_tokens = abs(actual - clamped)
        actual = clamped
    # A hit proves that somebody computed it, also before this server came up.
    ceiling = min(max(ceiling, actual or 0, 0), num_prompt_tokens)
    ceiling_blocks = None
    if block_size is not None:
        ceiling_blocks = max(_whole(ceiling, num_prompt_tokens, block_size), actual or 0)
    missed = None
    recomputed_tokens = min(max(recomputed_tokens, 0), num_prompt_tokens)
    if actual is not None:
        reachable = ceiling if ceiling_blocks is None else ceiling_blocks
        ends = _whole_ends(elsewhere, num_prompt_tokens, block_size)
        lost: Claims = (
            (Cause.OFFLOAD_DECLINED, ends.declined - actual),
            (Cause.OFFLOAD_MISSING, ends.offload - max(actual, ends.declined)),
            (Cause.RECOMPUTED, recomputed_tokens if recomputed_in_gap else 0),
            (Cause.OTHER_REPLICA, ends.other_replica - actual),
            (Cause.EVICTED, confirmed_evicted),
            (Cause.IN_FLIGHT, in_flight),
        )
        missed = _merged(
            _split(reachable - actual, lost, rest=Cause.UNKNOWN),
            _behind(num_prompt_tokens, reachable, ceiling, ends, volatile_tokens, max(0, history_tokens - shared_tokens)),
        )
        recomputed_tokens -= missed.get(Cause.RECOMPUTED, 0)
    return TurnHits(
        num_prompt_tokens,
        ceiling,
        ceiling_blocks,
        predicted,
        actual,
        missed,
        num_clamped_tokens=num_clamped_tokens,
        num_recomputed_tokens=recomputed_tokens,
        external_predicted=external_predicted,
        external=None if external is None or actual is None else min(external, actual),
    )


def _behind(
    num_prompt_tokens: int, reachable: int, ceiling: int, ends: Elsewhere, volatile_tokens: int, edited_tokens: int
) -> list[tuple[Cause, int]]:
    """The causes of what lies behind the reachable part: what a twin was computing, what no whole block holds, what was never computed."""
    in_flight = max(reachable, ends.in_flight)
    known = max(ceiling, in_flight)
    never: Claims = (
        (Cause.VOLATILE, volatile_tokens),
        (Cause.ISOLATION, ends.isolation - known),
        (Cause.CLIENT_EDIT, edited_tokens),
    )
    due = _split(num_prompt_tokens - known, never, rest=Cause.NEW)
    return [(Cause.IN_FLIGHT, in_flight - reachable), (Cause.TAIL, known - in_flight), *due]


def _whole(num_tokens: int, num_prompt_tokens: int, block_size: int) -> int:
    """What of the first `num_tokens` can be a hit: whole blocks, never the last token of the prompt."""
    return max(0, min(num_tokens, num_prompt_tokens - 1)) // block_size * block_size


def _whole_ends(ends: Elsewhere, num_prompt_tokens: int, block_size: int | None) -> Elsewhere:
    def whole(num_tokens: int) -> int:
        if block_size is None:
            return min(max(num_tokens, 0), num_prompt_tokens)
        return _whole(num_tokens, num_prompt_tokens, block_size)

    return Elsewhere(*map(whole, (ends.in_flight, ends.isolation, ends.offload, ends.declined, ends.other_replica)))


def _merged(*parts: list[tuple[Cause, int]]) -> dict[Cause, int]:
    """The causes above zero, each once."""
    missed: dict[Cause, int] = {}
    for cause, tokens in chain(*parts):
        if tokens:
            missed[cause] = missed.get(cause, 0) + tokens
    return missed


def _split(tokens: int, claims: Claims, rest: Cause) -> list[tuple[Cause, int]]:
    """Share `tokens` out to the claims in order, each cut to what is left; what nobody claims goes to `rest`."""
    shares = []
    for cause, claimed in claims:
        share = min(max(claimed or 0, 0), tokens)
        shares.append((cause, share))
        tokens -= share
    return [*shares, (rest, tokens)]


@dataclass(slots=True)
class _Share:
    """Of the prompts for which a figure is known, the tokens that it counts."""

    part: int = 0
    whole: int = 0

    def add(self, part: int | None, whole: int) -> None:
        if part is not None:
            self.part += part
            self.whole += whole

    @property
    def rate(self) -> float | None:
        return _rate(self.part, self.whole)


@dataclass(slots=True)
class _Shares:
    ceiling: _Share = field(default_factory=_Share)
    ceiling_blocks: _Share = field(default_factory=_Share)
    predicted: _Share = field(default_factory=_Share)
    actual: _Share = field(default_factory=_Share)
    external_predicted: _Share = field(default_factory=_Share)
    external: _Share = field(default_factory=_Share)

    def add(self, hits: TurnHits) -> None:
        for name in ("ceiling", "ceiling_blocks", "predicted", "actual", "external_predicted", "external"):
            share: _Share = getattr(self, name)
            share.add(getattr(hits, name), hits.num_prompt_tokens)


@dataclass(slots=True)
class HitTotals:
    """Sums over turns, in tokens. A turn without a figure is left out of that figure's rate, never counted as zero.

    All rates are over the turns whose actual hit is known, so that a hit rate and its ceiling can be compared; what a turn that broke off
    could have had is in the sums only. Where the engine never says a count, the other rates are over all turns.
    """

    num_turns: int = 0
    num_prompt_tokens: int = 0
    ceiling: int = 0
    ceiling_blocks: int = 0
    predicted: int = 0
    actual: int = 0
    external_predicted: int = 0
    external: int = 0
    missed: dict[Cause, int] = field(default_factory=dict)
    num_clamped_turns: int = 0
    num_recomputed_tokens: int = 0
    _told: _Shares = field(default_factory=_Shares)
    """Of turns whose actual hit is known."""
    _all: _Shares = field(default_factory=_Shares)

    def add(self, hits: TurnHits) -> None:
        self.num_turns += 1
        self.num_prompt_tokens += hits.num_prompt_tokens
        self.ceiling += hits.ceiling
        self.num_clamped_turns += hits.num_clamped_tokens > 0
        self.num_recomputed_tokens += hits.num_recomputed_tokens
        self.ceiling_blocks += hits.ceiling_blocks or 0
        self.predicted += hits.predicted or 0
        self.actual += hits.actual or 0
        self.external_predicted += hits.external_predicted or 0
        self.external += hits.external or 0
        self._all.add(hits)
        if hits.actual is not None:
            self._told.add(hits)
        for cause, tokens in (hits.missed or {}).items():
            self.missed[cause] = self.missed.get(cause, 0) + tokens

    @property
    def ceiling_hit_rate(self) -> float | None:
        return self._compared.ceiling.rate

    @property
    def ceiling_block_hit_rate(self) -> float | None:
        return self._compared.ceiling_blocks.rate

    @property
    def predicted_hit_rate(self) -> float | None:
        return self._compared.predicted.rate

    @property
    def actual_hit_rate(self) -> float | None:
        return self._compared.actual.rate

    @property
    def external_predicted_hit_rate(self) -> float | None:
        return self._compared.external_predicted.rate

    @property
    def external_hit_rate(self) -> float | None:
        return self._compared.external.rate

    @property
    def coverage(self) -> float | None:
        """Share of all prompt tokens whose actual hit is known, 0 to 1."""
        return _rate(self._told.actual.whole, self.num_prompt_tokens)

    @property
    def _compared(self) -> _Shares:
        return self._told if self._told.actual.whole else self._all


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
