"""The model of `benchmarks.gpu_plugin`: Llama's layers at the width of an 8B, fewer of them, with weights that vLLM makes up."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, VOCABULARY = 16, 4096, 32, 8, 128, 14_336, 32_000
KV_NUMBERS = 2 * LAYERS * KV_HEADS * HEAD_SIZE
"""Of a token over all ranks."""


def write_model() -> Path:
    """A folder with its configuration, and a tokenizer of a word an id for an API server."""
    folder = Path(mkdtemp(prefix="plugin-model-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(VOCABULARY)}, "unk_token": "w0"},
    }
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "bos_token": "w0"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
