"""A complete small model folder, made in seconds without a download: MiniMax-M3's chat format and control tokens, random weights.

It is for running the real engine where no real model is: scheduler, prefix cache, token counts and streams are then real; what it says
means nothing. The vocabulary is trained on this Python's standard library and `model/data/multilingual.txt`, so code and prose take about
as many tokens as with a small real vocabulary.

The weights are random, but shaped so that output is usable in tests: see `model.nano_weights`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from model.chat import minimax_m3 as m3
from model.nano_weights import NORM_EPS, Array, Shape, random_weights
from model.vocabulary import Vocabulary, read_json, read_tokenizer_json

PAD = "]!p~["
SPECIAL_TOKENS = (PAD, m3.BEGIN, m3.BLOCK, m3.END)
MARKER_TOKENS = (m3.THINK, m3.THINK_END, m3.NAMESPACE, m3.CALLS, m3.CALLS_END)
"""Added tokens that engines show as text, as the real vocabulary has them."""
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS_BYTES = 4_000_000
"""How much of the standard library the vocabulary is trained on."""

_DATA = Path(__file__).parent / "data"
_RECORD = "nano.json"
_FORMAT = 1


def make_nano(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    kv_heads: int = 1,
    head_dim: int = 32,
    vocab: int = 8192,
    max_model_len: int = 131072,
    seed: int = 0,
) -> None:
    """Write the model folder. One that is there stays as it is if it is complete and was made with these arguments; else it is replaced.

    The same arguments give the same files with the same Python and libraries. It is written beside `folder` and renamed, so that a killed
    process leaves no half a folder. Raises ValueError if the standard library's sources are too few for `vocab`, OSError.
    """
    shape = Shape(layers, hidden, kv_heads, head_dim, vocab, max_model_len)
    made = {"format": _FORMAT, "seed": seed, "shape": asdict(shape)}

    def model(vocabulary: Vocabulary) -> Model:
        return _config(shape), random_weights(shape, vocabulary, m3.END, np.random.default_rng(seed))

    write_folder(folder, made, vocab, max_model_len, model)


Model = tuple[dict[str, Any], Mapping[str, Array]]
"""config.json without the ids that end a turn, and the tensors by name."""


def write_folder(folder: Path, made: dict[str, Any], vocab: int, max_model_len: int, model: Callable[[Vocabulary], Model]) -> None:
    """A model folder: tokenizer, chat template, and what `model` gives.

    `made` says what it is made of: a complete folder whose record has it stays. Raises as `make_nano`.
    """
    if nano_is_complete(folder) and made.items() <= read_json(folder / _RECORD).items():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        vocabulary = _write_tokenizer(draft, vocab)
        config, tensors = model(vocabulary)
        _write_configs(draft, config, max_model_len, vocabulary)
        save_file(dict(tensors), draft / "model.safetensors", {"format": "pt"})
        sizes = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
        _write_json(draft / _RECORD, made | {"files": sizes})
        draft.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        _rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def nano_is_complete(folder: Path) -> bool:
    """Whether `folder` holds everything that this version of `make_nano` wrote."""
    try:
        record = msgspec.json.decode((folder / _RECORD).read_bytes())
        return record["format"] == _FORMAT and all((folder / name).stat().st_size == size for name, size in record["files"].items())
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return False


def _rename(draft: Path, folder: Path) -> None:
    try:
        os.rename(draft, folder)
    except OSError:
        if not nano_is_complete(folder):  # else another process made it meanwhile
            raise


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _corpus() -> Iterator[str]:
    """The standard library's sources in name order up to CORPUS_BYTES, then the multilingual text, often enough to count."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left = CORPUS_BYTES
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if left <= 0:
            break
        if "site-packages" not in path.parts and "test" not in path.relative_to(root).parts:
            text = path.read_text(encoding="utf-8", errors="ignore")
            left -= len(text)
            yield text
    yield from [(_DATA / "multilingual.txt").read_text(encoding="utf-8")] * 20


def _write_tokenizer(folder: Path, vocab: int) -> Vocabulary:
    """tokenizer.json, the same vocabulary as nano.tiktoken, and tokenizer_config.json with what both need."""
    added = len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab - added, show_progress=False, initial_alphabet=alphabet, max_token_length=24)
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKER_TOKENS])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the standard library gives only {tokenizer.get_vocab_size()} of {vocab} tokens: are its sources installed?")
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = read_tokenizer_json(folder / "tokenizer.json")
    tokens = sorted([*vocabulary.single.items(), *vocabulary.merged.items()], key=lambda pair: pair[1])
    (folder / "nano.tiktoken").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in tokens))
    return vocabulary


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_model_len,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 1_000_000.0,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _write_configs(folder: Path, config: dict[str, Any], max_model_len: int, vocabulary: Vocabulary) -> None:
    ids = {token.text: token.id for token in vocabulary.added}
    ends = {"bos_token_id": ids[m3.BLOCK], "eos_token_id": ids[m3.END], "pad_token_id": ids[PAD]}
    template = _chat_template()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(folder / "config.json", config | ends)
    _write_json(folder / "generation_config.json", ends)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": m3.BLOCK,
        "eos_token": m3.END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
        "pat_str": SPLIT_PATTERN,
        "added_tokens_decoder": {str(t.id): _added_token_json(t.text, t.special) for t in vocabulary.added},
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _added_token_json(text: str, special: bool) -> dict[str, Any]:
    return {"content": text, "special": special, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}


def _chat_template() -> str:
    """M3's format as a template: the format's fixed words as variables, then the rules."""
    words = {
        "ns": m3.NAMESPACE,
        "identity": m3.IDENTITY,
        "instructions": {mode: m3.thinking_instructions(mode) for mode in get_args(m3.ThinkingMode)},
        "default_developer": m3.DEFAULT_DEVELOPER,
        "tools_before": m3.TOOLS_BEFORE,
        "tools_after": m3.TOOLS_AFTER,
    }
    lines = [f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in words.items()]
    return "".join(lines) + (_DATA / "nano_chat_template.jinja").read_text(encoding="utf-8")
