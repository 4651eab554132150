"""Reads a model folder's byte-level BPE: `tokenizer.json` (Hugging Face) or `*.tiktoken` (base64 token, space, rank).

Both become one `Vocabulary`: the tokens in merge order and the regular expressions that split text before merging. What cannot be
represented exactly is refused by name; nothing is approximated.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The split that `ByteLevel(use_regex=True)` stands for."""


class UnsupportedTokenizer(ValueError):
    """The folder's tokenizer cannot be represented exactly; the message names the file and the part."""


@dataclass(frozen=True, slots=True)
class Split:
    """One pre-tokenizer. Text that `pattern` does not match is a piece of its own (`keep_unmatched`) or is left out."""

    pattern: str
    keep_unmatched: bool = True


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that stands beside the vocabulary; `special` ones are left out when ids are shown as text."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE. `merged` holds the tokens of two bytes and more in the order of their merges, `single` the 256 bytes.

    `unreachable` tokens have an id and bytes, but no merge makes them.
    """

    single: Mapping[bytes, int]
    merged: Mapping[bytes, int]
    unreachable: Mapping[bytes, int]
    splits: tuple[Split, ...]
    added: tuple[AddedToken, ...]
    nfc: bool = False


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of `folder`; tokenizer.json wins over a *.tiktoken file. Raises UnsupportedTokenizer, OSError."""
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer_json(folder / "tokenizer.json")
    files = sorted(folder.glob("*.tiktoken"))
    if len(files) == 1:
        return read_tiktoken(files[0])
    found = f"{len(files)} files *.tiktoken" if files else "neither tokenizer.json nor *.tiktoken"
    raise UnsupportedTokenizer(f"{str(folder)!r} holds {found}: point to a folder with one tokenizer")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises UnsupportedTokenizer if it is anything else, OSError if it cannot be read."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise UnsupportedTokenizer(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedTokenizer(f"{str(path)!r} must hold a JSON object")
    return value


def read_tokenizer_json(path: Path) -> Vocabulary:
    """A `tokenizer.json` with a BPE model and a ByteLevel pre-tokenizer."""
    file = read_json(path)
    try:
        model = file["model"]
        if model.get("type", "BPE") != "BPE":
            raise UnsupportedTokenizer(f"its model is {model.get('type')!r}; only byte-level BPE is read")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
            if model.get(key):
                raise UnsupportedTokenizer(f"its model sets {key!r}, which a byte-level BPE in tiktoken form cannot do")
        added = tuple(AddedToken(t["id"], t["content"], t["special"]) for t in file.get("added_tokens") or ())
        single, merged, unreachable = _sort_tokens(model["vocab"], model["merges"], {t.id for t in added})
        if model.get("ignore_merges") and unreachable:
            raise UnsupportedTokenizer(f"{len(unreachable)} tokens have no merge, but ignore_merges makes them reachable")
        splits = tuple(_splits(file.get("pre_tokenizer")))
        return Vocabulary(single, merged, unreachable, splits, added, _is_nfc(file.get("normalizer")))
    except UnsupportedTokenizer as error:
        raise UnsupportedTokenizer(f"{str(path)!r}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise UnsupportedTokenizer(f"{str(path)!r} lacks a part or has one of the wrong type: {error!r}") from error


def read_tiktoken(path: Path) -> Vocabulary:
    """A tiktoken file. Its pattern (`pat_str`) and added tokens (`added_tokens_decoder`) stand in tokenizer_config.json beside it."""
    config = read_json(path.parent / "tokenizer_config.json")
    pattern = config.get("pat_str")
    if not isinstance(pattern, str):
        raise UnsupportedTokenizer(f"{str(path)!r}: tokenizer_config.json must give the split pattern as 'pat_str'")
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ids = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        added = [AddedToken(int(i), t["content"], bool(t.get("special"))) for i, t in config.get("added_tokens_decoder", {}).items()]
    except (ValueError, binascii.Error, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedTokenizer(f"{str(path)!r} is not a tiktoken vocabulary: {error}") from error
    single = {token: rank for token, rank in ids.items() if len(token) == 1}
    _require_all_bytes(single)
    merged = {token: rank for token, rank in sorted(ids.items(), key=lambda pair: pair[1]) if len(token) > 1}
    return Vocabulary(single, merged, {}, (Split(pattern, keep_unmatched=False),), tuple(added))


def _byte_characters() -> dict[int, int]:
    """ByteLevel's printable stand-in of every byte, as a table for str.translate: stand-in code point to byte.

    Bytes that Latin-1 prints stand for themselves, the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {byte: byte for byte in printable}
    table.update({256 + n: byte for n, byte in enumerate(b for b in range(256) if b not in printable)})
    return table


_BYTE_OF = _byte_characters()


def _to_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[ord(character)] for character in token])
    except KeyError:
        raise UnsupportedTokenizer(f"token {token!r} is not in ByteLevel's alphabet") from None


def _require_all_bytes(single: Mapping[bytes, int]) -> None:
    if len(single) != 256:
        raise UnsupportedTokenizer(f"{256 - len(single)} of the 256 single bytes have no token")


def _sort_tokens(
    vocab: Mapping[str, int], merges: Sequence[str | Sequence[str]], added: set[int]
) -> tuple[dict[bytes, int], dict[bytes, int], dict[bytes, int]]:
    ids = {_to_bytes(token): id for token, id in vocab.items() if id not in added}
    single = {token: id for token, id in ids.items() if len(token) == 1}
    _require_all_bytes(single)
    merged: dict[bytes, int] = {}
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        token = _to_bytes(left + right)
        if token not in ids:
            raise UnsupportedTokenizer(f"the merge {merge!r} makes a token that has no id")
        merged.setdefault(token, ids[token])
    rest = {token: id for token, id in ids.items() if token not in merged and token not in single}
    return single, merged, rest


def _is_nfc(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        parts = [_is_nfc(part) for part in normalizer["normalizers"]]
        return any(parts)
    if normalizer["type"] != "NFC":
        raise UnsupportedTokenizer(f"its normalizer {normalizer['type']!r} changes text; only NFC is known here")
    return True


def _splits(pre_tokenizer: Mapping[str, Any] | None) -> list[Split]:
    parts = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise UnsupportedTokenizer("its pre-tokenizer does not end in ByteLevel")
    splits = []
    for part in parts:
        match part["type"]:
            case "Split":
                splits.append(_split(part))
            case "ByteLevel":
                if part.get("add_prefix_space"):
                    raise UnsupportedTokenizer("ByteLevel sets add_prefix_space, which changes text")
                if part.get("use_regex", True):
                    splits.append(Split(GPT2_PATTERN))
            case kind:
                raise UnsupportedTokenizer(f"its pre-tokenizer {kind!r} is not known; Split and ByteLevel are")
    return splits


def _split(part: Mapping[str, Any]) -> Split:
    pattern = part["pattern"].get("Regex")
    if pattern is None:
        raise UnsupportedTokenizer(f"the split pattern {part['pattern']!r} is not a Regex")
    match part["behavior"], part.get("invert", False):
        case "Isolated", False:
            return Split(pattern)
        case "Removed", True:
            return Split(pattern, keep_unmatched=False)
        case behavior, invert:
            raise UnsupportedTokenizer(f"the split behaviour {behavior!r} with invert {invert!r} is not known")
