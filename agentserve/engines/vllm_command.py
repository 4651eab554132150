"""The command line of the embedded vLLM: what a CPU engine on a nano model needs to start, and nothing that it does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from agentserve.engines.plugin.options import PluginOptions, transfer_config
from agentserve.engines.plugin.supported import PluginUnsupported
from agentserve.errors import SetupError
from model.nano import make_nano
from model.nano_m3 import make_nano_m3

SERVED_MODEL_NAME: Final = "nano"
_BLOCK_MULTIPLE: Final = 32  # of vLLM's CPU attention kernel
_KV_TENSORS: Final = 2  # keys and values
_FLOAT32_BYTES: Final = 4
_BFLOAT16_BYTES: Final = 2  # of index keys, whatever the model's format
NANO_M3: Final = "nano-m3"
EMBEDDED_MODELS: Final[dict[str, Callable[[Path], None]]] = {"nano": make_nano, NANO_M3: make_nano_m3}
"""Generated models by name, and how each is written into its folder."""

_TRANSFER: Final = "--kv-transfer-config"

_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",  # spinning OpenMP threads cost a factor of ten on a machine that is shared
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker runs inside the engine process: ten seconds and 600 MB less
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """What can be chosen of the embedded engine. Raises `SetupError` on values that vLLM would refuse."""

    cache_folder: Path
    """Keeps the generated model from one start to the next."""
    model: str = "nano"
    """nano: a small Llama. nano-m3: MiniMax-M3's own architecture, a few times slower."""
    index_topk_freq: int = 1
    """With nano-m3, one of so many sparse layers chooses blocks and the others read its choice; 1: every layer chooses."""
    kv_tokens: int = 262_144
    """Size of the KV cache, rounded down to whole blocks. A small one makes eviction happen for real."""
    block_size: int = 128
    """Tokens of a KV block; 128 is MiniMax-M3's."""
    max_model_len: int = 131_072
    """Prompt plus output, tokens; cut to what the KV cache and the model hold."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    tensor_parallel: int = 1
    """Ranks, each a process with a share of the heads: real shards, and slower than one on a CPU."""
    restart: bool = True
    """Start the engine again, with back-off, when it dies."""
    dev_mode: bool = False
    """Open vLLM's development routes, such as /reset_prefix_cache."""
    start_timeout_seconds: float = 300.0
    plugin: PluginOptions | None = None
    """Agentserve's plugin inside vLLM; None: vLLM without it."""
    extra_args: tuple[str, ...] = ()
    """Appended to vLLM's command line, so they win over what stands there."""

    def __post_init__(self) -> None:
        if self.model not in EMBEDDED_MODELS:
            raise SetupError(f"there is no embedded model {self.model!r}; there are: {', '.join(EMBEDDED_MODELS)}")
        if self.index_topk_freq != 1 and self.model != NANO_M3:
            raise SetupError(f"index reuse needs a model with an indexer: use it with --embedded-model {NANO_M3}")
        if self.model == NANO_M3 and self.tensor_parallel != 1:
            raise SetupError(f"{NANO_M3} runs on one rank only: leave --engine-tensor-parallel at 1")
        if self.block_size <= 0 or self.block_size % _BLOCK_MULTIPLE:
            raise SetupError(f"block_size is {self.block_size!r}: vLLM on the CPU takes multiples of {_BLOCK_MULTIPLE} only.")
        if self.kv_tokens < self.block_size:
            raise SetupError(f"kv_tokens is {self.kv_tokens!r}: it must hold a block of {self.block_size} tokens at least.")

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks."""
        return self.kv_tokens // self.block_size


class _SparseConfig(msgspec.Struct):
    """What sizes the cache of M3's index keys."""

    sparse_attention_freq: list[int] = []
    sparse_index_dim: int = 0


def plugin_options(policy: str, tier_bytes: int = 0) -> PluginOptions | None:
    """For the setting `engine.plugin`, with an exclusive tier of so many bytes behind it. Raises `SetupError` where that cannot be."""
    if policy == "off":
        if tier_bytes:
            raise SetupError("--offload-tier exclusive is kept by the engine's plugin: name its policy with --engine-plugin")
        return None
    try:
        return PluginOptions.read({"policy": policy, "tier_bytes": tier_bytes})
    except PluginUnsupported as error:
        raise SetupError(f"--engine-plugin: {error}") from error


class _ModelConfig(msgspec.Struct):
    """The fields of a model folder's config.json that size its KV cache."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    sparse_attention_config: _SparseConfig | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        sparse = self.sparse_attention_config or _SparseConfig()
        index = sum(map(bool, sparse.sparse_attention_freq)) * sparse.sparse_index_dim * _BFLOAT16_BYTES
        return self.num_hidden_layers * _KV_TENSORS * self.num_key_value_heads * self.head_dim * _FLOAT32_BYTES + index


class _NestedConfig(msgspec.Struct):
    text_config: _ModelConfig | None = None


def _read_config(model_folder: Path) -> _ModelConfig:
    content = (model_folder / "config.json").read_bytes()
    nested = msgspec.json.decode(content, type=_NestedConfig).text_config
    return msgspec.json.decode(content, type=_ModelConfig) if nested is None else nested


def kv_bytes_per_token(model_folder: Path) -> int:
    """What a token of the generated model takes in the KV cache, over all ranks."""
    return _read_config(model_folder).kv_bytes_per_token


def vllm_command(
    model_folder: Path,
    port: int,
    options: EmbeddedOptions,
    *,
    events_endpoint: str,
    replay_endpoint: str,
    variables: Mapping[str, str] | None = None,
) -> list[str]:
    """The command that serves `model_folder` on 127.0.0.1:`port` and publishes KV events on the two ZMQ endpoints.

    `variables`: further environment, over what stands here.
    """
    config = _read_config(model_folder)
    num_gpu_blocks = options.num_blocks + 1  # vLLM keeps block 0 as its null block
    max_model_len = min(options.max_model_len, config.max_position_embeddings, options.num_blocks * options.block_size)
    values = {
        "model": str(model_folder),
        "served-model-name": SERVED_MODEL_NAME,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": str(max_model_len),
        "block-size": str(options.block_size),
        "num-gpu-blocks-override": str(num_gpu_blocks),
        "kv-cache-memory-bytes": str(num_gpu_blocks * options.block_size * config.kv_bytes_per_token),
        "max-num-seqs": str(options.max_num_seqs),
        "max-num-batched-tokens": str(options.max_num_batched_tokens),
        "tensor-parallel-size": str(options.tensor_parallel),
        "scheduling-policy": "priority",
        "prefix-caching-hash-algo": "sha256_cbor",
        "tool-call-parser": "minimax_m3",
        "reasoning-parser": "minimax_m3",
        "structured-outputs-config": json.dumps({"enable_in_reasoning": True}),
        "kv-events-config": json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events_endpoint,
                "replay_endpoint": replay_endpoint,
                "topic": "kv-events",
            }
        ),
    }
    switches = (
        "enforce-eager",
        "enable-prefix-caching",
        "enable-prompt-tokens-details",
        "enable-scale-out",
        "enable-auto-tool-choice",
        "disable-uvicorn-access-log",
    )
    return [
        *_environment(options, variables or {}),
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *(word for name, value in values.items() for word in (f"--{name}", value)),
        *(f"--{name}" for name in switches),
        *_index_reuse(options),
        *_extra_args(options),
    ]


def _index_reuse(options: EmbeddedOptions) -> list[str]:
    if options.index_topk_freq == 1:
        return []
    switch = {"use_index_cache": True, "index_topk_freq": options.index_topk_freq}
    return ["--hf-overrides", json.dumps({"text_config": switch})]


def _extra_args(options: EmbeddedOptions) -> tuple[str, ...]:
    """Those asked for, with the plugin in front of the KV connector that they may name."""
    if options.plugin is None:
        return options.extra_args
    if _TRANSFER not in options.extra_args:
        return (_TRANSFER, transfer_config(options.plugin), *options.extra_args)
    place = options.extra_args.index(_TRANSFER) + 1
    both = transfer_config(options.plugin, beside=options.extra_args[place])
    return (*options.extra_args[:place], both, *options.extra_args[place + 1 :])


def _environment(options: EmbeddedOptions, variables: Mapping[str, str]) -> list[str]:
    """env(1) changes the inherited environment, which this process does not read."""
    names = {**_ENVIRONMENT, **variables}
    if options.dev_mode:
        names["VLLM_SERVER_DEV_MODE"] = "1"
    if options.plugin is not None:
        names["VLLM_PLUGINS"] = "agentserve"  # opens the plugin's routes
    # Without written bytecode every start compiles thousands of modules again, which doubles it.
    return ["env", "-u", "PYTHONDONTWRITEBYTECODE", *(f"{name}={value}" for name, value in names.items())]
