"""The canonicaliser on the server: sessions whose clients disturb their heads stay exact, and real changes are honoured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from model.conversation import ToolCall
from tests.real_engine import RealEngine
from tests.scripted import asked, assert_nothing_is_held, starts_with
from tests.serving import Reply, Served, chat, serving
from tests.test_canonical_rules import shuffled
from tests.test_turns import result, user
from tests.upstream import FormatRenderer, LoggedRequest, Script, Upstream

pytestmark = pytest.mark.anyio

RULES = "You are the coding agent of a shop.\n" + "".join(f"Rule {i}: keep change {i} small, run the tests.\n" for i in range(70))
SESSION = {"x-session-id": "s"}


def function(name: str) -> dict[str, Any]:
    properties = {"path": {"type": "string", "description": "a path"}, "lines": {"type": "integer"}, "mode": {"enum": ["r", "w"]}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = [function("read_file"), function("run_cmd"), function("search")]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def prompt_text(request: LoggedRequest, renderer: FormatRenderer) -> str:
    return renderer.decode_bytes(request.prompt_ids).decode()


async def session(served: Served, upstream: Upstream, head: Callable[[int], dict[str, Any]], num_turns: int = 8) -> list[Reply]:
    """A tool loop of one session; `head(turn)` gives the system text and tools of each request."""
    history: list[dict[str, Any]] = [user("Fix the total of the cart.")]
    replies = []
    for number in range(num_turns):
        calls = (ToolCall("", "read_file", {"path": f"{number}.py"}),) if number % 2 == 0 else ()
        upstream.script(Script(say=f"Answer {number}.", reason="Let me see.\n", calls=calls))
        disturbed = {"tools": TOOLS, **head(number)}
        reply = await chat(served.url, [system(disturbed.pop("system")), *history], stream=False, headers=SESSION, **disturbed)
        assert reply.status == 200
        replies.append(reply)
        following = [result(call, f"text {number}") for call in reply.message.get("tool_calls", ())] or [user(f"Go on, {number}.")]
        history += [reply.message, *following]
    return replies


def shuffled_tools(number: int) -> list[dict[str, Any]]:
    rng = random.Random(number)
    tools: list[dict[str, Any]] = shuffled(TOOLS, rng)
    rng.shuffle(tools)
    for tool in tools:
        tool["cache_control"] = {"type": "ephemeral"}
    return tools


DISTURBANCES: dict[str, Callable[[int], dict[str, Any]]] = {
    "billing_line": lambda n: {"system": f"x-anthropic-billing-header: cc_version=2.1; cch={n:05x};\n\n{RULES}"},
    "token_countdown": lambda n: {
        "system": RULES + "".join(f"\n<total_tokens>{900_000 - 2_588 * i} tokens left</total_tokens>" for i in range(n + 1))
    },
    "clock": lambda n: {"system": f"{RULES}\nThe current date and time is Tuesday, March 3, 2026 10:{41 + n} AM."},
    "date": lambda n: {"system": f"Today's date: 2026-03-{3 + n:02d}\n{RULES}"},
    "git_status": lambda n: {"system": f"{RULES}\n\ngitStatus: branch main\n M src/cart.py\n" + "".join(f"?? {i}.txt\n" for i in range(n))},
    "memory_order": lambda n: {
        "system": f"{RULES}<memories>\n" + "".join(f"- {m}\n" for m in random.Random(n).sample(["a", "b", "c"], 3)) + "</memories>"
    },
    "reminder_order": lambda n: {
        "system": RULES + "\n".join(random.Random(n).sample(["<reminder>a</reminder>", "<reminder>b</reminder>"], 2))
    },
    "schema_keys": lambda n: {"system": RULES, "tools": shuffled(TOOLS, random.Random(n))},
    "tool_order": lambda n: {"system": RULES, "tools": random.Random(n).sample(TOOLS, 3)},
    "cache_control": lambda n: (
        {
            "system": RULES,
            "tools": [
                {**tool, "function": {**tool["function"], "parameters": {**tool["function"]["parameters"], **mark}}} for tool in TOOLS
            ],
        }
        if (mark := {"cache_control": {"type": "ephemeral", "ttl": f"{n}h"}} if n % 2 else {}) is not None
        else {}
    ),
}
EVERYTHING: Callable[[int], dict[str, Any]] = lambda n: {  # noqa: E731 - stands beside the rows above
    "system": "\n\n".join(
        str(DISTURBANCES[name](n)["system"]).replace(RULES, "") for name in ("billing_line", "date", "clock", "memory_order", "git_status")
    )
    + f"\n{RULES}",
    "tools": shuffled_tools(n),
}


@pytest.mark.slow
@pytest.mark.case("PFX-01", "PFX-03", "PFX-04", "PFX-06", "PFX-09", "PFX-10")
@pytest.mark.parametrize("name", [*DISTURBANCES, "all at once"])
async def test_a_session_whose_head_is_disturbed_every_turn_stays_exact(served: Served, upstream: Upstream, name: str) -> None:
    replies = await session(served, upstream, DISTURBANCES.get(name, EVERYTHING))
    assert [reply.turn for reply in replies] == ["first", *["exact"] * (len(replies) - 1)]
    requests = asked(upstream)
    assert all(starts_with(later, earlier) for earlier, later in pairwise(requests))
    for reply in replies[1:]:
        assert reply.usage is not None
        assert set(reply.usage["agentserve"]["missed_tokens"]) <= {"new", "tail"}
        assert reply.usage["agentserve"]["encoded_tokens"] < 400
    if name in DISTURBANCES:
        fired = [reply.usage["agentserve"].get("canonicalised", {}).get(name, 0) for reply in replies if reply.usage]
        assert sum(count > 0 for count in fired) >= len(replies) // 2 - 1
        shown = next(reply for reply, count in zip(replies, fired, strict=True) if count)
        assert f"{name}={next(filter(None, fired))}" in shown.headers["x-agentserve-canonicalised"].split(",")


@pytest.mark.case("PFX-04")
async def test_without_the_rules_the_same_session_loses_its_head_and_the_books_say_why(
    upstream: Upstream, model_folder: Path, renderer: FormatRenderer
) -> None:
    with serving(upstream.url, model_folder, canonicalise_mode="off") as served:
        replies = await session(served, upstream, DISTURBANCES["clock"], num_turns=4)
        assert_nothing_is_held(served)
    assert all("x-agentserve-canonicalised" not in reply.headers for reply in replies)
    for number, (reply, request) in enumerate(zip(replies, asked(upstream), strict=True)):
        assert f"{RULES}\nThe current date and time is Tuesday, March 3, 2026 10:{41 + number} AM." in prompt_text(request, renderer)
        assert reply.usage is not None
        account, cached = reply.usage["agentserve"], reply.usage["prompt_tokens_details"]["cached_tokens"]
        assert sum(account["missed_tokens"].values()) == reply.usage["prompt_tokens"] - cached
        if number:
            before = asked(upstream)[number - 1]
            lost = len(before.prompt_ids) + len(before.generated_ids) - account["ceiling_tokens"]
            assert lost > 100
            assert abs(account["missed_tokens"]["volatile"] - lost) <= 5
            assert "client_edit" not in account["missed_tokens"]


@pytest.mark.parametrize("mode", ["off", "single"])
async def test_rules_that_are_off_pass_heads_exactly(upstream: Upstream, model_folder: Path, renderer: FormatRenderer, mode: str) -> None:
    text = str(EVERYTHING(1)["system"])
    flags: dict[str, Any] = {"canonicalise_mode": "off"} if mode == "off" else {"canonicalise_off": ["clock", "git_status", "schema_keys"]}
    with serving(upstream.url, model_folder, **flags) as served:
        tools = shuffled(TOOLS, random.Random(3))
        await chat(served.url, [system(text), user("Do it.")], stream=False, tools=tools)
        shown = prompt_text(asked(upstream)[0], renderer)
        assert all(json.dumps(_named_first(tool["function"])) in shown for tool in tools)
        if mode == "off":
            assert text in shown
        else:
            assert "cch=" not in shown
            assert shown.index("10:42 AM") < shown.index("Rule 1") < shown.index("Do it.") < shown.index("2026-03-04")


def _named_first(form: dict[str, Any]) -> dict[str, Any]:
    return {name: form[name] for name in ("name", "description", "parameters")}


@pytest.mark.case("PFX-04")
async def test_a_note_follows_the_message_that_was_newest_and_stays_there(
    served: Served, upstream: Upstream, renderer: FormatRenderer
) -> None:
    minutes = [41, 41, 42, 41]
    await session(served, upstream, lambda n: {"system": f"{RULES}\nCurrent time: 2026-03-03 10:{minutes[n]}"}, num_turns=4)
    texts = [prompt_text(request, renderer) for request in asked(upstream)]
    assert [text.count("Current time: 2026-03-03 10:41") for text in texts] == [1, 1, 1, 2]
    assert [text.count("Current time: 2026-03-03 10:42") for text in texts] == [0, 0, 1, 1]
    head, _, rest = texts[2].partition("Fix the total of the cart.")
    assert "Current time" not in head
    assert rest.index("10:41") < rest.index("Answer 0.") < rest.index("Go on, 1.") < rest.index("10:42")
    assert "10:42" in renderer.decode_bytes(asked(upstream)[2].prompt_ids[-64:]).decode("utf-8", "replace")


@pytest.mark.case("PFX-01", "PFX-03")
async def test_user_and_tool_text_passes_byte_for_byte(served: Served, upstream: Upstream, renderer: FormatRenderer) -> None:
    volatile = (
        "x-anthropic-billing-header: cch=1;\n<total_tokens>5 tokens left</total_tokens>\nToday's date: 2026-03-03\n"
        "Current time: 10:41\n<memories>\n- b\n- a\n</memories>\ngitStatus: branch main\n M a.py"
    )
    upstream.script(Script(calls=(ToolCall("", "read_file", {"path": "a"}),)))
    first = await chat(served.url, [system(RULES), user(volatile)], stream=False, tools=TOOLS)
    messages = [system(RULES), user(volatile), first.message, result(first.message["tool_calls"][0], volatile), system(volatile)]
    reply = await chat(served.url, messages, stream=False, tools=TOOLS)
    assert prompt_text(asked(upstream)[1], renderer).count(volatile) == 3
    assert reply.turn == "exact"
    assert "x-agentserve-canonicalised" not in reply.headers


async def test_a_real_edit_of_the_system_text_is_another_head(served: Served, upstream: Upstream, renderer: FormatRenderer) -> None:
    clock = "\nCurrent time: 10:{}"
    replies = await session(served, upstream, lambda n: {"system": (RULES if n < 2 else f"{RULES}New rule.\n") + clock.format(41 + n)}, 4)
    assert [reply.turn for reply in replies] == ["first", "exact", "edited", "exact"]
    assert "New rule." in prompt_text(asked(upstream)[2], renderer)
    assert replies[2].usage is not None
    assert replies[2].usage["agentserve"]["missed_tokens"]["client_edit"] > 0


async def test_sessions_of_different_days_share_one_head(served: Served, upstream: Upstream) -> None:
    for day in (3, 4):
        head = system(f"Today's date: 2026-03-{day:02d}\n{RULES}")
        reply = await chat(served.url, [head, user(f"Job {day}.")], stream=False, headers={"x-session-id": f"day {day}"})
    assert reply.usage is not None
    head_tokens = reply.usage["agentserve"]["ceiling_tokens"]
    assert head_tokens > 0.9 * reply.usage["prompt_tokens"]
    first, second = (request.prompt_ids for request in asked(upstream))
    assert first[:head_tokens] == second[:head_tokens]


@pytest.mark.case("PFX-14")
async def test_lines_of_a_session_move_when_their_rule_is_on(upstream: Upstream, model_folder: Path, renderer: FormatRenderer) -> None:
    shares = {}
    for name, on in (("off", []), ("on", ["session_lines"])):
        with serving(upstream.url, model_folder, canonicalise_on=on) as served:
            for number in ("aaaa", "bbbb"):
                await chat(served.url, [system(f"Log file: /tmp/s/0190-{number}.jsonl\n{RULES}"), user(f"Job {number}.")], stream=False)
        first, second = (request.prompt_ids for request in asked(upstream)[-2:])
        common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        shares[name] = common / len(second)
        assert "0190-bbbb" in prompt_text(asked(upstream)[-1], renderer)
    assert shares["on"] > 0.9
    assert shares["off"] < 0.5


@pytest.mark.case("PFX-09", "PFX-10")
async def test_tools_in_another_form_are_the_same_tokens(served: Served, upstream: Upstream) -> None:
    for number in range(6):
        await chat(served.url, [system(RULES), user("hi")], stream=False, tools=shuffled_tools(number) if number else TOOLS)
    assert len({request.prompt_ids for request in asked(upstream)}) == 1
    changed = [TOOLS[0], {**TOOLS[1], "function": {**TOOLS[1]["function"], "description": "Else."}}, TOOLS[2]]
    await chat(served.url, [system(RULES), user("hi")], stream=False, tools=changed)
    assert len({request.prompt_ids for request in asked(upstream)}) == 2


@pytest.mark.case("PFX-11")
async def test_another_set_of_tools_costs_one_cold_head_and_going_back_hits_again(
    served: Served, upstream: Upstream, renderer: FormatRenderer
) -> None:
    sets = [TOOLS[:1], TOOLS[:2], TOOLS[:1], TOOLS[:2], TOOLS[:2]]
    replies = await session(served, upstream, lambda n: {"system": RULES, "tools": sets[n]}, num_turns=5)
    requests = asked(upstream)
    for request, tools in zip(requests, sets, strict=True):
        shown = prompt_text(request, renderer)
        assert [f'"name": "{tool["function"]["name"]}"' in shown for tool in TOOLS] == [tool in tools for tool in TOOLS]
    head_ends = {len(node.head.tools): node.end for node in served.server.namespaces.of(None).ledger.nodes() if node.parent is None}
    ceilings = [reply.usage["agentserve"]["ceiling_tokens"] for reply in replies if reply.usage]
    cold = [ceiling < head_ends[len(tools)] for ceiling, tools in zip(ceilings, sets, strict=True)]
    assert cold == [True, True, False, False, False]
    assert requests[2].prompt_ids[: len(requests[0].prompt_ids)] == requests[0].prompt_ids
    assert starts_with(requests[4], requests[3])


async def test_a_retry_at_another_minute_keeps_the_message_and_an_older_answer_is_still_found(served: Served, upstream: Upstream) -> None:
    long = user("word " * 300)
    answers = []
    for minute, text in ((41, "left"), (42, "right")):
        upstream.script(Script(say=text))
        answers.append(await chat(served.url, [system(f"{RULES}Current time: 10:{minute}"), long], stream=False, headers=SESSION))
    assert [answer.turn for answer in answers] == ["first", "retry"]
    assert answers[1].usage is not None
    assert answers[1].usage["agentserve"]["ceiling_tokens"] > answers[0].usage["prompt_tokens"] - 40 if answers[0].usage else False
    for number, answer in enumerate(answers):
        head = system(f"{RULES}Current time: 10:{50 + number}")
        more = await chat(served.url, [head, long, answer.message, user("Go on.")], stream=False, headers=SESSION)
        assert more.turn == "exact"
        assert starts_with(asked(upstream)[-1], asked(upstream)[number])


async def test_metrics_count_matches_and_characters_by_rule(served: Served) -> None:
    line = "x-anthropic-billing-header: cch=1;"
    for _ in range(2):
        await chat(served.url, [system(f"{line}\n{RULES}"), user("hi")], stream=False)
    async with aiohttp.ClientSession() as http:
        lines = (await (await http.get(f"{served.url}/metrics")).text()).splitlines()
    assert 'agentserve_canonicalised_total{rule="billing_line"} 2.0' in lines
    assert f'agentserve_canonicalised_characters_total{{rule="billing_line"}} {2.0 * (len(line) + 1)}' in lines


@pytest.mark.case("PFX-01", "PFX-04", "PFX-06", "PFX-09", "PFX-10")
async def test_on_a_real_engine_a_disturbed_session_hits_its_block_ceiling(engine: RealEngine) -> None:
    with serving(engine.url, engine.model_folder) as served:
        history = [user("Fix the total of the cart.")]
        for number in range(6):
            head = EVERYTHING(number)
            messages = [system(str(head["system"])), *history]
            reply = await chat(served.url, messages, stream=number % 2 == 0, headers=SESSION, tools=head["tools"], max_tokens=24)
            assert reply.usage is not None
            account, cached = reply.usage["agentserve"], reply.usage["prompt_tokens_details"]["cached_tokens"]
            assert reply.turn == ("exact" if number else "first")
            if number:
                assert account["ceiling_tokens"] > 0.9 * reply.usage["prompt_tokens"]
                assert cached == account["ceiling_block_tokens"]
            history += [reply.message, user(f"Go on, {number}.")]
