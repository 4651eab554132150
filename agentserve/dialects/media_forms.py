"""Conversations with media, brought to the chat form that engines take. Each function gives None where there are no media, unless
conversations `always` go that way.

Looking for a media type costs one search of the bytes; only where one is named are the messages decoded whole. Images keep their place in
the user's text. Those in a tool's result follow it in a message of the user's, as chat has no other place for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from agentserve.errors import InvalidRequest, Unsupported

CHAT_TYPES = ("image_url", "input_audio", "audio_url", "video_url", "file")
MESSAGES_TYPES = ("image", "document")
RESPONSES_TYPES = ("input_image", "input_file", "input_audio")
TEXT_TYPES = ("text", "input_text", "output_text")

Json = Any


def hints_at_media(body: bytes, types: Sequence[str]) -> bool:
    """Whether the body may hold media of these types: it has such a name as a key or a value."""
    return any(f'"{name}"'.encode() in body for name in types)


def chat_media(messages: Sequence[msgspec.Raw], *, always: bool = False) -> list[Json] | None:
    """The messages of a chat, as they are. Raises InvalidRequest for media in no form that chat has."""
    found = _decoded(messages, CHAT_TYPES, always)
    for index, message in enumerate(found or ()):
        content = message.get("content") if isinstance(message, dict) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in CHAT_TYPES:
                _check_part(part, f"messages[{index}].content[{number}]")
    return found


def _check_part(part: dict[str, Json], at: str) -> None:
    kind = part["type"]
    value = part.get(kind)
    if value is None and "uuid" in part:  # the engine has it already
        return
    if not kind.endswith("_url"):
        is_good, wanted = isinstance(value, dict), "an object"
    else:
        is_good, wanted = isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("url"), str)), "an object with a url"
    if not is_good:
        raise InvalidRequest(f"{at}.{kind} must be {wanted}", param=f"{at}.{kind}")


def messages_media(system: msgspec.Raw, messages: Sequence[msgspec.Raw], *, always: bool = False) -> list[Json] | None:
    """The messages of Anthropic's dialect. Raises Unsupported for media that chat has no form for."""
    found = _decoded(messages, MESSAGES_TYPES, always)
    if found is None:
        return None
    head = msgspec.json.decode(system) if bytes(system) else None
    texts = [head] if isinstance(head, str) else [block.get("text") or "" for block in head or ()]
    chat: list[Json] = [{"role": "system", "content": "\n\n".join(texts)}] if any(texts) else []
    for message in found:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        chat += _assistant(blocks) if message["role"] == "assistant" else _user(message["role"], blocks)
    return chat


def responses_media(instructions: str | None, items: Iterable[bytes], *, always: bool = False) -> list[Json] | None:
    """The items of the Responses dialect. Raises Unsupported for media that chat has no form for."""
    found = _decoded([msgspec.Raw(item) for item in items], RESPONSES_TYPES, always)
    if found is None:
        return None
    chat: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    turn: dict[str, Json] | None = None
    for item in found:
        if (item.get("type") in ("reasoning", "function_call")) or item.get("role") == "assistant":
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                chat.append(turn)
            _say(turn, item)
        else:
            turn = None
            chat += _item(item)
    return chat


def _decoded(raws: Sequence[msgspec.Raw], types: Sequence[str], always: bool) -> list[Json] | None:
    if not always and not any(hints_at_media(bytes(raw), types) for raw in raws):
        return None
    decoded = [msgspec.json.decode(raw) for raw in raws]
    return decoded if always or any(_holds(message, types) for message in decoded) else None


def _holds(message: Json, types: Sequence[str]) -> bool:
    """Whether a part of the message's content, or of a result in it, is of one of the types."""
    if not isinstance(message, dict):
        return False
    parts = [part for name in ("content", "output") if isinstance(value := message.get(name), list) for part in value]
    return any(isinstance(part, dict) and (part.get("type") in types or _holds(part, types)) for part in parts)


def _user(role: str, blocks: Sequence[Json]) -> list[Json]:
    """Results as tool messages, then the rest and what the results held beside text."""
    chat: list[Json] = []
    parts: list[Json] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            parts.append(_block(block))
            continue
        content = block.get("content") or ""
        inner = [{"type": "text", "text": content}] if isinstance(content, str) else [_block(one) for one in content]
        chat.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": _texts(inner)})
        parts += [part for part in inner if part["type"] != "text"]
    return [*chat, {"role": role, "content": parts}] if parts else chat


def _block(block: Json) -> Json:
    """A block of Anthropic's as a part of chat."""
    said = block.get("source")
    source = said if isinstance(said, dict) else {}
    match block.get("type"), source.get("type"):
        case "text", _:
            return {"type": "text", "text": block.get("text") or ""}
        case "image", "url" if not isinstance(source.get("url"), str):
            raise InvalidRequest("an image with a source of type 'url' must have a url", param="messages")
        case "image", "base64" if not isinstance(source.get("data"), str):
            raise InvalidRequest("an image with a source of type 'base64' must have its data as text", param="messages")
        case "image", "base64":
            return _image(f"data:{source.get('media_type')};base64,{source.get('data')}")
        case "image", "url":
            return _image(source.get("url"))
        case "document", "text":
            return {"type": "text", "text": source.get("data") or ""}
    raise Unsupported(
        f"a block of type {block.get('type')!r} with a source of type {source.get('type')!r} is not supported", param="messages"
    )


def _assistant(blocks: Sequence[Json]) -> list[Json]:
    said: dict[str, Json] = {
        "role": "assistant",
        "content": "".join(block.get("text") or "" for block in blocks if block["type"] == "text"),
    }
    thoughts = "".join(block.get("thinking") or "" for block in blocks if block["type"] == "thinking")
    calls = [_call(block.get("id"), block.get("name"), _text_of(block.get("input"))) for block in blocks if block["type"] == "tool_use"]
    return [{**said, **({"reasoning": thoughts} if thoughts else {}), **({"tool_calls": calls} if calls else {})}]


def _say(turn: dict[str, Json], item: Json) -> None:
    """Add an output item to a turn of the assistant."""
    match item.get("type"):
        case "reasoning":
            thought = "".join(part.get("text") or "" for part in item.get("content") or item.get("summary") or ())
            turn["reasoning"] = turn.get("reasoning", "") + thought
        case "function_call":
            turn.setdefault("tool_calls", []).append(_call(item.get("call_id"), item.get("name"), item.get("arguments") or "{}"))
        case _:
            content = item.get("content") or ""
            turn["content"] += content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _item(item: Json) -> list[Json]:
    """An input item that is not the assistant's."""
    if item.get("type") != "function_call_output":
        content = item.get("content") or ""
        return [{"role": item.get("role"), "content": content if isinstance(content, str) else [_part(part) for part in content]}]
    output = item.get("output") or ""
    inner = [{"type": "text", "text": output}] if isinstance(output, str) else [_part(part) for part in output]
    media = [part for part in inner if part["type"] != "text"]
    result = {"role": "tool", "tool_call_id": item.get("call_id") or "", "content": _texts(inner)}
    return [result, {"role": "user", "content": media}] if media else [result]


def _part(part: Json) -> Json:
    """A part of Responses as a part of chat."""
    kind = part.get("type")
    if kind in TEXT_TYPES:
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return _image(part["image_url"])
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise Unsupported(f"a part of type {kind!r} in this form is not supported: send images by image_url", param="input")


def _image(url: Json) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def _call(call_id: Json, name: Json, arguments: str) -> Json:
    return {"id": call_id or "", "type": "function", "function": {"name": name or "", "arguments": arguments}}


def _text_of(value: Json) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value or {}).decode()


def _texts(parts: Iterable[Json]) -> str:
    return "".join(part["text"] for part in parts if part["type"] == "text")
