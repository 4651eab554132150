"""What an engine generates for one turn: its steps, the ids so far, and another engine where the first gives nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from agentserve.engines import Chunk
from agentserve.errors import EngineError
from agentserve.plans import Times
from agentserve.prompt import FlatPrompt
from agentserve.replicas import Replica, Replicas, Running
from agentserve.retention import Ask, Life


class Generation:
    """One request at an engine. Iterate `chunks` once; `end` gives back what it holds, and a second call is harmless."""

    def __init__(self, ask: Ask, times: Times, life: Life, running: Running, replicas: Replicas, clock: Callable[[], float]) -> None:
        self.ask = ask
        """On the engine that generates; another one if that fails before its first step."""
        self.times = times
        self.life = life
        self.running = running
        self.ids: list[int] = []
        self.last = Chunk()
        """What the engine has said of the end, over all steps."""
        self._replicas = replicas
        self._clock = clock
        self.sent = ask.replica.books.send(ask.estimate, ask.session)

    @property
    def prompt(self) -> FlatPrompt:
        """The session's prompt, brought to where this turn begins."""
        return self.ask.place.lay_out(self.ask.session.prompt)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The engine's steps, already counted. An engine that fails before its first is left, as nobody has seen anything yet.

        Raises EngineError, also for a stream that is not whole.
        """
        tried: list[Replica] = []
        started = False
        while not started:
            try:
                async with aclosing(self.ask.replica.engine.generate(self.ask.request)) as chunks:
                    async for chunk in chunks:
                        if not started:
                            started = True
                            self.ask.replica.worked()
                        self._take(chunk)
                        yield chunk
                break
            except EngineError as error:
                if started or error.status < 500:
                    raise
                self.ask.replica.failed()
                tried.append(self.ask.replica)
                other = self._replicas.instead(self.ask.session, self.prompt, tried)
                if other is None:
                    raise
                self._move_to(other)
        self._check_whole()

    def end(self) -> None:
        """The engine's request is over, booked or not."""
        self.ask.replica.books.ended(self.sent)

    def _move_to(self, replica: Replica) -> None:
        """Let another engine compute the prompt."""
        self.end()
        self.ask.replica.twins.computed(self.ask.request.request_id)
        estimate = self._replicas.estimate(replica, self.prompt, self.ask.place.twin_end)
        self.ask = replace(self.ask, replica=replica, estimate=estimate)
        self.life.engine = replica
        self.running.move_to(replica, estimate.num_uncached_tokens)
        self.sent = replica.books.send(estimate, self.ask.session)

    def _take(self, chunk: Chunk) -> None:
        is_first = not self.ids and bool(chunk.ids)
        self.ids.extend(chunk.ids)
        if chunk.finish_reason is not None or chunk.usage is not None:
            self.last = Chunk(
                finish_reason=chunk.finish_reason or self.last.finish_reason,
                stop_reason=chunk.stop_reason if chunk.stop_reason is not None else self.last.stop_reason,
                usage=chunk.usage or self.last.usage,
            )
        self.ask.replica.books.look(self.sent, self.ask.estimate)
        if is_first:
            self._prefilled()

    def _prefilled(self) -> None:
        """The engine has computed the prompt."""
        self.times.first_token = self._clock()
        books, prompt = self.ask.replica.books, self.prompt
        books.prefilled(self.sent)
        self.life.first_token()
        books.computed(prompt, len(prompt.ids))
        self.ask.replica.twins.computed(self.ask.request.request_id)

    def _check_whole(self) -> None:
        """A list of ids that lacks some is not what the engine has computed: it must never be sent again."""
        if self.last.finish_reason is None:
            raise EngineError("the engine ended the stream without a finish reason")
        usage, num_ids = self.last.usage, len(self.ids)
        if usage is not None and num_ids < usage.num_generated_tokens:
            self.ids.clear()
            raise EngineError(f"the engine counts {usage.num_generated_tokens} generated tokens and has sent {num_ids}")
