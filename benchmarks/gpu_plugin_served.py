"""A vLLM server that loads the plugin by its entry points, asked over HTTP: the last part of `benchmarks.gpu_plugin`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.gpu_plugin_model import KV_NUMBERS, write_model

NUM_BLOCKS, BLOCK_SIZE, PROMPT_TOKENS = 256, 16, 2_005


def served(log: Path, tp: int, environment: dict[str, str]) -> dict[str, Any]:
    """What a server of `tp` ranks with a tier answers to three requests, a hint, and the question for its state."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "AgentserveConnector",  # by its bare name: vLLM has loaded the plugin
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"tier_bytes": NUM_BLOCKS * BLOCK_SIZE * 2 * KV_NUMBERS},
    }
    flags = {
        "--model": str(write_model()),
        "--load-format": "dummy",
        "--port": str(port),
        "--host": "127.0.0.1",
        "--tensor-parallel-size": str(tp),
        "--block-size": str(BLOCK_SIZE),
        "--num-gpu-blocks-override": str(NUM_BLOCKS + 1),
        "--max-model-len": "4000",
        "--gpu-memory-utilization": "0.6",
        "--served-model-name": "m",
        "--kv-transfer-config": json.dumps(transfer),
    }
    switches = ["--enforce-eager", "--disable-custom-all-reduce", "--enable-prompt-tokens-details", "--enable-prefix-caching"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *(part for flag in flags.items() for part in flag), *switches]
    own = {name: value for name, value in environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=os.environ | own, stdout=file, stderr=subprocess.STDOUT)
    try:
        return _asked(f"http://127.0.0.1:{port}", process)
    except Exception as error:  # noqa: BLE001 # the other figures are still to be taken
        return {"failed": f"{error!r}", "log": log.read_text(errors="replace")[-1500:]}
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def _asked(url: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    end = time.monotonic() + 240
    while True:
        try:
            _http(f"{url}/health")
            break
        except (urllib.error.URLError, ConnectionError) as error:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server does not start") from error
            time.sleep(0.5)
    cached = []
    for name in ("a", "b", "c", "a"):
        ids = [10 + (at * (1 + ord(name) % 16)) % 30_000 for at in range(PROMPT_TOKENS)]
        hints = json.dumps({"session_id": name, "branch_id": "", "fate": "ended" if name == "b" else "live"})
        body = {"model": "m", "prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "vllm_xargs": {"agentserve": hints}}
        usage = _http(f"{url}/v1/completions", body)["usage"]
        cached.append([name, (usage.get("prompt_tokens_details") or {}).get("cached_tokens")])
    hinted = _http(f"{url}/v1/agentserve/hints", {"hints": [{"session_id": "a", "fate": "ended"}]})
    return {"version": _http(f"{url}/version")["version"], "cached_tokens": cached, "hinted": hinted["num_hints"]} | {
        "state": _http(f"{url}/v1/agentserve/state")
    }


def _http(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None  # noqa: TID251 # the server's own
