"""Small traces for replay tests, written down by hand, and the command that plays them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from replays.cli import app


def call(start: float, num_tokens: int, first_id: int = 1, **fields: object) -> dict[str, object]:
    ids = list(range(first_id, first_id + num_tokens // 64))
    made = {"type": "s", "t": start, "model": "m", "in": num_tokens, "out": 4, "hash_ids": ids, "stop": "tool_use", "api_time": 1.0}
    return made | fields


def session(name: str, *requests: dict[str, object]) -> dict[str, object]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def subagent(name: str, *requests: dict[str, object]) -> dict[str, object]:
    marker = {"type": "subagent", "t": requests[0]["t"], "agent_id": name, "subagent_type": "Explore", "status": "completed"}
    return marker | {"models": ["m"], "requests": list(requests)}


def written(folder: Path, *sessions: dict[str, object]) -> Path:
    path = folder / "traces.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in sessions))
    return path


def replay(*arguments: object) -> int:
    status = app(["replay", *(str(argument) for argument in arguments)], result_action="return_value")
    assert isinstance(status, int)
    return status
