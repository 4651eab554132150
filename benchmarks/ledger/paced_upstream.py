"""An upstream that answers like vLLM, one known stage after the other, and can be held in any of them.

The name of a request's session says where: the answer to session "text-7" stops behind its first text and goes on only after
`HOLD_SECONDS`, so that whoever is seen to end before has been aborted.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Self

import msgspec
from aiohttp import web

from model.chat import ChatFormat
from model.conversation import AssistantItem, ToolCall, UserItem
from model.tokenizer import Tokenizer

MODEL = "demo-model"
HOLD_SECONDS = 30.0
HOG_SECONDS = 0.2
_PREFILL_SECONDS = 0.004


class Stage(StrEnum):
    """Where an answer is."""

    PREFILL = "prefill"
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"
    LAST = "last"
    """The last chunk is about to be sent."""


class _Asked(msgspec.Struct):
    token_ids: list[int]


class PacedUpstream:
    """Listens on a free loopback port between enter and exit. Sessions called "hog-…" take `HOG_SECONDS` to prefill."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat) -> None:
        self.url = ""
        self.num_running = 0
        self.ended: dict[str, float] = {}
        """When each session's last request ended or was aborted, monotonic seconds."""
        self.asked: dict[str, array[int]] = {}
        """The prompt ids of each session's last request."""
        self._parts = _parts(tokenizer, chat)
        self.answer_ids = array("I", [number for _, ids in self._parts for number in ids])
        """What it says to everybody."""
        self._reached: dict[tuple[str, Stage], asyncio.Event] = {}

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.get("/version", self._version), web.get("/v1/models", self._models)])
        app.add_routes([web.get("/metrics", self._metrics), web.post("/inference/v1/generate", self._generate)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def reached(self, session: str, stage: Stage, seconds: float) -> bool:
        """Wait until the answer to `session` is in `stage`; False if it is not within `seconds`."""
        try:
            await asyncio.wait_for(self._event(session, stage).wait(), seconds)
        except TimeoutError:
            return False
        finally:
            del self._reached[session, stage]
        return True

    def forget(self, session: str) -> None:
        """Drop what is noted of a session."""
        self.ended.pop(session, None)
        self.asked.pop(session, None)

    def _event(self, session: str, stage: Stage) -> asyncio.Event:
        return self._reached.setdefault((session, stage), asyncio.Event())

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not request.headers.get("X-Session-ID"):
            return web.json_response({"error": {"message": "token_ids: Field required", "code": 400}}, status=400)
        session = request.headers["X-Session-ID"]
        self.asked[session] = array("I", msgspec.json.decode(await request.read(), type=_Asked).token_ids)
        self.num_running += 1
        try:
            return await self._answer(request, session)
        finally:
            self.num_running -= 1
            self.ended[session] = time.monotonic()

    async def _answer(self, request: web.Request, session: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await asyncio.sleep(HOG_SECONDS if session.startswith("hog-") else _PREFILL_SECONDS)
        await self._enter(session, Stage.PREFILL)
        num_generated = 0
        for stage, ids in self._parts:
            for number, chunk in enumerate((ids[: len(ids) // 2], ids[len(ids) // 2 :])):
                num_generated += len(chunk)
                await response.write(_event({"choices": [{"index": 0, "finish_reason": None, "token_ids": chunk}]}))
                if number == 0:
                    await self._enter(session, stage)
        await self._enter(session, Stage.LAST)
        usage = {"prompt_tokens": 1, "completion_tokens": num_generated, "prompt_tokens_details": {"cached_tokens": 0}}
        await response.write(_event({"choices": [{"index": 0, "finish_reason": "stop", "token_ids": []}]}))
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def _enter(self, session: str, stage: Stage) -> None:
        waited_for = self._reached.get((session, stage))
        if waited_for is not None:
            waited_for.set()
        is_held = session.startswith(f"{stage}-") and stage is not Stage.LAST
        await asyncio.sleep(HOLD_SECONDS if is_held else 0)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": MODEL, "max_model_len": 1 << 20}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text='vllm:cache_config_info{block_size="128",num_gpu_blocks="48945"} 1.0\n')


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _parts(tokenizer: Tokenizer, chat: ChatFormat) -> list[tuple[Stage, list[int]]]:
    """The ids of an answer's reasoning, text and call; the stop id ends the call."""
    calls = (ToolCall("", "read_file", {"path": "src/" + "long_name_" * 8 + ".py", "lines": 3}),)
    thought, text = "First I look at the file, then at its tests. " * 2, "I read the file and then its tests. " * 2
    ends = [
        _ids(tokenizer, chat, item)
        for item in (AssistantItem("", thought), AssistantItem(text, thought), AssistantItem(text, thought, calls))
    ]
    whole = [*ends[2], chat.stop_ids[0]]
    first, second = _common(ends[0], whole), _common(ends[1], whole)
    return [(Stage.REASONING, whole[:first]), (Stage.TEXT, whole[first:second]), (Stage.CALL, whole[second:])]


def _ids(tokenizer: Tokenizer, chat: ChatFormat, item: AssistantItem) -> list[int]:
    asked = UserItem("")
    ids = tokenizer.encode_pieces(chat.item(item, asked)[len(chat.open_turn(asked)) :])
    return [number for number in ids if number not in chat.stop_ids]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
