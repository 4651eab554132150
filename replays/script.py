"""Scripted answers: what a coding agent's model says between two tool results, said by whatever model is served.

A model with random weights calls no tool. So each request allows one text only (vLLM's `structured_outputs`), in which a bias makes the
chat format's markers come as the control tokens that they are. Which tokens spell the rest is sampled: they are seldom those that
encoding the text would give, so a server that encodes its history again loses the answer from its prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from model.chat import ChatFormat
from model.chat.formats import detect_chat_format
from model.conversation import AssistantItem, Json, ToolCall, UserItem
from model.tokenizer import Tokenizer
from replays.text import words

MARKER_BIAS = 100.0
"""Above any difference between two logits of the nano model; vLLM takes −100 … 100."""
_MAX_REASONING_WORDS = 256
"""Compiling an allowed text costs the engine time that grows with its length."""
_SPARE_TOKENS = 8
_TWO_CALLS_SHARE, _NO_REASONING_SHARE, _NO_TEXT_SHARE = 0.25, 0.125, 0.25


def embedded_model_folder() -> Path:
    """Where `agentserve serve` keeps the model of its embedded engine by default."""
    return Path.home() / ".cache" / "agentserve" / "nano"


def _tool(name: str, description: str, **properties: Json) -> dict[str, Json]:
    parameters: dict[str, Json] = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_STRING: dict[str, Json] = {"type": "string"}
_INTEGER: dict[str, Json] = {"type": "integer"}

TOOLS: list[Json] = [
    _tool("read_file", "Read lines of a file.", path=_STRING, offset=_INTEGER, limit=_INTEGER),
    _tool("search", "Find a pattern in files.", pattern=_STRING, paths={"type": "array", "items": _STRING}),
    _tool("edit_file", "Replace text in a file.", path=_STRING, old=_STRING, new=_STRING, everywhere={"type": "boolean"}),
    _tool("run_command", "Run a shell command.", command=_STRING, timeout_seconds=_INTEGER),
]
"""The tools that every scripted request offers."""


class _Dice:
    """Words and numbers that depend on a key alone."""

    def __init__(self, key: str) -> None:
        self._rng = np.random.default_rng(xxhash.xxh3_64_intdigest(key.encode()))

    def chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def number(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high))

    def words(self, count: int) -> str:
        return " ".join(words()[self._rng.integers(0, len(words()), count)])

    def path(self) -> str:
        return f"src/{self.words(1)}/{self.words(1)}.py"


_ARGUMENTS: dict[str, Callable[[_Dice], dict[str, Json]]] = {
    "read_file": lambda dice: {"path": dice.path(), "offset": dice.number(1, 900), "limit": 200},
    "search": lambda dice: {"pattern": dice.words(1), "paths": [dice.path() for _ in range(dice.number(1, 3))]},
    "edit_file": lambda dice: {"path": dice.path(), "old": dice.words(2), "new": dice.words(3), "everywhere": dice.chance(0.5)},
    "run_command": lambda dice: {"command": f"pytest {dice.path()}", "timeout_seconds": dice.number(10, 120)},
}


def scripted_item(key: str, num_tokens: int, *, calls_tools: bool) -> AssistantItem:
    """The answer that `key` names: reasoning about half of `num_tokens` long, a sentence, and one or two calls if it `calls_tools`."""
    dice = _Dice(key)
    reasoning = None
    if not dice.chance(_NO_REASONING_SHARE):
        reasoning = dice.words(min(max(3, num_tokens // 2), _MAX_REASONING_WORDS)) + "."
    if not calls_tools:
        return AssistantItem(f"Done: {dice.words(6)}.", reasoning)
    text = "" if dice.chance(_NO_TEXT_SHARE) else f"Next: {dice.words(3)}."
    names = [list(_ARGUMENTS)[dice.number(0, len(_ARGUMENTS))] for _ in range(1 + dice.chance(_TWO_CALLS_SHARE))]
    return AssistantItem(text, reasoning, tuple(ToolCall("", name, _ARGUMENTS[name](dice)) for name in names))


@dataclass(frozen=True, slots=True)
class ToolScript:
    """Scripted answers in the served model's chat format."""

    tokenizer: Tokenizer
    chat: ChatFormat

    @classmethod
    def load(cls, model_folder: Path) -> ToolScript:
        """With the tokenizer of `model_folder`. Raises OSError, or ValueError where there is none that can be used."""
        if not model_folder.is_dir():
            raise FileNotFoundError(f"no model folder at {str(model_folder)!r}: name the served model's with --model-folder")
        tokenizer = Tokenizer.load(model_folder)
        return cls(tokenizer, detect_chat_format(tokenizer))

    def text(self, item: AssistantItem) -> tuple[str, list[int]]:
        """`item` as the model writes it, and the control ids in it. The generation prompt and the end of the turn are left out."""
        asked = UserItem("")
        pieces = self.chat.item(item, asked)[len(self.chat.open_turn(asked)) :]
        while pieces and pieces[-1] in self.chat.stop_ids:
            pieces.pop()
        controls = [piece for piece in pieces if isinstance(piece, int)]
        return "".join(self._spelled(piece) for piece in pieces), list(dict.fromkeys(controls))

    def _spelled(self, piece: str | int) -> str:
        return piece if isinstance(piece, str) else self.tokenizer.token_bytes(piece).decode()

    def fields(self, key: str, num_tokens: int, *, calls_tools: bool) -> dict[str, object]:
        """The request fields that force `scripted_item`. A key has the same answer in every run, so that runs differ in servers only."""
        text, controls = self.text(scripted_item(key, num_tokens, calls_tools=calls_tools))
        return {
            "structured_outputs": {"choice": [text]},
            "logit_bias": {str(control): MARKER_BIAS for control in controls},
            "max_completion_tokens": len(text.encode()) + _SPARE_TOKENS,
        }
