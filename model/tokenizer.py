"""The model's byte-level BPE as a tiktoken Encoding.

Outside text is always *ordinary* text here: whatever it spells, `encode` never yields an added (control) token. Control tokens enter a
prompt only as ids that a chat format puts there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tiktoken
import tokenizers

from model.chat import Piece
from model.vocabulary import Split, UnsupportedTokenizer, Vocabulary, read_json, read_vocabulary

_SURROGATE = re.compile("[\ud800-\udfff]")
# tiktoken's regex engine keeps a backtracking entry for each character of a run of blanks and gives up (a Rust panic) near a million.
_LONG_RUN_CHARS = 200_000
_LONG_BLANKS = re.compile(rf"\s{{{_LONG_RUN_CHARS}}}")

SAMPLES: tuple[str, ...] = (
    "def f(x: int) -> str:\n\treturn f'{x:>08}'  # it's 3.14, they'LL see\r\n\r\n    pass\n",
    '{"path": "/usr/lib/x.py", "n": [1, 22, 333, 4444], "ok": true, "s": "a\\nb"}',
    "Ünïcode e\u0301 ﬁ ß ǅ ʼn, 漢字かな交じり文, 한국어, العربية, हिन्दी, ไทย, 👩‍👩‍👧 🇩🇪 ½ Ⅻ ²",
    "  leading\u00a0and\u3000trailing \t \v \x85 \u2028 blanks   \n\n\n  x   ",
    "\x00\x01\x1b[31mred\x7f\ufeff\ufffd",
    "don't DON'T I'm we'RE 'ſ x'd''s CamelCaseHTTPServer snake_case_2x" + " " * 40 + "-" * 40 + "\n" * 20 + "a" * 60,
)
"""Texts on which tokenizers are prone to differ."""


class MissingControlToken(ValueError):
    """The vocabulary lacks a control token that the chat format needs."""


class TokenizerMismatch(ValueError):
    """This encoding differs from the `tokenizers` library; the message names the sample, the token and both readings."""


def replace_surrogates(text: str) -> tuple[str, int]:
    """`text` with each lone surrogate as U+FFFD, and how many there were. They have no UTF-8 form, so no token either."""
    return _SURROGATE.subn("\ufffd", text)


class Tokenizer:
    """Text to ids and ids to bytes for one vocabulary. Immutable; safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, eos_ids: tuple[int, ...] = ()) -> None:
        """`eos_ids` end a turn by the model's own settings. Raises UnsupportedTokenizer for a bad split pattern."""
        self.control: Mapping[str, int] = {token.text: token.id for token in vocabulary.added}
        """Added tokens by their text."""
        self.special_ids: frozenset[int] = frozenset(token.id for token in vocabulary.added if token.special)
        """Added tokens that are never shown as text."""
        self.eos_ids = eos_ids
        self._normalizer = tokenizers.normalizers.NFC() if vocabulary.nfc else None  # Python's own NFC knows other Unicode versions
        self._bytes = _bytes_by_id(vocabulary)
        ranks, self._ids = _ranks(vocabulary)
        last = vocabulary.splits[-1] if vocabulary.splits else Split(r"[\s\S]+")
        try:
            self._encoding = tiktoken.Encoding("model", pat_str=_covering(last), mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise UnsupportedTokenizer(f"the split pattern cannot be compiled: {error}") from error
        self._before = tuple(_splitter(split) for split in vocabulary.splits[:-1])
        self._last = _splitter(last)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises UnsupportedTokenizer (what is wrong and where), OSError."""
        vocabulary = read_vocabulary(folder)
        return cls(vocabulary, _eos_ids(folder, {token.text: token.id for token in vocabulary.added}))

    @property
    def vocab_size(self) -> int:
        """Ids are below this; there may be gaps."""
        return len(self._bytes)

    def control_id(self, text: str) -> int:
        """The id of a control token. Raises MissingControlToken."""
        if text not in self.control:
            raise MissingControlToken(f"the vocabulary has no control token {text!r}")
        return self.control[text]

    def encode(self, text: str) -> list[int]:
        """Ordinary ids of `text`; never those of added tokens. Lone surrogates count as U+FFFD (see `replace_surrogates`)."""
        if not text.isascii():
            text = replace_surrogates(text)[0]
            if self._normalizer is not None:
                text = self._normalizer.normalize_str(text)
        ids: list[int] = []
        for part in self._split_before(text):
            ids += self._encode_part(part)
        return ids if self._ids is None else [self._ids[rank] for rank in ids]

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """The ids of rendered pieces. Neighbouring texts are joined first, so that merges see what a template's text would show them."""
        ids: list[int] = []
        run: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                run.append(piece)
                continue
            if run:
                ids += self.encode("".join(run))
                run.clear()
            ids.append(piece)
        if run:
            ids += self.encode("".join(run))
        return ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; an added token's are its text in UTF-8. Empty for an id without a token (padding rows)."""
        return self._bytes[id] if 0 <= id < len(self._bytes) else b""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids` one after another; not always whole UTF-8."""
        return b"".join([self.token_bytes(id) for id in ids])

    def _split_before(self, text: str) -> list[str]:
        parts = [text]
        for splitter in self._before:
            parts = [piece for part in parts for piece, _ in splitter.pre_tokenize_str(part)]
        return parts

    def _encode_part(self, text: str) -> list[int]:
        if len(text) > _LONG_RUN_CHARS and _LONG_BLANKS.search(text):
            # The same pieces from an engine without that limit; each is then merged by the same code.
            core = self._encoding._core_bpe
            return [id for piece, _ in self._last.pre_tokenize_str(text) for id in core.encode_single_piece(piece.encode())]
        return self._encoding.encode_ordinary(text)


def verify(tokenizer: Tokenizer, folder: Path, samples: Sequence[str] = SAMPLES) -> int:
    """Compare `tokenizer` with the `tokenizers` library on `samples`; returns how many were compared (0 without a tokenizer.json).

    Raises TokenizerMismatch at the first difference. The library is given no added tokens: as here, text is only text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return 0
    file = read_json(path) | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    reference = tokenizers.Tokenizer.from_str(msgspec.json.encode(file).decode())
    for number, sample in enumerate(samples):
        text = replace_surrogates(sample)[0]
        ours, theirs = tokenizer.encode(text), reference.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            raise TokenizerMismatch(_difference(tokenizer, number, ours, theirs))
    return len(samples)


def _difference(tokenizer: Tokenizer, number: int, ours: list[int], theirs: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    context, left, right = (tokenizer.decode_bytes(ids) for ids in (ours[max(0, at - 4) : at], ours[at : at + 4], theirs[at : at + 4]))
    here, there = f"{left!r} {ours[at : at + 4]}", f"{right!r} {theirs[at : at + 4]}"
    return f"sample {number} differs at token {at} after {context!r}: {here}, but the tokenizers library says {there}"


def _covering(split: Split) -> str:
    """The split as a pattern that matches every piece: what tiktoken's pattern does not match is lost."""
    return rf"{split.pattern}|(?:(?!{split.pattern})[\s\S])+" if split.keep_unmatched else split.pattern


def _splitter(split: Split) -> tokenizers.pre_tokenizers.Split:
    behavior = "isolated" if split.keep_unmatched else "removed"
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(split.pattern), behavior, invert=not split.keep_unmatched)


def _ranks(vocabulary: Vocabulary) -> tuple[dict[bytes, int], list[int] | None]:
    """tiktoken's ranks, and the id of each rank (None where they are the same, as they are when ids follow the merges)."""
    ids = list(vocabulary.merged.values())
    if all(a < b for a, b in itertools.pairwise(ids)):
        return {**vocabulary.single, **vocabulary.merged}, None
    tokens = [*vocabulary.single.items(), *vocabulary.merged.items()]
    return {token: rank for rank, (token, _) in enumerate(tokens)}, [id for _, id in tokens]


def _bytes_by_id(vocabulary: Vocabulary) -> list[bytes]:
    by_id = {id: token for part in (vocabulary.single, vocabulary.merged, vocabulary.unreachable) for token, id in part.items()}
    by_id.update({token.id: token.text.encode() for token in vocabulary.added})
    return [by_id.get(id, b"") for id in range(max(by_id) + 1)]


def _eos_ids(folder: Path, control: Mapping[str, int]) -> tuple[int, ...]:
    """The ids that end a turn: generation_config.json's, else the eos_token of tokenizer_config.json."""
    if (folder / "generation_config.json").is_file():
        match read_json(folder / "generation_config.json").get("eos_token_id"):
            case int(id):
                return (id,)
            case [*ids]:
                return tuple(int(id) for id in ids)
    if (folder / "tokenizer_config.json").is_file():
        token: Any = read_json(folder / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in control:
            return (control[text],)
    return ()
