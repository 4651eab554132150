"""What a simulation asks of whatever sends the calls: the closed loop of AgentX, or arrivals that wait for nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from replays.plan import PlannedCall
from replays.play import TreePlay
from replays.simulator.chains import Branch, BranchSet
from replays.simulator.outcomes import Outcome
from replays.simulator.scripts import Script
from replays.simulator.server import Call, path_of

PLAYS_EACH = 200
"""How often each session, or each lane one, is played in the profiling of a closed loop: more of the same would tell nothing new."""

_STREAMS_A_PLAY = 1 << 12


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Seconds are trace seconds, which are simulated seconds."""

    concurrency: int = 28
    """Of the closed loop."""
    seed: int = 42
    duration: float | None = 3600.0
    """Of profiling, at most (`PLAYS_EACH`); None: each session once, from its start, without a warm-up."""
    warmup: int = 10
    """Requests per lane after the primers, one token each."""
    window_start: float = 0.25
    window_end: float = 0.75
    window_in_turns: bool = False
    """The window is a share of a session's calls, not of its recorded time as with AgentX: long pauses then draw no starts."""
    idle_cap: float = 300.0
    system_idle_cap: float = 10.0
    num_tenants: int = 1
    """Sessions belong to them in turn."""
    num_clients: int = 0
    """Of the closed loop: tenants who are dealt its lanes in turn, instead of its sessions. 0: the server does not know its clients."""
    shuffle: bool = True
    """Draw the sessions in an order that the seed gives; else in the order of the files, as the live replay does."""
    arrivals: float | None = None
    """Open loop: sessions that begin a second, at random; 0: when they began in the recording. None: closed loop."""
    speed: float = 1.0
    """Of the open loop: how much faster than recorded sessions begin."""
    unmeasured: float = 0.0
    """Of the open loop: seconds at its start that are warm-up."""


@dataclass(slots=True, eq=False)
class Play:
    """One session being played."""

    script: Script
    tree: TreePlay
    branches: BranchSet
    number: int
    clock_seconds: float = 0.0
    """Recorded start of the newest call sent."""


class Loop(Protocol):
    """Sends calls to the server until it is over."""

    num_overflows: int

    @property
    def is_cut(self) -> bool:
        """It ended before its duration, as each session had been played `PLAYS_EACH` times."""
        ...

    @property
    def profiling(self) -> bool: ...

    @property
    def profiling_started(self) -> float: ...

    @property
    def is_over(self) -> bool:
        """Nothing is left to send, and nothing in flight."""
        ...

    def start(self) -> None:
        """Plan the first events; the clock does the rest."""
        ...

    def uses(self, branch: Branch, now: float) -> Iterator[tuple[float, int]]:
        """(time, depth) of the calls to come that ask for a branch, by time: what a clairvoyant policy is told."""
        ...


class Plays:
    """The plays of a loop that are live. Sessions whose ids mean the same in the whole trace share their branches."""

    def __init__(self) -> None:
        self.live: dict[int, Play] = {}
        self._shared: BranchSet | None = None

    def begin(self, script: Script, number: int, now: float, idle_cap: float) -> Play:
        tree = TreePlay(script.plan, number, now=now, time_scale=1.0, idle_cap_seconds=idle_cap)
        play = self.live[number] = Play(script, tree, self._branches(script, number), number)
        return play

    def _branches(self, script: Script, number: int) -> BranchSet:
        if not script.is_shared:
            return BranchSet(script.forest, number)
        if self._shared is None:
            self._shared = BranchSet(script.forest, -1)
        return self._shared

    def uses(self, branch: Branch, now: float) -> Iterator[tuple[float, int]]:
        """Of the live plays."""
        shared = self._shared is not None and branch.owner == -1
        plays = list(self.live.values()) if shared else [play for play in [self.live.get(branch.owner)] if play is not None]
        found = [use for play in plays if (number := play.branches.number_of(branch)) is not None for use in _uses(play, number, now)]
        return iter(sorted(found))


def _uses(play: Play, branch: int, now: float) -> Iterator[tuple[float, int]]:
    tree, calls = play.tree, play.script.plan.calls
    deepest = 0
    for number, depth in play.script.uses.get(branch, ()):
        if depth > deepest and not tree.has_started(calls[number]):
            deepest = depth
            yield tree.expected_at(calls[number], now, play.clock_seconds), depth


def tenant_of(options: LoopOptions, play: Play, lane: int = 0) -> str | None:
    """Whose session a play is, as far as the server knows."""
    if options.num_tenants > 1:
        return f"tenant-{play.number % options.num_tenants}"
    return f"client-{lane % options.num_clients}" if options.num_clients else None


def call_of(
    play: Play,
    call: PlannedCall,
    on_done: Callable[[Outcome | None], None],
    *,
    warmup: bool,
    max_tokens: int | None,
    primer: bool = False,
    tenant: str | None = None,
) -> Call:
    """What is sent for a planned call. `max_tokens` None: as many as were recorded."""
    numbers = play.script.plan.streams[call.stream]
    return Call(
        stream=play.number * _STREAMS_A_PLAY + call.stream,
        name=f"{play.number}/{play.script.plan.session.streams[call.stream].name}",
        path=path_of(play.branches.tail(play.script.places[call.number])),
        num_prompt_tokens=max(1, call.request.num_prompt_tokens),
        num_output_tokens=call.max_tokens if max_tokens is None else max_tokens,
        stop=call.request.stop,
        from_user="text" in call.request.input_types,
        tools=call.request.tools,
        tenant=tenant,
        warmup=warmup,
        on_done=on_done,
        num_theoretical_blocks=call.theoretical.num_hit_blocks,
        num_trace_blocks=call.theoretical.num_blocks,
        is_last=not primer and call.number == numbers[-1],
    )
