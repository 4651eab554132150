"""`agentserve sim-engine`: a simulated engine that serves."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import zmq
from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from rich.console import Console

from admission.eviction import EVICTION_POLICIES
from model.nano import make_nano, nano_is_complete
from replays.sim_engine.app import ServeOptions, SimulatedServer, simulated_server

_ERRORS = Console(stderr=True, highlight=False)
NANO_FOLDER = Path.home() / ".cache" / "agentserve" / "nano"
"""Where the server keeps the generated nano model as well."""


def sim_engine(
    *,
    profile: str = "m3-mi355x-mxfp4-tp4",
    model_folder: Path | None = None,
    model: str = "",
    host: str = "127.0.0.1",
    port: int = 8100,
    speed: PositiveFloat = 1.0,
    policy: str = "lru",
    capacity_tokens: PositiveInt | None = None,
    max_model_len: PositiveInt | None = None,
    steps_at_once: PositiveInt = 1,
    events: Annotated[str, Parameter(show_default=False)] = "tcp://127.0.0.1:5557",
    events_replay: Annotated[str, Parameter(show_default=False)] = "tcp://127.0.0.1:5558",
) -> int:
    """Serve a simulated engine behind vLLM's HTTP, metrics and KV events: M3's size and speed without a GPU. What it says means nothing.

    Parameters
    ----------
    profile
        Name of an engine (`agentserve profiles` lists them), or a file that `agentserve calibrate` wrote.
    model_folder
        Tokenizer and chat template; by default the generated nano model, which has M3's chat format.
    model
        Served name; by default the profile's.
    host
        Where to listen.
    port
        Where to listen; 0 takes a free one.
    speed
        Simulated seconds in a second.
    policy
        Eviction policy of the simulated pool.
    capacity_tokens
        Size of the KV cache; by default the profile's.
    max_model_len
        Prompt and answer of one request; by default what the KV cache holds.
    steps_at_once
        Decode steps whose tokens come out together; more of them cost less of this machine.
    events
        Where KV events are published (ZMQ).
    events_replay
        Where they can be asked for again.
    """
    if policy not in EVICTION_POLICIES:
        _ERRORS.print(f"error: there is no policy {policy!r}; there are {', '.join(EVICTION_POLICIES)}", style="red")
        return 2
    folder = model_folder or NANO_FOLDER
    try:
        if model_folder is None and not nano_is_complete(folder):
            _ERRORS.print(f"writing the nano model to {folder}")
            make_nano(folder)
        options = ServeOptions(
            profile, folder, model, host, port, speed, policy, capacity_tokens, max_model_len, steps_at_once, events, events_replay
        )
        asyncio.run(_serve(options))
    except (ValueError, OSError, zmq.ZMQError) as error:
        _ERRORS.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    return 0


async def _serve(options: ServeOptions) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with simulated_server(options) as server:
        _announce(server)
        await stop.wait()


def _announce(server: SimulatedServer) -> None:
    engine, options = server.engine.options, server.options
    _ERRORS.print(
        f"simulated engine {options.profile!r}, {engine.num_blocks * engine.block_size:,} tokens of KV cache, speed {options.speed:g}"
    )
    _ERRORS.print(f"listening on {server.url}; in front of it:")
    publisher = server.publisher
    flags = f"--engine-events {publisher.endpoint} --engine-events-replay {publisher.replay_endpoint}"
    _ERRORS.print(f"  agentserve serve --engine-url {server.url} {flags}", soft_wrap=True, markup=False)
