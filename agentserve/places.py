"""Where a prompt stands in the ledger: steps 1 and 2 of a turn, matching and rendering."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from agentserve.answers import kept_of
from agentserve.canonical.canonicaliser import NO_FORM, Canonicaliser, Form
from agentserve.conversation import Conversation
from agentserve.errors import Unsupported
from agentserve.heads import MAX_LOOKED_AT, HeadBreak, head_break
from agentserve.ledger import TWIN, Ledger
from agentserve.nodes import Node
from agentserve.prompt import FlatPrompt
from agentserve.sessions import Session
from agentserve.state.recall import Recall
from model.chat import ChatFormat, Piece, Unrenderable
from model.conversation import AssistantItem, Item, SystemItem
from model.tokenizer import Tokenizer

Steps: TypeAlias = Sequence[tuple[int | None, list[Item]]]

SHORT_TEXT_CHARACTERS = 1_024
"""Encoded in about 0.1 ms."""
MAX_CUT_CANDIDATES = 4
"""Answers, the latest first, that an unknown one is compared with: those of a turn that was stopped and of its regenerations."""
LONG_HEAD_CHARACTERS = 32_768
"""Heads above this are canonicalised off the event loop."""


@dataclass(slots=True)
class Place:
    """Where a prompt stands: its branch up to the last item (held), and the generation prompt that follows.

    `matched` is the last node that was known before, `num_known` the client's messages behind the head up to there. `more`: items of the
    client follow it; `foreign`: an answer that was not given here is among them. `twin_end`: how far the history was known under a head
    that differs only in what rules that are off would take out, tokens. `head_break`: where a head that is new leaves one that is known.
    """

    node: Node
    form: Form
    matched: Node
    num_encoded_tokens: int = 0
    num_known: int = 0
    more: bool = False
    foreign: bool = False
    twin_end: int = 0
    head_break: HeadBreak | None = None
    open_ids: Sequence[int] = ()
    owner: str | None = None

    def lay_out(self, prompt: FlatPrompt) -> FlatPrompt:
        """Bring a session's flat prompt to where its turn begins."""
        prompt.move_to(self.node)
        prompt.extend(self.open_ids)
        return prompt

    def move_to(self, node: Node, ledger: Ledger) -> None:
        """Hold `node` in place of where it stood."""
        ledger.hold(node)
        ledger.release(self.node)
        self.node = node


class Places:
    """Finds the place of each conversation. One per server."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, canonicaliser: Canonicaliser) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._canonicaliser = canonicaliser
        self._openings: dict[tuple[Piece, ...], list[int]] = {}

    async def find(
        self,
        conversation: Conversation,
        ledger: Ledger,
        onto: Node | None = None,
        session: Session | None = None,
        recall: Recall | None = None,
    ) -> Place:
        """Match by bytes, then by meaning; render and append the rest. The node comes back held.

        With `onto`, the conversation holds only what follows that node. `session` is the one that the client names, if it is known: where
        two sessions have said the same, its own ids are used. `recall` is asked where the session has said something that is not here.
        """
        tail: list[bytes] = []
        found = (onto, NO_FORM, 1) if onto is not None else ledger.find(conversation.chain)
        astray = found is not None and session is not None and not session.leads_to(found[0])
        if found is not None and not astray:
            place, start = Place(found[0], found[1], found[0]), conversation.first + found[2] - 1
        else:
            conversation = conversation.whole()
            place = await self._head(conversation, ledger, recall)
            tail = [place.form.key + digest for digest in conversation.tail()]
            start = 0 if astray else self._skip(place, ledger, tail)
        place.num_known = start
        place.owner = session.id if session is not None else None
        ledger.hold(place.node)
        try:
            steps = self._follow(place, ledger, conversation.steps(start))
            if recall is not None and onto is None and recall.is_needed(place.node, steps):
                conversation, steps = await self._recalled(recall, place, ledger, conversation, steps)
            for end, step in steps:
                await self._step(place, ledger, step)
                if end is not None and not place.more:
                    place.num_known = end
                # A head that changes its bytes every turn would be remembered at each node: where it ended is enough.
                if end is not None and place.more:
                    ledger.remember(conversation.chain[end - conversation.first], place.node, place.form)
            ledger.remember(conversation.chain[-1], place.node, place.form)
            if tail:
                ledger.remember(tail[-1], place.node, place.form)
            await self._note(place, ledger)
            place.open_ids = self._opening(place.node)
        except BaseException:
            ledger.release(place.node)
            raise
        return place

    async def _head(self, conversation: Conversation, ledger: Ledger, recall: Recall | None) -> Place:
        """The place of a head whose bytes are not known."""
        sent = conversation.head()
        is_long = len(sent.system) > LONG_HEAD_CHARACTERS
        head, form = await asyncio.to_thread(self._canonicaliser.apply, sent) if is_long else self._canonicaliser.apply(sent)
        node = ledger.find_head(form.key)
        if node is None and recall is not None and recall.is_needed(None, conversation.steps(0)):
            await recall.ask(conversation, form.key)
            node = ledger.find_head(form.key)
        num_encoded, twin_end, broken = 0, 0, None
        if node is None:
            twin_end = self._twin_end(conversation, ledger, form)
            with _rendering():
                pieces = self._chat.head(head)
            ids = await self._encode(pieces)
            num_encoded = len(ids)
            compared = (head, ids, list(islice(ledger.heads(), MAX_LOOKED_AT)), self._canonicaliser)
            broken = await asyncio.to_thread(head_break, *compared) if is_long else head_break(*compared)
            node = ledger.add_head(head, ids, form.key)
        form = self._canonicaliser.pinned(form, head, node.head)
        ledger.remember(conversation.chain[0], node, form)
        if not self._canonicaliser.is_complete:
            ledger.remember(TWIN + form.alike, node, form)
        return Place(node, form, node, num_encoded, twin_end=twin_end, head_break=broken)

    def _follow(self, place: Place, ledger: Ledger, steps: Steps) -> Steps:
        """Go on through known steps; those that are left begin with one that is not known."""
        node, number = place.node, 0
        for end, step in steps:
            child = ledger.follow(node, step, place.owner)
            if child is None:
                break
            node, number = child, number + 1
            place.num_known = place.num_known if end is None else end
        if number:
            place.move_to(node, ledger)  # nothing else runs meanwhile, so what lies between needs no hold
            place.matched = node
        return steps[number:]

    async def _recalled(
        self, recall: Recall, place: Place, ledger: Ledger, conversation: Conversation, steps: Steps
    ) -> tuple[Conversation, Steps]:
        """Go on through what other servers have stored of the session; the steps that are left then, and the conversation they are of."""
        head = await recall.ask(conversation, place.form.key)
        place.owner = recall.session_id
        if head is None:
            return conversation, steps
        steps = self._follow(place, ledger, steps)
        if not recall.is_needed(place.node, steps) or head.meaning != place.form.key:
            return conversation, steps
        # What was stored leaves this path further up, or has a head of its own.
        whole = conversation.whole()
        again = Place(head, place.form, head, owner=recall.session_id)
        ledger.hold(head)
        left = self._follow(again, ledger, whole.steps(0))
        if len(left) <= len(steps) or not recall.is_needed(again.node, left):
            place.move_to(again.node, ledger)
            place.matched, place.num_known = again.matched, again.num_known
            conversation, steps = whole, left
        ledger.release(again.node)
        return conversation, steps

    def _skip(self, place: Place, ledger: Ledger, tail: Sequence[bytes]) -> int:
        """Go from the head to where the longest known run of the messages behind it ends; how many those are.

        So a head of other bytes and the same form costs no look at what follows it.
        """
        found = ledger.find(tail[1:])
        if found is None:
            return 0
        place.node = place.matched = found[0]
        return found[2]

    def _twin_end(self, conversation: Conversation, ledger: Ledger, form: Form) -> int:
        """How far the history is known under the latest head of the same `alike`, in tokens; 0 without one."""
        steps = conversation.steps(0)  # also without a twin: a history that cannot be read must leave nothing behind
        found = None if self._canonicaliser.is_complete else ledger.find([TWIN + form.alike])
        node = None if found is None else found[0]
        end = 0
        for _, step in steps:
            if node is None:
                break
            end = node.end
            node = ledger.follow(node, step)
        return node.end if node is not None else end

    async def _step(self, place: Place, ledger: Ledger, step: Sequence[Item]) -> None:
        """Go on to the node of `step`; what is not known is rendered."""
        child = ledger.follow(place.node, step, place.owner)
        if child is None:
            place.move_to(ledger.tail(place.node), ledger)
            if not place.more:
                place.matched, place.more = place.node, True
            child = self._cut_answer(place, ledger, step)
        if child is None:
            place.foreign = place.foreign or isinstance(step[0], AssistantItem)
            ids = await self._encode(self._pieces(place.node, step))
            place.num_encoded_tokens += len(ids)
            child = ledger.append(place.node, step, ids)
        place.move_to(child, ledger)
        if not place.more:
            place.matched = child

    def _cut_answer(self, place: Place, ledger: Ledger, step: Sequence[Item]) -> Node | None:
        """The node of a stored answer's beginning, as it comes back after the user has stopped it: ids stay, but for the one it ends in."""
        item = step[0]
        if not isinstance(item, AssistantItem):
            return None
        for stored in islice(ledger.answers(place.node), MAX_CUT_CANDIDATES):
            assert stored.parent is not None
            opening = self._opening(stored.parent)
            generated = stored.ids[len(opening) :]
            kept = kept_of(generated, item, self._chat.parser(stored.head.tools)) if list(stored.ids[: len(opening)]) == opening else None
            if kept is not None:
                rest = self._tokenizer.encode(kept.rest)
                place.num_encoded_tokens += len(rest)
                return ledger.append(stored.parent, step, [*opening, *generated[: kept.num_ids], *rest], generated=True)
        return None

    async def _note(self, place: Place, ledger: Ledger) -> None:
        """Tell the model what the head would have said, where that differs from what it has read on this branch."""
        news = place.form.news(place.node.notes)
        if not news:
            return
        note = ledger.follow_note(place.node, news)
        if note is None:
            text = "\n".join(news.values())
            ids = await self._encode(self._pieces(place.node, (SystemItem(text),)))
            place.num_encoded_tokens += len(ids)
            note = ledger.append_note(place.node, text, news, ids)
        elif not place.more:
            place.matched = note
        place.move_to(note, ledger)

    def _opening(self, node: Node) -> list[int]:
        """The generation prompt behind `node`: words of the format only, so each form is encoded once."""
        pieces = (*self._closing(node), *self._chat.open_turn(node.shape))
        ids = self._openings.get(pieces)
        if ids is None:
            ids = self._openings[pieces] = self._tokenizer.encode_pieces(pieces)
        return ids

    def _pieces(self, node: Node, step: Sequence[Item]) -> list[Piece]:
        pieces = self._closing(node)
        previous = node.shape
        for item in step:
            with _rendering():
                pieces += self._chat.item(item, previous)
            previous = item
        return pieces

    def _closing(self, node: Node) -> list[Piece]:
        return self._chat.close_turn(node.ids[-1] if len(node.ids) else None) if node.generated else []

    async def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Off the event loop, but for texts so short that the way to a thread and back takes longer."""
        if sum(len(piece) for piece in pieces if isinstance(piece, str)) <= SHORT_TEXT_CHARACTERS:
            return self._tokenizer.encode_pieces(pieces)
        return await asyncio.to_thread(self._tokenizer.encode_pieces, pieces)


@contextmanager
def _rendering() -> Iterator[None]:
    """What the model's chat format has no form for is the client's to change."""
    try:
        yield
    except Unrenderable as error:
        raise Unsupported(f"the model's chat format cannot express this conversation: {error}", param="messages") from error
