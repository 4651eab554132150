"""What the upstream does with one request, and how it becomes generated ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec import structs

from model.chat import ChatFormat, Piece
from model.conversation import AssistantItem, Json, ToolCall, UserItem


@dataclass(frozen=True, slots=True)
class UsageOverride:
    """Counts to report in place of the true ones, tokens. None: the true one."""

    num_prompt_tokens: int | None = None
    num_generated_tokens: int | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """One answer. What is said is `ids`, or else `reason`, `say` and `calls` in the renderer's format, ended by its stop id."""

    say: str = "ok"
    reason: str | None = None
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[int, ...] | None = None
    """The exact generated ids (a stop id included, if there is to be one)."""
    ids_per_chunk: int = 1
    """Ids of one stream event; 0 sends all in one."""
    ttft_seconds: float = 0.0
    itl_seconds: float = 0.0
    finish_reason: str | None = None
    """In place of "stop" or "length"."""
    usage: UsageOverride = field(default_factory=UsageOverride)
    omit_usage: bool = False
    drop_ids_in_chunks: frozenset[int] = frozenset()
    """Stream events (from 0) that are sent without their ids, as engines do whose parsers hold text back."""
    raw_sse: tuple[bytes, ...] | None = None
    """Written as they are in place of the stream's events, one write each."""
    bytes_per_write: int = 0
    """Cut the stream's bytes into writes of this size; 0 writes each event whole."""
    cut: Literal["fin", "rst"] | None = None
    """End the connection in the middle of the body after `cut_after_chunks` events, by FIN or by RST."""
    cut_after_chunks: int = 0
    error_after_chunks: int | None = None
    """Send an error event after so many events, then [DONE], as vLLM does when its engine dies in a stream."""
    preempt_after_chunks: int | None = None
    """Take the request's blocks away after so many events and let others have them; then it computes them again, as vLLM does."""
    preempted_blocks_stay: bool = False
    """Nobody takes them meanwhile: the request's second run hits its own, which engines' counters have taken for hits of prompts."""
    status: int = 200
    """Other than 200: answer with an error body and this status."""
    message: str = "scripted error"
    retry_after_seconds: int | None = None


class Renderer(Protocol):
    """Turns text into ids and back for the upstream."""

    stop_id: int

    def render(self, item: AssistantItem) -> list[int]:
        """The ids that a model would generate for `item`, without the stop id."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


class ByteRenderer:
    """A vocabulary of bytes: id = byte, 256 = stop. Reasoning stands in <think>, calls as `name{arguments}` lines."""

    stop_id = 256

    def render(self, item: AssistantItem) -> list[int]:
        think = "" if item.reasoning is None else f"<think>{item.reasoning}</think>"
        return self.encode(think + item.text + "".join(f"\n{call.name}{call.arguments}" for call in item.calls))

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(token for token in ids if token < self.stop_id)


class PieceTokenizer(Protocol):
    """The part of `model.tokenizer.Tokenizer` that the upstream needs."""

    def encode(self, text: str) -> list[int]: ...

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]: ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes: ...


class FormatRenderer:
    """Renders through a model family's chat format: what `item` has beyond the generation prompt is what the model generates."""

    def __init__(self, chat_format: ChatFormat, tokenizer: PieceTokenizer) -> None:
        self._format = chat_format
        self._tokenizer = tokenizer
        self.stop_id = chat_format.stop_ids[0]

    def render(self, item: AssistantItem) -> list[int]:
        previous = UserItem("")
        opened = _joined(self._format.open_turn(previous))
        # A generation prompt may open the reasoning; then a turn without reasoning generates an empty one.
        for candidate in (item, structs.replace(item, reasoning=item.reasoning or "")):
            rest = _after(_joined(self._format.item(candidate, previous)), opened)
            if rest is not None:
                # A turn in a history ends itself; a generated one ends by the stop id that `generate` adds.
                return self._tokenizer.encode_pieces(rest[:-1] if rest and rest[-1] == self.stop_id else rest)
        raise ValueError(f"format {self._format.name!r} renders no turn that starts with its own generation prompt")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self._tokenizer.decode_bytes(ids)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """`pieces` with neighbouring texts joined."""
    joined: list[Piece] = []
    for is_text, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if is_text:
            joined.append("".join(str(piece) for piece in group))
        else:
            joined.extend(group)
    return joined


def _after(whole: list[Piece], opened: list[Piece]) -> list[Piece] | None:
    """What follows `opened` in `whole`; None if it does not start with it. The last text may be cut in its middle."""
    if not opened:
        return whole
    num_equal, last = len(opened) - 1, opened[-1]
    if whole[:num_equal] != opened[:-1] or len(whole) <= num_equal:
        return None
    found = whole[num_equal]
    if isinstance(found, str) and isinstance(last, str) and found.startswith(last):
        return [*([found[len(last) :]] if len(found) > len(last) else []), *whole[num_equal + 1 :]]
    return whole[num_equal + 1 :] if found == last else None


@dataclass(frozen=True, slots=True)
class Generation:
    """A script applied to one request: the ids, and why they end. The fields as vLLM reports them."""

    item: AssistantItem
    ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None

    def chunks(self, ids_per_chunk: int) -> list[tuple[int, ...]]:
        """The ids as stream events."""
        size = ids_per_chunk or max(1, len(self.ids))
        return [self.ids[start : start + size] for start in range(0, len(self.ids), size)]


def generate(script: Script, renderer: Renderer, sampling: Mapping[str, Json], max_tokens: int) -> Generation:
    """Apply `script` under the request's sampling parameters: max_tokens, ignore_eos, stop and stop_token_ids."""
    item = AssistantItem(script.say, script.reason, script.calls)
    ids = list(script.ids) if script.ids is not None else [*renderer.render(item), renderer.stop_id]
    finish, stop_reason = "stop", None
    if sampling.get("ignore_eos"):
        # Without an end the model goes on; it repeats itself here until max_tokens ends it.
        body = [token for token in ids if token != renderer.stop_id] or [0]
        ids = list(itertools.islice(itertools.cycle(body), max_tokens + 1))
    stopped = _first_stop(ids, renderer, sampling)
    if stopped is not None:
        end, stop_reason = stopped
        ids = ids[:end]
    if len(ids) > max_tokens:
        ids, finish, stop_reason = ids[:max_tokens], "length", None
    return Generation(item, tuple(ids), script.finish_reason or finish, stop_reason)


def _first_stop(ids: Sequence[int], renderer: Renderer, sampling: Mapping[str, Json]) -> tuple[int, str | int] | None:
    """(number of ids kept, stop reason) of the first stop id or stop string; the id that completes it is kept, as vLLM does."""
    stop_ids, stop = sampling.get("stop_token_ids"), sampling.get("stop")
    watched = set(stop_ids) - {renderer.stop_id} if isinstance(stop_ids, list) else set()
    texts = [stop] if isinstance(stop, str) else [text for text in stop if isinstance(text, str)] if isinstance(stop, list) else []
    if not watched and not texts:
        return None
    seen = ""
    for number, token in enumerate(ids, start=1):
        if token in watched:
            return number, token
        if texts:
            seen = renderer.decode_bytes(ids[:number]).decode("utf-8", "ignore")
            for text in texts:
                if text in seen:
                    return number, text
    return None
