"""Several answers to one prompt: real generations over one prefill, each a branch that the session may go on from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.processes import wait_until
from tests.real_engine import RealEngine
from tests.scripted import asked, post, starts_with
from tests.serving import Served, serving
from tests.upstream import Script, Upstream

pytestmark = pytest.mark.anyio

SYSTEM = "You are the coding agent of a shop.\n" * 40
ASK = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Name it."}]
SAID = ("Cart.", "Basket of goods.", "Trolley")


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def streamed(served: Served, **fields: Any) -> tuple[dict[int, str], dict[int, str | None], Any]:
    """Text and finish reason by choice, and the usage, as the official client reads them."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage = None
    async with client(served) as openai_client:
        stream: Any = await openai_client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        async for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return texts, reasons, usage


async def whole(served: Served) -> Any:
    fields: dict[str, Any] = {"model": "demo-model", "messages": ASK, "n": 2}
    async with client(served) as openai_client:
        return await openai_client.chat.completions.create(**fields)


@pytest.mark.case("PAR-04")
async def test_each_choice_is_an_answer_of_its_own_and_only_the_first_computes_the_prompt(served: Served, upstream: Upstream) -> None:
    upstream.script(*(Script(say=text, itl_seconds=0.01) for text in SAID))
    texts, reasons, usage = await streamed(served, model="demo-model", messages=ASK, n=3)
    assert sorted(texts.values()) == sorted(SAID)
    assert set(texts) == {0, 1, 2}
    assert set(reasons.values()) == {"stop"}
    sent = asked(upstream)
    assert len({request.prompt_ids for request in sent}) == 1
    assert sent[0].num_cached_tokens == 0
    blocks = (len(sent[0].prompt_ids) - 1) // 32
    assert [request.num_cached_tokens for request in sent[1:]] == [blocks * 32] * 2
    assert usage.completion_tokens == sum(len(request.generated_ids) for request in sent)
    assert usage.prompt_tokens == len(sent[0].prompt_ids)


@pytest.mark.case("PAR-04")
@pytest.mark.parametrize("chosen", range(3))
async def test_a_session_goes_on_exactly_from_any_choice(served: Served, upstream: Upstream, chosen: int) -> None:
    upstream.script(*(Script(say=text) for text in SAID))
    answer = await post(f"{served.url}/v1/chat/completions", {"messages": ASK, "n": 3})
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
    message = answer.body["choices"][chosen]["message"]
    later = await post(f"{served.url}/v1/chat/completions", {"messages": [*ASK, message, {"role": "user", "content": "Why?"}]})
    assert later.headers["x-agentserve-turn"] == "exact"
    *first, second = asked(upstream)
    assert starts_with(second, first[SAID.index(message["content"])])
    [namespace] = served.server.namespaces
    assert sum(len(session.tips) for session in namespace.sessions.values()) == 3


async def test_seeds_of_choices_differ_as_vllm_s_do(served: Served, upstream: Upstream) -> None:
    await post(f"{served.url}/v1/chat/completions", {"messages": ASK, "n": 3, "seed": 7})
    assert [request.body["sampling_params"]["seed"] for request in asked(upstream)] == [7, 8, 9]


async def test_every_choice_is_counted_as_a_turn_and_missed_tokens_add_up(served: Served, upstream: Upstream) -> None:
    answer = await post(f"{served.url}/v1/chat/completions", {"messages": ASK, "n": 2})
    totals = served.server.books.totals
    num_prompt_tokens = answer.body["usage"]["prompt_tokens"]
    assert totals.num_prompt_tokens == 2 * num_prompt_tokens
    session = answer.headers["x-agentserve-session"]
    assert served.server.namespaces.of(None).sessions[session].num_turns == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_failure_of_one_choice_ends_them_all(served: Served, upstream: Upstream, stream: bool) -> None:
    upstream.script(Script(say="x" * 400, itl_seconds=0.05), Script(status=503, message="gone"))
    asking = streamed(served, model="demo-model", messages=ASK, n=2) if stream else whole(served)
    with pytest.raises(openai.APIError, match="gone"):
        await asking
    assert wait_until(lambda: asked(upstream)[0].aborted_at is not None, seconds=2)


async def test_a_client_that_leaves_stops_every_choice(served: Served, upstream: Upstream) -> None:
    upstream.script(*(Script(say="x" * 400, itl_seconds=0.05) for _ in range(3)))
    async with client(served) as openai_client:
        fields: dict[str, Any] = {"model": "demo-model", "messages": ASK, "n": 3, "stream": True}
        stream: Any = await openai_client.chat.completions.create(**fields)
        async for event in stream:
            if event.choices and event.choices[0].index == 2:
                break
        await stream.close()
    assert wait_until(lambda: all(request.aborted_at is not None for request in asked(upstream)), seconds=2)


@pytest.fixture(scope="module")
def real(engine: RealEngine) -> Iterator[Served]:
    with serving(engine.url, engine.model_folder, model_name="nano") as running:
        yield running


@pytest.mark.case("PAR-04")
async def test_a_real_engine_computes_the_prompt_once_for_all_choices(real: Served, engine: RealEngine) -> None:
    before = real.server.books.totals.actual
    _, reasons, usage = await streamed(real, model="nano", messages=ASK, n=3, max_tokens=8, extra_body={"ignore_eos": True})
    assert set(reasons) == {0, 1, 2}
    assert set(reasons.values()) == {"length"}
    assert usage.completion_tokens == 24
    size = engine.info.block_size
    assert size is not None
    blocks = (usage.prompt_tokens - 1) // size * size
    assert blocks > 0
    assert real.server.books.totals.actual - before >= 2 * blocks
