"""Bodies that begin like an earlier one are read from where that one ended, and mean exactly what they would mean read whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from agentserve.dialects.known_bodies import CHUNK_BYTES, KnownBodies
from agentserve.dialects.openai_chat import ChatConversation, parse, read
from agentserve.errors import InvalidRequest


def message(rng: random.Random, role: str) -> dict[str, Any]:
    text = "".join(rng.choice('abc é\\\n"[]{},:') for _ in range(rng.randrange(1, 4000)))
    if role == "assistant" and rng.random() < 0.5:
        calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": text})}} for i in range(2)]
        return {"role": role, "content": None, "tool_calls": calls}
    return {"role": role, "content": text}


def body(messages: list[dict[str, Any]], style: int) -> bytes:
    fields: dict[str, Any] = {
        "model": "m",
        "messages": messages,
        "stream": True,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    if style == 1:
        fields = dict(reversed(fields.items()))
    return json.dumps(fields, indent=2 if style == 2 else None, ensure_ascii=style != 1).encode()


def assert_same_as_whole(raw: bytes, got: ChatConversation) -> None:
    whole = ChatConversation(parse(raw))
    assert got.chain == whole.chain[got.first :]
    assert got.steps(got.first) == [(end, step) for end, step in whole.steps(got.first) if end > got.first]
    assert got.whole().head() == whole.head()


@pytest.mark.parametrize("style", [0, 1, 2], ids=["plain", "other field order, escaped", "indented"])
@pytest.mark.parametrize("seed", range(5))
def test_a_growing_history_is_read_from_its_last_end(seed: int, style: int) -> None:
    rng = random.Random(seed)
    bodies = KnownBodies()
    messages = [{"role": "system", "content": "s" * 20_000}, message(rng, "user")]
    num_known = 0
    for _ in range(12):
        raw = body(messages, style)
        _, got = read(raw, bodies)
        assert_same_as_whole(raw, got)
        num_known += got.first > 0
        assert got.first in (0, len(messages) - 3)
        messages += [message(rng, "assistant"), message(rng, "user")]
    assert num_known == 11


def test_the_same_body_again_has_nothing_left_to_read() -> None:
    bodies = KnownBodies()
    raw = body([{"role": "user", "content": "x" * 50_000}], 0)
    read(raw, bodies)
    request, again = read(raw, bodies)
    assert (request.messages, again.first, again.steps(1)) == ([], 1, [])
    assert request.stream is True
    assert_same_as_whole(raw, again)


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff"])
@pytest.mark.parametrize("size", [10, 50_000])
def test_a_body_with_half_a_surrogate_pair_is_read_and_so_is_what_grows_from_it(half: str, size: int) -> None:
    bodies = KnownBodies()
    start = b'{"messages":[{"role":"user","content":"%b%b"}' % (b"x" * size, half.encode())
    for tail in (
        b"",
        b',{"role":"assistant","content":"a"},{"role":"user","content":"b"}',
        b',{"role":"user","content":"%b"}' % half.encode(),
    ):
        _, got = read(start + tail + b"]}", bodies)
        assert_same_as_whole(start + tail + b"]}", got)


def test_forks_of_one_history_each_find_their_own_end() -> None:
    rng = random.Random(3)
    bodies = KnownBodies()
    shared = [{"role": "user", "content": "x" * (2 * CHUNK_BYTES)}, message(rng, "assistant")]
    forks = [[*shared, {"role": "user", "content": f"fork {number}"}] for number in range(8)]
    for fork in forks:
        read(body(fork, 0), bodies)
    for fork in forks:
        longer = [*fork, message(rng, "assistant"), {"role": "user", "content": "on"}]
        _, got = read(body(longer, 0), bodies)
        assert got.first == 3
        assert_same_as_whole(body(longer, 0), got)


def test_an_edit_anywhere_before_the_end_is_read_whole_or_from_an_earlier_end() -> None:
    rng = random.Random(4)
    bodies = KnownBodies()
    messages = [message(rng, role) for role in ("user", "assistant") * 10] + [{"role": "user", "content": "end"}]
    read(body(messages, 0), bodies)
    for index in range(len(messages)):
        edited = [*messages[:index], {"role": "user", "content": "edited"}, *messages[index + 1 :], message(rng, "user")]
        raw = body(edited, 0)
        _, got = read(raw, bodies)
        assert_same_as_whole(raw, got)


@pytest.mark.parametrize(
    ("tail", "param"),
    [
        (b",{]}", None),
        (b"", None),
        (b" x]}", None),
        (b',{"role":"robot"}]}', "messages[2].role"),
        (b',{"role":"user","content":7}]}', "messages[2].content"),
        (b',7],"stream":true}', "messages[2]"),
        (b'],"max_tokens":"x"}', "max_tokens"),
    ],
)
def test_errors_behind_a_known_beginning_name_the_place_in_the_whole_body(tail: bytes, param: str | None) -> None:
    bodies = KnownBodies()
    start = b'{"messages":[' + json.dumps({"role": "user", "content": "x" * 40_000}).encode() + b',{"role":"user","content":"y"}'
    read(start + b"]}", bodies)

    def attempt() -> None:
        _, conversation = read(start + tail, bodies)
        conversation.steps(conversation.first)

    with pytest.raises(InvalidRequest) as caught:
        attempt()
    assert caught.value.param == param
