"""Pass-through: the engine renders every conversation, and what needs tokens here is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentserve.errors import SetupError
from tests.scripted import assert_nothing_is_held, post
from tests.serving import Served, serving
from tests.test_media import BODIES, passed
from tests.upstream import Script, Upstream

pytestmark = pytest.mark.anyio

TEXTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages": {"system": "Be short.", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"instructions": "Be short.", "input": "hi", "max_output_tokens": 9},
}


@pytest.fixture
def through(upstream: Upstream, model_folder: Path) -> Iterator[Served]:
    with serving(upstream.url, model_folder, engine_chat_format="passthrough") as served:
        yield served


@pytest.mark.parametrize(("path", "stream"), [*((path, False) for path in TEXTS), ("/v1/messages", True), ("/v1/responses", True)])
async def test_every_dialect_is_passed_through_where_the_format_says_so(
    through: Served, upstream: Upstream, path: str, stream: bool
) -> None:
    upstream.script(Script(say="Said."), Script(say="A dot."))
    said = await post(through.url + path, {**TEXTS[path], "stream": stream})
    shown = await post(through.url + path, {**BODIES[path], "stream": stream})
    assert (said.status, shown.status) == (200, 200)
    assert said.headers["x-agentserve-turn"] == "passed"
    assert "Said." in str(said.body or said.events)
    first, second = passed(upstream)
    assert [message["role"] for message in first.body["messages"]] == ["system", "user"]
    assert first.body["max_tokens"] == 9
    assert "image_url" in str(second.body["messages"])
    assert through.server.books.totals.num_turns == 0
    assert_nothing_is_held(through)


async def test_a_conversation_stays_in_one_session(through: Served, upstream: Upstream) -> None:
    body = TEXTS["/v1/chat/completions"]
    for number in range(3):
        messages = [*body["messages"], *[{"role": "user", "content": f"more {step}"} for step in range(number)]]
        await post(f"{through.url}/v1/chat/completions", {**body, "messages": messages})
    assert len({request.headers["X-Session-ID"] for request in passed(upstream)}) == 1


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v1/chat/completions", {"n": 2}), ("/v1/chat/completions", {"logprobs": True}), ("/v1/messages/count_tokens", {})],
)
async def test_what_needs_tokens_is_refused(through: Served, path: str, more: dict[str, Any]) -> None:
    base = TEXTS["/v1/messages" if "messages" in path else "/v1/chat/completions"]
    if path.endswith("count_tokens"):
        base = {name: value for name, value in base.items() if name != "max_tokens"}
    refused = await post(through.url + path, {**base, **more})
    assert refused.status == 400
    assert_nothing_is_held(through)


async def test_a_template_that_is_refused_names_the_way_out(upstream: Upstream, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(SetupError, match="passthrough"), serving(upstream.url, folder, engine_chat_format="jinja"):
        pass
    with serving(upstream.url, folder, engine_chat_format="passthrough") as served:
        assert (await post(f"{served.url}/v1/chat/completions", TEXTS["/v1/chat/completions"])).status == 200
