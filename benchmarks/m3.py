"""MiniMax-M3: shapes and capacity beside published figures, the reference's shortcuts, planted faults, and index reuse with its gate.

`--quick` needs neither an engine nor a GPU. Without it nano-M3 runs on the embedded engine too. With `--gpu` the real vLLM with M3's layers
at full width is measured as well (`benchmarks.m3_gpu`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from rich.console import Console

from benchmarks.contenders import ContenderFailed
from benchmarks.m3_checks import (
    PUBLISHED_CAPACITY_TOKENS,
    capacity_tokens,
    planted_faults,
    reference_checks,
    shape_checks,
)
from benchmarks.m3_nano import FREQS, engine_gate, nano_overlap, nano_weights, rounding_gate
from benchmarks.report import REPOSITORY, Options, Result, Row

_COLUMNS = ("of", "passed", "figure")
_BASE, _REUSE = "every layer chooses", "1 of 4 chooses"
_TURN, _DECODE = "turn", "decode_28x65536"


def measure(options: Options) -> Result:
    """Everything that this machine can show. Raises ContenderFailed where the GPU part does not run."""
    figures: dict[str, Any] = {
        "shape_checks": _counted(shape_checks(), "passed"),
        "capacity_error_share": abs(capacity_tokens() - PUBLISHED_CAPACITY_TOKENS) / PUBLISHED_CAPACITY_TOKENS,
        "reference_checks": _counted(reference_checks(), "passed"),
        "planted_faults_caught": _counted(planted_faults(), "caught"),
    }
    with torch.inference_mode():
        weights = nano_weights(options.cache_folder / "nano-m3")
        gates: dict[str, dict[str, Any]] = {f"rounding, reuse {freq}": rounding_gate(weights, freq) for freq in FREQS}
        figures["overlap_by_layer"] = nano_overlap(weights)
    figures["overlap_of"] = "nano-M3, random weights"
    if not options.quick:
        say = Console(stderr=True).print
        gates |= {f"vLLM on the CPU, reuse {freq}": asyncio.run(engine_gate(options.cache_folder, freq, say)) for freq in FREQS}
    figures |= _on_gpu(options.quick) if options.gpu else _without_gpu()
    gates |= figures.get("gpu", {}).get("gate", {})
    figures["gate"] = {"passed": all(gate["passed"] for gate in gates.values()), "each": gates}
    return Result("MiniMax-M3", _COLUMNS, _rows(figures), _notes(figures), figures=figures)


def _counted(each: Mapping[str, Mapping[str, Any]], word: str) -> dict[str, Any]:
    return {word: sum(bool(check[word]) for check in each.values()), "of": len(each), "each": each}


def _without_gpu() -> dict[str, Any]:
    why = "--gpu was not given" if torch.cuda.is_available() else "there is no CUDA device here"
    return {"reuse_turn_speedup": None, "reuse_decode_speedup": None, "reuse_speedup_missing_because": why}


def _on_gpu(quick: bool) -> dict[str, Any]:
    """The figures of `benchmarks.m3_gpu`, which runs in a process of its own: vLLM keeps the device until its process ends."""
    if not torch.cuda.is_available():
        return _without_gpu()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "gpu.json"
        command = [sys.executable, "-m", "benchmarks.m3_gpu", "--out", str(out), *(("--rounds", "1") if quick else ("--profile",))]
        ended = subprocess.run(command, cwd=REPOSITORY, check=False)
        if ended.returncode or not out.exists():
            raise ContenderFailed(f"benchmarks.m3_gpu ended with code {ended.returncode}: its own output says why")
        found = msgspec.json.decode(out.read_bytes(), type=dict[str, Any])
    return {
        "reuse_turn_speedup": found[_TURN][_REUSE]["speedup"],
        "reuse_decode_speedup": found[_DECODE][_REUSE]["speedup"],
        "overlap_by_layer": found["overlap_by_layer"],
        "overlap_of": f"{found['layers']} layers at full width, random weights",
        "gpu": found,
    }


def _rows(figures: Mapping[str, Any]) -> tuple[Row, ...]:
    def row(name: str, passed: float | None = None, total: float | None = None, figure: float | None = None) -> Row:
        return Row(name, dict(zip(_COLUMNS, (total, passed, figure), strict=True)))

    gates = figures["gate"]["each"]
    return (
        *(row(name, figures[name]["passed"], figures[name]["of"]) for name in ("shape_checks", "reference_checks")),
        row("planted_faults_caught", figures["planted_faults_caught"]["caught"], figures["planted_faults_caught"]["of"]),
        row("gate", sum(gate["passed"] for gate in gates.values()), len(gates)),
        row("capacity_error_share", figure=figures["capacity_error_share"]),
        row("reuse_turn_speedup", figure=figures["reuse_turn_speedup"]),
        row("reuse_decode_speedup", figure=figures["reuse_decode_speedup"]),
        *(row(f"overlap with the layer before, sparse layer {n}", figure=r[n - 1]) for n, r in enumerate(figures["overlap_by_layer"]) if n),
    )


def _notes(figures: Mapping[str, Any]) -> tuple[str, ...]:
    missing = figures.get("reuse_speedup_missing_because")
    notes = [f"Overlap: {figures['overlap_of']}."]
    return (*notes, f"Speedups are not measured: {missing}.") if missing else tuple(notes)
