"""`agentserve model …`: local shapes, KV geometry, capacity and launch profiles without a GPU, and an audit of a running engine."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from agentserve.engine_evidence import process_evidence, read_kernels, read_log, read_metrics
from agentserve.errors import SetupError
from model.m3.config import MINIMAX_M3, M3Config, config_from_json
from model.m3.dtypes import Dtype
from model.m3.exchange import collectives
from model.m3.fast_paths import EngineFacts
from model.m3.fast_paths import audit as look_at
from model.m3.index_reuse import measured_plan
from model.m3.kv import CacheGeometry
from model.m3.launch import LAUNCH_PROFILES, arguments, check_launch, engine_flags, environment, offload_flags
from model.m3.memory import GIB, WeightFormat, implied_other_bytes, plan_memory
from model.m3.shapes import local_shapes
from model.m3.sharding import Shard

app = App(name="model", help="MiniMax-M3: shapes, KV bytes, capacity, launch profiles, and what runs of what was configured.")

_PIPE_WIDTH = 120
_OUTPUT = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
_ERRORS = Console(stderr=True, highlight=False)

_Tp = Annotated[int, Parameter(help="Tensor-parallel size.")]
_Config = Annotated[Path | None, Parameter(help="A checkpoint's config.json; by default the published model.")]
_Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")]
_KvDtype = Annotated[Dtype, Parameter(help="Format of K and V in the cache.")]
_IndexDtype = Annotated[Dtype, Parameter(help="Format of index K in the cache; vLLM's default is bf16, also beside an fp8 K and V.")]


@app.command
def shapes(
    *,
    tp: _Tp = 4,
    prefill_tokens: Annotated[int, Parameter(help="Tokens of a prefill batch.")] = 32_768,
    decode_sequences: Annotated[int, Parameter(help="Sequences of a decode batch.")] = 28,
    draft_tokens: Annotated[int, Parameter(help="Draft tokens verified for each of them.")] = 3,
    expert_parallel: Annotated[bool, Parameter(negative="", help="Each rank holds whole experts, its share of them.")] = False,
    fuse_shared_expert: Annotated[bool, Parameter(negative="", help="The shared expert as one more slot that every token takes.")] = False,
    config: _Config = None,
    json: _Json = False,
) -> None:
    """Matrix shapes on one rank for a prefill and a decode batch (M = rows), and what the ranks exchange."""
    shard = _shard(config, tp, expert_parallel)
    decode_tokens = decode_sequences * (1 + draft_tokens)
    try:
        rows = local_shapes(shard, fuse_shared_expert=fuse_shared_expert)
    except ValueError as error:
        raise SetupError(str(error)) from error
    matrices = [
        {
            "layer": row.name,
            "times": row.num_layers * row.num_matrices,
            "N": row.n,
            "K": row.k,
            "M prefill": _rows(row.m(1 if row.sampled_only else prefill_tokens)),
            "M decode": _rows(row.m(decode_tokens)),
            "cut": row.how,
        }
        for row in rows
    ]
    exchanged = [
        {"collective": each.name, "kind": each.kind, "count": each.count, "prefill bytes": each.num_bytes, "decode bytes": decode.num_bytes}
        for each, decode in zip(
            collectives(shard, prefill_tokens, decode_sequences), collectives(shard, decode_tokens, decode_sequences), strict=True
        )
    ]
    _print({"matrices": matrices, "exchange": exchanged}, json)


@app.command
def kv(
    *, tp: _Tp = 4, kv_dtype: _KvDtype = Dtype.FP8, index_dtype: _IndexDtype = Dtype.BF16, config: _Config = None, json: _Json = False
) -> None:
    """Bytes that a token leaves in the KV cache: by kind of layer, rank, and deployment."""
    geometry = CacheGeometry(_shard(config, tp), kv_dtype, index_dtype)
    kinds: dict[tuple[str, bool, int], int] = {}
    for cache in geometry.layers():
        key = (cache.role, cache.layer >= geometry.shard.config.num_dense_layers, cache.bytes_per_token)
        kinds[key] = kinds.get(key, 0) + 1
    per_layer = [
        {"cache": role, "layers": "sparse" if sparse else "dense", "count": count, "bytes per token": size}
        for (role, sparse, size), count in kinds.items()
    ]
    sums = [
        {"sum": "one rank, per token", "bytes": geometry.bytes_per_token},
        {"sum": "one rank, per block", "bytes": geometry.bytes_per_block},
        {"sum": "all ranks with copies, per token", "bytes": geometry.stored_bytes_per_token},
        {"sum": "all ranks without copies, per token", "bytes": geometry.distinct_bytes_per_token},
    ]
    _print({"layers": per_layer, "sums": sums}, json)


@app.command
def capacity(
    *,
    tp: _Tp = 4,
    memory_gib: Annotated[float, Parameter(help="Memory of one device, GiB; an MI355X has 288.")] = 288.0,
    utilization: Annotated[float, Parameter(help="The engine's --gpu-memory-utilization.")] = 0.85,
    other_gib: Annotated[float, Parameter(help="Activations, graphs, communication buffers and drafts of one rank, GiB.")] = 14.0,
    kv_dtype: _KvDtype = Dtype.FP8,
    index_dtype: _IndexDtype = Dtype.BF16,
    expert_dtype: Annotated[Dtype, Parameter(help="Format of the experts' weights.")] = Dtype.MXFP4,
    linear_dtype: Annotated[Dtype, Parameter(help="Format of the other linear layers' weights.")] = Dtype.BF16,
    measured_tokens: Annotated[
        int | None, Parameter(help="A capacity that an engine has printed: say what it leaves for the rest.")
    ] = None,
    config: _Config = None,
    json: _Json = False,
) -> None:
    """Tokens of KV cache that fit, from a memory budget."""
    geometry = CacheGeometry(_shard(config, tp), kv_dtype, index_dtype)
    weights = WeightFormat(expert_dtype, linear_dtype)
    device = int(memory_gib * GIB)
    try:
        plan = plan_memory(geometry, weights, device_bytes=device, utilization=utilization, other_bytes=int(other_gib * GIB))
    except ValueError as error:
        raise SetupError(str(error)) from error
    parts = [
        {"part of one rank": "budget", "GiB": _gib(plan.budget_bytes)},
        {"part of one rank": "weights", "GiB": _gib(plan.weight_bytes)},
        {"part of one rank": "other", "GiB": _gib(plan.other_bytes)},
        {"part of one rank": "KV cache", "GiB": _gib(plan.kv_bytes)},
    ]
    sizes: list[dict[str, Any]] = [{"KV cache": "tokens", "size": plan.capacity_tokens}]
    sizes.append({"KV cache": "blocks", "size": plan.capacity_tokens // geometry.shard.config.block_size})
    if measured_tokens is not None:
        other = implied_other_bytes(geometry, weights, device_bytes=device, utilization=utilization, tokens=measured_tokens)
        parts.append({"part of one rank": f"other, if {measured_tokens:,} tokens fit", "GiB": _gib(other)})
    _print({"memory": parts, "capacity": sizes}, json)


@app.command
def profiles(*, json: _Json = False) -> None:
    """The launch profiles for MI355X."""
    rows = [
        {"profile": each.name, "tp": each.tp, "weights": each.quantization, "index reuse": each.index_topk_freq, "for": each.summary}
        for each in LAUNCH_PROFILES.values()
    ]
    _print({"profiles": rows}, json)


@app.command
def launch(
    profile: str,
    *,
    concurrency: Annotated[int, Parameter(help="Agent sessions at a time; the engine may run twice as many requests.")] = 28,
    port: Annotated[int, Parameter(help="The engine's port.")] = 8001,
    kv_events: Annotated[str, Parameter(help="Where the engine announces its blocks (ZMQ); the server's --kv-events-url reads it.")] = (
        "tcp://*:5557"
    ),
    json: _Json = False,
) -> None:
    """The exact command lines and environment of a launch profile, after its conditions have been checked."""
    chosen = LAUNCH_PROFILES.get(profile)
    if chosen is None:
        raise SetupError(f"there is no launch profile {profile!r}; there are: {', '.join(LAUNCH_PROFILES)}")
    findings = check_launch(chosen, concurrency=concurrency)
    for finding in findings:
        _ERRORS.print(
            f"{'refused' if finding.fatal else 'note'}: {finding.what}. {finding.fix[:1].upper()}{finding.fix[1:]}.", soft_wrap=True
        )
    if any(finding.fatal for finding in findings):
        raise SetupError(f"launch profile {profile!r} does not meet its conditions")
    flags = engine_flags(chosen, max_num_seqs=2 * concurrency, kv_events_endpoint=kv_events)
    engine = ["vllm", "serve", chosen.model, "--port", str(port), *arguments(flags)]
    servers = [["lmcache", "server", *arguments(each)] for each in offload_flags(chosen)]
    if json:
        _OUTPUT.print_json(data={"environment": environment(chosen), "engine": engine, "offload": servers})
        return
    for name, value in environment(chosen).items():
        _OUTPUT.print(f"export {name}={shlex.quote(value)}", soft_wrap=True, markup=False)
    for line in (*servers, engine):
        _OUTPUT.print(f"{shlex.join(line)}{' &' if line is not engine else ''}", soft_wrap=True, markup=False)


@app.command
def audit(
    *,
    engine_url: Annotated[str | None, Parameter(help="The running engine; its metrics are evidence.")] = None,
    pid: Annotated[int | None, Parameter(help="The engine's process on this host; its command line and environment are evidence.")] = None,
    log: Annotated[Path | None, Parameter(help="The engine's log from its start.")] = None,
    trace: Annotated[Path | None, Parameter(help="A torch profiler trace (.json or .json.gz).")] = None,
    tp: Annotated[int | None, Parameter(help="Tensor-parallel size; by default the command line's.")] = None,
    quantization: Annotated[str | None, Parameter(help="mxfp4 or mxfp8: the weights'.")] = None,
    decode_tokens: Annotated[int | None, Parameter(help="Rows of a usual decode step.")] = None,
    config: _Config = None,
    json: _Json = False,
) -> None:
    """Which fast paths are eligible, which are configured, and which have been shown to run."""
    if engine_url is None and pid is None and log is None and trace is None:
        raise SetupError("nothing to look at: give --engine-url, --pid, --log or --trace")
    flags, variables = process_evidence(pid) if pid is not None else (None, None)
    size = tp or (int(flags.get("tensor-parallel-size", 1)) if flags is not None else None)
    facts = EngineFacts(
        shard=None if size is None else _shard(config, size),
        flags=flags,
        environment=variables,
        log=None if log is None else read_log(log),
        metrics=None if engine_url is None else asyncio.run(read_metrics(engine_url)),
        kernels=None if trace is None else read_kernels(trace),
        decode_tokens=decode_tokens,
        quantization=quantization,
    )
    rows: list[dict[str, Any]] = []
    evidence: list[dict[str, Any]] = []
    for each in look_at(facts):
        words = {"eligible": each.eligible, "configured": each.configured, "executed": each.executed}
        rows.append({"fast path": each.name, **{name: _SHOWN[word.holds] for name, word in words.items()}})
        evidence += [{"fast path": each.name, "word": name, "evidence": word.why} for name, word in words.items() if word.why]
    _print({"fast paths": rows, "evidence": evidence}, json)


@app.command
def reuse(
    overlap: Path,
    *,
    least_overlap: Annotated[float, Parameter(help="A layer reads its leader while the two choose this share of the same blocks.")] = 0.9,
    longest: Annotated[int, Parameter(help="Layers that follow one leader, at most.")] = 3,
    json: _Json = False,
) -> None:
    """Leaders of index reuse by measured overlap, and the engine's option for them.

    OVERLAP is the file that an engine wrote whose configuration named it as index_overlap_file.
    """
    try:
        measured = msgspec.json.decode(overlap.read_bytes(), type=_Overlap)
        plan = measured_plan(measured.overlap, least_overlap, longest)
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise SetupError(f"cannot use {overlap}: {error}") from error
    leaders = [
        {"sparse layer": n, "reads": leader, "overlap": round(measured.overlap[n][leader], 3)} for n, leader in enumerate(plan.leaders)
    ]
    switch = msgspec.json.encode({"text_config": {"use_index_cache": True, "index_topk_leaders": plan.leaders}}).decode()
    option = f"--hf-overrides {shlex.quote(switch)}"
    _print(
        {"leaders": leaders, "result": [{"choose": plan.num_leaders, "of": len(plan.leaders), "measured passes": measured.num_passes}]},
        json,
    )
    if not json:
        _OUTPUT.print("no reuse: no two layers agree so far" if plan.is_off else option, soft_wrap=True, markup=False)


class _Overlap(msgspec.Struct):
    """What the plugin's meter writes."""

    overlap: list[list[float]]
    num_passes: int


_PROSE = ("evidence", "for")
_SHOWN = {True: "yes", False: "no", None: "not shown"}


def _rows(average: float) -> float:
    return int(average) if average == int(average) else round(average, 1)


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 2)


def _shard(path: Path | None, tp: int, expert_parallel: bool = False) -> Shard:
    try:
        return Shard(_config(path), tp, expert_parallel)
    except ValueError as error:
        raise SetupError(str(error)) from error


def _config(path: Path | None) -> M3Config:
    if path is None:
        return MINIMAX_M3
    try:
        return config_from_json(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error


def _print(sections: dict[str, list[dict[str, Any]]], json: bool) -> None:
    if json:
        _OUTPUT.print_json(data=sections)
        return
    for rows in sections.values():
        if not rows:
            continue
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(rows[0]):
            wraps = name in _PROSE
            table.add_column(name, justify="right" if index and not wraps else "left", no_wrap=not wraps)
        for row in rows:
            table.add_row(*(f"{cell:,}" if isinstance(cell, int | float) else str(cell) for cell in row.values()))
        _OUTPUT.print(table)
