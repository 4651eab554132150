"""The replay commands by name; each module is imported when its command is called.

Exit codes: 0 well, 1 too many failed requests, 2 wrong use or bad files.
"""

from __future__ import annotations

from cyclopts import App

COMMANDS = {
    "simulate": (
        "replays.simulator.command:simulate_command",
        "Simulate recorded sessions under eviction policies, capacities and loads: hits, the gap to the ceiling, latency and throughput.",
    ),
    "tune": (
        "replays.tuner.command:tune_command",
        "Search eviction policies and their parameters on recorded sessions: hit rate, TTFT p95, throughput and preemptions.",
    ),
    "sim-engine": (
        "replays.sim_engine.command:sim_engine",
        "Serve a simulated engine behind vLLM's HTTP, metrics and KV events: M3's size and speed without a GPU.",
    ),
    "profiles": (
        "replays.simulator.profile_command:profiles",
        "List the engines that can be simulated; or the published points that their constants come from, fitted and held back.",
    ),
    "calibrate": (
        "replays.calibrate.command:calibrate",
        "Measure a running, idle vLLM and write its profile for `simulate` and `sim-engine`.",
    ),
    "replay": (
        "replays.replay_command:replay",
        "Drive agent sessions through a server by AgentX's rules and report hits, misses and latency.",
    ),
    "report": ("replays.replay_command:report", "Show reports side by side; the first is what the others are compared with."),
    "generate": (
        "replays.generate_command:generate",
        "Make up agent sessions like AgentX's: sub-agents, context cuts, tool and human gaps.",
    ),
    "shapes": (
        "replays.shapes_command:shapes",
        "Shapes that a workload brings to MiniMax-M3's kernels, and the work that repeats per layer, token and request.",
    ),
}
"""By name: where it is, and its summary, which `agentserve --help` shows without importing it."""

app = App(name="replays", help="Replay recorded agent sessions, report on replays, and generate sessions.")
for _name, (_where, _) in COMMANDS.items():
    app.command(_where, name=_name)
