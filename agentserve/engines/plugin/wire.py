"""What the server tells the engine's plugin and what that answers, as JSON. Both sides import this and nothing heavier.

Hints are advice: each one is soft, none locks a block, and an engine without the plugin ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from admission.eviction.policy import Fate

HINTS_PATH: Final = "/v1/agentserve/hints"
STATE_PATH: Final = "/v1/agentserve/state"
"""Routes on vLLM's own port; below /v1, so that its API key guards them."""
XARG: Final = "agentserve"
"""The name in `vllm_xargs` under which a request carries its hints, a JSON text; `kv_transfer_params` may have it too, as an object."""


class BadHint(ValueError):
    """A hint that cannot be read; the message says which field. It is counted and dropped, and its request runs as if it had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHint:
    """What has become known of a session after its request was sent. None: not said, so that what was known stays.

    demote: a `fate` other than live. retain: a `priority`, for `retention_seconds`. After a turn: its `return_class`.
    """

    session_id: str
    branch_id: str | None = None
    """Only what this branch has for itself. None: the whole session."""
    start_tokens: int = 0
    """Only what starts at this token of the branch or behind it."""
    only_generated: bool = False
    """Only blocks that a generation filled."""
    fate: Fate | None = None
    return_class: str | None = None
    """Why it is idle now (`admission.return_class`)."""
    priority: int | None = None
    """0 to 100; 35 is the default."""
    retention_seconds: float | None = None
    """How long `priority` holds, from when its blocks were last let go."""
    awaited_seconds: float | None = None
    """A turn of it waits in front of the engine: for so long its blocks go only when nothing else is left, or until the turn comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnHints:
    """What rides on a request. Its session is the request's own (`GenerateRequest.session_id`)."""

    session_id: str | None = None
    """For vLLM before 0.28, which does not pass X-Session-ID on to its scheduler; else not needed."""
    branch_id: str | None = None
    """The branch of the session that the prompt extends. What this branch has had and the prompt has no more is cut: dead at once.
    None: nothing is concluded from what the prompt lacks, as a session may run several conversations."""
    fate: Fate = Fate.LIVE
    """Of what this request alone has used, when it is over: `one_shot` for a side request, `ended` for a session's last turn."""
    echoes: bool = True
    """Whether the client sends generated tokens back. Where it does not, generated blocks are dead when the request is over."""
    return_class: str | None = None
    """Of the idle time that follows, where it is known before the turn is over; else a `SessionHint` says it afterwards."""
    priority: int | None = None
    retention_seconds: float | None = None
    others: tuple[SessionHint, ...] = ()
    """Hints on any sessions that travel along, for engines without the route for them."""


@dataclass(frozen=True, slots=True)
class HintBatch:
    """The body of a POST to `HINTS_PATH`."""

    hints: tuple[SessionHint, ...] = ()
    policy: str | None = None
    """Switch to this eviction policy; what is resident keeps its facts."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Of that policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginState:
    """What the plugin answers to both routes. Counts since the engine started; blocks as they are now."""

    policy: str
    parameters: Mapping[str, float]
    is_ordering: bool
    """False: it fell back to plain LRU, for `off_because`."""
    off_because: str = ""
    num_blocks: int
    num_free_blocks: int
    """As vLLM counts: what can be allocated, cached or not."""
    num_dead_blocks: int
    """Free, cached, and believed dead."""
    num_sessions: int
    num_extents: int
    num_evicted_dead_blocks: int
    num_evicted_live_blocks: int
    num_hints: int
    num_bad_hints: int
    """That could not be read. A hint on a session with nothing resident is not bad, it does nothing."""
    num_errors: int
    """Faults of the plugin itself; the first one turns it off."""
    tier_off_because: str = ""
    """Why there is no offload tier, or none any more; empty: it works."""
    num_tier_blocks: int = 0
    """What the tier holds at most."""
    num_kept_blocks: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_dropped_blocks: int = 0
    """That left the tier because they were dead, or on the GPU again."""
    num_displaced_blocks: int = 0
    """That left it, or were never let in, because it was full."""
    num_declined_loads: int = 0
    """That were not made because computing was quicker."""
    stored_token_seconds: float | None = None
    """What a token has lately taken: to store and to load, by the slowest rank, and to compute. None: not measured yet."""
    loaded_token_seconds: float | None = None
    computed_token_seconds: float | None = None
    resident_blocks: Mapping[str, int] = field(default_factory=dict)
    """By session: free blocks that the session let go last."""


_TURN = msgspec.json.Decoder(TurnHints)
_BATCH = msgspec.json.Decoder(HintBatch)


def encode(message: TurnHints | HintBatch | PluginState) -> bytes:
    return msgspec.json.encode(message)


def xargs(hints: TurnHints) -> dict[str, str]:
    """For `vllm_xargs`, which takes no objects."""
    return {XARG: msgspec.json.encode(hints).decode()}


def read_turn(value: Any) -> TurnHints:
    """Hints of a request, as JSON text or as an object. Raises BadHint."""
    try:
        return _TURN.decode(value) if isinstance(value, str | bytes) else msgspec.convert(value, TurnHints)
    except msgspec.MsgspecError as error:
        raise BadHint(str(error)) from error


def read_batch(body: bytes) -> HintBatch:
    """The body of a POST. Raises BadHint."""
    try:
        return _BATCH.decode(body)
    except msgspec.MsgspecError as error:
        raise BadHint(str(error)) from error


def read_state(body: bytes) -> PluginState:
    """An answer of the plugin. Raises BadHint."""
    try:
        return msgspec.json.decode(body, type=PluginState)
    except msgspec.MsgspecError as error:
        raise BadHint(str(error)) from error
