"""The tiktoken form of a vocabulary gives exactly the ids of the `tokenizers` library."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from model.nano import make_nano
from model.tokenizer import SAMPLES, MissingControlToken, Tokenizer, TokenizerMismatch, replace_surrogates, verify
from model.vocabulary import Split, UnsupportedTokenizer, read_vocabulary

QWEN_TYPE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_TYPE = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def split_by(*patterns: str, behavior: str = "isolated", invert: bool = False) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior, invert) for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen": lambda: split_by(QWEN_TYPE),
    "o200k": lambda: split_by(O200K_TYPE),
    "o200k_removed": lambda: split_by(O200K_TYPE, behavior="removed", invert=True),
    "three_splits": lambda: split_by(r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", QWEN_TYPE),
    "unmatched": lambda: split_by(r"\d+|[a-z]+"),
}
NORMALIZERS: dict[str, Callable[[], Any]] = {"qwen": normalizers.NFC}
KINDS = list(PRE_TOKENIZERS)


def sources(pattern: str, limit: int) -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(root.glob(pattern))[:limit]]


def train(folder: Path, kind: str) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    if kind in NORMALIZERS:
        tokenizer.normalizer = NORMALIZERS[kind]()
    texts = [*sources("*.py", 60), *SAMPLES * 5]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=4000, show_progress=False, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("[e~[", special=True)])
    tokenizer.add_tokens([AddedToken("<mm:think>", special=False, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabularies")
    return {kind: train(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


def random_texts(seed: int) -> list[str]:
    """Bytes decoded as they come, and characters of every kind: letters, marks, CJK, private, controls, blanks, quotes."""
    rng = random.Random(seed)
    ranges = [(0x20, 0x7E), (0x80, 0x250), (0x300, 0x370), (0x370, 0x3000), (0x3000, 0xD7FF), (0xE000, 0x10FFFF), (0, 0x20)]

    def character() -> str:
        return rng.choice(" \n\r\t'1aA") if rng.random() < 0.4 else chr(rng.randint(*rng.choice(ranges)))

    noise = [rng.randbytes(2000).decode("utf-8", "replace") for _ in range(15)]
    return noise + ["".join(character() for _ in range(2000)) for _ in range(40)]


def corpus() -> list[str]:
    code = [*sources("json/*.py", 5), *sources("email/*.py", 5), *sources("test/test_unicode*.py", 6), *sources("test/test_re.py", 1)]
    crlf = [text.replace("\n", "\r\n") for text in code[:3]]
    data = [json.dumps({"id": n, "path": f"/a/b{n}.py", "x": [n / 7, None, True, "é\n漢"]}, ensure_ascii=n % 2 == 0) for n in range(200)]
    runs = [
        character * 3000 + tail
        for character in (" ", "\n", "\t", "a", "A", "-", "1", "é", "\u0301", "漢", "🎉", " \n", "\u3000")
        for tail in ("", "x")
    ]
    return [*SAMPLES, *code, *crlf, *data, *runs, *random_texts(0)]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_the_tokenizers_library_on_a_mixed_corpus(folders: dict[str, Path], loaded: dict[str, Tokenizer], kind: str) -> None:
    texts = corpus()
    assert sum(map(len, texts)) > 500_000
    assert verify(loaded[kind], folders[kind], texts) == len(texts)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.text(max_size=200))
def test_ids_equal_the_tokenizers_library_on_any_text(folders: dict[str, Path], loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    verify(loaded[kind], folders[kind], [text])


@pytest.mark.parametrize("kind", ["gpt2", "o200k"])
@pytest.mark.parametrize(
    "text", [" " * 1_000_000 + "x", "a" * 1_000_000, "\n" * 1_000_000, " \t\u3000" * 350_000], ids=["blanks", "letters", "lines", "mixed"]
)
def test_a_megabyte_without_a_break_is_encoded_alike(folders: dict[str, Path], loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    assert loaded[kind].decode_bytes(loaded[kind].encode(text)).decode() == text
    assert verify(loaded[kind], folders[kind], [text]) == 1


def test_ids_in_another_order_than_the_merges_are_mapped(folders: dict[str, Path], tmp_path: Path) -> None:
    file = json.loads((folders["gpt2"] / "tokenizer.json").read_text())  # noqa: TID251  (the order of keys matters here)
    vocab: dict[str, int] = file["model"]["vocab"]
    shuffled = list(vocab.values())
    random.Random(1).shuffle(shuffled)
    file["model"]["vocab"] = dict(zip(vocab, shuffled, strict=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert verify(Tokenizer.load(tmp_path), tmp_path, corpus()) > 0


def test_a_tiktoken_file_gives_the_same_ids_as_tokenizer_json(tmp_path: Path) -> None:
    make_nano(tmp_path / "both", layers=1, vocab=2048)
    both = Tokenizer.load(tmp_path / "both")
    (tmp_path / "both" / "tokenizer.json").unlink()
    only = Tokenizer.load(tmp_path / "both")
    assert (only.control, only.special_ids, only.eos_ids, only.vocab_size) == (
        both.control,
        both.special_ids,
        both.eos_ids,
        both.vocab_size,
    )
    assert [only.encode(text) for text in corpus()] == [both.encode(text) for text in corpus()]
    assert [only.token_bytes(id) for id in range(2100)] == [both.token_bytes(id) for id in range(2100)]
    assert verify(only, tmp_path / "both") == 0


@given(text=st.text(max_size=50), split=st.integers(0, 50), spelled=st.sampled_from(["[e~[", "<mm:think>", ""]))
@settings(max_examples=100, deadline=None)
def test_text_never_yields_an_added_id_and_pieces_are_joined(loaded: dict[str, Tokenizer], text: str, split: int, spelled: str) -> None:
    tokenizer = loaded["o200k"]
    text = text[:split] + spelled + text[split:]
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.control.values())
    assert tokenizer.decode_bytes(ids).decode() == text
    end = tokenizer.control_id("[e~[")
    assert tokenizer.encode_pieces([text[:split], "", text[split:], end, text, end, end]) == [*ids, end, *ids, end, end]


def test_lone_surrogates_become_the_replacement_character(loaded: dict[str, Tokenizer]) -> None:
    assert replace_surrogates("a\ud800b\udfff\U0001f600") == ("a\ufffdb\ufffd\U0001f600", 2)
    assert loaded["o200k"].encode("a\ud800b") == loaded["o200k"].encode("a\ufffdb")


def test_added_tokens_and_gaps_have_bytes(loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["gpt2"]
    think = tokenizer.control_id("<mm:think>")
    assert tokenizer.decode_bytes([*tokenizer.encode("é"), think]) == "é<mm:think>".encode()
    assert tokenizer.special_ids == {tokenizer.control_id("[e~[")}
    assert (tokenizer.token_bytes(-1), tokenizer.token_bytes(tokenizer.vocab_size)) == (b"", b"")
    with pytest.raises(MissingControlToken, match="<nope>"):
        tokenizer.control_id("<nope>")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 8]}, "tokenizer_config.json": {"eos_token": "[e~["}}, (7, 8)),
        ({"generation_config.json": {"eos_token_id": 7}}, (7,)),
        ({"generation_config.json": {}, "tokenizer_config.json": {"eos_token": "[e~["}}, (4000,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "[e~["}}}, (4000,)),
        ({}, ()),
    ],
)
def test_end_ids_come_from_the_generation_config_first(
    folders: dict[str, Path], tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["gpt2"] / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).eos_ids == expected


def test_a_difference_is_named_with_its_place(folders: dict[str, Path]) -> None:
    vocabulary = replace(read_vocabulary(folders["o200k"]), splits=(Split(r"[\s\S]"),))
    with pytest.raises(TokenizerMismatch, match=r"sample 1 differs at token 0 after b''.*the tokenizers library says"):
        verify(Tokenizer(vocabulary), folders["o200k"], ["a", "import"])


def edit(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def apply(file: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for name in path:
            file = file[name]
        file[last] = value

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("model.type", "Unigram"), "its model is 'Unigram'"),
        (edit("model.byte_fallback", True), "'byte_fallback'"),
        (edit("model.end_of_word_suffix", "</w>"), "'end_of_word_suffix'"),
        (edit("model.merges", ["Ġ zzzz"]), "makes a token that has no id"),
        (edit("model.vocab", {"a": 0}), "255 of the 256 single bytes"),
        (edit("model.vocab", {"日": 0}), "not in ByteLevel's alphabet"),
        (edit("normalizer", {"type": "Lowercase"}), "'Lowercase'"),
        (edit("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}), "'Strip'"),
        (edit("pre_tokenizer", {"type": "Metaspace"}), "does not end in ByteLevel"),
        (edit("pre_tokenizer.add_prefix_space", True), "add_prefix_space"),
        (edit("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}), "'Digits'"),
        (edit("model", None), "lacks a part"),
        (edit("model.ignore_merges", True), "reachable"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    file = json.loads((folders["gpt2"] / "tokenizer.json").read_text())  # noqa: TID251  (edited and written again)
    file["model"]["vocab"]["Ġunreachable"] = 9000
    change(file)
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(UnsupportedTokenizer, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither tokenizer.json nor"),
        ({"a.tiktoken": "", "b.tiktoken": ""}, "2 files"),
        ({"tokenizer.json": "{"}, "is not JSON"),
        ({"tokenizer.json": "[]"}, "must hold a JSON object"),
        ({"a.tiktoken": "IQ== 0", "tokenizer_config.json": "{}"}, "'pat_str'"),
        ({"a.tiktoken": "!! 0", "tokenizer_config.json": '{"pat_str": "."}'}, "is not a tiktoken vocabulary"),
        ({"a.tiktoken": "IQ== 0", "tokenizer_config.json": '{"pat_str": "."}'}, "255 of the 256 single bytes"),
    ],
)
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UnsupportedTokenizer, match=message):
        Tokenizer.load(tmp_path)


def test_a_pattern_that_does_not_compile_is_refused(folders: dict[str, Path]) -> None:
    vocabulary = replace(read_vocabulary(folders["gpt2"]), splits=(Split("("),))
    with pytest.raises(UnsupportedTokenizer, match="cannot be compiled"):
        Tokenizer(vocabulary)
