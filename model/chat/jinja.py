"""The chat format of any model that brings a template in Jinja, made incremental.

A template renders whole conversations. What an item adds is the difference between two renderings: a shortest history that ends like the
item's own, without the item and with it. Both end in what the template writes before an answer, the *opening*: the end of the message
before, and the generation prompt. It depends on the kind of the last message only, so a prompt is a *stem*, which grows, and an opening,
which is cut off again. A stem ends with the client's text, or behind the token that ends the model's turn.

    stem(head) + item + item + … + opening      the prompt
    stem(history + item) − stem(history)        what the item adds

Whether a template is made like this is proved when it is loaded (`model.chat.jinja_proof`). Text of clients is never read by the
template: stand-ins take its place (`model.chat.marks`), so it passes byte for byte, and what it spells never becomes a control token.

Where a template refuses an order that clients do send (two user messages, a later system message), the item is rendered as behind
another kind of message, and a system message that is refused everywhere becomes the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from model.chat import OutputParser, Piece
from model.chat.jinja_messages import CALL, EXAMPLES, LAST_WORD, Kind, MessageForm, function, kind_of
from model.chat.jinja_template import ChatTemplate, Message, TemplateRefused
from model.chat.marks import Marks, Spellings, count
from model.chat.minimax_m3_output import random_call_id
from model.chat.tagged_calls import reasoning_elements, structural_tag
from model.chat.tagged_output import TaggedParser, find_markup
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, UserItem
from model.tokenizer import Tokenizer

_TURNS: tuple[Kind, ...] = ("assistant", "calls")
_PROBE_TOOL = Tool("toolword", "descriptionword", {"type": "object", "properties": {"propertyword": {"type": "string"}}})
_REASONING = "reasonword"


class UnstableTemplate(ValueError):
    """The template's prompts do not grow at their end only. `probe` names what showed it; the message says what can be done."""

    def __init__(self, probe: str, reason: str) -> None:
        super().__init__(
            f"the model's chat template cannot be served exactly (probe {probe!r}: {reason}). Choose a format by name with "
            "--engine-chat-format, or name a copy of the model folder with --engine-model-folder whose chat_template.jinja does not do "
            "this: the engine is sent token ids and does not use its own"
        )
        self.probe = probe


class JinjaFormat:
    """The format of one template over one vocabulary. Raises UnstableTemplate where the template has no openings."""

    name = "jinja"

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, new_call_id: Callable[[], str] = random_call_id) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._spellings = Spellings(tokenizer.control)
        self._new_call_id = new_call_id
        self._ends = set(tokenizer.eos_ids) or set(tokenizer.special_ids)
        self._stems: dict[Kind | None, str] = {}
        self._texts: dict[tuple[Kind, Kind | None, bool, bool], str | None] = {}
        self._form = MessageForm()
        if self._refuses("tool"):
            self._form = replace(self._form, short_ids=True)
        kinds: tuple[Kind, ...] = ("user", *_TURNS, "tool")
        self._openings = {kind: self._opening(kind) for kind in kinds}
        turn_ends = [self._turn_end(kind)[1] for kind in _TURNS]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((*turn_ends, *tokenizer.eos_ids)))
        self._turn_ends = turn_ends
        self._first = self._first_message()
        generation_prompt = _common_end(list(self._openings.values()))
        self._closings = {kind: opening.removesuffix(generation_prompt) for kind, opening in self._openings.items()}
        self._take_system_messages()
        spoken = self.item(AssistantItem(LAST_WORD["assistant"], _REASONING, (CALL,)), UserItem(""))
        self._markup = find_markup(spoken, _REASONING, tokenizer.control)
        self.call_ids: tuple[int, ...] = (self._markup.call[0],) if self._markup.call is not None else ()
        self._hidden = (tokenizer.special_ids | set(self.stop_ids)) - self._markup.ids
        opened = [piece for piece in self.open_turn(UserItem("")) if isinstance(piece, int)]
        self._starts_in_reasoning = self._markup.reasoning is not None and opened[-1:] == [self._markup.reasoning[0]]

    def head(self, head: Head) -> list[Piece]:
        marks = Marks(self._spellings)
        text = self._template.render([*self._leading(head, marks), *self._form.shortest("user", marks)], self._tools(head, marks))
        return marks.pieces(_without(text, self._first))

    def item(self, item: Item, previous: Item | None) -> list[Piece]:
        marks = Marks(self._spellings)
        known = self._known(item, None if previous is None else kind_of(previous))
        if known is None:
            return marks.pieces(self._added(item, previous, marks))
        self._form.message(item, marks)  # takes the same stand-ins as the text that is known
        return marks.pieces(known)

    def open_turn(self, previous: Item | None) -> list[Piece]:
        if previous is not None:
            opening = self._openings[kind_of(previous)]
        else:
            opening = self._closing_of(None) + self._openings["user"].removeprefix(self._closings["user"])
        return Marks(self._spellings).pieces(opening)

    def close_turn(self, last_id: int | None) -> list[Piece]:
        return [] if last_id in self._turn_ends else [self._turn_ends[0]]

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return TaggedParser(
            self._tokenizer.token_bytes, self._markup, self._hidden, self._new_call_id, starts_in_reasoning=self._starts_in_reasoning
        )

    def call_constraint(self, tools: Sequence[Tool], *, required: bool, single: bool) -> Mapping[str, Json] | None:
        if self._markup.call is None:
            return None
        excluded = sorted({*self._tokenizer.control.values(), *self.stop_ids})
        thinking = reasoning_elements(self._markup.reasoning, excluded, begun=self._starts_in_reasoning)
        return {"structural_tag": structural_tag(tools, self._markup.call, thinking, excluded, required=required, single=single)}

    def rendering(self, head: Head, items: Sequence[Item]) -> tuple[list[Piece], str]:
        """The template's own prompt for a whole conversation, as pieces and as text. Raises TemplateRefused."""
        marks = Marks(self._spellings)
        messages = [*self._leading(head, marks), *(self._form.message(item, marks) for item in items)]
        text = self._template.render(messages, self._tools(head, marks))
        return marks.pieces(text), marks.text(text)

    # What the template writes ---------------------------------------------------------------------------------------------------------

    def _refuses(self, kind: Kind) -> bool:
        try:
            self._template.render(self._form.shortest(kind, Marks(self._spellings)))
        except TemplateRefused:
            return True
        return False

    def _opening(self, kind: Kind) -> str:
        """What follows the stem of a history of this kind in a prompt."""
        text, end = self._last_word(kind)
        if kind in _TURNS:
            return text[self._turn_end(kind)[0] :]
        for start, _, _ in self._controls(text, end):
            return text[start:]
        raise UnstableTemplate(kind, f"no control token ends a {kind} message")

    def _turn_end(self, kind: Kind) -> tuple[int, int]:
        """Where a turn of the model ends in the shortest history, and the token that ends it."""
        text, end = self._last_word(kind)
        for _, stop, id in self._controls(text, end):
            if id in self._ends:
                return stop, id
        raise UnstableTemplate(kind, "a turn of the model does not end with a token at which the engine stops")

    def _last_word(self, kind: Kind) -> tuple[str, int]:
        """The prompt of the shortest history of this kind, and where its last text ends."""
        try:
            text = self._template.render(self._form.shortest(kind, Marks(self._spellings)))
        except TemplateRefused as error:
            raise UnstableTemplate(kind, str(error)) from error
        if text.count(LAST_WORD[kind]) != 1:
            raise UnstableTemplate(kind, f"the text of a {kind} message is left out or comes twice")
        return text, text.index(LAST_WORD[kind]) + len(LAST_WORD[kind])

    def _controls(self, text: str, start: int) -> Iterator[tuple[int, int, int]]:
        """Start, end and id of each control token from `start` on."""
        for found in self._spellings.rendered.finditer(text, start):
            if found[0] in self._spellings.control:
                yield found.start(), found.end(), self._spellings.control[found[0]]

    def _first_message(self) -> str:
        """What every prompt of one user message ends with, whatever its head: from a control token on, so that it is encoded apart."""
        marks = Marks(self._spellings)
        asked = self._form.shortest("user", marks)
        texts = []
        for head in (Head(), Head("headword"), Head("", (_PROBE_TOOL,)), Head("headword", (_PROBE_TOOL,))):
            try:
                texts.append(self._template.render([*self._leading(head, marks), *asked], self._tools(head, marks)))
            except TemplateRefused as error:
                raise UnstableTemplate("head", str(error)) from error
        shared = _common_end(texts)
        end = shared.find(LAST_WORD["user"])
        for start, _, _ in self._controls(shared, 0):
            if start < end:
                return shared[start:]
        raise UnstableTemplate("head", "the first message is not the same behind every head, or no control token keeps it apart")

    def _leading(self, head: Head, marks: Marks) -> list[Message]:
        return [{"role": "system", "content": marks.whole(head.system)}] if head.system else []

    def _tools(self, head: Head, marks: Marks) -> list[Message]:
        return [function(tool, marks) for tool in head.tools]

    # What an item adds ----------------------------------------------------------------------------------------------------------------

    def _known(self, item: Item, before: Kind | None) -> str | None:
        """The text that any item of this form adds behind this kind; None if it depends on more, as calls do."""
        if isinstance(item, AssistantItem) and item.calls:
            return None
        reasons = isinstance(item, AssistantItem) and bool(item.reasoning)
        form = (kind_of(item), before, bool(item.text), reasons)
        if form not in self._texts:
            text = "x" if item.text else ""
            example = structs.replace(EXAMPLES[kind_of(item)], text=text)
            if isinstance(example, AssistantItem) and reasons:
                example = structs.replace(example, reasoning="x")
            marks = Marks(self._spellings)
            added = self._added(example, None if before is None else EXAMPLES[before], marks)
            shows_call = CALL.name in added or self._form.id_of(CALL.id, marks) in added
            self._texts[form] = None if shows_call else added
        return self._texts[form]

    def _added(self, item: Item, previous: Item | None, marks: Marks) -> str:
        """The text that `item` adds behind `previous`. Raises TemplateRefused if the template takes it behind no kind of message."""
        message = self._form.message(item, marks)
        kind, before = kind_of(item), None if previous is None else kind_of(previous)
        try:
            return self._difference(self._form.before(previous, item, marks), before, message, kind)
        except TemplateRefused as error:
            refused = error
        for other, closing in self._closings.items():
            try:
                text = self._difference(self._form.shortest(other, marks), other, message, kind)
            except TemplateRefused:
                continue
            if text.startswith(closing):
                return self._closing_of(before) + text[len(closing) :]
        raise refused

    def _difference(self, history: list[Message], before: Kind | None, message: Message, kind: Kind) -> str:
        stem = self._stem(history, before)
        longer = _without(self._template.render([*history, message]), self._openings[kind])
        if not longer.startswith(stem):
            raise TemplateRefused(f"a {kind} message changes what is before it")
        added = longer[len(stem) :]
        if message["content"] and count(added, message["content"]) != 1:
            raise TemplateRefused(f"the text of a {kind} message is left out or comes twice")
        return added

    def _stem(self, history: list[Message], before: Kind | None) -> str:
        """The stem of a history that ends in this kind of message; one without calls is always the same."""
        if before in ("calls", "tool"):
            return _without(self._template.render(history), self._openings[before])
        if before is None and None not in self._stems:
            asked = self._template.render(self._form.shortest("user", Marks(self._spellings)))
            self._stems[None] = _without(asked, self._first)
        elif before is not None and before not in self._stems:
            self._stems[before] = _without(self._template.render(history), self._openings[before])
        return self._stems[before]

    def _closing_of(self, before: Kind | None) -> str:
        """What ends the message before; for the head, what stands between it and a user message as it comes behind another turn."""
        if before is not None:
            return self._closings[before]
        asked = Marks(self._spellings)
        later = self._added(UserItem(LAST_WORD["user"]), AssistantItem(), asked)
        own = asked.text(later).removeprefix(self._closings["assistant"])
        return _without(_without(self._first, self._openings["user"]), own)

    def _take_system_messages(self) -> None:
        """Find out how a system message is rendered that comes later."""
        try:
            self._openings["system"] = self._opening("system")
            self._closings["system"] = self._openings["system"].removesuffix(self._openings["user"].removeprefix(self._closings["user"]))
            self._added(SystemItem("x"), AssistantItem(), Marks(self._spellings))
        except (UnstableTemplate, TemplateRefused):
            self._form = replace(self._form, system_role="user")
            self._stems.clear()
            self._openings["system"], self._closings["system"] = self._openings["user"], self._closings["user"]


def _without(text: str, end: str) -> str:
    """`text` without its `end`. Raises TemplateRefused if it ends in another way."""
    if not text.endswith(end):
        raise TemplateRefused("the end of a message depends on its text")
    return text[: len(text) - len(end)]


def _common_end(texts: Sequence[str]) -> str:
    """The longest text that all of `texts` end with."""
    shortest = min(texts, key=len)
    start = next((start for start in range(len(shortest)) if all(text.endswith(shortest[start:]) for text in texts)), len(shortest))
    return shortest[start:]
