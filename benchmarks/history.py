"""Chat histories of an agent's session as JSON bodies, growing turn by turn as clients make them grow."""

from __future__ import annotations

import random
from typing import Any

import msgspec

_SOURCE = """
def return import class self value index items total price count error result config path open read write test assert None
True for while if else try raise with async await list dict str int float range len print cart order user session token cache
"""


def code(rng: random.Random, num_bytes: int) -> str:
    """About `num_bytes` of lines that look like source."""
    words, lines, size = _SOURCE.split(), [], 0
    while size < num_bytes:
        line = "    " * rng.randrange(3) + " ".join(rng.choices(words, k=9)) + f" {rng.randrange(10_000)}"
        lines.append(line)
        size += len(line) + 1
    return "\n".join(lines)[:num_bytes]


class History:
    """One session: a system message, rounds of user, tool call and tool result, an answer, a question. Every session has its own text.

    `num_messages` is a multiple of three, at least 6.
    """

    def __init__(self, seed: int, *, model: str, num_messages: int, num_bytes: int) -> None:
        self._rng = random.Random(seed)
        self._model = model
        self._messages: list[bytes] = []
        self._add({"role": "system", "content": f"You are coding agent {seed}.\n" + code(self._rng, num_bytes // num_messages)})
        per_round = 3 * num_bytes // num_messages
        while len(self._messages) < num_messages - 2:
            number = len(self._messages)
            self._add({"role": "user", "content": code(self._rng, per_round // 6)})
            arguments = msgspec.json.encode({"path": f"src/{number}.py"}).decode()
            function = {"name": "read_file", "arguments": arguments}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            self._add({"role": "assistant", "content": "I read the file.", "tool_calls": [call]})
            self._add({"role": "tool", "tool_call_id": f"call_{number}", "content": code(self._rng, per_round * 4 // 5)})
        self.grow("Done.", per_round // 6)

    @property
    def num_messages(self) -> int:
        return len(self._messages)

    def body(self) -> bytes:
        """The whole history as a streamed chat request."""
        return self._request(self._messages)

    def newest(self) -> bytes:
        """The newest message alone, for a server that holds the rest."""
        return self._request(self._messages[-1:])

    def _request(self, messages: list[bytes]) -> bytes:
        return b'{"model":"%b","messages":[%b],"max_tokens":16,"stream":true,"stream_options":{"include_usage":true}}' % (
            self._model.encode(),
            b",".join(messages),
        )

    def grow(self, answer: str, num_bytes: int) -> None:
        """The next turn: the answer as it came, and new user text of `num_bytes`."""
        self._add({"role": "assistant", "content": answer})
        self._add({"role": "user", "content": code(self._rng, num_bytes)})

    def _add(self, message: dict[str, Any]) -> None:
        self._messages.append(msgspec.json.encode(message))
