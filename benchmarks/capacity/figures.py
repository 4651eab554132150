"""From samples to figures: sums over sums, pooled over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.capacity.drive import Measured
from benchmarks.report import percentile


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm over all seeds. Shares of prompt tokens in percent, times in seconds."""

    ceiling: float
    actual: float
    gap_points: float
    gap_closed_share: float | None
    """Of plain vLLM's gap on the same seeds; None for plain itself."""
    output_tokens_per_second: float
    uncached_tokens_per_second: float
    requests_per_second: float
    ttft_p95_seconds: float
    gateway_wait_p99_seconds: float
    preemptions_per_1000: float
    jain: float
    """Of the lanes' share of time that was not spent waiting, at the gate and for the first token."""
    mean_waiting: float
    client_cpu: float
    lag_seconds: float
    num_requests: int
    num_above_ceiling: int
    """Requests that hit more than was ever sent: a fault of the measurement."""
    num_errors: int
    leaked_tickets: int


def gap_tokens(runs: Sequence[Measured]) -> tuple[int, int]:
    """(tokens that could have been hits and were not, prompt tokens)."""
    samples = [sample for run in runs for sample in run.samples]
    return sum(s.ceiling_tokens - s.num_cached_tokens for s in samples), sum(s.num_prompt_tokens for s in samples)


def figures(runs: Sequence[Measured], plain: Sequence[Measured] | None) -> ArmFigures:
    """An arm's, with `plain`'s gap to compare with. Raises ValueError where nothing was measured."""
    samples = [sample for run in runs for sample in run.samples]
    if not samples:
        raise ValueError("an arm without a request")
    seconds = sum(run.seconds for run in runs)
    gap, prompt = gap_tokens(runs)
    closed = None
    if plain is not None:
        plain_gap, plain_prompt = gap_tokens(plain)
        closed = 1 - (gap / prompt) / (plain_gap / plain_prompt) if plain_gap > 0 else None
    return ArmFigures(
        ceiling=100 * sum(s.ceiling_tokens for s in samples) / prompt,
        actual=100 * sum(s.num_cached_tokens for s in samples) / prompt,
        gap_points=100 * gap / prompt,
        gap_closed_share=closed,
        output_tokens_per_second=sum(s.num_output_tokens for s in samples) / seconds,
        uncached_tokens_per_second=sum(s.num_prompt_tokens - s.num_cached_tokens for s in samples) / seconds,
        requests_per_second=len(samples) / seconds,
        ttft_p95_seconds=percentile([s.ttft_seconds for s in samples], 95),
        gateway_wait_p99_seconds=percentile([s.wait_seconds for s in samples], 99),
        preemptions_per_1000=1000 * sum(run.num_preemptions for run in runs) / len(samples),
        jain=jain([share for run in runs for share in _unhindered(run)]),
        mean_waiting=sum(run.mean_waiting * run.seconds for run in runs) / seconds,
        client_cpu=sum(run.client_cpu * run.seconds for run in runs) / seconds,
        lag_seconds=max(run.lag_seconds for run in runs),
        num_requests=len(samples),
        num_above_ceiling=sum(s.num_cached_tokens > s.ceiling_tokens for s in samples),
        num_errors=sum(run.num_errors for run in runs),
        leaked_tickets=sum(run.leaked_tickets for run in runs),
    )


def _unhindered(run: Measured) -> list[float]:
    lost: dict[int, float] = {}
    for sample in run.samples:
        lost[sample.lane] = lost.get(sample.lane, 0.0) + sample.wait_seconds + sample.ttft_seconds
    return [1 - min(seconds / run.seconds, 1.0) for seconds in lost.values()]


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def faults(plain: ArmFigures) -> list[str]:
    """Why plain vLLM's run does not count, in words; empty: it does."""
    found = []
    if not 4.0 <= plain.gap_points <= 6.5:
        found.append(f"plain vLLM loses {plain.gap_points:.2f} points, not 4 to 6.5: change the blocks by 50 to 100")
    if plain.preemptions_per_1000:
        found.append(f"{plain.preemptions_per_1000:.1f} preemptions in 1,000 requests")
    if plain.mean_waiting >= 0.5:
        found.append(f"{plain.mean_waiting:.2f} requests wait in the engine on average, not below 0.5")
    if plain.num_above_ceiling or plain.num_errors:
        found.append(f"{plain.num_above_ceiling} requests above their ceiling, {plain.num_errors} lanes failed")
    return found
