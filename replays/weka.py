"""The weka trace form on the wire: what one JSON session may hold, field by field. Unknown fields are refused at every level.

`in`/`input_length` and `out`/`output_length` name the same thing; which one a file uses is settled in `replays.traces`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]


class WekaCall(Struct, forbid_unknown_fields=True, tag_field="type", tag="n", omit_defaults=True, kw_only=True):
    """One model call that was not streamed. `t` is its start, seconds since the session began (or since a sub-agent's marker)."""

    t: Seconds
    model: str
    in_: Count | UnsetType = msgspec.field(name="in", default=UNSET)
    input_length: Count | UnsetType = UNSET
    out: Count | UnsetType = UNSET
    output_length: Count | UnsetType = UNSET
    hash_ids: list[Count] = []
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str = ""
    api_time: Seconds | None = None
    think_time: float | None = None


class WekaStreamedCall(WekaCall, tag="s", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One streamed model call; only these know their time to first token."""

    ttft: Seconds | None = None


class WekaSubagent(Struct, forbid_unknown_fields=True, tag_field="type", tag="subagent", kw_only=True):
    """A sub-agent that the session started at `t`, with its own calls. Sub-agents do not nest."""

    t: Seconds
    agent_id: str
    subagent_type: str
    duration_ms: Count | None = None
    total_tokens: Count | None = None
    tool_use_count: Count | None = None
    status: str
    requests: list[WekaCall | WekaStreamedCall]
    models: list[str]
    tool_tokens: Count = 0
    system_tokens: Count = 0


class WekaSession(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One recorded session. `tool_tokens + system_tokens` is the declared head of each prompt."""

    id: str
    models: list[str]
    block_size: Annotated[int, Meta(gt=0)]
    hash_id_scope: Literal["local"]
    tool_tokens: Count = 0
    system_tokens: Count = 0
    requests: list[WekaCall | WekaStreamedCall | WekaSubagent]
    totals: dict[str, object] | None = None
