"""Sessions as the server would know them: each call feeds the lifecycle and the return-time model, as a turn does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from admission.last_turn import TurnEnd
from admission.lifecycle import Lifecycle
from replays.simulator.chains import Branch
from replays.simulator.pool import Use

if TYPE_CHECKING:
    from replays.simulator.server import Call

_UNNAMED_TOOL = ("tool",)
"""Traces say that a tool was called, not which."""


@dataclass(eq=False)
class Lives:
    """`says_ends`: clients say when a session is over; else it is inferred. Ids of sessions are the calls' names."""

    lifecycle: Lifecycle
    says_ends: bool
    _over: set[str] = field(default_factory=set)
    """Believed to have ended."""
    _names: dict[int, str] = field(default_factory=dict)

    @property
    def due_seconds(self) -> float | None:
        return self.lifecycle.due_seconds

    def started(self, call: Call, now: float) -> list[str]:
        """The client asks. Returns whose fate has changed."""
        self._names[call.stream] = call.name
        root = call.name.partition("/")[0] + "/"
        parent = None if call.name == root else root
        return self._changed(self.lifecycle.turn_started(call.name, now, parent_id=parent, tenant=call.tenant))

    def use(self, call: Call, now: float) -> Use:
        """What the pool is told of the call when it lets its blocks go."""
        return Use(call.name, self.lifecycle.class_after(call.name, now, _end(call)))

    def ended(self, call: Call, now: float) -> list[str]:
        """The answer is there."""
        self.lifecycle.turn_ended(call.name, now, _end(call))
        said = self.lifecycle.end_said(call.name, now) if call.is_last and self.says_ends else []
        return self._changed(said)

    def due(self, now: float) -> list[str]:
        """Time has passed."""
        return self._changed(self.lifecycle.due(now))

    def is_over(self, session_id: str) -> bool:
        return session_id in self._over

    def is_left(self, branch: Branch) -> bool:
        """Whether nobody is believed to ask for the branch again: all whose newest prompt it is in, or was in last, are over."""
        streams = branch.claims or ([branch.last_claim] if branch.last_claim is not None else [])
        return bool(streams) and all(self._names[stream] in self._over for stream in streams)

    def _changed(self, session_ids: Iterable[str]) -> list[str]:
        changed = list(session_ids)
        for session_id in changed:
            if self.lifecycle.is_over(session_id):
                self._over.add(session_id)
            else:
                self._over.discard(session_id)
        return changed


def _end(call: Call) -> TurnEnd:
    return TurnEnd(
        ends_turn=call.stop == "end_turn",
        tools=call.tools or (_UNNAMED_TOOL if call.stop == "tool_use" else ()),
        from_user=call.from_user,
        num_prompt_tokens=call.num_prompt_tokens,
        num_output_tokens=call.num_output_tokens,
    )
