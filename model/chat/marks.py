"""Stand-ins for text that comes from outside, so that what a template wrote and what it was given can be told apart.

A stand-in holds a quotation mark and a letter beyond ASCII: so it shows whether the template wrote it as JSON, and then what it stands for
is written so, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from model.chat import Piece
from model.conversation import Json

_NONCE = "qZ7kXw"
_END = '"éz'
_MARK = rf'{_NONCE}(\d+)(\\?)"(é|\\u00e9)z'


class Spellings:
    """The control tokens of a vocabulary, and how text spells them. Immutable."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self.control = control
        # The longest first: the tokenizers library takes the longest added token at each place, too.
        words = [re.escape(word) for word in sorted(control, key=len, reverse=True)]
        self.outside = re.compile("|".join([_NONCE, *words]))
        self.rendered = re.compile("|".join([_MARK, *words]))


class Marks:
    """The stand-ins of one rendering.

    A text is hidden as a whole, or, where a template looks into it (names, arguments, schemas), only what spells a control token in it.
    Text that spells a stand-in is itself hidden.
    """

    def __init__(self, spellings: Spellings) -> None:
        self._spellings = spellings
        self._texts: list[str] = []

    def whole(self, text: str) -> str:
        """The stand-in of a text; an empty text stays empty, as templates ask for that."""
        if not text:
            return ""
        self._texts.append(text)
        return f"{_NONCE}{len(self._texts) - 1}{_END}"

    def word(self, text: str) -> str:
        """A text with stand-ins for what spells control tokens in it."""
        return self._spellings.outside.sub(lambda found: self.whole(found[0]), text)

    def inside(self, value: Json) -> Json:
        """The same for all texts and keys in a value."""
        match value:
            case str():
                return self.word(value)
            case list():
                return [self.inside(child) for child in value]
            case dict():
                return {self.word(name): self.inside(child) for name, child in value.items()}
            case _:
                return value

    def pieces(self, rendered: str) -> list[Piece]:
        """A rendered text: control tokens that the template wrote as ids, all between two of them as one text."""
        pieces: list[Piece] = []
        run: list[str] = []
        end = 0
        for found in self._spellings.rendered.finditer(rendered):
            run.append(rendered[end : found.start()])
            end = found.end()
            if found[1]:
                run.append(self._said(found))
                continue
            pieces += [text] if (text := "".join(run)) else []
            pieces.append(self._spellings.control[found[0]])
            run.clear()
        text = "".join([*run, rendered[end:]])
        return [*pieces, text] if text else pieces

    def text(self, rendered: str) -> str:
        """A rendered text as a template would have written it without stand-ins."""
        return self._spellings.rendered.sub(lambda found: self._said(found) if found[1] else found[0], rendered)

    def _said(self, found: re.Match[str]) -> str:
        text = self._texts[int(found[1])]
        return json.dumps(text, ensure_ascii=found[3] != "é")[1:-1] if found[2] else text


def count(rendered: str, mark: str) -> int:
    """How often a stand-in stands in a rendered text."""
    return sum(found[1] == mark[len(_NONCE) : -len(_END)] for found in re.finditer(_MARK, rendered))
