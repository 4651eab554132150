"""The report of one replay: what the workload could have hit, what it did hit, and what it cost. Rates are sums over sums.

None means that nobody said, which is not zero. Keys are stable: scripts read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from replays.hit_origins import hit_origins
from replays.recomputed import recomputed_tokens
from replays.records import Phase, Record, RecordsError, Run, Sample
from replays.row_faults import RowsReport


class Percentiles(Struct):
    """Seconds."""

    p50: float | None = None
    p95: float | None = None


class WarmupReport(Struct):
    """The warm-up, kept apart: nothing of it is in the other figures."""

    requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int | None = None
    actual_hit_rate: float | None = None
    duration_seconds: float | None = None


class Report(Struct, kw_only=True, forbid_unknown_fields=True):
    """One run, as its JSON. Of the profiling phase, failed requests left out unless a field says otherwise."""

    theoretical_hit_rate: float | None
    """AgentX's own figure: blocks of the trace, unlimited cache per trace."""
    ceiling_hit_rate: float | None
    """Tokens already computed by any request of the deployment, over prompt tokens."""
    ceiling_block_hit_rate: float | None
    """The same in whole engine blocks, at most all but one token."""
    actual_hit_rate: float | None
    """Cached tokens as the engine counts them, GPU and external, over prompt tokens."""
    gpu_hit_rate: float | None
    external_hit_rate: float | None
    shared_head_share: float | None = None
    """Of the hits, those of what a play's first request hit, which only others can have computed."""
    own_history_share: float | None = None
    """Of the hits, those behind that: the rest."""
    is_upper_bound: bool = False
    """Idle times were dropped: nothing was evicted in them, so real clients hit less."""
    kv_usage_peak: float | None
    """Of the KV pool, blocks of running requests only, as vLLM counts."""
    kv_usage_mean: float | None
    kv_resident_peak: float | None
    """Of the KV pool, blocks that hold anything that could be hit."""
    kv_resident_mean: float | None
    kv_capacity_tokens: int | None
    block_size: int | None
    """Tokens of a KV block."""
    requests: int
    """All that ended, failed ones too."""
    failed_requests: int
    overflowed_requests: int
    """Prompts longer than the model's context; not failures, and their sessions ended there."""
    cancelled_requests: int
    exact_turns: int | None
    """Turns whose prompt started with the earlier prompt and answer, as the same ids."""
    unedited_turns: int | None
    """Turns whose client did not change its history: all of these should be exact."""
    output_tokens_per_second: float | None
    requests_per_second: float | None
    ttft_seconds: Percentiles
    tpot_seconds: Percentiles
    missed_tokens: dict[str, int] | None
    recomputed_tokens: dict[str, int] | None
    """Of the turn before, computed again: in its `answer`, in the `history` before that."""
    tool_calls: int | None
    prompt_tokens: int | None
    computed_tokens: int | None
    """Prompt tokens that were no hit: what the prompts cost to compute."""
    output_tokens: int | None
    planned_prompt_tokens: int
    """Prompt tokens that the trace asks for at this scale."""
    preemptions: int | None
    coverage: float | None
    """Share of the phase in which some request was between its first and its last content (AgentX asks for 0.95)."""
    engine: str
    trace: str
    seed: int
    concurrency: int
    scale: float
    time_scale: float
    assistant: str
    url: str
    marker: str = "on"
    """Whether each play had a marker of its own, so that plays of one session share no more than what stands before it."""
    delays: str = "kept"
    """Idle times: `kept` (over the time scale), or `zero`."""
    rows: RowsReport | None = None
    """Rows of the trace that were left out or are odd; None where nobody looked."""
    duration_seconds: float | None
    warmup: WarmupReport
    direct: Report | None = None
    """The same trace sent straight to the engine, in the same run."""


def _rate(pairs: Iterable[tuple[int | None, int | None]]) -> float | None:
    """Sum over sum of the pairs where both are known."""
    above = below = 0
    for part, whole in pairs:
        if part is not None and whole is not None:
            above += part
            below += whole
    return above / below if below else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _computed(record: Record) -> int | None:
    if record.num_prompt_tokens is None or record.num_cached_tokens is None:
        return None
    return record.num_prompt_tokens - record.num_cached_tokens


def percentiles(values: Sequence[float]) -> Percentiles:
    """p50 and p95 of `values`, linear between neighbours; None for none."""
    if not values:
        return Percentiles()
    p50, p95 = np.percentile(np.asarray(values), [50, 95])
    return Percentiles(float(p50), float(p95))


def _missed(records: Sequence[Record]) -> dict[str, int] | None:
    total: Counter[str] = Counter()
    known = [record.missed_tokens for record in records if record.missed_tokens is not None]
    for causes in known:
        total.update(causes)
    return dict(sorted(total.items(), key=lambda item: -item[1])) if known else None


def tpot_seconds(record: Record) -> float | None:
    """Mean time per output token after the first, as AgentX counts: last content − first content over tokens − 1."""
    if record.first_content is None or record.last_content is None or (record.num_output_tokens or 0) < 2:
        return None
    return (record.last_content - record.first_content) / ((record.num_output_tokens or 0) - 1)


def _coverage(records: Sequence[Record], started: float, ended: float) -> float | None:
    spans = sorted((r.started, r.last_content) for r in records if r.last_content is not None)
    covered, until = 0.0, started
    for begin, end in spans:
        begin, end = max(begin, until), min(end, ended)
        if end > begin:
            covered += end - begin
            until = end
    return covered / (ended - started) if ended > started else None


def _growth(samples: Sequence[Sample], field: Callable[[Sample], float | None]) -> float | None:
    values = [value for sample in samples if (value := field(sample)) is not None]
    return values[-1] - values[0] if len(values) > 1 else None


def _peak_and_mean(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return (max(known), sum(known) / len(known)) if known else (None, None)


def _split(actual: float | None, samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """(GPU, external) hit rate by the engine's counters over the phase; all of it is the GPU's where no other source is counted."""
    gpu = _growth(samples, lambda sample: sample.num_gpu_hit_tokens)
    external = _growth(samples, lambda sample: sample.num_external_hit_tokens)
    computed = _growth(samples, lambda sample: sample.num_computed_tokens)
    total = (gpu or 0.0) + (external or 0.0) + (computed or 0.0)
    if gpu is None or computed is None or total <= 0:
        return None, None
    if actual is None or not gpu + (external or 0.0):
        return gpu / total, (external or 0.0) / total
    # The counters also see what was in flight at the edges of the phase; their split is taken, the sum is the requests' own.
    share = gpu / (gpu + (external or 0.0))
    return actual * share, actual * (1 - share)


def _turns(records: Sequence[Record]) -> tuple[int | None, int | None]:
    kinds = [record.turn for record in records if record.turn is not None]
    if not kinds:
        return None, None
    return kinds.count("exact"), kinds.count("exact") + kinds.count("inexact")


def _phase_samples(run: Run, phase: Phase) -> list[Sample]:
    """The samples of `phase`, and the last one before it: counters grow from there."""
    inside = [sample for sample in run.samples if sample.phase == phase]
    before = [sample for sample in run.samples if inside and sample.time < inside[0].time]
    return before[-1:] + inside


def _warmup(run: Run) -> WarmupReport:
    records = [record for record in run.records if record.phase == "warmup"]
    good = [record for record in records if record.error is None]
    span = max(r.ended for r in records) - min(r.started for r in records) if records else None
    return WarmupReport(
        requests=len(records),
        failed_requests=sum(record.error is not None and not record.overflow for record in records),
        prompt_tokens=_sum(record.num_prompt_tokens for record in good),
        actual_hit_rate=_rate((record.num_cached_tokens, record.num_prompt_tokens) for record in good),
        duration_seconds=span,
    )


def make_report(run: Run) -> Report:
    """The report of `run`. Duration is the phase as measured, or the records' span when the run was cut short."""
    records = [record for record in run.records if record.phase == "profiling"]
    good = [record for record in records if record.error is None]
    samples = _phase_samples(run, "profiling")
    inside = [sample for sample in samples if sample.phase == "profiling"]
    started = min((record.started for record in records), default=0.0)
    ended = max((record.ended for record in records), default=0.0)
    seconds = ended - started
    actual = _rate((record.num_cached_tokens, record.num_prompt_tokens) for record in good)
    gpu, external = _split(actual, samples)
    kv_peak, kv_mean = _peak_and_mean(sample.kv_usage for sample in inside)
    capacity = next((sample.kv_capacity_tokens for sample in reversed(run.samples) if sample.kv_capacity_tokens), None)
    resident_peak, resident_mean = _peak_and_mean(
        sample.kv_resident_tokens / capacity if sample.kv_resident_tokens is not None and capacity else None for sample in inside
    )
    block_size = next((sample.block_size for sample in reversed(run.samples) if sample.block_size), None)
    exact, unedited = _turns(good)
    preemptions = _growth(samples, lambda sample: sample.num_preemptions)
    origins = hit_origins(run.records, good)
    output = _sum(record.num_output_tokens for record in good)
    header = run.header
    return Report(
        theoretical_hit_rate=_rate((record.num_theoretical_blocks, record.num_blocks) for record in good),
        ceiling_hit_rate=_rate((record.ceiling_tokens, record.num_prompt_tokens) for record in good),
        ceiling_block_hit_rate=_rate((record.ceiling_block_tokens, record.num_prompt_tokens) for record in good),
        actual_hit_rate=actual,
        gpu_hit_rate=gpu,
        external_hit_rate=external,
        shared_head_share=origins.shared_head_share,
        own_history_share=origins.own_history_share,
        is_upper_bound=header.delays == "zero",
        kv_usage_peak=kv_peak,
        kv_usage_mean=kv_mean,
        kv_resident_peak=resident_peak,
        kv_resident_mean=resident_mean,
        kv_capacity_tokens=capacity,
        block_size=block_size,
        requests=len(records),
        failed_requests=sum(record.error is not None and not record.overflow for record in records),
        overflowed_requests=sum(record.overflow for record in records),
        cancelled_requests=run.end.num_cancelled if run.end else 0,
        exact_turns=exact,
        unedited_turns=unedited,
        output_tokens_per_second=output / seconds if output is not None and seconds > 0 else None,
        requests_per_second=len(good) / seconds if good and seconds > 0 else None,
        ttft_seconds=percentiles([record.first_content - record.started for record in good if record.first_content is not None]),
        tpot_seconds=percentiles([tpot for record in good if (tpot := tpot_seconds(record)) is not None]),
        missed_tokens=_missed(good),
        recomputed_tokens=recomputed_tokens(good, block_size) if block_size else None,
        tool_calls=_sum(record.num_tool_calls for record in good),
        prompt_tokens=_sum(record.num_prompt_tokens for record in good),
        computed_tokens=_sum(_computed(record) for record in good),
        output_tokens=output,
        planned_prompt_tokens=round(sum(record.planned_prompt_tokens for record in good)),
        preemptions=None if preemptions is None else round(preemptions),
        coverage=_coverage(good, started, ended),
        engine=header.engine,
        trace=header.trace,
        seed=header.seed,
        concurrency=header.concurrency,
        scale=header.scale,
        time_scale=header.time_scale,
        assistant=header.assistant,
        url=header.url,
        marker=header.marker,
        delays=header.delays,
        duration_seconds=seconds if records else None,
        warmup=_warmup(run),
    )


def write_report(path: Path, report: Report) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def read_report(path: Path) -> Report:
    """A report written before. Raises RecordsError when it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise RecordsError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RecordsError(f"{path}: not a replay report: {error}") from None
