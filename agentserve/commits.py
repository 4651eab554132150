"""How a turn is booked: generated ids join the ledger as the engine sent them, and everybody who counts is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agentserve.answers import kept_of
from agentserve.capture import MAX_TOOL_NAME, Capture, TurnFacts, namespaced, stop_of
from agentserve.generation import Generation
from agentserve.plans import Outcome, Plan
from agentserve.prompt import FlatPrompt
from agentserve.records import TurnLog, TurnRecord
from agentserve.state.stored import StoredSessions
from model.chat import ChatFormat
from model.conversation import AssistantItem
from model.tokenizer import Tokenizer
from prefix_cache.captured import CapturedTurn
from prefix_cache.hits import TurnHits


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client got. `has_hidden`: ids behind a stop string, which nobody saw; `is_cut_call`: it ends inside a tool call."""

    item: AssistantItem
    has_hidden: bool = False
    is_cut_call: bool = False
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commits:
    """Books turns. One per server. `clock` in seconds, `wall_clock` since 1970."""

    tokenizer: Tokenizer
    chat: ChatFormat
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    log: TurnLog
    stored: StoredSessions | None = None
    capture: Capture | None = None

    def commit(self, generation: Generation, plan: Plan, answer: Answer) -> tuple[Outcome, asyncio.Future[bool] | None]:
        """Step 6 of a turn; the outcome, and when the session is stored for other servers."""
        ask, last, item = generation.ask, generation.last, answer.item
        computed, kept = self._append(generation, answer)
        num_cached_tokens = last.usage.num_cached_tokens if last.usage else None
        hits = ask.replica.books.book(ask.session, ask.relation, ask.estimate, generation.sent, num_cached_tokens, computed)
        ask.namespace.totals.add(hits)
        ask.session.count_turn(ask.relation.kind)
        reason = last.finish_reason or "abort"
        if reason == "stop" and item.calls and not answer.is_cut_call:
            reason = "tool_calls"
        num_generated = len(generation.ids)
        self.log.add(ask.session, self._record(generation, plan, reason, hits))
        generation.life.committed(item, reason, num_generated, hits)
        if self.capture is not None:
            self.capture.turn(self._facts(generation, item, reason))
        return Outcome(item, reason, last.stop_reason, num_generated, last.usage, hits, answer.num_reasoning_tokens), kept

    def _append(self, generation: Generation, answer: Answer) -> tuple[FlatPrompt, asyncio.Future[bool] | None]:
        """Lengthen the branch by what the client saw; the prompt as the engine has computed it, and when the session is stored."""
        ask, place, prompt = generation.ask, generation.ask.place, generation.ask.session.prompt
        if not generation.ids:
            prompt.move_to(place.node)
            return prompt, None
        kept: asyncio.Future[bool] | None = None
        computed, rest = self._seen(generation, answer.item) if answer.has_hidden else (generation.ids, [])
        node = ask.namespace.ledger.append(place.node, (answer.item,), [*place.open_ids, *computed, *rest], generated=True)
        if ask.namespace.advance(ask.session, node):
            if ask.options.answer_id is not None:
                ask.session.name_answer(ask.options.answer_id, node)
            if self.stored is not None:
                kept = self.stored.keep(ask.namespace, ask.session)
        if rest:
            place.lay_out(prompt).extend(computed)
        else:
            prompt.move_to(node)
        ask.replica.books.computed(prompt, len(prompt.ids) - 1)  # the last sampled token has no KV
        return prompt, kept

    def _seen(self, generation: Generation, item: AssistantItem) -> tuple[list[int], list[int]]:
        """The generated ids that `item` shows whole, and those of what it shows of the next one."""
        if not item.text.strip() and item.reasoning is None:
            return [], []
        kept = kept_of(generation.ids, item, self.chat.parser(generation.ask.place.node.head.tools))
        if kept is None:
            return generation.ids, []
        return generation.ids[: kept.num_ids], self.tokenizer.encode(kept.rest)

    def _record(self, generation: Generation, plan: Plan, reason: str, hits: TurnHits) -> TurnRecord:
        ask, times, ended = generation.ask, generation.times, self.clock()
        return TurnRecord(
            ask.session.num_turns,
            ask.relation.kind,
            self.wall_clock(),
            times.granted - times.asked,
            None if times.first_token is None else times.first_token - times.granted,
            ended - times.asked,
            reason,
            ask.place.num_encoded_tokens,
            len(generation.ids),
            hits,
            plan.divergence,
            plan.head_break,
        )

    def _facts(self, generation: Generation, item: AssistantItem, reason: str) -> TurnFacts:
        """What a capture is told: everything but text."""
        ask, times, usage = generation.ask, generation.times, generation.last.usage
        session, namespace = ask.session, ask.namespace.name
        seconds = self.clock() - times.asked
        turn = CapturedTurn(
            session=namespaced(session.id, namespace),
            parent=None if session.parent is None else namespaced(session.parent, namespace),
            t=round(self.wall_clock() - seconds, 3),
            seconds=round(seconds, 3),
            wait=round(times.granted - times.asked, 3),
            ttft=None if times.first_token is None else round(times.first_token - times.asked, 3),
            num_prompt_tokens=ask.estimate.num_prompt_tokens,
            num_output_tokens=len(generation.ids),
            num_cached_tokens=usage.num_cached_tokens if usage else None,
            stop=stop_of(reason),
            tools=[call.name[:MAX_TOOL_NAME] for call in item.calls],
            relation=ask.relation.kind.value,
        )
        chain = session.prompt.chain
        return TurnFacts(turn, chain.hashes[: ask.estimate.num_prompt_tokens // chain.block_size])
