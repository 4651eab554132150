"""Agent sessions made up from the statistics of recorded ones, for when no recording may be shipped or enough of them cannot be had.

The tables are quantiles of public Claude Code recordings (kv-cache-tester, Apache-2.0, 49,334 calls), read between the points on a
logarithmic scale. Sub-agents are rare in those recordings; how often and how wide sessions fan out follows the published AgentX corpus
(44 % of its sessions do). The same settings and seed give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from replays.weka import WekaCall, WekaSession, WekaStreamedCall, WekaSubagent


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution given by points: value `values[i]` is not exceeded with probability `shares[i]`."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, share: float) -> float:
        """The value at `share` (0…1), read between the points on a logarithmic scale."""
        return float(np.exp(np.interp(share, self.shares, np.log(self.values))))


_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)

NUM_TURNS = Quantiles(_SHARES, (2, 3, 4, 7, 18, 45, 92, 155, 234, 340, 514))
FIRST_PROMPT_TOKENS = Quantiles(_SHARES, (9e3, 10.2e3, 13e3, 15.6e3, 18.5e3, 24.2e3, 109e3, 250e3, 350e3, 560e3, 800e3))
NEW_TOKENS = Quantiles(_SHARES, (70, 108, 154, 191, 326, 646, 1520, 3511, 6450, 16.4e3, 60e3))
OUTPUT_TOKENS = Quantiles(_SHARES, (20, 57, 90, 105, 138, 216, 426, 898, 1561, 3686, 7e3))
HEAD_TOKENS = Quantiles(_SHARES, (7.6e3, 8.7e3, 10e3, 12e3, 12.8e3, 14.9e3, 15.5e3, 16e3, 16.9e3, 21e3, 24e3))
SUBAGENT_HEAD_TOKENS = Quantiles(_SHARES, (6e3, 6.5e3, 7.5e3, 8.5e3, 9.2e3, 9.8e3, 10.5e3, 12e3, 14e3, 18e3, 20e3))
SUBAGENT_TURNS = Quantiles(_SHARES, (1, 1, 2, 3, 5, 9, 15, 25, 35, 60, 90))
GAP_SECONDS: dict[str, Quantiles] = {
    "tool_use": Quantiles(_SHARES, (1.5, 2.3, 3.4, 3.9, 5.3, 9, 19, 71, 160, 612, 20e3)),
    "end_turn": Quantiles(_SHARES, (1.5, 2.2, 3.4, 5.1, 54, 210, 950, 3070, 7480, 39.5e3, 77e3)),
    "": Quantiles(_SHARES, (3, 5, 7, 8, 10, 15, 32, 97, 172, 1176, 5e3)),
}
"""Idle time after a turn, by its stop reason ("" = the recorder did not see one)."""
_SECONDS_PER_OUTPUT_TOKEN = 0.022
_FIRST_TOKEN_SECONDS = 1.4
_MODEL = "generated"
_LONG_CONTEXT_SHARE = 0.25
_LONG_CONTEXT_TOKENS = (230_000, 900_000)
_CONTEXT_TOKENS = (145_000, 185_000)
"""Where a session compacts its history: most clients keep within a 200k window, some have a million tokens."""
_SUMMARY_TOKENS = (30_000, 70_000)
"""What a compaction puts in the place of the history: a summary, and files read again."""


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """What to make. `token_scale` shrinks every token count (a small sample keeps its shape); shares are of sessions or turns."""

    num_sessions: int
    seed: int = 42
    block_size: int = 64
    token_scale: float = 1.0
    min_turns: int = 2
    max_turns: int = 514
    subagent_share: float = 0.44
    cut_share: float = 0.022
    deep_cut_share: float = 0.001
    """Of all turns, those where the user goes back or compacts early, by more than 30 % of the history; part of `cut_share`."""
    end_turn_share: float = 0.06
    unknown_stop_share: float = 0.08
    output_scale: float = 1.0
    """Beside `token_scale`: makes answers longer without their prompts."""
    gap_scale: float = 1.0
    """Shortens or stretches the clients' idle time."""


class _Ids:
    """Hands out block ids that no prompt of the session has used."""

    def __init__(self) -> None:
        self._next = 1

    def fresh(self, num_blocks: int) -> list[int]:
        first = self._next
        self._next += num_blocks
        return list(range(first, self._next))


class _Line:
    """One stream as it grows: its tokens, its block ids and its clock."""

    def __init__(self, rng: np.random.Generator, settings: GeneratorSettings, ids: _Ids, head: list[int], start_seconds: float) -> None:
        self._rng = rng
        self._settings = settings
        self._ids = ids
        self._blocks = list(head)
        self._num_tokens = 0
        self._floor = len(head)
        self.clock = start_seconds
        self.stop = ""
        self.gap_seconds = 0.0

    def wait(self) -> None:
        """Let the client's idle time pass."""
        self.gap_seconds = GAP_SECONDS[self.stop].at(self._rng.random()) * self._settings.gap_scale
        self.clock += self.gap_seconds

    def turn(self, new_tokens: float, *, stop: str) -> WekaCall:
        """One call with `new_tokens` (unscaled) more than before."""
        settings = self._settings
        output = max(1, round(OUTPUT_TOKENS.at(self._rng.random()) * settings.token_scale * settings.output_scale))
        self._num_tokens += max(1, round(new_tokens * settings.token_scale))
        num_blocks = self._num_tokens // settings.block_size
        self._blocks.extend(self._ids.fresh(max(0, num_blocks - len(self._blocks))))
        seconds = _FIRST_TOKEN_SECONDS + output / settings.token_scale * _SECONDS_PER_OUTPUT_TOKEN * self._rng.lognormal(0, 0.25)
        tool = self.stop == "tool_use"
        call = WekaStreamedCall(
            t=round(self.clock, 3),
            model=_MODEL,
            in_=self._num_tokens,
            out=output,
            hash_ids=self._blocks[:num_blocks],
            input_types=["tool_result" if tool else "text"],
            output_types=["thinking", "text", "tool_use"] if stop == "tool_use" else ["thinking", "text"],
            stop=stop,
            api_time=round(seconds, 3),
            think_time=round(self.gap_seconds, 3),
            ttft=round(_FIRST_TOKEN_SECONDS * self._rng.lognormal(0, 0.3), 3),
        )
        self.clock += call.api_time or 0.0
        self.stop = stop
        return call

    @property
    def unscaled_tokens(self) -> float:
        return self._num_tokens / self._settings.token_scale

    def cut(self, share: float) -> None:
        """Drop the last `share` of the history, but never the head."""
        keep = max(self._floor, int(len(self._blocks) * (1 - share)))
        self._num_tokens = min(self._num_tokens, keep * self._settings.block_size)
        del self._blocks[keep:]


class _SessionMaker:
    """Makes one session."""

    def __init__(self, rng: np.random.Generator, settings: GeneratorSettings, index: int) -> None:
        self._rng = rng
        self._settings = settings
        self._ids = _Ids()
        self._id = f"generated-{settings.seed}-{index:05d}"
        self._num_agents = 0
        self._context_tokens = 0.0
        self._agent_head_tokens = self._scaled_blocks(SUBAGENT_HEAD_TOKENS.at(rng.random()))

    def _scaled_blocks(self, tokens: float) -> int:
        """Whole blocks of a head, in tokens."""
        size = self._settings.block_size
        return max(1, round(tokens * self._settings.token_scale / size)) * size

    def make(self) -> WekaSession:
        settings, rng = self._settings, self._rng
        num_turns, first_tokens = self._length_and_start()
        self._context_tokens = max(self._context(), first_tokens * 1.1)
        head_tokens = self._scaled_blocks(min(HEAD_TOKENS.at(rng.random()), first_tokens * 0.9))
        line = _Line(rng, settings, self._ids, self._ids.fresh(head_tokens // settings.block_size), 0.0)
        agent_head = self._ids.fresh(self._agent_head_tokens // settings.block_size)
        fan_out_turns = self._fan_out_turns(num_turns)
        entries: list[WekaCall | WekaStreamedCall | WekaSubagent] = []
        for index in range(num_turns):
            stop = "tool_use" if index in fan_out_turns else self._stop(last=index == num_turns - 1)
            if index:
                self._maybe_cut(line)
            entries.append(line.turn(self._new_tokens(index, first_tokens, line), stop=stop))
            if index in fan_out_turns:
                agents = self._fan_out(agent_head, line.clock)
                entries.extend(agents)
                line.clock = max(call.t + (call.api_time or 0.0) for agent in agents for call in agent.requests)
            line.wait()
        return WekaSession(
            id=self._id,
            models=[_MODEL],
            block_size=settings.block_size,
            hash_id_scope="local",
            tool_tokens=head_tokens * 4 // 5,
            system_tokens=head_tokens - head_tokens * 4 // 5,
            requests=entries,
        )

    def _length_and_start(self) -> tuple[int, float]:
        """Number of turns and size of the first prompt (tokens). Sessions that begin large (resumed ones) are the shorter ones."""
        low, high = self._rng.multivariate_normal([0, 0], [[1, -0.4], [-0.4, 1]])
        turns = round(NUM_TURNS.at(NormalDist().cdf(low)))
        return min(max(turns, self._settings.min_turns), self._settings.max_turns), FIRST_PROMPT_TOKENS.at(NormalDist().cdf(high))

    def _context(self) -> float:
        """Tokens at which this session's client compacts."""
        return self._rng.uniform(*(_LONG_CONTEXT_TOKENS if self._rng.random() < _LONG_CONTEXT_SHARE else _CONTEXT_TOKENS))

    def _new_tokens(self, index: int, first_tokens: float, line: _Line) -> float:
        if index == 0:
            return first_tokens
        new = NEW_TOKENS.at(self._rng.random())
        if line.unscaled_tokens + new > self._context_tokens:
            line.cut(1.0)
            new = self._rng.uniform(*_SUMMARY_TOKENS)
        return new

    def _stop(self, *, last: bool) -> str:
        if last:
            return "end_turn"
        draw = self._rng.random()
        if draw < self._settings.end_turn_share:
            return "end_turn"
        return "" if draw < self._settings.end_turn_share + self._settings.unknown_stop_share else "tool_use"

    def _maybe_cut(self, line: _Line) -> None:
        draw = self._rng.random()
        if draw < self._settings.deep_cut_share:
            line.cut(self._rng.uniform(0.35, 0.9))
        elif draw < self._settings.cut_share:
            line.cut(self._rng.uniform(0.001, 0.02))

    def _fan_out_turns(self, num_turns: int) -> set[int]:
        if num_turns < 3 or self._rng.random() >= self._settings.subagent_share:
            return set()
        most = max(1, num_turns // 12)
        num_groups = min(most, int(self._rng.geometric(0.25)))
        return {int(turn) for turn in self._rng.choice(num_turns - 2, size=min(num_groups, num_turns - 2), replace=False)}

    def _fan_out(self, head: list[int], start_seconds: float) -> list[WekaSubagent]:
        """Sub-agents that one turn starts together. They share their head, as agents of one kind do."""
        width = int(min(6, self._rng.geometric(0.5)))
        return [self._subagent(head, start_seconds + 0.05 + 0.4 * place) for place in range(width)]

    def _subagent(self, head: list[int], start_seconds: float) -> WekaSubagent:
        rng = self._rng
        self._num_agents += 1
        line = _Line(rng, self._settings, self._ids, head, start_seconds)
        calls: list[WekaCall | WekaStreamedCall] = []
        num_turns = min(self._settings.max_turns, round(SUBAGENT_TURNS.at(rng.random())))
        for index in range(num_turns):
            if index:
                # A sub-agent's tools are reads and searches: short waits, no human.
                line.gap_seconds = float(rng.lognormal(1.2, 0.8))
                line.clock += line.gap_seconds
            first = self._agent_head_tokens / self._settings.token_scale + float(rng.lognormal(6.5, 0.8))
            new = first if index == 0 else NEW_TOKENS.at(rng.random())
            calls.append(line.turn(new, stop="end_turn" if index == num_turns - 1 else "tool_use"))
        counts = [(call.in_, call.out) for call in calls]
        return WekaSubagent(
            t=round(start_seconds, 3),
            agent_id=f"agent_{self._num_agents:03d}",
            subagent_type="Explore",
            duration_ms=round((line.clock - start_seconds) * 1000),
            total_tokens=sum(int(given or 0) + int(made or 0) for given, made in counts),
            tool_use_count=num_turns - 1,
            status="completed",
            requests=calls,
            models=[_MODEL],
            tool_tokens=self._agent_head_tokens,
        )


def generate_sessions(settings: GeneratorSettings) -> Iterator[WekaSession]:
    """The sessions, one at a time. Session i depends on the seed and i alone, so a longer run begins with a shorter one's sessions."""
    for index in range(settings.num_sessions):
        rng = np.random.default_rng([settings.seed, index])
        yield _SessionMaker(rng, settings, index).make()
