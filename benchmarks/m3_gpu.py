"""Index reuse on a GPU: the real vLLM with M3's layers at full width, its arms alternating in one process, beside the gate.

    python -m benchmarks.m3_gpu --out FILE.json              with CUDA graphs
    python -m benchmarks.m3_gpu --out FILE.json --eager
    python -m benchmarks.m3_gpu --out FILE.json --eager --gate-only      gate and overlap: a minute or two, a page of output

Needs a CUDA device and vLLM with M3's NVIDIA model. Weights are random, drawn so that activations keep their size; layers and experts are
fewer than M3's so that one device holds them. What is done so far is in FILE.json after each step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentserve.engines.plugin.index_reuse import OverlapMeter
from benchmarks.m3_engine import ARMS, NUM_SEQUENCES, Arm, Engine, layers_of
from benchmarks.m3_gate import gate
from benchmarks.m3_growth import error_growth
from model.m3.index_reuse import index_work

GATE_TOKENS = 3_200
"""25 blocks: more than the 16 that are chosen, so that the choice matters."""
TURN_CACHED, TURN_NEW = 129_024, 1_024
HBM_BYTES_PER_SECOND = 4.8e12
"""An H200's memory bandwidth by its data sheet: the floor of what must be read."""


def random_ids(rng: random.Random, count: int, vocabulary: int = 200_000) -> list[int]:
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def alternating(engine: Engine, rounds: int, run: Callable[[], list[float]]) -> dict[str, list[float]]:
    """What `run` gives under each arm, arms taking turns; the order is turned round each time."""
    found: dict[str, list[float]] = {arm.name: [] for arm in ARMS}
    for number in range(rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            engine.choose(arm)
            run()  # the first after a switch is not counted
            found[arm.name] += run()
    return found


def turn_milliseconds(engine: Engine, prefix: list[int], rng: random.Random) -> list[float]:
    """Three turns of TURN_NEW tokens over a cached prefix."""
    times = []
    for _ in range(3):
        seconds, out = engine.generate([prefix + random_ids(rng, TURN_NEW)])
        assert out[0].num_cached_tokens >= len(prefix) - 128, out[0].num_cached_tokens
        times.append(1000 * seconds)
    return times


def decode_milliseconds(engine: Engine, prompts: list[list[int]], steps: int = 64) -> list[float]:
    """One decode step of all prompts, their prefixes cached: the difference of a long and a one-token answer."""
    one, _ = engine.generate(prompts)
    many, _ = engine.generate(prompts, max_tokens=1 + steps)
    return [1000 * (many - one) / steps]


def kernels(engine: Engine, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Device time by kernel over 16 decode steps and a warm prefill of all prompts, in milliseconds, largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts, max_tokens=17)
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:25]
    return {row.key[:90]: {"ms": row.self_device_time_total / 1000, "count": row.count} for row in rows if row.self_device_time_total}


def floor_milliseconds(engine: Engine, arm: Arm, context: list[int]) -> float:
    """Least time of one decode step's indexers: their keys read once at full bandwidth (the arithmetic is far below it)."""
    ones = [1] * len(context)
    work = index_work(engine.config, engine.plan(arm), num_index_heads=4, query_tokens=ones, context_tokens=context)
    return 1000 * work.read_bytes / HBM_BYTES_PER_SECOND


def measured_overlap(engine: Engine, rng: random.Random, folder: Path) -> list[list[float]]:
    """Of a prompt of 32,768 tokens, by the plugin's own meter. Raises RuntimeError where it booked no pass."""
    path = folder / "overlap.json"
    engine.choose(ARMS[0])
    engine.reuse.meter = meter = OverlapMeter(path)
    engine.generate([random_ids(rng, 32_768)])
    engine.reuse.meter = None
    if not meter.num_passes:
        raise RuntimeError(f"no pass was booked; ignored: {dict(meter.ignored)}; {engine.buffer_facts()}")
    table: list[list[float]] = json.loads(path.read_text())["overlap"]  # noqa: TID251 # the engine's machine has no msgspec
    return table


def speedups(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, spread and each arm's speed against the first's."""
    base = statistics.median(times[ARMS[0].name])
    return {
        name: {"median_ms": statistics.median(each), "least_ms": min(each), "most_ms": max(each), "speedup": base / statistics.median(each)}
        for name, each in times.items()
    }


def steps(engine: Engine, options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Any]]:
    """Each figure by its name, as soon as it is measured."""
    rng = random.Random(0)
    ids = random_ids(rng, GATE_TOKENS)
    with torch.inference_mode():
        yield "gate", {arm.name: gate(engine, arm, ids) for arm in ARMS[:3]}
        if not options.gate_only:
            tokens = torch.tensor(ids, device=engine.device)
            yield "error_growth", error_growth(engine.config, engine.weights(), tokens, engine.plan(ARMS[0]))
    yield "overlap_by_layer", measured_overlap(engine, rng, folder)
    if options.gate_only:
        return
    engine.choose(ARMS[0])
    engine.reset()
    prefix = random_ids(rng, TURN_CACHED)
    yield "cold_prefill_ms", 1000 * engine.generate([prefix])[0]
    yield "turn", speedups(alternating(engine, options.rounds, partial(turn_milliseconds, engine, prefix, rng)))
    for length in options.contexts:
        engine.choose(ARMS[0])
        engine.reset()
        prompts = [random_ids(rng, length) for _ in range(NUM_SEQUENCES)]
        engine.generate(prompts)
        prompts = [prompt + random_ids(rng, 64) for prompt in prompts]
        name = f"decode_{NUM_SEQUENCES}x{length}"
        yield name, speedups(alternating(engine, options.rounds, partial(decode_milliseconds, engine, prompts)))
        yield f"{name}_indexer_floor_ms", {arm.name: floor_milliseconds(engine, arm, [length] * NUM_SEQUENCES) for arm in ARMS}
        if options.profile:
            for arm in ARMS[:3]:
                engine.choose(arm)
                yield f"{name}_kernels, {arm.name}", kernels(engine, prompts)
    yield "calls", {"choices": engine.reuse.num_choices, "reads": engine.reuse.num_reads}


def summary(name: str, value: Any) -> str:
    """A line for the gate of each arm, else one for the whole figure, numbers rounded and cut: a page in all."""
    parts = {f"{name}, {arm}": each for arm, each in value.items()} if name == "gate" else {name: value}
    return "\n".join(f"{title}: {json.dumps(_rounded(part))[:950]}" for title, part in parts.items())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--gate-only", action="store_true", help="The gate and overlap; nothing is timed.")
    parser.add_argument("--profile", action="store_true", help="Also device time by kernel.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32_768, 65_536])
    options = parser.parse_args()
    device = torch.cuda.get_device_name()
    result: dict[str, Any] = {"device": device, "eager": options.eager, "layers": options.layers, "experts": options.experts}
    engine = Engine(layers_of(options.layers, options.experts), eager=options.eager, utilization=0.7)
    for name, value in steps(engine, options, options.out.parent):
        result[name] = value
        options.out.write_text(json.dumps(result, indent=1))
        if "kernels" not in name and name != "error_growth":
            print(summary(name, value), flush=True)


if __name__ == "__main__":
    main()
