"""The generated model folder: complete, repeatable, and shaped so that its output is usable."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from model.chat.formats import detect_chat_format
from model.chat.minimax_m3 import END
from model.nano import make_nano, nano_is_complete
from model.tokenizer import Tokenizer, verify

Array = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "nano"
    make_nano(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_folder_is_complete_and_readable(nano: Path) -> None:
    assert nano_is_complete(nano)
    tokenizer = Tokenizer.load(nano)
    assert verify(tokenizer, nano) > 0
    assert tokenizer.vocab_size == 8192
    assert tokenizer.eos_ids == (tokenizer.control[END],)
    assert detect_chat_format(tokenizer).name == "minimax_m3"
    config = msgspec.json.decode((nano / "config.json").read_bytes())
    assert (config["max_position_embeddings"], config["tie_word_embeddings"], config["dtype"]) == (131072, False, "float32")


def test_the_same_arguments_give_the_same_files(nano: Path, tmp_path: Path) -> None:
    make_nano(tmp_path / "again")
    make_nano(tmp_path / "other", seed=1)
    again, other, first = digests(tmp_path / "again"), digests(tmp_path / "other"), digests(nano)
    assert again == first
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors", "nano.json"}


def test_sizes_are_as_asked(tmp_path: Path) -> None:
    make_nano(tmp_path / "small", layers=1, hidden=32, kv_heads=2, head_dim=16, vocab=1024, max_model_len=4096)
    weights = load_file(tmp_path / "small" / "model.safetensors")
    assert weights["lm_head.weight"].shape == (1024, 32)
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (32, 32)
    assert not any(name.startswith("model.layers.1.") for name in weights)
    assert Tokenizer.load(tmp_path / "small").vocab_size == 1024


def test_a_broken_or_different_folder_is_replaced_and_a_complete_one_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "nano"
    make_nano(folder, layers=1, vocab=1024)
    kept = (folder / "model.safetensors").stat().st_ino
    make_nano(folder, layers=1, vocab=1024)
    assert (folder / "model.safetensors").stat().st_ino == kept
    make_nano(folder, layers=1, vocab=1024, seed=7)
    assert (folder / "model.safetensors").stat().st_ino != kept
    (folder / "model.safetensors").write_bytes(b"half")
    assert not nano_is_complete(folder)
    make_nano(folder, layers=1, vocab=1024, seed=7)
    assert nano_is_complete(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["nano"]


def test_a_vocabulary_that_the_library_cannot_fill_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gives only \d+ of 500000 tokens"):
        make_nano(tmp_path / "nano", vocab=500_000)
    assert list(tmp_path.iterdir()) == []
    assert not nano_is_complete(tmp_path / "nano")


def rms_norm(x: Array, weight: Array) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
    return normed


def rotate(x: Array) -> Array:
    """Rotary embedding of [heads, tokens, dim], halves paired as Llama does."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] / 1_000_000.0 ** (np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], axis=-1)


class Llama:
    """The forward pass in numpy: logits [tokens, vocab] for the ids of one sequence."""

    def __init__(self, folder: Path) -> None:
        self.weights: dict[str, Array] = {
            name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.num_layers, self.head_dim = 2, 32

    def logits(self, ids: list[int]) -> Array:
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.num_layers):
            w = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in self.weights.items()}
            x = x + self.attention(rms_norm(x, w["input_layernorm.weight"]), w)
            h = rms_norm(x, w["post_attention_layernorm.weight"])
            gate = h @ w["mlp.gate_proj.weight"].T + w["mlp.gate_proj.bias"]
            up = h @ w["mlp.up_proj.weight"].T + w["mlp.up_proj.bias"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T + w["mlp.down_proj.bias"]
        logits: Array = rms_norm(x, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T
        return logits

    def attention(self, h: Array, w: dict[str, Array]) -> Array:
        def heads(name: str) -> Array:
            return (h @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(h), -1, self.head_dim).swapaxes(0, 1)

        q, k, v = rotate(heads("q")), rotate(heads("k")), heads("v")
        scores = q @ k.swapaxes(1, 2) / np.sqrt(self.head_dim) + np.triu(np.full((len(h), len(h)), -np.inf), 1)
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        mixed: Array = (probabilities @ v).swapaxes(0, 1).reshape(len(h), -1) @ w["self_attn.o_proj.weight"].T
        return mixed


def test_output_is_text_that_depends_on_the_whole_context_and_ends(nano: Path) -> None:
    tokenizer, llama = Tokenizer.load(nano), Llama(nano)
    prompts = [tokenizer.encode(Path(__file__).read_text())[start : start + 300] for start in (0, 300, 600)]
    logits = np.concatenate([llama.logits(ids) for ids in prompts])
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)

    end = tokenizer.control[END]
    whole = [id for id in range(8192) if not _is_text(tokenizer.token_bytes(id)) or id in tokenizer.control.values()]
    unwanted = [id for id in whole if id != end]
    assert len(unwanted) > 8
    assert probabilities[:, unwanted].sum(-1).max() < 1e-12
    assert 1 / 300 < probabilities[:, end].mean() < 1 / 75
    assert (logits.argmax(-1) == end).mean() < 0.05
    entropy = -(probabilities * np.log(probabilities + 1e-300)).sum(-1)
    assert entropy.mean() > 5  # of ln 8192 = 9
    assert len(set(logits.argmax(-1).tolist())) > 100

    changed = [prompts[0][0] + 1, *prompts[0][1:]]
    assert np.abs(llama.logits(changed)[-1] - llama.logits(prompts[0])[-1]).max() > 1e-3


def _is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True
