"""The report of a simulation. Rates are sums over sums, of the profiling phase; keys are stable, scripts read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from replays.options import NO_IDLE_SECONDS
from replays.simulator.anatomy import Anatomy, AnatomyReport, weighted_percentiles
from replays.simulator.fairness import fairness
from replays.simulator.outcomes import Outcome

if TYPE_CHECKING:
    from replays.simulator.loop import Loop
    from replays.simulator.run import SimulationOptions
    from replays.simulator.server import Server


class SimulationReport(Struct, kw_only=True):
    """One policy point. Seconds are simulated."""

    policy: str
    admission: str
    profile: str
    seed: int
    concurrency: int
    capacity_tokens: int
    block_size: int
    num_requests: int
    num_overflows: int
    duration_seconds: float
    theoretical_hit_rate: float | None
    """AgentX's own figure, from the trace alone."""
    ceiling_hit_rate: float | None
    """Whole blocks that stood in an earlier prompt."""
    actual_hit_rate: float | None
    gpu_hit_rate: float | None
    external_hit_rate: float | None
    missed_tokens: dict[str, int]
    prompt_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_seconds: dict[str, float]
    """From the client's request, any wait for admission included."""
    tpot_seconds: dict[str, float]
    e2e_seconds: dict[str, float]
    wait_seconds: dict[str, float]
    """For admission: `replays.simulator.fairness`, with Jain's index over sessions as `jain`."""
    preemptions: int
    kv_usage_peak: float
    kv_usage_mean: float
    composition: dict[str, float]
    """Share of the pool by kind, mean over time."""
    evicted_blocks: dict[str, int]
    evicted_live_age_seconds: dict[str, float]
    anatomy: AnatomyReport
    parameters: dict[str, float] = {}
    """Of the eviction policy, where they are not its defaults."""
    admission_parameters: dict[str, float] = {}
    """The same of the admission policy."""
    tier_tokens: int = 0
    """Of the CPU tier; 0 without one."""
    ends: str = "unknown"
    """Whether the policy is told that a session has ended: `said`, `inferred` or `unknown`."""
    is_upper_bound: bool = False
    """Idle times were dropped: nothing was evicted in them."""
    is_cut: bool = False
    """It ended before its duration, as each session had been played often enough."""
    arrivals: float | None = None
    """Sessions a second of an open loop; 0: as recorded; None: closed loop."""

    @property
    def gap_points(self) -> float | None:
        """Ceiling less actual, in points."""
        if self.ceiling_hit_rate is None or self.actual_hit_rate is None:
            return None
        return 100 * (self.ceiling_hit_rate - self.actual_hit_rate)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p95 = np.percentile(values, (50, 95))
    return {"p50": float(p50), "p95": float(p95), "mean": float(np.mean(values))}


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def make_report(options: SimulationOptions, loop: Loop, server: Server, outcomes: Sequence[Outcome], anatomy: Anatomy) -> SimulationReport:
    """The figures of the profiling phase."""
    done = [outcome for outcome in outcomes if not outcome.warmup]
    prompt = sum(outcome.num_prompt_tokens for outcome in done)
    hits = sum(outcome.num_hit_tokens for outcome in done)
    external = sum(outcome.num_external_tokens for outcome in done)
    output = sum(outcome.num_output_tokens for outcome in done)
    missed: Counter[str] = Counter()
    for outcome in done:
        missed.update(outcome.missed)
    seconds = max((outcome.finished for outcome in done), default=0.0) - loop.profiling_started
    counters = [engine.counters for engine in server.engines]
    elapsed = server.clock.now
    return SimulationReport(
        policy=options.policy,
        admission=options.admission,
        profile=options.profile,
        seed=options.loop.seed,
        concurrency=options.loop.concurrency if options.loop.arrivals is None else 0,
        capacity_tokens=sum(engine.pool.num_blocks for engine in server.engines) * options.block_size,
        block_size=options.block_size,
        num_requests=len(done),
        num_overflows=loop.num_overflows,
        duration_seconds=seconds,
        theoretical_hit_rate=_rate(sum(o.num_theoretical_blocks for o in done), sum(o.num_trace_blocks for o in done)),
        ceiling_hit_rate=_rate(sum(outcome.num_ceiling_tokens for outcome in done), prompt),
        actual_hit_rate=_rate(hits + external, prompt),
        gpu_hit_rate=_rate(hits, prompt),
        external_hit_rate=_rate(external, prompt),
        missed_tokens=dict(missed),
        prompt_tokens=prompt,
        requests_per_second=len(done) / seconds if seconds > 0 else 0.0,
        output_tokens_per_second=output / seconds if seconds > 0 else 0.0,
        total_tokens_per_second=(prompt + output) / seconds if seconds > 0 else 0.0,
        ttft_seconds=_percentiles([outcome.first_token - outcome.asked for outcome in done]),
        tpot_seconds=_percentiles([_tpot(outcome) for outcome in done if outcome.num_output_tokens > 1]),
        e2e_seconds=_percentiles([outcome.finished - outcome.asked for outcome in done]),
        wait_seconds=fairness(done),
        preemptions=sum(counter.num_preemptions for counter in counters),
        kv_usage_peak=max(counter.peak_usage for counter in counters),
        kv_usage_mean=sum(counter.usage_seconds for counter in counters) / (elapsed * len(counters)) if elapsed else 0.0,
        composition=anatomy.mean_shares(),
        evicted_blocks=dict(anatomy.evicted_blocks),
        evicted_live_age_seconds=weighted_percentiles(anatomy.evicted_age_seconds),
        anatomy=anatomy.report(options.block_size, loop.profiling_started),
        parameters=dict(options.parameters),
        admission_parameters=dict(options.admission_parameters),
        tier_tokens=options.tier.capacity_tokens if options.tier is not None else 0,
        ends="said" if options.knowledge.ends else "inferred" if options.knowledge.inferred else "unknown",
        is_cut=loop.is_cut,
        is_upper_bound=options.loop.idle_cap < NO_IDLE_SECONDS,
        arrivals=options.loop.arrivals,
    )


def _tpot(outcome: Outcome) -> float:
    return (outcome.finished - outcome.first_token) / (outcome.num_output_tokens - 1)
