"""Many simulations in one run: policies × admissions × capacities × concurrencies × seeds, spread over processes, joined into points."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from admission.choice import Choice, PolicyParameterError
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from replays.simulator.fates import Knowledge
from replays.simulator.profiles import find_profile
from replays.simulator.report import SimulationReport
from replays.simulator.run import SimulationOptions, simulate
from replays.simulator.scripts import Script
from replays.simulator.tiers import TierOptions

BASELINE = "lru"
"""The policy of a plain vLLM, which every gap is compared with."""
ENDS: dict[str, Knowledge] = {"unknown": Knowledge(), "inferred": Knowledge(inferred=True), "said": Knowledge(ends=True)}
"""What the policy is told of sessions that have ended, by name."""
UNLIMITED_TOKENS = 10**12
"""A capacity in which nothing is ever evicted."""


class GridError(ValueError):
    """A name, number or combination that cannot be simulated. Says what there is."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy and its parameters, as `name` or `name:parameter=value,parameter=value`."""

    name: str
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        values = ",".join(f"{name}={value:g}" for name, value in self.parameters.items())
        return f"{self.name}:{values}" if values else self.name


def parse_policy(text: str) -> PolicySpec:
    """An eviction policy. Raises GridError for a policy or parameter that there is not, and for a value outside its range."""
    return _parse(text, "eviction policy", EVICTION_POLICIES)


def parse_admission(text: str) -> PolicySpec:
    """An admission policy. Raises GridError, as for eviction."""
    return _parse(text, "admission policy", ADMISSION_POLICIES)


def _parse(text: str, what: str, table: Mapping[str, Choice]) -> PolicySpec:
    name, _, rest = text.partition(":")
    choice = table.get(name)
    if choice is None:
        raise GridError(f"no {what} {name!r}; there are: {', '.join(table)}")
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        try:
            values[key] = float(value)
        except ValueError:
            raise GridError(f"{text!r}: {part!r} is not parameter=number") from None
        if not equals:
            raise GridError(f"{text!r}: {part!r} is not parameter=number")
    try:
        choice.chosen(values)
    except PolicyParameterError as error:
        raise GridError(f"policy {name!r}: {error}") from None
    return PolicySpec(name, values)


_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}


def parse_tokens(text: str) -> int:
    """A number of tokens: `6264960`, `6.26M`, `500k`. Raises GridError."""
    factor = _FACTORS.get(text[-1:].lower(), 1.0)
    digits = text[:-1] if factor > 1 else text
    try:
        tokens = round(float(digits.replace("_", "").replace(",", "")) * factor)
    except (ValueError, OverflowError):
        raise GridError(f"{text!r} is no number of tokens; write 6264960 or 6.26M") from None
    if tokens <= 0:
        raise GridError(f"a capacity of {text!r} tokens holds nothing")
    return tokens


def parse_tier(text: str) -> TierOptions | None:
    """A CPU tier: `1.5M`, `inclusive:1.5M`, or `0` for none. Raises GridError."""
    kind, colon, tokens = text.rpartition(":")
    if colon and kind not in ("exclusive", "inclusive"):
        raise GridError(f"{text!r}: a tier is exclusive or inclusive")
    return None if tokens == "0" else TierOptions(parse_tokens(tokens), exclusive=kind != "inclusive")


Arm: TypeAlias = "tuple[PolicySpec, PolicySpec, str, TierOptions | None]"
"""(eviction, admission, what is told of ends, tier)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What to simulate: every combination. Capacities None: the profile's own."""

    policies: Sequence[PolicySpec]
    capacities: Sequence[int | None] = (None,)
    streams: Sequence[int] = (28,)
    seeds: Sequence[int] = (1,)
    admissions: Sequence[PolicySpec] = (PolicySpec("fcfs"),)
    ends: Sequence[str] = ("unknown",)
    tiers: Sequence[TierOptions | None] = (None,)
    base: SimulationOptions = field(default_factory=SimulationOptions)

    def check(self) -> None:
        """Raises GridError for what cannot be simulated."""
        check_profile(self.base.profile)
        _known("knowledge of ends", self.ends, ENDS)
        size = self.base.block_size
        for capacity in self.capacities:
            if capacity is not None and capacity < size:
                raise GridError(f"a capacity of {capacity} tokens is less than a block of {size}")
        if min(self.streams, default=0) < 1:
            raise GridError("give one or more streams")

    def options(self) -> Iterator[SimulationOptions]:
        """Of each run, the seeds of one point next to each other, the baseline first."""
        for capacity in self.capacities:
            for streams in self.streams:
                for policy, admission, ends, tier in self._arms():
                    for seed in self.seeds:
                        loop = replace(self.base.loop, concurrency=streams, seed=seed)
                        yield replace(
                            self.base,
                            policy=policy.name,
                            parameters=dict(policy.parameters),
                            admission=admission.name,
                            admission_parameters=dict(admission.parameters),
                            knowledge=ENDS[ends],
                            tier=tier,
                            capacity_tokens=capacity,
                            loop=loop,
                        )

    def _arms(self) -> Iterator[Arm]:
        """What a policy that ignores ends is told makes no difference, so it is told once."""
        first = (PolicySpec(BASELINE), PolicySpec("fcfs"), self.ends[0], None)
        yield first
        for policy, admission, tier in product(self.policies, self.admissions, self.tiers):
            keeps_living = tier is not None and tier.exclusive
            reads = EVICTION_POLICIES[policy.name].reads_fates or admission.name != "fcfs" or keeps_living
            for ends in self.ends if reads else self.ends[:1]:
                arm = (policy, admission, ends, tier)
                if arm != first:
                    yield arm


def check_profile(name: str) -> None:
    """Raises GridError for a profile that there is not, or a file that is none."""
    try:
        find_profile(name)
    except ValueError as error:
        raise GridError(str(error)) from None


def _known(what: str, names: Iterable[str], table: Mapping[str, object]) -> None:
    for name in names:
        if name not in table:
            raise GridError(f"no {what} {name!r}; there are: {', '.join(table)}")


class PointReport(Struct, kw_only=True):
    """One point: the runs of all seeds joined. Rates are sums over sums, other figures means over the seeds, `spread` max − min."""

    policy: str
    parameters: dict[str, float]
    admission: str
    admission_parameters: dict[str, float]
    ends: str
    profile: str
    tier_tokens: int
    """Of the CPU tier; 0 without one."""
    capacity_tokens: int
    streams: int
    arrivals: float | None
    seeds: list[int]
    num_requests: int
    hit_rate: float | None
    hit_spread: float | None
    ceiling: float | None
    external_hit_rate: float | None
    gap_points: float | None
    gap_closed_share: float | None = None
    """Of the gap that the baseline leaves at the same capacity and load."""
    theoretical: float | None
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    tpot_p50_seconds: float | None
    requests_per_second: float
    output_tokens_per_second: float
    preemptions: float
    overflows: int
    kv_usage_peak: float
    kv_usage_mean: float
    composition: dict[str, float]


DEFINITIONS: dict[str, str] = {
    "hit_rate": "prompt tokens taken from a cache over prompt tokens, of the requests that ended in the profiling phase of all seeds",
    "hit_spread": "largest less smallest hit rate of the seeds",
    "ceiling": "prompt tokens in whole blocks that stood in an earlier prompt (or answer that is sent back) over prompt tokens",
    "external_hit_rate": "the part of hit_rate that was brought back from a CPU tier",
    "gap_points": "100 × (ceiling − hit_rate)",
    "gap_closed_share": "1 − gap_points over that of lru, fcfs and no tier at the same capacity and load; null where that is below 0.05",
    "theoretical": "AgentX's figure: leading run of the trace's own blocks that were named before, per session",
    "ttft_p50_seconds": "from the client's request to the first token, waiting for admission included; mean of the seeds' medians",
    "ttft_p95_seconds": "the same, 95th percentile",
    "tpot_p50_seconds": "(end − first token) / (output tokens − 1), median; mean over the seeds",
    "requests_per_second": "requests that ended over the time from the start of profiling to the last end",
    "output_tokens_per_second": "their output tokens over the same time",
    "preemptions": "running requests that gave up their blocks, mean over the seeds",
    "overflows": "requests that the whole pool could not hold; they were refused",
    "kv_usage_peak": "most of the pool that running requests held",
    "kv_usage_mean": "the same, mean over time",
    "composition": "share of the pool by kind, mean over time: pinned (in use), live_idle, cut (history that its session left), generated "
    "(answers and unaligned tails that nobody sends back), ended, spare_copies (of what is there twice), unused",
    "used_within_tokens": "tokens in use or used within so many seconds; at unlimited capacity what an LRU needs to survive that idle time",
}
"""Keys of the JSON report."""

_LEAST_GAP_POINTS = 0.05


def run_all(
    scripts: Sequence[Script],
    options: Sequence[SimulationOptions],
    jobs: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[SimulationReport]:
    """One report for each of `options`, in their order, by `jobs` processes. Raises what a simulation raises."""
    reports: list[SimulationReport] = []
    for report in _reports(scripts, options, jobs):
        reports.append(report)
        progress(len(reports), len(options))
    return reports


def _reports(scripts: Sequence[Script], options: Sequence[SimulationOptions], jobs: int) -> Iterator[SimulationReport]:
    if jobs == 1 or len(options) == 1:
        yield from (simulate(scripts, one) for one in options)
        return
    with worker_pool(scripts, min(jobs, len(options))) as pool:
        yield from pool.imap(simulate_shared, options)


_shared: Sequence[Script] = ()


def share_scripts(scripts: Sequence[Script]) -> None:
    """Starts a process that simulates on these."""
    global _shared
    _shared = scripts


def simulate_shared(options: SimulationOptions) -> SimulationReport:
    """In a process of `worker_pool`: simulates on the scripts that it was forked with."""
    return simulate(_shared, options)


def worker_pool(scripts: Sequence[Script], jobs: int) -> multiprocessing.pool.Pool:
    """Processes that have `scripts` without copying them."""
    return multiprocessing.get_context("fork").Pool(jobs, share_scripts, (scripts,))


def points_of(reports: Iterable[SimulationReport]) -> list[PointReport]:
    """The runs of one setting joined over their seeds, in order of appearance, with the gap that each closes."""
    groups: dict[tuple[object, ...], list[SimulationReport]] = {}
    for report in reports:
        policy = (report.policy, tuple(sorted(report.parameters.items())))
        admission = (report.admission, tuple(sorted(report.admission_parameters.items())))
        key = (policy, admission, report.ends, report.tier_tokens)
        groups.setdefault((*key, report.capacity_tokens, report.concurrency, report.arrivals), []).append(report)
    points = [joined(group) for group in groups.values()]
    base = {_load(point): point.gap_points for point in points if _is_baseline(point)}
    for point in points:
        point.gap_closed_share = closed_share(point.gap_points, base.get(_load(point)))
    return points


def _is_baseline(point: PointReport) -> bool:
    return point.policy == BASELINE and point.admission == "fcfs" and not point.tier_tokens


def _load(point: PointReport) -> tuple[int, int, float | None]:
    return point.capacity_tokens, point.streams, point.arrivals


def closed_share(gap: float | None, base: float | None) -> float | None:
    """Share of the baseline's gap that is closed; None where there is none to speak of."""
    if gap is None or base is None or base < _LEAST_GAP_POINTS:
        return None
    return 1 - gap / base


def joined(reports: Sequence[SimulationReport]) -> PointReport:
    """One point of the runs of its seeds."""
    first = reports[0]
    hit, ceiling = _pooled(reports, "actual_hit_rate"), _pooled(reports, "ceiling_hit_rate")
    rates = [report.actual_hit_rate for report in reports if report.actual_hit_rate is not None]
    return PointReport(
        policy=first.policy,
        parameters=first.parameters,
        admission=first.admission,
        admission_parameters=first.admission_parameters,
        ends=first.ends,
        profile=first.profile,
        tier_tokens=first.tier_tokens,
        capacity_tokens=first.capacity_tokens,
        streams=first.concurrency,
        arrivals=first.arrivals,
        seeds=[report.seed for report in reports],
        num_requests=sum(report.num_requests for report in reports),
        hit_rate=hit,
        hit_spread=max(rates) - min(rates) if rates else None,
        ceiling=ceiling,
        external_hit_rate=_pooled(reports, "external_hit_rate"),
        gap_points=100 * (ceiling - hit) if hit is not None and ceiling is not None else None,
        theoretical=_pooled(reports, "theoretical_hit_rate"),
        ttft_p50_seconds=_mean(report.ttft_seconds.get("p50") for report in reports),
        ttft_p95_seconds=_mean(report.ttft_seconds.get("p95") for report in reports),
        tpot_p50_seconds=_mean(report.tpot_seconds.get("p50") for report in reports),
        requests_per_second=float(np.mean([report.requests_per_second for report in reports])),
        output_tokens_per_second=float(np.mean([report.output_tokens_per_second for report in reports])),
        preemptions=float(np.mean([report.preemptions for report in reports])),
        overflows=sum(report.num_overflows for report in reports),
        kv_usage_peak=max(report.kv_usage_peak for report in reports),
        kv_usage_mean=float(np.mean([report.kv_usage_mean for report in reports])),
        composition={kind: float(np.mean([report.composition[kind] for report in reports])) for kind in first.composition},
    )


def _pooled(reports: Sequence[SimulationReport], rate: str) -> float | None:
    known = [(getattr(report, rate), report.prompt_tokens) for report in reports if getattr(report, rate) is not None]
    weight = sum(tokens for _, tokens in known)
    return sum(value * tokens for value, tokens in known) / weight if weight else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def unlimited(grid: Grid) -> Grid:
    """The same loads in a pool where nothing is evicted: what an LRU would need, and the ceiling's own speed."""
    return replace(
        grid,
        policies=(PolicySpec(BASELINE),),
        admissions=(PolicySpec("fcfs"),),
        ends=grid.ends[:1],
        capacities=(UNLIMITED_TOKENS,),
        tiers=(None,),
    )
