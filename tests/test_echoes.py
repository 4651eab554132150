"""Answers come back as clients write them: escaped, trimmed, cut, inline or in other fields. Their ids stay what they were."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from model.conversation import AssistantItem, Head, Tool, ToolCall, ToolResultItem, UserItem
from tests.dialect_forms import FORMS, Form
from tests.processes import wait_until
from tests.real_engine import RealEngine
from tests.scripted import asked, assert_nothing_is_held, post, starts_with
from tests.serving import Served, chat, serving
from tests.test_turns import SYSTEM, TOOLS, result, user
from tests.upstream import FormatRenderer, KvModel, Script, Upstream, UsageOverride, in_thread

pytestmark = pytest.mark.anyio

every_form = pytest.mark.parametrize("form", FORMS, ids=["chat", "messages", "responses"])

TRICKY = ["echo café > /tmp/x && grep -n '<b>' a.html", '\\d+\\n "quoted" \t\x01', "🛒 \u2028 naïve", "C:\\new\ttable", "a/b//c\n\n", ""]


def escapings(arguments: dict[str, Any]) -> list[str]:
    """The same JSON value as serialisers of several languages write it."""
    plain = json.dumps(arguments, ensure_ascii=False)
    return [
        json.dumps(arguments, ensure_ascii=True),
        json.dumps(dict(reversed(arguments.items())), ensure_ascii=False, separators=(",", ":")),
        plain.replace("/", "\\/"),
        plain.replace("<", "\\u003c").replace(">", "\\u003E").replace("&", "\\u0026").replace("'", "\\u0027"),
        json.dumps(arguments, indent=4).replace("\\t", "\\u0009"),
    ]


@pytest.mark.case("TOK-05")
@pytest.mark.parametrize("text", TRICKY)
async def test_arguments_in_any_escaping_keep_their_ids(served: Served, upstream: Upstream, text: str) -> None:
    arguments: dict[str, Any] = {"path": text, "lines": 3}
    upstream.script(Script(say="", calls=(ToolCall("", "read_file", arguments),)))
    first = await chat(served.url, [SYSTEM, user("go")], stream=False, tools=TOOLS)
    (call,) = first.message["tool_calls"]
    assert msgspec.json.decode(call["function"]["arguments"]) == arguments
    for number, written in enumerate(escapings(arguments)):
        assert json.loads(written) == arguments  # noqa: TID251 - the standard library's reading is the other opinion here
        echo = {**first.message, "tool_calls": [{**call, "function": {**call["function"], "arguments": written}}]}
        again = await chat(served.url, [SYSTEM, user("go"), echo, result(call, f"text {number}")], stream=False, tools=TOOLS)
        assert again.turn in ("exact", "edited")  # each form after the first is a branch beside the one before
        assert starts_with(asked(upstream)[-1], asked(upstream)[0])


@pytest.mark.case("TOK-07")
async def test_empty_content_in_any_form_is_the_same_prompt(served: Served, upstream: Upstream, renderer: FormatRenderer) -> None:
    """In histories from elsewhere, and in echoes of an answer given here."""
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
    empty: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {"content": []}, {}]
    with_calls: list[dict[str, Any]] = [{"tool_calls": [call], **content} for content in empty]
    without_calls: list[dict[str, Any]] = [{"tool_calls": []}, {"tool_calls": None}, {}]
    with_text = [{"content": "Seen.", **calls} for calls in without_calls]
    prompts = set()
    for number, form in enumerate(with_calls):
        history = [SYSTEM, user("go"), {"role": "assistant", **form}, result(call, "text"), {"role": "assistant", **with_text[number % 3]}]
        named = {"x-session-id": f"copy {number}"}
        reply = await chat(served.url, [*history, user("on")], stream=False, tools=TOOLS, headers=named)
        assert reply.status == 200
        prompts.add(asked(upstream)[-1].prompt_ids)
    assert len(prompts) == 1
    shown = renderer.decode_bytes(prompts.pop()).decode().partition("go")[2]
    assert ("None" in shown, "null" in shown, shown.count("a.py"), shown.count("Seen.")) == (False, False, 1, 1)
    upstream.script(Script(say="", calls=(ToolCall("", "read_file", {"path": "b.py"}),)))
    first = await chat(served.url, [user("hi")], stream=False, tools=TOOLS)
    given = asked(upstream)[-1]
    for form in with_calls:
        echo = {"role": "assistant", **form, "tool_calls": first.message["tool_calls"]}
        again = await chat(served.url, [user("hi"), echo, result(first.message["tool_calls"][0], "text")], stream=False, tools=TOOLS)
        assert again.turn in ("exact", "retry")
        assert starts_with(asked(upstream)[-1], given)


def thoughts(message: dict[str, Any], tag: str) -> list[dict[str, Any]]:
    """An answer with its reasoning under each name, inline as some clients keep it, and left out."""
    reasoning, content = message["reasoning"], message["content"]
    bare = {"role": "assistant", "content": content}
    return [
        {**bare, "reasoning": reasoning},
        {**bare, "reasoning_content": reasoning},
        {**bare, "reasoning": reasoning, "reasoning_content": reasoning},
        {**bare, "content": f"<{tag}>{reasoning}</{tag}>{content}"},
        {**bare, "content": f"<{tag}>\n{reasoning}\n</{tag}>\n\n{content}"},
        bare,
    ]


@pytest.mark.case("TOK-08", "TOK-09")
@pytest.mark.parametrize("tag", ["think", "mm:think", "thinking"])
async def test_a_thought_that_comes_back_anywhere_is_in_the_prompt_once(
    served: Served, upstream: Upstream, renderer: FormatRenderer, tag: str
) -> None:
    upstream.script(Script(say="It returns 0.", reason="Check the empty case."))
    first = await chat(served.url, [user("go")], stream=True)
    for form in thoughts(first.message, tag):
        again = await chat(served.url, [user("go"), form, user("on")], stream=True)
        assert again.turn in ("exact", "retry")
        assert starts_with(asked(upstream)[-1], asked(upstream)[0])
        assert renderer.decode_bytes(asked(upstream)[-1].prompt_ids).decode().count("Check the empty case.") == 1


@pytest.mark.case("TOK-09")
async def test_text_that_only_looks_like_a_thought_stays_text(served: Served, upstream: Upstream, renderer: FormatRenderer) -> None:
    for text in ("<think>as text</think>It is.", "<think>never closed", "<b></b><think>x</think>"):
        upstream.script(Script(say=text))
        first = await chat(served.url, [user(text)], stream=False)
        assert first.message["content"] == text
        again = await chat(served.url, [user(text), first.message, user("on")], stream=False)
        assert again.turn == "exact"
        foreign = await chat(served.url, [user("hi"), {"role": "assistant", "content": text}, user("on")], stream=False)
        assert foreign.status == 200
        assert text in renderer.decode_bytes(asked(upstream)[-1].prompt_ids).decode()


@pytest.mark.case("TOK-03")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dropped", [{0}, {3}, {5, 6, 7}])
async def test_an_engine_that_leaves_ids_out_fails_the_turn_and_teaches_the_ledger_nothing(
    served: Served, upstream: Upstream, dropped: set[int], stream: bool
) -> None:
    messages = [SYSTEM, user("go")]
    call = ToolCall("", "read_file", {"path": "src/cart.py"})
    script = Script(say="Reading it.", calls=(call,))
    upstream.script(replace(script, drop_ids_in_chunks=frozenset(dropped)), script)
    broken = await chat(served.url, messages, stream=stream, tools=TOOLS)
    assert broken.error is not None
    assert (broken.finish_reason, broken.done and stream) == (None, False)
    assert all(not node.generated for node in served.server.namespaces.of(None).ledger.nodes())
    whole = await chat(served.url, messages, stream=stream, tools=TOOLS)
    (form,) = whole.message["tool_calls"]
    again = await chat(served.url, [*messages, whole.message, result(form, "def total(): ...")], stream=stream, tools=TOOLS)
    assert again.turn == "exact"
    assert starts_with(asked(upstream)[-1], asked(upstream)[-2])


@pytest.mark.case("SES-11", "SSE-05")
@pytest.mark.parametrize("cut", ["alpha beta ga", "alpha", "alpha beta gamma delta "])
async def test_an_answer_that_the_user_stopped_keeps_the_ids_of_its_whole_words(
    served: Served, upstream: Upstream, renderer: FormatRenderer, cut: str
) -> None:
    words = ["alpha", " be", "ta", " gam", "ma", " del", "ta", " epsilon", " zeta", " eta"]
    ids = tuple(token for word in words for token in renderer.encode(word))
    assert ids != tuple(renderer.encode("".join(words)))
    unheard = 400 * tuple(renderer.encode(" theta"))  # the user stops long before it, however late the test sees the time to stop
    upstream.script(Script(ids=(*ids, *unheard, renderer.stop_id), itl_seconds=0.05))
    body = {"messages": [SYSTEM, user("List.")], "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{served.url}/v1/chat/completions", json=body):
        assert await asyncio.to_thread(wait_until, lambda: bool(asked(upstream) and asked(upstream)[0].num_sent_chunks >= len(ids) - 1), 10)
    assert await asyncio.to_thread(wait_until, lambda: asked(upstream)[0].aborted_at is not None, 5.0)
    stopped = {"role": "assistant", "content": cut}
    reply = await chat(served.url, [SYSTEM, user("List."), stopped, user("shorter")], stream=True)
    assert reply.status == 200
    first, second = asked(upstream)
    kept = [word for number, word in enumerate(words) if cut.startswith("".join(words[: number + 1]))]
    whole = sum(len(renderer.encode(word)) for word in kept)
    assert second.prompt_ids[: len(first.prompt_ids) + whole] == (*first.prompt_ids, *ids[:whole])
    shown = renderer.decode_bytes(second.prompt_ids).decode()
    assert cut.strip() in shown
    assert "epsilon" not in shown
    more = await chat(served.url, [SYSTEM, user("List."), stopped, user("shorter"), reply.message, user("on")], stream=True)
    assert more.turn == "exact"
    assert starts_with(asked(upstream)[2], second)


@pytest.mark.case("TOK-13", "TOK-14")
@every_form
async def test_an_answer_cut_anywhere_is_gone_on_from_exactly(served: Served, upstream: Upstream, form: Form) -> None:
    """In its reasoning, its text, between and inside calls."""
    head = Head("s", (Tool("run_cmd", "Run.", {"type": "object", "properties": {"cmd": {"type": "string"}}}),))
    script = Script(say="Running it now.", reason="Let me run the tests.", calls=(ToolCall("", "run_cmd", {"cmd": "pytest -q tests"}),) * 2)
    for limit in (1, 3, 8, 12, 16, 24, 32, 48, 64):
        upstream.script(script)
        items: list[Any] = [UserItem(f"Run {limit}.")]
        reply = await post(served.url + form.path, {**form.body(head, items), "max_tokens": limit, "max_output_tokens": limit})
        assert reply.status == 200
        cut = form.said({**reply.body, "output": reply.body.get("output") or [], "content": reply.body.get("content", [])})
        items += [cut, *(ToolResultItem(call.id, "no such command") for call in cut.calls), UserItem("go on")]
        if cut == AssistantItem("", cut.reasoning):
            continue  # clients do not send back an answer that says nothing
        again = await post(served.url + form.path, form.body(head, items))
        assert (again.status, again.headers["x-agentserve-turn"]) == (200, "exact"), limit
        assert starts_with(asked(upstream)[-1], asked(upstream)[-2])


@pytest.mark.case("TOK-07", "TOK-11", "INP-12")
async def test_on_a_real_engine_odd_text_and_trimmed_echoes_stay_exact(engine: RealEngine) -> None:
    odd = "é e\u0301 \ufeff\u200b a\r\nb\rc\u00a0d Ω ﬁ   \n\t\n"
    with serving(engine.url, engine.model_folder) as served:
        messages = [SYSTEM, user(odd)]
        for number in range(4):
            reply = await chat(served.url, messages, stream=number % 2 == 0, max_tokens=24)
            assert reply.turn == ("exact" if number else "first")
            assert reply.usage is not None
            assert reply.usage["prompt_tokens_details"]["cached_tokens"] == reply.usage["agentserve"]["ceiling_block_tokens"]
            messages += [{"role": "assistant", "content": f"  {(reply.message['content'] or '').strip()}\n"}, user(odd)]


@pytest.mark.case("TOK-03")
async def test_the_count_of_an_honest_engine_fails_no_turn(model_folder: Path, renderer: FormatRenderer) -> None:
    """Also where the answer ends at a limit or a stop string, or the engine does not count at all."""
    with (
        in_thread(Upstream(renderer=renderer, kv=KvModel(num_blocks=256, block_size=32))) as upstream,
        serving(upstream.url, model_folder) as served,
    ):
        upstream.script(Script(say="one two three"), Script(say="one two three"), Script(say="one two", omit_usage=True))
        for fields in ({"max_tokens": 2}, {"stop": ["two"]}, {}):
            assert (await chat(served.url, [user("hi")], stream=True, **fields)).error is None
        upstream.script(Script(say="one", usage=UsageOverride(num_generated_tokens=99)))
        assert (await chat(served.url, [user("hi")], stream=True)).error is not None
        assert_nothing_is_held(served)


@pytest.mark.case("PAR-06")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["The quick br", "own", " fo", "x jumps"], "own fox", "The quick br"),
        (["The", " quick", " brown", " fox"], "fox", "The quick brown "),
        (["The", " quick brown", " fox"], "ick", "The qu"),
        (["STOP", " here"], "STOP", ""),
        (["Ünï 🛒", " and", " more"], "🛒 a", "Ünï "),
    ],
)
async def test_what_a_stop_string_hides_is_in_no_later_prompt(
    served: Served, upstream: Upstream, renderer: FormatRenderer, pieces: list[str], stop: str, shown: str, stream: bool
) -> None:
    encoded = [tuple(renderer.encode(piece)) for piece in pieces]
    upstream.script(Script(ids=(*(token for ids in encoded for token in ids), renderer.stop_id)))
    reply = await chat(served.url, [SYSTEM, user("Say it.")], stream=stream, stop=[stop])
    assert (reply.message["content"] or "", reply.finish_reason) == (shown, "stop")
    more = await chat(served.url, [SYSTEM, user("Say it."), reply.message, user("on")], stream=stream)
    assert more.turn == "exact"
    first, second = asked(upstream)
    whole = [ids for number, ids in enumerate(encoded) if shown.startswith("".join(pieces[: number + 1]))]
    kept = (*first.prompt_ids, *(token for ids in whole for token in ids))
    assert second.prompt_ids[: len(kept)] == kept
    behind = renderer.decode_bytes(second.prompt_ids[len(first.prompt_ids) :]).decode()
    assert behind.startswith(shown.rstrip())
    assert stop not in behind
    last = await chat(served.url, [SYSTEM, user("Say it."), reply.message, user("on"), more.message, user("on")], stream=stream)
    assert last.turn == "exact"
    assert starts_with(asked(upstream)[2], second)
