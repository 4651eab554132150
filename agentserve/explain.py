"""`agentserve explain SESSION`: a session's turns as a table, what cost most, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.table import Table

from agentserve.asking import Said, ask
from agentserve.divergence import Difference
from agentserve.errors import SetupError
from prefix_cache.hits import Cause

ABORT = "abort"
"""Finish reason of a turn that broke off."""
CURES: Mapping[Cause, str] = {
    Cause.NEW: "it had never been computed, so this work was due",
    Cause.CLIENT_EDIT: "the client changes its history: stop it from doing so, see where it left it",
    Cause.VOLATILE: "turn the canonicaliser's rules on again (--canonicalise-mode, --canonicalise-off)",
    Cause.TAIL: "ends of prompts in no whole block: a smaller block size would save some of it",
    Cause.IN_FLIGHT: "agents that begin alike were started at once: let the first one get its first token before the others start",
    Cause.EVICTED: "the KV cache is too small for the live sessions: fewer at a time (--limits-running-turns), more KV memory, or a tier",
    Cause.OFFLOAD_MISSING: "the offload tier lost it: a larger one, a longer read TTL, and every rank must hold it",
    Cause.OFFLOAD_DECLINED: "the offload tier had it, and computing was quicker than loading: a faster way to it would save that",
    Cause.OTHER_REPLICA: "another engine holds it: route a session's turns to one engine",
    Cause.ISOLATION: "another API key has computed the same: --share-prefixes, if the keys may share",
    Cause.RECOMPUTED: "the engine preempted running turns: fewer at a time (--limits-running-turns), or more KV memory",
    Cause.UNKNOWN: "nobody knows why: give the server the engine's KV events (--engine-events, --engine-events-replay)",
}
"""By cause, what there is to do about it."""

EDIT_CURES: Mapping[Difference, str] = {
    Difference.SYSTEM_CHANGED: "its system text changes from turn to turn: keep it fixed, and say what is new in the newest message",
    Difference.TOOLS_CHANGED: "its list of tools changes from turn to turn: offer the same tools, in one order",
    Difference.TEXT_CHANGED: "it rewrites earlier messages: leave them as they were, and append what is new",
    Difference.REASONING_CHANGED: "it sends reasoning back changed: send it as it came, or leave it out",
    Difference.ARGUMENTS_CHANGED: "it sends tool calls back with other arguments: send them as they came",
    Difference.ITEM_MISSING: "it drops messages out of its history: compact rarely and from the end of a task, not every turn",
    Difference.ITEM_INSERTED: "it puts messages into its history: append them instead",
    Difference.ITEM_REPLACED: "it compacts its history: do that rarely",
}
"""By kind of difference, in place of the general cure of `client_edit`."""


SHORT_PROMPTS = "these prompts are hardly longer than a block, whose last token is always computed: long ones lose a block at most"
"""In place of the general cure of `tail`, where it is a good part of the prompts that have one."""
SHORT_SHARE = 0.25
"""From which share of those prompts on the tail is a good part."""

MAX_NAMES = 6
"""Tools that are named in a cell."""


class Divergence(msgspec.Struct):
    """As GET /v1/sessions/ID/turns shows it."""

    difference: Difference
    item: int
    item_kind: str
    token: int
    lost_tokens: int
    tools: tuple[str, ...] = ()


class HeadBreak(msgspec.Struct):
    """As GET /v1/sessions/ID/turns shows it."""

    shared_tokens: int
    broken_tokens: int
    line: int | None = None
    tools: tuple[str, ...] = ()
    rule: str | None = None


class Turn(msgspec.Struct):
    """The fields of a turn that are shown here."""

    number: int
    kind: str
    prompt_tokens: int
    ceiling_tokens: int
    finish_reason: str | None = None
    predicted_tokens: int | None = None
    cached_tokens: int | None = None
    missed_tokens: dict[Cause, int] | None = None
    external_tokens: int | None = None
    recomputed_tokens: int = 0
    divergence: Divergence | None = None
    head_break: HeadBreak | None = None


class _Turns(msgspec.Struct):
    data: list[Turn]
    has_more: bool = False


def read_turns(url: str, session_id: str, api_key: str | None, limit: int) -> list[Turn]:
    """The latest turns of a session. Raises SetupError where the server or the session is not there."""
    where = f"{url.rstrip('/')}/v1/sessions/{quote(session_id)}/turns?limit={limit}"
    said = ask(where, api_key=api_key)
    if said is None:
        raise SetupError(f"no server answers at {url!r}: start it, or name its address with --url")
    if said.status == 404 and b"session_not_found" in said.body:
        raise SetupError(f"the server at {url!r} knows no session {session_id!r} (of this API key); GET /v1/sessions lists them")
    if said.status == 401:
        raise SetupError(f"the server at {url!r} wants one of its API keys: name it with --api-key")
    return _decode(said, url)


def _decode(said: Said, url: str) -> list[Turn]:
    try:
        if said.status == 200:
            return msgspec.json.decode(said.body, type=_Turns).data
    except msgspec.MsgspecError as error:
        raise SetupError(f"the server at {url!r} is not an agentserve: {error}") from error
    raise SetupError(f"the server at {url!r} answers with status {said.status}: is it an agentserve of this version?")


def causes(turns: Sequence[Turn]) -> Counter[Cause]:
    """Missed tokens of all turns by cause, and what was computed again on top."""
    total: Counter[Cause] = Counter()
    for turn in turns:
        total.update(turn.missed_tokens or {})
        if turn.recomputed_tokens:
            total[Cause.RECOMPUTED] += turn.recomputed_tokens
    return total


def advice(turns: Sequence[Turn]) -> str:
    """One sentence: what cost most, apart from what was due, and what to do about it."""
    total = causes(turns)
    avoidable = Counter({cause: tokens for cause, tokens in total.items() if cause is not Cause.NEW})
    if not any(turn.missed_tokens is not None for turn in turns):
        if all(turn.finish_reason == ABORT for turn in turns):
            return "No turn ran to its end, and only there does the engine say how many tokens it took from its cache."
        return "The engine does not say how many tokens it took from its cache: start vLLM with --enable-prompt-tokens-details."
    if not avoidable:
        return "Nothing was missed that could have been a hit: every computed token was new."
    cause, tokens = avoidable.most_common(1)[0]
    share = tokens / max(1, sum(turn.prompt_tokens for turn in turns))
    due = f"{total[Cause.NEW]:,} tokens were new, so computing them was due. " if total[Cause.NEW] else ""
    return f"{due}Most was lost to {cause.value}, {tokens:,} tokens ({share:.1%} of all prompt tokens): {_cure(cause, turns)}."


def _cure(cause: Cause, turns: Sequence[Turn]) -> str:
    if cause is Cause.TAIL:
        return SHORT_PROMPTS if _tail_share(turns) >= SHORT_SHARE else CURES[cause]
    lost: Counter[Difference] = Counter()
    for turn in turns:
        if turn.divergence is not None and cause in (turn.missed_tokens or {}):
            lost[turn.divergence.difference] += turn.divergence.lost_tokens
    if cause is not Cause.CLIENT_EDIT or not lost:
        return CURES[cause]
    return EDIT_CURES.get(lost.most_common(1)[0][0], CURES[cause])


def _tail_share(turns: Sequence[Turn]) -> float:
    """Of the prompts that have a tail, the share that it is."""
    tails = [(tail, turn.prompt_tokens) for turn in turns if (tail := (turn.missed_tokens or {}).get(Cause.TAIL, 0))]
    return sum(tail for tail, _ in tails) / max(1, sum(prompt for _, prompt in tails))


def show(console: Console, session_id: str, turns: Sequence[Turn]) -> None:
    """Print the table and the advice."""
    table = Table(title=f"session {session_id}", title_justify="left")
    for name in ("turn", "kind"):
        table.add_column(name)
    for name in ("prompt", "ceiling", "predicted", "actual"):
        table.add_column(name, justify="right")
    table.add_column("missed, by cause")
    table.add_column("left its history at")
    for turn in turns:
        figures = (turn.prompt_tokens, turn.ceiling_tokens, turn.predicted_tokens, turn.cached_tokens)
        numbers = ["–" if figure is None else f"{figure:,}" for figure in figures]
        if turn.external_tokens:
            numbers[-1] += f" ({turn.external_tokens:,} offloaded)"
        table.add_row(str(turn.number), turn.kind, *numbers, _causes(turn), _place(turn))
    console.print(table, markup=False)
    console.print(advice(turns), markup=False, highlight=False, soft_wrap=True)


def _causes(turn: Turn) -> str:
    if turn.missed_tokens is None:
        return "–"
    parts = [f"{cause.value} {tokens:,}" for cause, tokens in sorted(turn.missed_tokens.items(), key=lambda row: -row[1])]
    if turn.recomputed_tokens:
        parts.append(f"+ recomputed {turn.recomputed_tokens:,}")
    return ", ".join(parts)


def _place(turn: Turn) -> str:
    return "; ".join([part for part in (_left(turn.divergence), _broken(turn.head_break)) if part])


def _broken(broken: HeadBreak | None) -> str:
    """Where a head stopped being the one that others share."""
    if broken is None:
        return ""
    where = f"line {broken.line} of the system text" if broken.line is not None else f"its tools ({_names(broken.tools)})"
    cure = f" (rule {broken.rule} would join them)" if broken.rule else ""
    return f"a known head is left at {where}: {broken.shared_tokens:,} tokens shared, {broken.broken_tokens:,} behind{cure}"


def _names(tools: tuple[str, ...]) -> str:
    shown = ", ".join(tools[:MAX_NAMES])
    return shown if len(tools) <= MAX_NAMES else f"{shown} and {len(tools) - MAX_NAMES} more"


def _left(left: Divergence | None) -> str:
    if left is None:
        return ""
    item = "head" if left.item == 0 else f"item {left.item} ({left.item_kind})"
    tools = f" ({_names(left.tools)})" if left.tools else ""
    return f"{item}, token {left.token:,}: {left.difference.value}{tools}, {left.lost_tokens:,} lost"
