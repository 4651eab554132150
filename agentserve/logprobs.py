"""Log probabilities on their way to the client: which tokens are of the answer's text, and which text they end in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from agentserve.engines import Chunk, IdLogprob
from model.chat import Delta, OutputParser, TextDelta, TokenLogprob
from model.tokenizer import Tokenizer


class LogprobTrail:
    """Follows one turn, id by id. Only tokens of text count: not those of reasoning, of calls, or of the format.

    `num_top` of the likeliest tokens are named. With `cut` text may be withheld and dropped, so tokens go by the bytes that were shown.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, cut: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._cut = cut
        self._control = frozenset(tokenizer.control.values())
        self._unsettled: list[TokenLogprob] = []
        self._text: deque[TokenLogprob] = deque()
        self._budget = 0

    def feed(self, chunk: Chunk, parser: OutputParser) -> list[Delta]:
        """What `parser` makes of the chunk's ids."""
        deltas: list[Delta] = []
        known = chunk.id_logprobs if len(chunk.id_logprobs) == len(chunk.ids) else (None,) * len(chunk.ids)
        for id, logprob in zip(chunk.ids, known, strict=True):
            parsed = parser.feed((id,))
            self._heard(id, logprob, parsed)
            deltas += parsed
        return deltas

    def attach(self, shown: Sequence[Delta]) -> list[Delta]:
        """`shown` with the log probabilities of what its texts say."""
        return [replace(delta, logprobs=self._take(delta.text)) if isinstance(delta, TextDelta) else delta for delta in shown]

    def _heard(self, id: int, logprob: IdLogprob | None, parsed: Sequence[Delta]) -> None:
        is_format = id in self._control
        if logprob is not None and not is_format:
            self._unsettled.append(self._named(logprob))
        if any(isinstance(delta, TextDelta) for delta in parsed):
            self._text.extend(self._unsettled)
        elif not parsed and not is_format:
            return  # half a character, or white space that is held back
        self._unsettled = []

    def _take(self, text: str) -> tuple[TokenLogprob, ...]:
        taken: list[TokenLogprob] = []
        self._budget += len(text.encode("utf-8", "surrogatepass"))
        while self._text and (not self._cut or self._budget > 0):
            token = self._text.popleft()
            self._budget -= len(token.token)
            taken.append(token)
        return tuple(taken)

    def _named(self, logprob: IdLogprob) -> TokenLogprob:
        name = self._tokenizer.token_bytes
        likeliest = sorted(logprob.top, key=lambda pair: -pair[1])[: self._num_top]
        return TokenLogprob(name(logprob.id), logprob.logprob, tuple((name(id), value) for id, value in likeliest))
