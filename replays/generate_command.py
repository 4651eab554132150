"""`agentserve generate`: made-up sessions as a trace."""

from __future__ import annotations

from pathlib import Path

import msgspec
from cyclopts.types import NonNegativeFloat, PositiveFloat, PositiveInt
from rich.console import Console
from rich.progress import track

from replays.generator import GeneratorSettings, generate_sessions

_ERRORS = Console(stderr=True, highlight=False)


def generate(
    *,
    sessions: PositiveInt,
    out: Path,
    seed: int = 42,
    token_scale: PositiveFloat = 1.0,
    min_turns: PositiveInt = 2,
    max_turns: PositiveInt = 514,
    subagent_share: NonNegativeFloat = 0.44,
) -> int:
    """Make up agent sessions like AgentX's: sub-agents, context cuts, tool and human gaps.

    Parameters
    ----------
    sessions
        How many.
    out
        A .jsonl file, or a folder for one .json file a session (what AgentX's own harness reads).
    seed
        The same seed gives the same bytes.
    token_scale
        Shrinks every token count.
    min_turns
        Fewest turns of a session's root.
    max_turns
        Most turns of a session's root, and of a sub-agent.
    subagent_share
        Share of sessions that start sub-agents.
    """
    settings = GeneratorSettings(
        sessions, seed, token_scale=token_scale, min_turns=min_turns, max_turns=max_turns, subagent_share=subagent_share
    )
    made = track(generate_sessions(settings), "generating", total=sessions, console=_ERRORS, transient=True)
    try:
        if out.suffix == ".jsonl":
            with out.open("wb") as file:
                file.writelines(msgspec.json.encode(session) + b"\n" for session in made)
        else:
            out.mkdir(parents=True, exist_ok=True)
            for session in made:
                (out / f"{session.id}.json").write_bytes(msgspec.json.encode(session))
    except OSError as error:
        _ERRORS.print(f"error: {out}: {error.strerror}", style="red", markup=False, soft_wrap=True)
        return 2
    _ERRORS.print(f"{sessions} sessions in {out}")
    return 0
