"""A client that plays a script against the server, and checks at the engine that every prompt goes on from what was said before.

The measure is the same for every turn: where the history that a client sends holds answers unchanged, the prompt must start with the
prompt and the generated ids of the last of them.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from msgspec import structs
from starlette.types import ASGIApp

from agentserve.canonical.rules import Action
from agentserve.canonical.table import CANONICAL_RULES
from benchmarks.ledger import speech
from benchmarks.ledger.asgi import Answered, post
from benchmarks.ledger.disturbances import disturb
from benchmarks.ledger.forms import FORMS, Body, Style
from benchmarks.ledger.respelled import respelled
from benchmarks.ledger.script import Script, Step, StepKind
from benchmarks.ledger.simulated_engine import ASKED, Ask
from model.conversation import AssistantItem, Head, Item, Json, ToolCall, ToolResultItem, UserItem

_RESPONSES = 2
_SUB_AGENT_TURNS = 3
_STANDING = (Action.ORDER, Action.PIN)
"""Actions of rules whose content stays in the head."""


@dataclass(slots=True)
class Tally:
    """Counts over turns. Unedited and re-serialised turns are apart. `failures`: whose prompt did not start as it must, or which
    tokenised more than what is new, in words."""

    turns: int = 0
    unedited: int = 0
    exact: int = 0
    reserialised: int = 0
    reserialised_exact: int = 0
    edited: int = 0
    edited_kept: int = 0
    """Edited turns that kept all before the edit."""
    encoded_tokens: int = 0
    new_tokens: int = 0
    """Tokens of the prompts behind what was said before, notes and the generation prompt included."""
    failures: list[str] = field(default_factory=list)

    @property
    def continued(self) -> int:
        """Unedited turns, re-serialised or not."""
        return self.unedited + self.reserialised

    def add(self, other: Tally) -> None:
        """Add the counts of `other`."""
        for name in ("turns", "unedited", "exact", "reserialised", "reserialised_exact", "edited", "edited_kept"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.encoded_tokens += other.encoded_tokens
        self.new_tokens += other.new_tokens
        self.failures += other.failures


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """A turn that was answered. `whole` is prompt and generated ids, `base` the turn that its history goes on from."""

    history: tuple[Item, ...]
    answer: AssistantItem
    whole: array[int]
    base: Said | None
    dialect: int
    response_id: str | None

    @property
    def after(self) -> tuple[Item, ...]:
        return (*self.history, self.answer)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `history` goes on from `base`, whose answer stands in it unchanged; `new` is what follows that answer."""

    history: tuple[Item, ...]
    base: Said | None
    new: tuple[Item, ...] = ()
    is_edited: bool = False


class Agent:
    """One session's client. Without `disturbed` its head stays as it is; `rhythm_seconds`: how often what moves changes."""

    def __init__(
        self, app: ASGIApp, script: Script, tally: Tally, *, disturbed: bool, rhythm_seconds: float = 60.0, parent: str | None = None
    ) -> None:
        self._app = app
        self._script = script
        self._tally = tally
        self._disturbed = disturbed
        self._rhythm_seconds = rhythm_seconds
        self._rng = random.Random(f"says {script.seed}")
        """What is said: the same in a clean and a disturbed play."""
        self._writing = random.Random(f"writes {script.seed}")
        self._name = f"session-{script.seed}"
        self._parent = parent
        self._head = speech.head(script.product, script.head_bytes)
        self._texts: dict[str, str] = {}
        self._said: list[Said] = []
        self._seconds = 0.0
        self._num_requests = 0

    @property
    def last(self) -> Said:
        return self._said[-1]

    async def play(self) -> None:
        """All steps, one after the other."""
        for step in self._script.steps:
            self._seconds += step.seconds
            if not self._said:
                await self._first(step)
            else:
                await self._step(step)

    async def _first(self, step: Step) -> None:
        opening = speech.question(self._rng, self._script.turn_bytes)
        self._keep(await self._ask(step, Request((opening,), None, (opening,)), self._next_answer()))

    async def _step(self, step: Step) -> None:
        match step.kind:
            case StepKind.GO_ON:
                await self._go_on(step, self.last)
            case StepKind.FORK:
                await self._go_on(step, self._rng.choice(self._said))
            case StepKind.REGENERATE:
                await self._again(step)
            case StepKind.RETRY:
                request, answer = self._on(self.last), self._next_answer()
                await self._ask(replace(step, streams=True), request, answer, leaves=True)
                self._keep(await self._ask(step, request, answer))
            case StepKind.EDIT:
                await self._edit(step)
            case StepKind.COMPACT:
                summary = UserItem(f"So far: {speech.question(self._rng, self._script.turn_bytes).text}")
                self._keep(await self._ask(step, Request((summary,), None, is_edited=True), self._next_answer()))
            case StepKind.SUB_AGENT:
                await self._sub_agent(step)
            case StepKind.TWO_AT_ONCE:
                asks = [self._ask(step, self._on(self.last), self._next_answer()) for _ in range(2)]
                for said in await asyncio.gather(*asks):
                    self._keep(said)

    def _on(self, said: Said) -> Request:
        new = tuple(speech.following(said.answer, self._rng, self._script.turn_bytes))
        return Request((*said.after, *new), said, new)

    async def _go_on(self, step: Step, said: Said) -> None:
        self._keep(await self._ask(step, self._on(said), self._next_answer()))

    async def _again(self, step: Step) -> None:
        last = self.last
        self._keep(await self._ask(step, Request(last.history, last.base), self._next_answer()))

    async def _edit(self, step: Step) -> None:
        whole = self._on(self.last).history
        at = self._rng.choice([i for i, item in enumerate(whole) if not isinstance(item, AssistantItem)])
        edited = structs.replace(whole[at], text=f"Changed. {whole[at].text}")
        base: Said | None = self.last
        while base is not None and len(base.after) > at:
            base = base.base
        self._keep(await self._ask(step, Request((*whole[:at], edited, *whole[at + 1 :]), base, is_edited=True), self._next_answer()))

    async def _sub_agent(self, step: Step) -> None:
        steps = tuple(replace(step, kind=StepKind.GO_ON, seconds=2.0) for _ in range(_SUB_AGENT_TURNS))
        own = replace(
            self._script,
            seed=self._rng.getrandbits(48),
            steps=steps,
            product=self._script.product + 100,
            head_bytes=self._script.head_bytes // 4,
        )
        child = Agent(self._app, own, self._tally, disturbed=self._disturbed, rhythm_seconds=self._rhythm_seconds, parent=self._name)
        await child.play()
        said = self.last
        reports: list[Item] = [ToolResultItem(call.id, child.last.answer.text) for call in said.answer.calls]
        new = tuple(reports or [UserItem(child.last.answer.text)])
        self._keep(await self._ask(step, Request((*said.after, *new), said, new), self._next_answer()))

    def _keep(self, said: Said | None) -> None:
        assert said is not None
        self._said.append(said)

    def _next_answer(self) -> Ask:
        item = speech.answer(self._rng, self._script.turn_bytes)
        return Ask(item, random.Random(self._rng.getrandbits(64)))

    async def _ask(self, step: Step, request: Request, ask: Ask, *, leaves: bool = False) -> Said | None:
        """Send `request`; the turn that came of it, or None where the client left."""
        self._num_requests += 1
        ask = replace(ask, rng=random.Random(ask.rng.getrandbits(64)), prompt=array("I"), generated=array("I"))
        form = FORMS[step.dialect]
        body = msgspec.json.encode({**self._body(step, request), "stream": step.streams})
        ASKED.set(ask)
        answered = await post(self._app, form.path, body, self._headers(), leave_after=1 if leaves else None)
        if leaves:
            return None
        assert answered.status == 200, f"status {answered.status}: {answered.body[:300]!r}"
        answer = form.streamed(answered.body) if step.streams else msgspec.json.decode(answered.body)
        self._check(step, request, ask, answer["usage"]["agentserve"]["encoded_tokens"], answered)
        self._texts |= form.argument_texts(answer)
        return Said(request.history, form.said(answer), ask.prompt + ask.generated, request.base, step.dialect, answer.get("id"))

    def _headers(self) -> Mapping[str, str]:
        if not self._script.is_named:
            return {}
        return {"x-session-id": self._name, **({"x-parent-session-id": self._parent} if self._parent else {})}

    def _body(self, step: Step, request: Request) -> Body:
        form, base, head = FORMS[step.dialect], request.base, self._sent_head()
        style = Style(self._arguments(step), self._writing.choice(("reasoning", "reasoning_content")), self._writing.random() < 0.3)
        can_name_it = step.dialect == _RESPONSES and base is not None and base.dialect == _RESPONSES and base.response_id is not None
        if step.by_id and can_name_it and request.new:
            assert base is not None
            return {**form.body(head, request.new, style), "previous_response_id": base.response_id}
        body = form.body(head, [self._echoed(step, item) for item in request.history], style)
        return body | ({"stream_options": {"include_usage": True}} if step.dialect == 0 and step.streams else {})

    def _sent_head(self) -> Head:
        rules = self._script.disturbances
        if not self._disturbed:
            return disturb(self._head, [name for name in rules if CANONICAL_RULES[name].action in _STANDING], 0, 0)
        return disturb(self._head, rules, int(self._seconds // self._rhythm_seconds), self._num_requests)

    def _arguments(self, step: Step) -> Callable[[ToolCall], str]:
        return partial(_respelled, self._writing) if step.reserialises else self._as_received

    def _as_received(self, call: ToolCall) -> str:
        return self._texts[call.id]

    def _echoed(self, step: Step, item: Item) -> Item:
        if not isinstance(item, AssistantItem):
            return item
        reasoning = None if self._script.drops_reasoning else item.reasoning
        text = f" {item.text}\n" if step.pads_text else item.text
        return AssistantItem(text, reasoning, item.calls)

    def _check(self, step: Step, request: Request, ask: Ask, num_encoded: int, answered: Answered) -> None:
        tally, base = self._tally, request.base
        tally.turns += 1
        kept = base is None or ask.prompt[: len(base.whole)] == base.whole
        num_new = len(ask.prompt) - (len(base.whole) if base is not None and kept else 0)
        if request.is_edited:
            tally.edited += 1
            tally.edited_kept += kept
        elif base is not None:
            again = step.reserialises and _has_calls(request.history)
            tally.unedited += not again
            tally.exact += kept and not again
            tally.reserialised += again
            tally.reserialised_exact += kept and again
            tally.encoded_tokens += num_encoded
            tally.new_tokens += num_new
        if not kept or (not request.is_edited and num_encoded > num_new):
            kind = answered.headers.get("x-agentserve-turn")
            tally.failures.append(
                f"{self._name} request {self._num_requests}: {step}, the server says {kind!r}, {num_encoded=}, {num_new=}"
            )


def _has_calls(history: Sequence[Item]) -> bool:
    return any(isinstance(item, AssistantItem) and item.calls for item in history)


def _respelled(rng: random.Random, call: ToolCall) -> str:
    arguments: Json = call.arguments
    return respelled(arguments, rng)
