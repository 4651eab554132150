"""`python -m benchmarks NAME`: run one benchmark, print its table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from benchmarks import agentx, cache, offload, overhead, simulator, turn_cost
from benchmarks.capacity import measure as capacity
from benchmarks.cases import CasesFailed
from benchmarks.client import BadAnswer
from benchmarks.contenders import ContenderFailed
from benchmarks.ledger import measure as ledger
from benchmarks.report import CACHE_FOLDER, Benchmark, Options, Result, show, write_json


def _m3(options: Options) -> Result:
    # torch takes seconds to import and need not be installed: only this one pays for it.
    from benchmarks import m3

    return m3.measure(options)


BENCHMARKS: dict[str, Benchmark] = {
    "agentx": agentx.measure,
    "cache": cache.measure,
    "capacity": capacity.measure,
    "ledger": ledger.measure,
    "m3": _m3,
    "offload": offload.measure,
    "overhead": overhead.measure,
    "simulator": simulator.measure,
    "turn_cost": turn_cost.measure,
}

app = App(name="benchmarks", help="Benchmarks: each prints one table with ratios, all measured in one run.")


@app.default
def run(
    name: Annotated[str, Parameter(help=f"One of: {', '.join(BENCHMARKS)}.")],
    *,
    json: Annotated[Path | None, Parameter(help="Also write the table and its environment here.")] = None,
    quick: Annotated[bool, Parameter(help="Measure less, for a first look.")] = False,
    contenders: Annotated[
        tuple[str, ...], Parameter(help="Servers that take part (repeat the flag); default: those of the benchmark.")
    ] = (),
    cache_folder: Annotated[Path, Parameter(help="Where peers are installed.")] = CACHE_FOLDER,
    gpu: Annotated[bool, Parameter(negative="", help="Measure on the CUDA device as well (m3).")] = False,
    seeds: Annotated[tuple[int, ...], Parameter(help="Seeds (capacity; repeat the flag); default: those of the benchmark.")] = (),
    blocks: Annotated[int, Parameter(help="KV blocks of the engine (capacity); 0: as the benchmark says.")] = 0,
    url: Annotated[str, Parameter(help="A running server to measure (agentx); empty: one of the benchmark's own.")] = "",
    traces: Annotated[
        Path | None, Parameter(help="Recorded sessions (cache, capacity, simulator): a file or folder; else generated ones.")
    ] = None,
    resume: Annotated[Path | None, Parameter(help="The --json of a run that was cut off, to go on from its arms (capacity).")] = None,
) -> int:
    """Run benchmark NAME."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        Console(stderr=True).print(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
        return 2
    try:
        asked = Options(
            quick=quick,
            contenders=contenders,
            cache_folder=cache_folder,
            gpu=gpu,
            url=url,
            traces=traces,
            seeds=seeds,
            blocks=blocks,
            json=json,
            resume=resume,
        )
        result = benchmark(asked)
    except (BadAnswer, CasesFailed, ContenderFailed, ValueError) as error:
        Console(stderr=True).print(str(error), markup=False)
        return 1
    show(result)
    if json is not None:
        write_json(result, json)
    return 0


if __name__ == "__main__":
    raise SystemExit(app())
