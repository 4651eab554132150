"""What HTTP brings beside JSON: packed and chunked bodies, limits, clients that dawdle or leave. Raw sockets, the scripted upstream."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentserve.body import FORM_TYPES
from agentserve.dialects.json_body import MAX_DEPTH
from agentserve.web import MAX_HEAD_BYTES, web_server
from model.conversation import AssistantItem, Head, Item, Json, Tool, ToolCall, ToolResultItem, UserItem
from tests.dialect_forms import FORMS, Form
from tests.processes import wait_until
from tests.raw_client import RawAnswer, RawClient, chunked, post_head, raw_client
from tests.scripted import asked, assert_nothing_is_held
from tests.serving import Served, serving
from tests.test_codings import PACKERS, bomb, pack
from tests.upstream import Upstream

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()

every_form = pytest.mark.parametrize("form", FORMS, ids=["chat", "messages", "responses"])


def body_of(form: Form, text: str = "hi", **fields: Any) -> bytes:
    return json.dumps({**form.body(Head("s"), [UserItem(text)]), "max_tokens": 8, **fields}).encode()


def check_refused(answer: RawAnswer, path: str, status: int) -> None:
    """An error in the dialect of `path`."""
    assert answer.status == status, answer.body
    assert answer.error["message"]
    assert answer.error["type"]
    assert ("code" in answer.error) != path.startswith("/v1/messages")
    assert (msgspec.json.decode(answer.body).get("type") == "error") == path.startswith("/v1/messages")


# Codings and framing ------------------------------------------------------------------------------------------------------------------


@pytest.mark.case("HTTP-01")
@every_form
@pytest.mark.parametrize("coding", [*PACKERS, "gzip, zstd", "identity"])
async def test_a_packed_body_says_the_same_as_a_plain_one(served: Served, upstream: Upstream, form: Form, coding: str) -> None:
    body = body_of(form, "héllo " * 500)
    packed = pack([name for name in coding.split(", ") if name != "identity"], body)
    async with raw_client(served.url) as client:
        assert (await client.request(form.path, body)).status == 200
        assert (await client.request(form.path, packed, {"content-encoding": coding})).status == 200
        framed = post_head(form.path, {"content-encoding": coding, "transfer-encoding": "chunked"}) + chunked(packed, 7)
        await client.send(framed)
        assert (await client.answer()).status == 200
    assert len({request.prompt_ids for request in asked(upstream)}) == 1


async def test_codings_may_stand_in_two_headers(served: Served) -> None:
    packed = pack(["gzip", "zstd"], HELLO)
    head = post_head(CHAT, {"content-length": str(len(packed)), "content-encoding": "gzip"})
    async with raw_client(served.url) as client:
        await client.send(head.removesuffix(b"\r\n") + b"content-encoding: zstd\r\n\r\n" + packed)
        assert (await client.answer()).status == 200


@pytest.mark.slow
@pytest.mark.case("HTTP-01")
@every_form
async def test_bodies_that_cannot_be_unpacked_are_refused_and_the_connection_goes_on(
    served: Served, upstream: Upstream, form: Form
) -> None:
    body = body_of(form)
    async with raw_client(served.url) as client:
        for coding, data, status in (
            ("br", body, 415),
            ("gzip", body, 400),
            ("gzip", gzip.compress(body)[:-4], 400),
            ("zstd", b"\x28\xb5\x2f\xfd", 400),
            ("gzip", b"", 400),
            ("gzip", bomb("gzip"), 413),
            ("zstd", bomb("zstd"), 413),
        ):
            check_refused(await client.request(form.path, data, {"content-encoding": coding}), form.path, status)
        assert not asked(upstream)
        assert (await client.request(form.path, body)).status == 200


@pytest.mark.case("HTTP-02")
@every_form
async def test_bodies_are_taken_up_to_the_limit_however_they_are_framed(upstream: Upstream, model_folder: Path, form: Form) -> None:
    limit = 1_000_000
    exact = body_of(form, metadata={"pad": ""})
    exact = exact.replace(b'"pad": ""', b'"pad": "%s"' % (b"x" * (limit - len(exact))))
    assert len(exact) == limit
    with serving(upstream.url, model_folder, limits_body_bytes=limit) as served:
        for body, status in ((exact, 200), (exact + b" ", 413)):
            for headers, sent in (
                ({"content-length": str(len(body))}, body),
                ({"transfer-encoding": "chunked"}, chunked(body, 65_536)),
                ({"transfer-encoding": "chunked", "content-encoding": "zstd"}, chunked(pack(["zstd"], body), 50)),
            ):
                async with raw_client(served.url) as client:
                    await client.send(post_head(form.path, headers) + sent)
                    answer = await client.answer()
                    assert answer.status == status
                    if status != 200:
                        check_refused(answer, form.path, 413)
                    assert (await client.request(form.path, body_of(form))).status == 200
        assert_nothing_is_held(served)


@pytest.mark.case("HTTP-02")
async def test_a_chunked_body_of_8_mb_is_served(served: Served) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "metadata": {"pad": "word " * 1_600_000}}).encode()
    async with raw_client(served.url) as client:
        await client.send(post_head(CHAT, {"transfer-encoding": "chunked"}) + chunked(body, 65_536))
        assert (await client.answer()).status == 200


@pytest.mark.case("HTTP-04")
@every_form
async def test_a_client_that_asks_whether_to_go_on_is_told_at_once(served: Served, form: Form) -> None:
    body = body_of(form)
    expecting = {"expect": "100-continue", "content-length": str(len(body))}
    async with raw_client(served.url) as client:
        await client.send(post_head(form.path, expecting))
        async with asyncio.timeout(1):  # clients that hear nothing wait about as long, then send all the same
            assert (await client.head())[0] == 100
        await client.send(body)
        assert (await client.answer()).status == 200
        await client.send(post_head(form.path, {**expecting, "content-length": str(1 << 40)}))
        check_refused(await client.answer(), form.path, 413)


# Content ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.case("INP-02")
@every_form
async def test_a_body_that_is_not_utf_8_leaves_the_connection_usable(served: Served, upstream: Upstream, form: Form) -> None:
    async with raw_client(served.url) as client:
        check_refused(await client.request(form.path, body_of(form, "mark").replace(b"mark", b"\xff\xfe")), form.path, 400)
        assert not asked(upstream)
        assert (await client.request(form.path, body_of(form))).status == 200


@pytest.mark.case("INP-03")
@every_form
async def test_control_characters_arrive_as_they_were_sent(served: Served, upstream: Upstream, form: Form) -> None:
    odd = "W\0s\0l\0 \x01\b\x1b[31mred\x1b[0m \x7f\u2028\ufeff end"
    call = ToolCall("c1", "read_file", {"path": odd})
    items: list[Item] = [UserItem(odd), AssistantItem("", None, (call,)), ToolResultItem("c1", odd)]
    body = json.dumps({**form.body(Head(odd), items), "max_tokens": 8}).encode()
    async with raw_client(served.url) as client:
        assert (await client.request(form.path, body)).status == 200
    assert upstream.renderer.decode_bytes(asked(upstream)[-1].prompt_ids).decode().count(odd) == 4


def nested(depth: int) -> dict[str, Json]:
    schema: dict[str, Json] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.slow
@pytest.mark.case("INP-05")
@every_form
@pytest.mark.parametrize("depth", [50, 60, 70, 200, 400])
async def test_nested_schemas_and_arguments_are_served_up_to_the_written_depth(served: Served, form: Form, depth: int) -> None:
    """Each level of a schema is two objects; argument text that is deeper goes to the model as it is."""
    call = ToolCall("c1", "t", nested(depth))
    conversations: list[tuple[Head, list[Item], bool]] = [
        (Head("", (Tool("t", "", nested(depth)),)), [UserItem("x")], False),
        (Head(""), [UserItem("x"), AssistantItem("", None, (call,)), ToolResultItem("c1", "y")], form.path != "/v1/messages"),
    ]
    async with raw_client(served.url) as client:
        for head, items, is_text in conversations:
            answer = await client.request(form.path, json.dumps({**form.body(head, items), "max_tokens": 8}).encode())
            if is_text or 2 * depth + 5 < MAX_DEPTH:
                assert answer.status == 200
            else:
                check_refused(answer, form.path, 400)


@every_form
async def test_brackets_in_text_are_no_nesting(served: Served, form: Form) -> None:
    text = '[{"' * 1000 + "\\" * 3 + '"]' * 7
    async with raw_client(served.url) as client:
        assert (await client.request(form.path, body_of(form, text))).status == 200


@pytest.mark.case("INP-05")
@every_form
async def test_bottomless_nesting_is_refused(served: Served, form: Form) -> None:
    async with raw_client(served.url) as client:
        for part in (b"[" * 20_000 + b"]" * 20_000, b'{"a":' * 20_000 + b"1" + b"}" * 20_000, b"[" * 1_000_000):
            for body in (body_of(form)[:-1] + b', "x": ' + part + b"}", body_of(form)[:-1] + b', "tools": ' + part + b"}", part):
                check_refused(await client.request(form.path, body), form.path, 400)
        bottomless = ToolCall("c1", "t", "[" * 100_000)
        items: list[Item] = [UserItem("x"), AssistantItem("", None, (bottomless,)), ToolResultItem("c1", "y")]
        assert (await client.request(form.path, json.dumps(form.body(Head(""), items)).encode())).status in (200, 400)
        assert (await client.request(form.path, body_of(form))).status == 200


@pytest.mark.case("INP-06")
@every_form
async def test_of_a_key_that_comes_twice_the_last_value_counts(served: Served, upstream: Upstream, form: Form) -> None:
    field = b'"input"' if form.path == "/v1/responses" else b'"messages"'
    first, last = body_of(form, "first"), body_of(form, "last")
    list_of_first = first[first.index(field) : first.index(b"]", first.index(field)) + 1]
    async with raw_client(served.url) as client:
        assert (await client.request(form.path, b"{" + list_of_first + b", " + last[1:])).status == 200
    text = upstream.renderer.decode_bytes(asked(upstream)[-1].prompt_ids).decode()
    assert "last" in text
    assert "first" not in text


@pytest.mark.case("HTTP-06")
@every_form
async def test_what_web_pages_may_post_unasked_is_refused(served: Served, upstream: Upstream, form: Form) -> None:
    async with raw_client(served.url) as client:
        for kind in FORM_TYPES:
            check_refused(await client.request(form.path, body_of(form), {"content-type": f"{kind}; charset=utf-8"}), form.path, 415)
        assert not asked(upstream)
        for kind in ("application/json; charset=utf-8", "application/octet-stream"):
            assert (await client.request(form.path, body_of(form), {"content-type": kind})).status == 200


@pytest.mark.case("HTTP-06")
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/messages", b"", 405),
        ("PUT", CHAT, HELLO, 405),
        ("DELETE", "/v1/responses", b"", 405),
        ("POST", CHAT, b"", 400),
        ("POST", "/v1/messages", b"[]", 400),
        ("POST", "/v1/responses", b"null", 400),
        ("POST", "/v1/messages/unknown", HELLO, 404),
        ("POST", "/v1/unknown", HELLO, 404),
    ],
)
async def test_wrong_requests_get_an_error_in_the_dialect_of_the_path(
    served: Served, method: str, path: str, body: bytes, status: int
) -> None:
    async with raw_client(served.url) as client:
        await client.send(post_head(path, {"content-length": str(len(body))}).replace(b"POST", method.encode(), 1) + body)
        answer = await client.answer()
        check_refused(answer, path, status)
        assert (answer.headers.get("allow") == "POST") == (status == 405)
        assert (await client.request(CHAT, HELLO)).status == 200


# Time ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.case("HTTP-07")
async def test_slow_senders_are_cut_off_and_hold_up_nobody(upstream: Upstream, model_folder: Path) -> None:
    """Half of them dawdle in the head of their request, half in its body."""
    with serving(upstream.url, model_folder, limits_body_seconds=2) as served:
        async with AsyncExitStack() as stack:
            slow = [await stack.enter_async_context(raw_client(served.url)) for _ in range(200)]
            for number, client in enumerate(slow):
                whole = post_head(CHAT, {"content-length": str(len(HELLO))}) + HELLO
                await client.send(whole[: 40 if number % 2 else -5])
            trickling = [asyncio.ensure_future(trickle(client)) for client in slow]
            for _ in range(20):
                async with raw_client(served.url) as client:
                    assert (await client.request(CHAT, HELLO)).status == 200
            assert not any(task.done() for task in trickling)
            assert await asyncio.gather(*trickling) == [408] * 200
        assert len(asked(upstream)) == 20
        assert_nothing_is_held(served)


async def trickle(client: RawClient) -> int:
    """The status that a connection is given which has sent a part of its request; the connection must be closed after."""
    answer = await client.answer()
    await client.closed()
    return answer.status


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [(CHAT, {"content-encoding": "br"}, 415), (CHAT, {"authorization": "Bearer wrong"}, 401), ("/v1/unknown", {}, 404)],
)
async def test_who_was_refused_cannot_keep_sending_for_ever(
    upstream: Upstream, model_folder: Path, path: str, headers: dict[str, str], status: int
) -> None:
    with serving(upstream.url, model_folder, limits_body_seconds=0.5, api_keys=["key"]) as served:
        async with raw_client(served.url) as client, asyncio.timeout(5):
            authorized = {"authorization": "Bearer key", "content-length": "1000", **headers}
            await client.send(post_head(path, authorized) + b"{")
            assert (await client.answer()).status == status
            await client.closed()


@every_form
@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "in pieces"])
async def test_a_head_is_refused_from_its_first_byte_beyond_the_limit(served: Served, form: Form, *, in_pieces: bool) -> None:
    body = body_of(form)
    bare = len(post_head(form.path, {"content-length": str(len(body)), "x-long": ""}).removesuffix(b"\r\n"))
    for num_bytes, status in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431), (66_000, 431), (140_000, 431)):
        head = post_head(form.path, {"content-length": str(len(body)), "x-long": "a" * (num_bytes - bare)})
        async with raw_client(served.url) as client:
            if in_pieces and num_bytes <= MAX_HEAD_BYTES + 1:  # an endless head is refused, and its connection closed, before it is whole
                await client.send(head[:50_000])
                await asyncio.sleep(0.01)
                head = head[50_000:]
            await client.send(head + body)
            answer = await client.answer()
            if status != 200:
                check_refused(answer, form.path, status)
                await client.closed()
            assert answer.status == status, num_bytes


async def test_an_endless_head_is_refused(served: Served) -> None:
    async with raw_client(served.url) as client:
        await client.send(b"POST / HTTP/1.1\r\n")
        num_sent = number = 0
        while num_sent <= 2 * MAX_HEAD_BYTES:
            line = f"x-{number}: {'a' * 990}\r\n".encode()
            await client.send(line)
            num_sent, number = num_sent + len(line), number + 1
        check_refused(await client.answer(), "/", 431)
        await client.closed()


async def test_idle_connections_outlive_the_pools_of_clients(served: Served) -> None:
    assert web_server(served.server).config.timeout_keep_alive >= 75
    async with raw_client(served.url) as client:
        for pause_seconds in (0, 0.5, 1.5):
            await asyncio.sleep(pause_seconds)
            assert (await client.request(CHAT, HELLO)).status == 200


async def test_a_time_limit_on_requests_is_none_on_idle_connections(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, limits_body_seconds=0.3) as served:
        async with raw_client(served.url) as client:
            await asyncio.sleep(0.6)
            assert (await client.request(CHAT, HELLO)).status == 200
            await asyncio.sleep(0.6)
            assert (await client.request(CHAT, HELLO)).status == 200


# Clients that leave -------------------------------------------------------------------------------------------------------------------


@pytest.mark.case("HTTP-03")
@every_form
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
async def test_a_body_that_ends_early_leaves_nothing(served: Served, upstream: Upstream, form: Form, *, reset: bool) -> None:
    body = body_of(form)
    for head, part in (
        ({"content-length": "5000"}, body),
        ({"transfer-encoding": "chunked"}, chunked(body, 16).removesuffix(b"0\r\n\r\n")),
        ({"content-length": "5000", "content-encoding": "gzip"}, gzip.compress(body)),
    ):
        async with raw_client(served.url) as client:
            await client.send(post_head(form.path, head) + part)
            await asyncio.sleep(0.05)
            if reset:
                client.reset()
    async with raw_client(served.url) as client:
        assert (await client.request(CHAT, HELLO)).status == 200
    assert len(asked(upstream)) == 1
    assert served.server.namespaces.num_sessions == 1
    assert await asyncio.to_thread(wait_until, lambda: served.server.replicas.num_tickets == 0, 1)
