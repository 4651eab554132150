"""Items as the messages that chat templates take, and the shortest histories that end in each kind of message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import xxhash
from msgspec import structs

from model.chat.jinja_template import Message
from model.chat.marks import Marks
from model.conversation import AssistantItem, Item, SystemItem, Tool, ToolCall, ToolResultItem, UserItem

Kind: TypeAlias = Literal["user", "system", "assistant", "calls", "tool"]

LAST_WORD: dict[Kind, str] = {
    "user": "questionword",
    "system": "systemword",
    "assistant": "answerword",
    "calls": "argumentword",
    "tool": "resultword",
}
"""The text that stands last in the shortest history of each kind."""
CALL = ToolCall("call_0123456789abcdef01234567", "lookup", {"key": LAST_WORD["calls"]})
EXAMPLES: dict[Kind, Item] = {
    "user": UserItem(""),
    "system": SystemItem(""),
    "assistant": AssistantItem(),
    "calls": AssistantItem(calls=(CALL,)),
    "tool": ToolResultItem(CALL.id, ""),
}
"""What the shortest history of each kind ends with, without its texts."""
_ASKED: Message = {"role": "user", "content": LAST_WORD["user"]}
_SAID: Message = {"role": "assistant", "content": LAST_WORD["assistant"]}


def kind_of(item: Item) -> Kind:
    """What a template may write differently, whatever the texts are."""
    match item:
        case UserItem():
            return "user"
        case SystemItem():
            return "system"
        case ToolResultItem():
            return "tool"
        case AssistantItem(_, _, calls):
            return "calls" if calls else "assistant"


def function(tool: Tool, marks: Marks) -> Message:
    """A tool in OpenAI's form; what the client left out stays out."""
    fields: Message = {"name": marks.word(tool.name)}
    if tool.description:
        fields["description"] = marks.word(tool.description)
    if tool.parameters is not None:
        fields["parameters"] = marks.inside(tool.parameters)
    return {"type": "function", "function": fields}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What a template needs. `short_ids`: ids of calls as nine letters and digits (Mistral's templates take no others)."""

    system_role: Literal["system", "user"] = "system"
    short_ids: bool = False

    def message(self, item: Item, marks: Marks) -> Message:
        """`item` as a message. Text and reasoning take the first stand-ins, in this order."""
        match item:
            case UserItem(text):
                return {"role": "user", "content": marks.whole(text)}
            case SystemItem(text):
                return {"role": self.system_role, "content": marks.whole(text)}
            case ToolResultItem(call_id, text):
                return {"role": "tool", "content": marks.whole(text), "tool_call_id": self.id_of(call_id, marks)}
            case AssistantItem(text, reasoning, calls):
                message: Message = {"role": "assistant", "content": marks.whole(text)}
                if reasoning:
                    message["reasoning"] = message["reasoning_content"] = marks.whole(reasoning)
                if calls:
                    message["tool_calls"] = [self._call(call, marks) for call in calls]
                return message

    def shortest(self, kind: Kind, marks: Marks) -> list[Message]:
        """The shortest history that ends in a message of this kind."""
        match kind:
            case "user":
                return [_ASKED]
            case "assistant":
                return [_ASKED, _SAID]
            case "system":
                return [_ASKED, _SAID, {"role": self.system_role, "content": LAST_WORD["system"]}]
            case "calls":
                return self._with_calls((CALL,), marks)
            case "tool":
                return [*self._with_calls((CALL,), marks), self._result(CALL.id, marks)]

    def before(self, previous: Item | None, item: Item, marks: Marks) -> list[Message]:
        """The shortest history that ends like `previous` and that `item` may follow; `previous` may lack its texts."""
        match previous:
            case None:
                return []
            case AssistantItem(_, _, calls) if calls:
                return self._with_calls(tuple(structs.replace(call, arguments=CALL.arguments) for call in calls), marks)
            case ToolResultItem(call_id):
                ids = [call_id, item.call_id] if isinstance(item, ToolResultItem) else [call_id]  # of two results, both have their call
                return [*self._with_calls(tuple(structs.replace(CALL, id=id) for id in ids), marks), self._result(call_id, marks)]
            case _:
                return self.shortest(kind_of(previous), marks)

    def _with_calls(self, calls: tuple[ToolCall, ...], marks: Marks) -> list[Message]:
        return [_ASKED, {"role": "assistant", "content": "", "tool_calls": [self._call(call, marks) for call in calls]}]

    def _result(self, call_id: str, marks: Marks) -> Message:
        return {"role": "tool", "tool_call_id": self.id_of(call_id, marks), "content": LAST_WORD["tool"]}

    def _call(self, call: ToolCall, marks: Marks) -> Message:
        arguments = marks.inside(call.arguments if isinstance(call.arguments, dict) else {"text": call.arguments})
        return {
            "type": "function",
            "id": self.id_of(call.id, marks),
            "function": {"name": marks.word(call.name), "arguments": arguments},
        }

    def id_of(self, call_id: str, marks: Marks) -> str:
        """The id of a call as the template is given it."""
        return xxhash.xxh3_64_hexdigest(call_id.encode("utf-8", "replace"))[:9] if self.short_ids else marks.word(call_id)
