"""The eviction plugin and its exclusive tier on GPUs, with one rank and with two: the same answers, hits, speeds, and a served engine.

    python -m benchmarks.gpu_plugin --out FOLDER
    python -m benchmarks.gpu_plugin --out FOLDER --only "plugin by scheduler" --only plain

Needs CUDA devices, and agentserve installed beside vLLM so that vLLM finds its entry points. Each engine is a process of its own; those
with one rank run side by side, one on each device. What an engine was asked and answered is in FOLDER, and its log.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.gpu_plugin_served import served

# vLLM is not imported here: a process that has touched the device cannot share it as well.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "agentserve",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
TIER = {"carrier": "connector", "has_tier": True}
LONG = TIER | {"dtype": "bfloat16", "num_blocks": 4096, "prompt_blocks": 480}
PLAIN, ALL_FITS = REFERENCES = "plain", "plain, all fits"
STATES = (
    "is_ordering",
    "off_because",
    "tier_off_because",
    "num_errors",
    "num_bad_hints",
    "num_evicted_dead_blocks",
    "num_evicted_live_blocks",
    "num_stored_blocks",
    "num_loaded_blocks",
    "num_dropped_blocks",
    "num_displaced_blocks",
)
"""What is shown of the plugin's state."""


@dataclass(frozen=True, slots=True)
class Run:
    """One engine: what differs from `Arm`'s defaults, and from ENVIRONMENT."""

    name: str
    tp: int
    arm: dict[str, Any]
    environment: dict[str, str]
    is_compared: bool = True
    """Its answers must be those of plain vLLM of as many ranks."""

    @property
    def slug(self) -> str:
        return f"{self.name} tp{self.tp}".replace(" ", "_").replace(",", "")


def runs(num_devices: int) -> list[Run]:
    """Every one, those that matter most first. Ranks are never more than devices."""
    found = []
    for tp in (1, 2)[:num_devices]:
        found += [
            Run(PLAIN, tp, {}, {}),
            Run("tier", tp, TIER | {"other_memory": True, "breaks": "store"}, {}),
            Run("plugin by scheduler", tp, {"carrier": "scheduler"}, {}),
            Run("plugin by connector", tp, {"carrier": "connector"}, {}),
            Run(ALL_FITS, tp, {"num_blocks": 4096}, {}),
            Run("speed, blocks of 16", tp, LONG, {}, is_compared=False),
            Run("speed, blocks of 128", tp, LONG | {"block_size": 128, "num_blocks": 512, "prompt_blocks": 60}, {}, is_compared=False),
            Run("tier, a load fails", tp, TIER | {"breaks": "load"}, {}),
            Run("tier, a load fails, V1 in step", tp, TIER | {"breaks": "load", "is_async": False, "failure_policy": "recompute"}, V1),
        ]
    return found


def play(run: Run, folder: Path, devices: str, timeout: float) -> dict[str, Any]:
    """The engine's own account, or `{"failed": last lines of its log}`."""
    out, log = folder / f"{run.slug}.json", folder / f"{run.slug}.log"
    command = [sys.executable, "-m", "benchmarks.gpu_plugin_arm", "--arm", json.dumps(run.arm), "--tp", str(run.tp), "--out", str(out)]
    environment = os.environ | ENVIRONMENT | run.environment | {"CUDA_VISIBLE_DEVICES": devices}
    began = time.perf_counter()
    with log.open("w") as file:
        try:
            subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            file.write("\nended by the benchmark: it took too long\n")
    found: dict[str, Any] = {"failed": log.read_text(errors="replace")[-1500:]}
    if out.exists():
        found = json.loads(out.read_text())  # noqa: TID251 # this module runs where nothing of agentserve's need be
    print(f"{time.perf_counter() - began:6.1f} s  {run.slug}{'  FAILED' if 'failed' in found else ''}", flush=True)
    return found


def play_all(chosen: Iterable[Run], folder: Path, num_devices: int, timeout: float) -> dict[str, dict[str, Any]]:
    """Those of one rank side by side, then the others one after the other."""
    found: dict[str, dict[str, Any]] = {}
    free: SimpleQueue[str] = SimpleQueue()
    for device in range(num_devices):
        free.put(str(device))

    def alone(run: Run) -> None:
        device = free.get()
        try:
            found[run.slug] = play(run, folder, device, timeout)
        finally:
            free.put(device)

    chosen = list(chosen)
    with ThreadPoolExecutor(num_devices) as pool:
        list(pool.map(alone, [run for run in chosen if run.tp == 1]))
    for run in chosen:
        if run.tp > 1:
            found[run.slug] = play(run, folder, ",".join(map(str, range(run.tp))), timeout)
    return found


def row(run: Run, every: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is to be said of one engine among `every`."""
    found = every[run.slug]
    if "failed" in found:
        return {"failed": found["failed"][-300:]}
    asked = [each for turn in found["rounds"] for each in turn]
    back = [each for turn in found["rounds"][1:] for each in turn if each["name"].startswith("live")]
    said: dict[str, Any] = {
        "facts": found["facts"],
        "hit_share_by_turn": [round(_hit_share(turn), 4) for turn in found["rounds"][1:]],
        "hit_share": round(_hit_share(back), 4),
        "loaded_blocks": sum(each["num_loaded_blocks"] for each in asked),
    }
    for name in REFERENCES if run.is_compared else ():
        other = every.get(Run(name, run.tp, {}, {}).slug, {"failed": ""})
        if "failed" not in other:
            wanted = [each["ids"] for turn in other["rounds"] for each in turn]
            said[f"same as {name}"] = f"{sum(each['ids'] == ids for each, ids in zip(asked, wanted, strict=True))} of {len(asked)}"
    state = found["state"]
    said["state"] = {
        name: state[name] for name in state if name.startswith(("num_evicted", "is_ordering", "num_err", "tier_off", "num_st"))
    }
    said["state"] |= {name: state[name] for name in ("num_loaded_blocks", "num_dropped_blocks", "num_displaced_blocks") if name in state}
    for name in ("again", "overwritten", "after_reset", "broken"):
        if name in found:
            parts = found[name] if isinstance(found[name], list) else [found[name]]
            said[name] = [f"{each['same']} of {each['of']} the same, {each['loaded_blocks']} blocks loaded" for each in parts]
    if "state_after" in found:
        said["tier_off_because"] = found["state_after"]["tier_off_because"]
    said["speeds"] = {name: _rounded(each) for name, each in found["speeds"].items()}
    if not run.is_compared:
        said["seconds"] = _seconds(asked)
    return said


def _hit_share(asked: list[dict[str, Any]]) -> float:
    """Of the prompt tokens of sessions that came back."""
    back = [each for each in asked if each["name"].startswith("live")]
    return float(sum(each["num_cached_tokens"] for each in back) / sum(each["num_prompt_tokens"] for each in back))


def _seconds(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """A whole request by where its prompt came from: medians, and how many, where nearly all of it was."""
    parts: dict[str, list[float]] = {"computed": [], "hit": [], "loaded": []}
    for each in asked:
        is_loaded, is_hit = each["num_loaded_blocks"] > 0, each["num_cached_tokens"] > 0.9 * each["num_prompt_tokens"]
        if is_hit or not each["num_cached_tokens"]:
            parts["loaded" if is_loaded else "hit" if is_hit else "computed"].append(each["seconds"])
    return {name: [round(sorted(each)[len(each) // 2], 4), len(each)] for name, each in parts.items() if each}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="Names of engines (repeat the flag); default: all, and the served one.")
    parser.add_argument("--tp", type=int, default=0, help="Those of so many ranks alone.")
    parser.add_argument("--timeout", type=float, default=150.0, help="Seconds for one engine.")
    parser.add_argument("--dtype", default="", help="Instead of float32, where answers are compared.")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [run for run in runs(options.devices) if run.name in (options.only or [run.name]) and options.tp in (0, run.tp)]
    if options.dtype:
        chosen = [replace(run, arm={"dtype": options.dtype} | run.arm) for run in chosen]
    result: dict[str, Any] = {}
    if not options.only or "served" in options.only:
        result["served"] = served(options.out / "served.log", min(2, options.devices), ENVIRONMENT)
        print("served:", json.dumps(result["served"])[:1500], flush=True)
    found = play_all(chosen, options.out, options.devices, options.timeout)
    for run in chosen:
        result[run.slug] = row(run, found)
        print(f"{run.slug}: {json.dumps(result[run.slug])}", flush=True)
    (options.out / "result.json").write_text(json.dumps(result | {"runs": [asdict(run) for run in chosen]}, indent=1))


if __name__ == "__main__":
    main()
