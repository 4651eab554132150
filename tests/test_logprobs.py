"""Log probabilities: of the tokens of the text and no others, by their own bytes, streamed and whole, in both of OpenAI's dialects."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from agentserve.engines import Chunk, GenerateRequest, IdLogprob
from agentserve.engines.vllm_wire import COMPLETIONS, GENERATE, read_event
from agentserve.logprobs import LogprobTrail
from model.chat import TextDelta
from model.chat.minimax_m3 import MiniMaxM3Format
from model.conversation import ToolCall
from model.tokenizer import Tokenizer
from tests.real_engine import RealEngine
from tests.scripted import asked, post, starts_with
from tests.serving import Served, chat, serving
from tests.upstream import FormatRenderer, Script, Upstream
from tests.upstream.dialects import likeliest, logprob_of

pytestmark = pytest.mark.anyio

ASK = [{"role": "user", "content": "Say it."}]
TEXT = "Grüße, 世界 \N{GRINNING FACE}."
SPOKEN = Script(say=TEXT, reason="Let me greet them.", calls=(ToolCall("", "look", {"at": "x"}),))
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}]


def content(reply: Any) -> list[dict[str, Any]]:
    """The tokens of a chat stream."""
    choices = [choice for event in reply.events for choice in event["choices"]]
    return [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]


def spelled(tokens: list[dict[str, Any]]) -> str:
    return bytes(byte for token in tokens for byte in token["bytes"]).decode()


@pytest.mark.parametrize("ids_per_chunk", [1, 3, 0])
async def test_the_tokens_of_a_stream_spell_its_text_and_nothing_else(
    served: Served, upstream: Upstream, renderer: FormatRenderer, ids_per_chunk: int
) -> None:
    upstream.script(Script(SPOKEN.say, SPOKEN.reason, SPOKEN.calls, ids_per_chunk=ids_per_chunk))
    reply = await chat(served.url, ASK, stream=True, tools=TOOLS, logprobs=True, top_logprobs=2)
    tokens = content(reply)
    assert reply.message["content"] == spelled(tokens) == TEXT
    ids = renderer.encode(TEXT)
    assert [token["logprob"] for token in tokens] == [max(logprob_of(id), -9999.0) for id in ids]
    for token, id in zip(tokens, ids, strict=True):
        wanted = sorted(likeliest(id, 3), key=lambda pair: -pair[1])[:2]
        assert [(bytes(one["bytes"]), one["logprob"]) for one in token["top_logprobs"]] == [
            (renderer.decode_bytes([other]), max(value, -9999.0)) for other, value in wanted
        ]
        assert token["token"] == bytes(token["bytes"]).decode("utf-8", "replace")


async def test_a_whole_answer_has_the_tokens_of_a_stream(served: Served, upstream: Upstream) -> None:
    upstream.script(SPOKEN, SPOKEN)
    streamed = await chat(served.url, ASK, stream=True, logprobs=True)
    whole = await post(f"{served.url}/v1/chat/completions", {"messages": ASK, "logprobs": True})
    assert whole.body["choices"][0]["logprobs"] == {"content": content(streamed), "refusal": None}
    assert all(token["top_logprobs"] == [] for token in content(streamed))
    first, second = (request.body["sampling_params"] for request in asked(upstream))
    assert first["logprobs"] == second["logprobs"] == 0


async def test_responses_have_them_in_their_deltas_and_in_the_item(served: Served, upstream: Upstream) -> None:
    upstream.script(SPOKEN, SPOKEN)
    body = {"input": ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    streamed = await post(f"{served.url}/v1/responses", {**body, "stream": True})
    whole = await post(f"{served.url}/v1/responses", body)
    grown = [token for event in streamed.events if event["type"] == "response.output_text.delta" for token in event["logprobs"]]
    parts = [item["content"][0] for item in whole.body["output"] if item["type"] == "message"]
    assert spelled(grown) == TEXT
    assert parts[0]["logprobs"] == grown
    done = next(event for event in streamed.events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == grown
    assert all(len(token["top_logprobs"]) == 1 for token in grown)


@pytest.mark.case("PAR-05")
async def test_who_asks_for_none_gets_none_and_the_prompt_is_the_same(served: Served, upstream: Upstream) -> None:
    upstream.script(SPOKEN, SPOKEN)
    await chat(served.url, ASK, stream=True, logprobs=True)
    plain = await chat(served.url, ASK, stream=True)
    assert content(plain) == []
    first, second = asked(upstream)
    assert first.prompt_ids == second.prompt_ids
    assert "logprobs" not in second.body["sampling_params"]


@pytest.mark.case("PAR-05")
async def test_a_session_with_log_probabilities_stays_exact(served: Served, upstream: Upstream) -> None:
    first = await chat(served.url, ASK, stream=False, logprobs=True)
    await chat(served.url, [*ASK, first.message, {"role": "user", "content": "Again."}], stream=False)
    one, two = asked(upstream)
    assert starts_with(two, one)


async def test_tokens_end_where_a_stop_string_cuts_the_text(served: Served, upstream: Upstream) -> None:
    upstream.script(Script(say="one two three STOP four"))
    reply = await chat(served.url, ASK, stream=True, logprobs=True, stop=["STOP"])
    assert reply.message["content"] == "one two three "
    *before, last = content(reply)  # which may go beyond the cut, as its text is shown in part
    assert "one two three ".startswith(spelled(before))
    assert spelled([*before, last]).startswith("one two three ")


async def test_half_characters_keep_their_bytes(model_folder: Any) -> None:
    tokenizer = Tokenizer.load(model_folder)
    parser = MiniMaxM3Format(tokenizer).parser(())
    ids = next(  # a character that is more than one token
        found for text in "\N{GRINNING FACE}\N{OLD PERSIAN SIGN A}\N{CUNEIFORM SIGN A}" if len(found := tokenizer.encode(text)) > 1
    )
    trail = LogprobTrail(tokenizer, 0, cut=False)
    shown = []
    for id in ids:
        shown += trail.attach(trail.feed(Chunk((id,), id_logprobs=(IdLogprob(id, -1.0),)), parser))
    assert len(shown) == 1
    assert isinstance(shown[0], TextDelta)
    assert [token.token for token in shown[0].logprobs] == [tokenizer.token_bytes(id) for id in ids]


def test_both_routes_say_the_same_by_id() -> None:
    by_id = (
        b'{"content":[{"token_id":5,"logprob":-1.5,"rank":2,"top_logprobs":[{"token_id":5,"logprob":-1.5},{"token_id":6,"logprob":-0.5}]}]}'
    )
    by_name = b'{"tokens":["token_id:5"],"token_logprobs":[-1.5],"top_logprobs":[{"token_id:5":-1.5,"token_id:6":-0.5}],"text_offset":[0]}'
    for logprobs in (by_id, by_name):
        chunk = read_event(b'{"choices":[{"token_ids":[5],"logprobs":%b}]}' % logprobs)
        assert chunk.id_logprobs == (IdLogprob(5, -1.5, ((5, -1.5), (6, -0.5))),)
    request = GenerateRequest("r", (b"1",), 1, 4, {"stop": ["x"]}, logprobs=3)
    assert b'"output_mode":"tokens"' in b"".join(GENERATE.body(request, "m"))
    assert b'"return_tokens_as_token_ids":true' in b"".join(COMPLETIONS.body(request, "m"))


@pytest.fixture(scope="module")
def real(engine: RealEngine) -> Iterator[Served]:
    with serving(engine.url, engine.model_folder) as running:
        yield running


@pytest.mark.case("PAR-05")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_real_engine_s_log_probabilities_spell_the_answer(real: Served, engine: RealEngine, stream: bool) -> None:
    marks = Tokenizer.load(engine.model_folder).control.values()
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logit_bias": {str(mark): -100.0 for mark in marks}}
    url, body = f"{real.url}/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 3, **fields}
    reply = await chat(real.url, ASK, stream=True, logprobs=True, top_logprobs=3, **fields) if stream else None
    if reply is not None:
        text, tokens = reply.message["content"], content(reply)
    else:
        choice = (await post(url, body)).body["choices"][0]
        text, tokens = choice["message"]["content"], choice["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode("utf-8", "replace") == text
    for token in tokens:
        top = [one["logprob"] for one in token["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert math.isclose(token["logprob"], top[0], abs_tol=1e-4)  # greedy
