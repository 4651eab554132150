"""vLLM with MiniMax-M3's layers at full width on a GPU, and index reuse that can be switched while it runs, captured graphs included.

A captured graph keeps the plan that it was captured with. So each arm has a size of batch of its own: the graph for that size is captured
with the arm's plan, and a decode batch is sent to the graph of the arm that is wanted, padded by a row or more. Everything else is shared:
one process, one set of weights, one cache with the same prompts in it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the benchmark's output is to be read whole

import torch
import vllm.models.minimax_m3.nvidia.model as m3
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from agentserve.engines.plugin.index_reuse import IndexReuse, install, use_epilogue
from agentserve.engines.plugin.topk_layout import turn_choice_buffers
from benchmarks.m3_choices import Asked, as_mask, check_blocks, check_experts
from model.m3.config import MINIMAX_M3, M3Config, config_to_json
from model.m3.index_reuse import ReusePlan, fixed_plan
from model.reference.causal import Forced
from model.reference.norms import gemma_norm

MAX_MODEL_LEN = 140_000


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run: the reuse period, whether followers write their index keys, and the batch size whose graph is captured so."""

    name: str
    freq: int
    keeps_keys: bool
    graph_size: int


ARMS = (
    Arm("every layer chooses", 1, True, 29),
    Arm("1 of 4 chooses", 4, True, 30),
    Arm("1 of 4 chooses, keys of the others left out", 4, False, 31),
    Arm("every layer chooses, again", 1, True, 32),
)
"""The last is the first once more, with the most padding: what it differs by is not the arm."""
NUM_SEQUENCES = 28


def layers_of(num_layers: int, num_experts: int) -> M3Config:
    """M3 at full width, with fewer layers and experts."""
    return replace(MINIMAX_M3, num_hidden_layers=num_layers, num_local_experts=num_experts)


class Engine:
    """The engine and the switch between arms."""

    def __init__(self, config: M3Config, *, eager: bool, utilization: float, dtype: str = "bfloat16") -> None:
        self.config, self.eager = config, eager
        self.reuse = IndexReuse(self.plan(ARMS[0]))
        self._arm = ARMS[0]
        m3.MiniMAXGemmaRMSNorm.forward = _norm
        turn_choice_buffers(m3.MiniMaxM3SparseAttention)
        install(m3.MiniMaxM3SparseAttention, self.reuse)
        use_epilogue(m3, self.reuse)
        self._capture_arms_by_size()
        folder = Path(mkdtemp(prefix="m3-layers-"))
        (folder / "config.json").write_text(json.dumps(config_to_json(config, 524_288, dtype)))
        graphs = {} if eager else {"compilation_config": {"cudagraph_capture_sizes": [1, *(arm.graph_size for arm in ARMS)]}}
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            block_size=128,
            max_model_len=MAX_MODEL_LEN,
            gpu_memory_utilization=utilization,
            enforce_eager=eager,
            max_num_batched_tokens=16_384,
            max_num_seqs=64,
            **graphs,
        )
        self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        model = self.runner.get_model()
        self.model = model.language_model if hasattr(model, "language_model") else model
        self.draw_weights()
        self.choose(ARMS[0])

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def plan(self, arm: Arm) -> ReusePlan:
        return fixed_plan(self.config.num_sparse_layers, arm.freq)

    def _capture_arms_by_size(self) -> None:
        forward, by_size = m3.MiniMaxM3Model.forward, {arm.graph_size: arm for arm in ARMS}

        def run(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            self._set(by_size.get(len(input_ids), self._arm) if not self.eager and input_ids is not None else self._arm)
            return forward(model, input_ids, *args, **kwargs)

        m3.MiniMaxM3Model.forward = run

    def _set(self, arm: Arm) -> None:
        self.reuse.plan, self.reuse.keeps_keys = self.plan(arm), arm.keeps_keys

    def choose(self, arm: Arm) -> None:
        """All that runs from now on is `arm`'s: eager passes by the plan, decode batches of NUM_SEQUENCES by the graph they are sent to."""
        self._arm = arm
        self._set(arm)
        if self.eager:
            return
        manager = getattr(self.runner, "cudagraph_manager", None)
        if manager is not None:
            manager._candidates[NUM_SEQUENCES, 0] = manager._candidates[arm.graph_size, 0]
        else:
            self.runner.cudagraph_dispatcher._bs_to_padded_graph_size[NUM_SEQUENCES] = arm.graph_size

    def reset(self) -> None:
        self.llm.llm_engine.reset_prefix_cache()

    def draw_weights(self, seed: int = 0) -> None:
        """Overwrite the loader's dummies, which make every layer a whisper beside the residual, in place."""
        torch.manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if "embed" in name or "correction_bias" in name:  # biases are wide, so that few experts are near ties
                parameter.data.normal_(0, 1.0)
            elif parameter.dim() >= 2:
                parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.data.normal_(0, 0.1)

    def generate(self, prompts: Sequence[list[int]], **options: Any) -> tuple[float, list[Any]]:
        """Seconds that it took, and vLLM's outputs."""
        options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "detokenize": False} | options
        _synchronize()
        began = time.perf_counter()
        out = self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], SamplingParams(**options), use_tqdm=False)
        _synchronize()
        return time.perf_counter() - began, out

    def weights(self) -> dict[str, Tensor]:
        """By vLLM's names, the output head included."""
        held = dict(self.model.model.named_parameters())
        return held | {name: tensor for name, tensor in self.model.named_parameters() if name.startswith("lm_head")}

    def seen(self, ids: list[int]) -> Seen:
        """What the engine computes for a prompt, in one eager prefill. Raises ChoicesBroken where its choices cannot be such."""
        with _watching(self) as (states, routed, picked):
            self.generate([ids], prompt_logprobs=1)
        hidden, config = max(states, key=len), self.config
        num_rows = len(hidden)
        check_experts(routed, config.num_sparse_layers, len(ids), config.num_local_experts)
        asked = Asked(
            len(ids), config.num_index_heads, config.block_size, config.topk_blocks, config.num_init_blocks, config.num_local_blocks
        )
        for ordinal, rows in picked.items():
            check_blocks(rows, asked, ordinal)
        blocks = {ordinal: as_mask(rows[:num_rows], asked.num_blocks) for ordinal, rows in picked.items()}
        chosen = [blocks[self.reuse.plan.leaders[ordinal]] for ordinal in range(config.num_sparse_layers)]
        return Seen(hidden, Forced([rows[:num_rows] for rows in routed], chosen))

    def buffer_facts(self) -> str:
        """How the buffer of chosen blocks lies in memory, and which of vLLM's classes read and write it."""
        layer = next(layer.self_attn for layer in self.model.model.layers if hasattr(layer.self_attn, "indexer"))
        buffer, kernels = layer.topk_indices_buffer, (type(layer.indexer.impl).__name__, type(layer.impl).__name__)
        return f"buffer {list(buffer.shape)} by strides {buffer.stride()}, {buffer.dtype}; {' and '.join(kernels)}"


@dataclass(frozen=True, slots=True)
class Seen:
    """`hidden`: [tokens, hidden] that logits are made of; and the engine's own choice of experts and blocks in each layer."""

    hidden: Tensor
    choices: Forced


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """The model's norm in PyTorch: its own kernel is FlashInfer's, which need not be installed."""
    if residual is None:
        return gemma_norm(x, self.weight, self.variance_epsilon)
    residual = residual + x
    return gemma_norm(residual, self.weight, self.variance_epsilon), residual


class _Picks:
    """In the place of the overlap meter: keeps each leader's choice of the longest pass."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}

    def saw(self, ordinal: int, chosen: Tensor) -> None:
        if len(chosen) >= len(self.by_layer.get(ordinal, ())):
            self.by_layer[ordinal] = chosen.clone()

    def passed(self) -> None:
        """Nothing to book."""


@contextmanager
def _watching(engine: Engine) -> Iterator[tuple[list[Tensor], list[Tensor], dict[int, Tensor]]]:
    """Collects what is turned into logits, each router's choice, and each leader's blocks."""
    states: list[Tensor] = []
    routed: list[Tensor] = []
    picks, meter = _Picks(), engine.reuse.meter
    top_k = engine.config.num_experts_per_tok
    original = engine.model.compute_logits

    def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        states.append(hidden.clone())
        return original(hidden, *args, **kwargs)

    def routing(bias: Tensor) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            if len(logits) > 1:
                routed.append((torch.sigmoid(logits.float()) + bias.float()).topk(top_k, -1).indices)

        return hook

    layers = [layer.block_sparse_moe for layer in engine.model.model.layers if hasattr(layer, "block_sparse_moe")]
    hooks = [layer.gate.register_forward_hook(routing(layer.e_score_correction_bias)) for layer in layers]
    engine.model.compute_logits = compute_logits
    engine.reuse.meter = picks
    try:
        yield states, routed, picks.by_layer
    finally:
        engine.model.compute_logits, engine.reuse.meter = original, meter
        for hook in hooks:
            hook.remove()
