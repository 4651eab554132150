"""Requests that clients send again: one generation for all of them.

A client that does not get its answer — a timeout, a broken connection — sends the same request again, and the engine may still be at work
on the first one, or done with an answer that got lost. What is marked as such a retry goes on with the generation that runs, from its first
byte, or gets the answer that was made. What is not marked is a request of its own: people ask again because they want another answer.

Marks are those of known clients: `x-stainless-retry-count` above 0 (the SDKs of OpenAI and Anthropic count their retries in it, from 0)
and `idempotency-key`, which names one request however often it is sent. The same request: the same API key, route, session and body, and
both or neither only append to the session.

    no entry              runs
    the first one runs    its generation goes on at the new connection, the old connection is closed
      too long to keep    it is stopped and runs again
    it is answered        the same answer again, while it is kept
    it broke off          runs
    two ran at once       runs: which of them is meant cannot be known (unless their idempotency keys differ)
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import xxhash

from agentserve.conversation import APPEND
from agentserve.exchange import Exchange, Sink, Wire

RETRY_HEADER = "x-agentserve-retry"
Outcome: TypeAlias = Literal["joined", "repeated", "replaced", "new"]
MAX_SHARE = 16
"""One answer may take up this part of what is kept in all."""


class Run(Protocol):
    """What makes one answer. `answered`: it was made whole."""

    @property
    def answered(self) -> bool: ...

    async def handle(self, wire: Sink) -> None: ...


@dataclass(frozen=True, slots=True)
class Mark:
    """Which request this is; whether its client says that it was sent before, or named it so that it can be told when it comes again."""

    key: bytes
    is_retry: bool = False
    is_named: bool = False


def mark_of(headers: Mapping[str, str], namespace: str, path: str, session: str | None, body: bytes) -> Mark:
    """The mark of a request; `headers` with lower-case names."""
    named = headers.get("idempotency-key", "")
    key = xxhash.xxh3_128(body)
    for part in (namespace, path, session or "", named, headers.get(APPEND, "")):
        key.update(part.encode("utf-8", "surrogatepass") + b"\0")
    count = headers.get("x-stainless-retry-count", "")
    return Mark(key.digest(), count.isdecimal() and int(count) > 0, bool(named))


class Relay:
    """A `Sink` that remembers what was sent and can change to another connection in the middle of an answer."""

    def __init__(self, wire: Wire, max_bytes: int) -> None:
        self._wire = wire
        self._max_bytes = max_bytes
        self._head: tuple[int, Mapping[str, str]] | None = None
        self._more_headers: Mapping[str, str] = {}
        self._writing: set[asyncio.Task[None] | None] = set()
        self._moving: set[asyncio.Task[None] | None] = set()
        self.tape: list[bytes] | None = []
        """All bytes so far; None if they are too many to keep."""
        self.num_bytes = 0
        self.finished = False

    @property
    def started(self) -> bool:
        return self._wire.started

    @property
    def client_left(self) -> bool:
        return self._wire.client_left

    def prepare(self, status: int, headers: Mapping[str, str]) -> None:
        self._head = status, headers
        self._wire.prepare(status, {**headers, **self._more_headers})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        self._keep(body)
        self.finished = self.finished or not more
        task = asyncio.current_task()
        self._writing.add(task)
        try:
            await self._wire.write(body, more=more)
        except asyncio.CancelledError:
            if task is None or task not in self._moving:
                raise
            self._moving.discard(task)
            task.uncancel()  # only this write was meant: the new connection has its bytes from the tape
        finally:
            self._writing.discard(task)

    async def move_to(self, wire: Wire, outcome: Outcome) -> None:
        """Send all that was sent to `wire`, and what follows too. A write that the old connection holds up is given up."""
        self._wire, self._more_headers = wire, {RETRY_HEADER: outcome}
        for task in self._writing:
            self._moving.add(task)
            if task is not None:
                task.cancel()
        if self._head is not None:
            await replay(wire, self._head, self.tape or [], outcome, finished=self.finished)

    def answer(self) -> tuple[int, Mapping[str, str]] | None:
        """Status and headers."""
        return self._head

    def _keep(self, body: bytes) -> None:
        if self.tape is not None:
            self.num_bytes += len(body)
            self.tape.append(body)
            if self.num_bytes > self._max_bytes:
                self.tape, self.num_bytes = None, 0


async def replay(wire: Wire, head: tuple[int, Mapping[str, str]], tape: list[bytes], outcome: Outcome, *, finished: bool) -> None:
    """Send an answer from its beginning, or as much as there is of it."""
    wire.prepare(head[0], {**head[1], RETRY_HEADER: outcome})
    body = b"".join(tape)
    if body or finished:
        await wire.write(body, more=not finished)


@dataclass(slots=True, eq=False)
class Delivery:
    """One generation and the connection it goes to. `ambiguous`: another of the same key ran beside it."""

    key: bytes
    ambiguous: bool = False
    exchange: Exchange | None = None
    relay: Relay | None = None
    answered_at: float | None = None
    lost: bool = False

    @property
    def is_running(self) -> bool:
        """Whether it has no end yet, good or bad."""
        return self.answered_at is None and not self.lost

    @property
    def num_bytes(self) -> int:
        return self.relay.num_bytes if self.relay is not None and self.answered_at is not None else 0


@dataclass(slots=True)
class Deliveries:
    """Keeps up to `max_bytes` of whole answers for up to `seconds`, the oldest go first. `counted` hears of each marked retry."""

    max_bytes: int
    seconds: float
    clock: Callable[[], float]
    counted: Callable[[Outcome], None]
    num_bytes: int = 0
    _by_key: dict[bytes, Delivery] = field(default_factory=dict)
    _answered: OrderedDict[bytes, Delivery] = field(default_factory=OrderedDict)

    def exchange(self, mark: Mark, run: Run, *, silence_seconds: float, keep_alive: bytes | None) -> Exchange:
        """The response to a request."""
        self._expire()
        known = self._by_key.get(mark.key)
        comes_again = mark.is_retry or (mark.is_named and known is not None)
        if comes_again and known is not None and not known.ambiguous and not known.lost:

            async def again(wire: Wire) -> None:
                await self._again(known, exchange, wire, run)

            exchange = Exchange(again, silence_seconds=silence_seconds, keep_alive=keep_alive)
            return exchange
        if comes_again:
            self.counted("new")
        delivery = Delivery(mark.key, ambiguous=known is not None and (known.is_running or known.ambiguous))
        self._put(delivery)

        async def first(wire: Wire) -> None:
            await self._run(delivery, wire, run)

        delivery.exchange = Exchange(first, silence_seconds=silence_seconds, keep_alive=keep_alive)
        return delivery.exchange

    async def _run(self, delivery: Delivery, wire: Wire, run: Run) -> None:
        delivery.relay = Relay(wire, self.max_bytes // MAX_SHARE)
        try:
            await run.handle(delivery.relay)
        finally:
            self._ended(delivery, whole=run.answered and delivery.relay.finished)

    async def _again(self, delivery: Delivery, exchange: Exchange, wire: Wire, run: Run) -> None:
        relay, before = delivery.relay, delivery.exchange
        if relay is not None and relay.tape is not None and delivery.answered_at is not None and (head := relay.answer()) is not None:
            self.counted("repeated")
            await replay(wire, head, relay.tape, "repeated", finished=True)
        elif delivery.is_running and relay is not None and before is not None and (work := before.take()) is not None:
            delivery.exchange = exchange
            if relay.tape is not None:
                self.counted("joined")
                await _follow(work, relay, wire)
            else:
                self.counted("replaced")
                await _stop(work)
                await self._fresh(delivery.key, exchange, wire, run)
        else:
            self.counted("new")
            await self._fresh(delivery.key, exchange, wire, run)

    async def _fresh(self, key: bytes, exchange: Exchange, wire: Wire, run: Run) -> None:
        delivery = Delivery(key, exchange=exchange)
        self._put(delivery)
        await self._run(delivery, wire, run)

    def _put(self, delivery: Delivery) -> None:
        self._drop(self._by_key.get(delivery.key))
        self._by_key[delivery.key] = delivery

    def _ended(self, delivery: Delivery, *, whole: bool) -> None:
        delivery.lost = not whole
        if self._by_key.get(delivery.key) is not delivery:
            return
        if not whole and not delivery.ambiguous:
            del self._by_key[delivery.key]
            return
        delivery.answered_at = self.clock()
        self._answered[delivery.key] = delivery
        self.num_bytes += delivery.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._answered.values())))

    def _expire(self) -> None:
        for delivery in list(self._answered.values()):
            if delivery.answered_at is not None and self.clock() - delivery.answered_at <= self.seconds:
                return
            self._drop(delivery)

    def _drop(self, delivery: Delivery | None) -> None:
        if delivery is None:
            return
        if self._answered.pop(delivery.key, None) is not None:
            self.num_bytes -= delivery.num_bytes
        if self._by_key.get(delivery.key) is delivery:
            del self._by_key[delivery.key]


async def _follow(work: asyncio.Future[None], relay: Relay, wire: Wire) -> None:
    """Let the work go on at `wire`; it ends when this client leaves."""
    try:
        await relay.move_to(wire, "joined")
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await _stop(work)
        raise


async def _stop(work: asyncio.Future[None]) -> None:
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
