"""Scripted answers: written in the model's format, forced on a server, read back as calls, and answered with tool results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from model.conversation import AssistantItem, Tool
from replays.report import read_report
from replays.script import MARKER_BIAS, TOOLS, ToolScript, scripted_item
from tests.chat_upstream import ChatUpstream
from tests.chat_upstream import serving as serving_chat
from tests.real_engine import RealEngine
from tests.replaying import call, replay, session, subagent, written
from tests.serving import Served, serving


class FunctionForm(msgspec.Struct):
    name: str
    description: str
    parameters: dict[str, object]


class ToolForm(msgspec.Struct):
    function: FunctionForm


@pytest.fixture(scope="module")
def script(model_folder: Path) -> ToolScript:
    return ToolScript.load(model_folder)


def offered() -> list[Tool]:
    forms = msgspec.convert(TOOLS, list[ToolForm])
    return [Tool(form.function.name, form.function.description, msgspec.to_builtins(form.function.parameters)) for form in forms]


def said(script: ToolScript, text: str, controls: list[int]) -> AssistantItem:
    """What the server makes of `text` when the model says its markers as control tokens and spells the rest out byte by byte."""
    names = {script.tokenizer.token_bytes(control).decode(): control for control in controls}
    parser = script.chat.parser(offered())
    while text:
        name = next((name for name in names if text.startswith(name)), None)
        parser.feed([names[name]] if name else script.tokenizer.encode(text[0]))
        text = text[len(name or text[0]) :]
    parser.finish()
    return parser.item()


@pytest.mark.parametrize("calls_tools", [True, False])
def test_what_is_forced_is_read_back_as_the_same_answer(script: ToolScript, calls_tools: bool) -> None:
    seen: set[str] = set()
    for number in range(60):
        item = scripted_item(f"s/{number}", 20, calls_tools=calls_tools)
        text, controls = script.text(item)
        read = said(script, text, controls)
        assert (read.text, read.reasoning) == (item.text, item.reasoning)
        assert [(one.name, one.arguments) for one in read.calls] == [(one.name, one.arguments) for one in item.calls]
        assert bool(item.calls) == calls_tools
        seen |= {one.name for one in item.calls} | {f"{len(item.calls)} calls", f"reasoning {item.reasoning is not None}"}
    kinds = {"1 calls", "2 calls", *(tool.name for tool in offered())} if calls_tools else {"0 calls"}
    assert seen == kinds | {"reasoning True", "reasoning False"}


def test_an_answer_depends_on_its_key_alone_and_grows_with_the_recorded_one() -> None:
    assert scripted_item("s/1", 20, calls_tools=True) == scripted_item("s/1", 20, calls_tools=True)
    assert scripted_item("s/1", 20, calls_tools=True) != scripted_item("s/2", 20, calls_tools=True)
    lengths = [len((scripted_item("s/1", tokens, calls_tools=True).reasoning or "").split()) for tokens in (1, 20, 200, 20_000)]
    assert lengths == [3, 10, 100, 256]


def test_the_fields_allow_one_text_with_its_markers_as_control_tokens(script: ToolScript) -> None:
    fields = script.fields("s/1", 20, calls_tools=True)
    text, controls = script.text(scripted_item("s/1", 20, calls_tools=True))
    assert fields["structured_outputs"] == {"choice": [text]}
    assert fields["logit_bias"] == {str(control): MARKER_BIAS for control in controls}
    assert {script.tokenizer.token_bytes(control) for control in controls} >= {b"<mm:think>", b"</mm:think>", b"]<]minimax[>["}
    assert int(str(fields["max_completion_tokens"])) > len(text)


def test_a_scripted_replay_sends_tools_and_answers_calls_with_results(tmp_path: Path, model_folder: Path) -> None:
    traces = written(tmp_path, session("one", call(0, 640), call(5, 1280), call(9, 1344, stop="end_turn")))
    arguments = ("--once", "--concurrency", 1, "--time-scale", 100, "--assistant", "live", "--script", "tools")
    with serving_chat(ChatUpstream(tool_calls=True)) as upstream:
        assert replay(traces, "--url", upstream.url, *arguments, "--model-folder", model_folder) == 0
    first, second, last = (received.body for received in upstream.received)
    assert upstream.probes[0].tools == first.tools == last.tools == TOOLS
    assert "<tool_call>" in first.structured_outputs["choice"][0]
    assert "<tool_call>" not in last.structured_outputs["choice"][0]
    assert not first.ignore_eos
    assert [message.role for message in second.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--script", "tools"), "--assistant live"),
        (("--script", "tools", "--assistant", "live", "--model-folder", "none"), "--model-folder"),
    ],
)
def test_what_a_script_lacks_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str) -> None:
    traces = written(tmp_path, session("one", call(0, 640)))
    with serving_chat(ChatUpstream()) as upstream:
        assert replay(traces, "--url", upstream.url, *arguments) == 2
    assert reason in capfd.readouterr().err
    assert not upstream.received


@pytest.fixture(scope="module")
def server(engine: RealEngine) -> Iterator[Served]:
    with serving(
        engine.url, engine.model_folder, engine_events=engine.events_endpoint, engine_events_replay=engine.replay_endpoint
    ) as served:
        yield served


def test_scripted_turns_on_a_real_engine_are_exact_and_hit_all_whole_blocks(tmp_path: Path, engine: RealEngine, server: Served) -> None:
    agents = [subagent(f"a{place}", call(6, 320, 500), call(9, 384, 500)) for place in range(2)]
    turns = [call(20 + 5 * turn, 704 + 64 * turn) for turn in range(4)]
    traces = written(tmp_path, session("one", call(0, 640), *agents, *turns))
    out = tmp_path / "report.json"
    arguments = ("--once", "--concurrency", 1, "--time-scale", 1000, "--assistant", "live", "--script", "tools", "--duration", 120)
    direct = ("--direct-url", engine.url, "--model-folder", engine.model_folder)
    assert replay(traces, "--url", server.url, *arguments, *direct, "--json", out) == 0
    report = read_report(out)
    assert (report.requests, report.failed_requests) == (9, 0)
    assert (report.exact_turns, report.unedited_turns) == (6, 6)
    assert report.tool_calls is not None
    assert report.tool_calls >= 6
    assert report.recomputed_tokens == {"answer": 0, "history": 0}
    assert report.actual_hit_rate == pytest.approx(report.ceiling_block_hit_rate)
    assert report.direct is not None
    assert report.direct.tool_calls == report.tool_calls
    assert report.direct.recomputed_tokens is not None
    assert report.direct.recomputed_tokens["answer"] > 0
