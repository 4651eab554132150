"""Index reuse on a GPU: the real vLLM and M3's layers at full width, with and without reuse in turn, in one process, beside the gate.

    python -m benchmarks.m3_gpu --out FILE.json [--eager]

Needs a CUDA device and vLLM with M3's NVIDIA model. Weights are random, drawn so that activations keep their size; layers and experts are
fewer than M3's so that one device holds them. Each arm has its own captured graphs: they are captured again at every change of arm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm.models.minimax_m3.nvidia.model as m3
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from agentserve.engines.plugin.index_reuse import IndexReuse, install
from model.m3.config import MINIMAX_M3
from model.m3.index_reuse import ReusePlan, fixed_plan, index_work
from model.reference.experts import ExpertRule, ExpertWeights, experts, swiglu_oai
from model.reference.gate import Thresholds, Verdict, compare
from model.reference.norms import gemma_norm, rotate
from model.reference.sparse_attention import SparseRule, attend, block_scores, choose_blocks

NUM_DENSE = MINIMAX_M3.num_dense_layers
GATE_TOKENS = 3_200
"""25 blocks: more than the 16 that are chosen, so that the choice matters."""
TURN_CACHED, TURN_NEW = 129_024, 1_024
HBM_BYTES_PER_SECOND = 4.8e12
"""An H200's memory bandwidth by its data sheet: the floor of what must be read."""


def write_model(folder: Path, num_layers: int, num_experts: int) -> Path:
    frequencies = [0] * NUM_DENSE + [1] * (num_layers - NUM_DENSE)
    sparse = {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_disable_index_value": frequencies,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": frequencies,
    }
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_text",
        "num_hidden_layers": num_layers,
        "num_local_experts": num_experts,
        "moe_layer_freq": frequencies,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
        "bos_token_id": 0,
        "sparse_attention_config": sparse,
    }
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"architectures": text["architectures"], "model_type": "minimax_m3_vl", "text_config": text, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def _norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """The model's norm in PyTorch: its own kernel is FlashInfer's, which need not be installed."""
    if residual is None:
        return gemma_norm(x, self.weight, getattr(self, "variance_epsilon", 1e-6))
    residual = residual + x
    return gemma_norm(residual, self.weight, getattr(self, "variance_epsilon", 1e-6)), residual


def draw_weights(model: Any) -> None:
    """Overwrite the loader's dummies, which make every layer a whisper beside the residual, in place."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "embed" not in name:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
        elif "embed" in name:
            parameter.data.normal_(0, 1.0)
        elif "norm" in name:
            parameter.data.normal_(0, 0.1)
        elif "bias" in name:
            parameter.data.normal_(0, 0.01)


class Arms:
    """The engine and the switch between arms."""

    def __init__(self, eager: bool, num_layers: int, num_experts: int, utilization: float) -> None:
        m3.MiniMAXGemmaRMSNorm.forward = _norm
        self.num_sparse = num_layers - NUM_DENSE
        self.reuse = IndexReuse(fixed_plan(self.num_sparse))
        install(m3.MiniMaxM3SparseAttention, self.reuse)
        folder = write_model(Path("/tmp/m3-layers"), num_layers, num_experts)
        extra = {} if eager else {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 28, 32]}}
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            block_size=128,
            max_model_len=140_000,
            gpu_memory_utilization=utilization,
            enforce_eager=eager,
            max_num_batched_tokens=16_384,
            max_num_seqs=64,
            **extra,
        )
        self.eager = eager
        self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.get_model()
        draw_weights(self.model)
        self.reset()

    def choose(self, freq: int) -> None:
        """Switch to an arm; its graphs are captured anew. KV written by another arm stays valid to time, not to compare."""
        self.reuse.plan = fixed_plan(self.num_sparse, freq)
        if not self.eager:
            from vllm.compilation.cuda_graph import CUDAGraphWrapper

            CUDAGraphWrapper.clear_all_graphs()
            self.runner.capture_model()

    def reset(self) -> None:
        self.llm.llm_engine.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], **options: Any) -> tuple[float, list[Any]]:
        options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "detokenize": False} | options
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], SamplingParams(**options), use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - began, out


def reference_hidden(model: Any, ids: list[int], plan: ReusePlan) -> torch.Tensor:
    """The last hidden states by the reference, with the engine's own weights: [tokens, hidden]."""
    text = model.language_model if hasattr(model, "language_model") else model
    inner = text.model
    parameters = dict(inner.named_parameters())
    positions = torch.arange(len(ids), device="cuda")
    rule = SparseRule()
    hidden = parameters["embed_tokens.weight"][torch.tensor(ids, device="cuda")].to(torch.bfloat16)
    choices: list[torch.Tensor] = []
    for number in range(len(inner.layers)):
        own = {name.removeprefix(f"layers.{number}."): value for name, value in parameters.items() if name.startswith(f"layers.{number}.")}
        hidden = hidden + _attention(own, hidden, positions, rule, plan, choices, sparse=number >= NUM_DENSE)
        hidden = hidden + _mlp(own, gemma_norm(hidden, own["post_attention_layernorm.weight"]), sparse=number >= NUM_DENSE)
    return gemma_norm(hidden, parameters["norm.weight"])


def _attention(
    own: dict[str, torch.Tensor],
    hidden: torch.Tensor,
    positions: torch.Tensor,
    rule: SparseRule,
    plan: ReusePlan,
    choices: list[torch.Tensor],
    sparse: bool,
) -> torch.Tensor:
    normed = gemma_norm(hidden, own["input_layernorm.weight"])
    sizes = [8192, 512, 512] + ([512, 128] if sparse else [])
    parts = (normed @ own["self_attn.qkv_proj.weight"].T).split(sizes, -1)

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return rotate(gemma_norm(x.unflatten(-1, (-1, 128)), own[f"self_attn.{name}.weight"]), positions, MINIMAX_M3.rotary_dim)

    query, key, value = heads(parts[0], "q_norm"), heads(parts[1], "k_norm"), parts[2].unflatten(-1, (-1, 128))
    chosen = None
    if sparse:
        ordinal = len(choices)
        if plan.leads(ordinal):
            scores = block_scores(heads(parts[3], "index_q_norm"), heads(parts[4], "index_k_norm")[:, 0], positions, rule)
            choices.append(choose_blocks(scores, positions, rule))
        else:
            choices.append(choices[plan.leaders[ordinal]])
        chosen = choices[ordinal]
    pieces = []
    for start in range(0, len(positions), 400):  # scores of all heads and keys do not fit at once
        rows = slice(start, start + 400)
        picked = None if chosen is None else chosen[:, rows]
        pieces.append(attend(query[rows], key, value, positions[rows], picked, rule.block_size))
    return torch.cat(pieces).flatten(1) @ own["self_attn.o_proj.weight"].T


def _mlp(own: dict[str, torch.Tensor], normed: torch.Tensor, sparse: bool) -> torch.Tensor:
    rule = ExpertRule()

    def find(*words: str) -> torch.Tensor:
        return next(value for name, value in own.items() if all(word in name for word in words))

    if not sparse:
        gate, up = (normed @ find("mlp", "gate_up").T).chunk(2, -1)
        return swiglu_oai(gate, up, rule).to(normed.dtype) @ find("mlp", "down").T
    weights = ExpertWeights(
        router=find("moe.gate", "weight"),
        bias=find("correction_bias"),
        gate_up=find("w13_weight"),
        down=find("w2_weight"),
        shared_gate_up=find("shared", "gate_up"),
        shared_down=find("shared", "down"),
    )
    return experts(normed, weights, rule)


@contextmanager
def hidden_states(arms: Arms) -> Iterator[list[torch.Tensor]]:
    """Collects what the engine turns into logits; with prompt logprobs that is every position of a prompt."""
    seen: list[torch.Tensor] = []
    original = arms.model.compute_logits

    def compute_logits(states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(states.clone())
        return original(states, *args, **kwargs)

    arms.model.compute_logits = compute_logits
    try:
        yield seen
    finally:
        arms.model.compute_logits = original


GATE = Thresholds(least_cosine=0.98, largest_relative_error=0.2, least_top1=0.95)
"""bf16 through all layers of two implementations: near ties in routing and in the choice of blocks fall either way, and a row differs."""


def gate(arms: Arms, freq: int, rng: random.Random) -> dict[str, Any]:
    """The engine's hidden states and logits of a prompt against the reference's, and against the reference without reuse."""
    arms.choose(freq)
    arms.reset()
    ids = [rng.randrange(10, 200_000) for _ in range(GATE_TOKENS)]
    with hidden_states(arms) as seen:
        arms.generate([ids], prompt_logprobs=1)
    ours = max(seen, key=len).float()
    plan = fixed_plan(arms.num_sparse, freq)
    expected = reference_hidden(arms.model, ids, plan)[: len(ours)].float()
    text = arms.model.language_model if hasattr(arms.model, "language_model") else arms.model
    head = next(value for name, value in text.named_parameters() if "lm_head" in name).float()
    rows = slice(-256, None)
    verdict = compare(ours[rows] @ head.T, expected[rows] @ head.T, GATE)
    states = torch.nn.functional.cosine_similarity(ours, expected, dim=-1)
    report = _words(verdict) | {
        "rows_of_hidden_states": len(ours),
        "cosine_median": states.median().item(),
        "cosine_p1": states.quantile(0.01).item(),
        "cosine_least": states.min().item(),
    }
    if freq > 1:
        plain = reference_hidden(arms.model, ids, fixed_plan(arms.num_sparse))[: len(ours)].float()
        report["cosine_to_no_reuse_median"] = torch.nn.functional.cosine_similarity(ours, plain, dim=-1).median().item()
    return report


def _words(verdict: Verdict) -> dict[str, Any]:
    return {
        "passed": verdict.passed,
        "least_cosine": verdict.least_cosine,
        "top1_share": verdict.top1_share,
        "largest_relative_error": verdict.largest_relative_error,
    }


def turn_milliseconds(arms: Arms, prefix: list[int], rng: random.Random, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        seconds, out = arms.generate([prefix + [rng.randrange(10, 200_000) for _ in range(TURN_NEW)]])
        assert out[0].num_cached_tokens >= len(prefix) - 128, out[0].num_cached_tokens
        times.append(1000 * seconds)
    return times


def decode_milliseconds(arms: Arms, prompts: list[list[int]], steps: int = 64) -> float:
    """One decode step of all prompts, their prefixes cached: the difference of a long and a one-token answer."""
    one, _ = arms.generate(prompts, max_tokens=1)
    many, _ = arms.generate(prompts, max_tokens=1 + steps)
    return 1000 * (many - one) / steps


def kernels(arms: Arms, prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Device time by kernel over 16 decode steps and a warm prefill of all prompts, in milliseconds, largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        arms.generate(prompts, max_tokens=17)
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)[:25]
    return {row.key[:90]: {"ms": row.self_device_time_total / 1000, "count": row.count} for row in rows if row.self_device_time_total}


def floor_milliseconds(num_sparse: int, freq: int, context: list[int]) -> float:
    """Least time of one decode step's indexers: their keys read once at full bandwidth (the arithmetic is far below it)."""
    work = index_work(MINIMAX_M3, fixed_plan(num_sparse, freq), num_index_heads=4, query_tokens=[1] * len(context), context_tokens=context)
    return 1000 * work.read_bytes / HBM_BYTES_PER_SECOND


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32_768, 65_536])
    options = parser.parse_args()
    rng = random.Random(0)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "eager": options.eager, "layers": options.layers}

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1))

    arms = Arms(options.eager, options.layers, options.experts, 0.85)
    result["gate"] = {f"reuse_{freq}": gate(arms, freq, rng) for freq in (1, 4)}
    print(json.dumps(result["gate"]), flush=True)
    save()
    prefix = [rng.randrange(10, 200_000) for _ in range(TURN_CACHED)]
    arms.generate([prefix])
    turns: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(options.rounds):
        for freq in (1, 4):
            arms.choose(freq)
            turn_milliseconds(arms, prefix, rng, 1)
            turns[freq] += turn_milliseconds(arms, prefix, rng, 3)
    result["turn_ms"] = turns
    save()
    print("turn", {freq: statistics.median(times) for freq, times in turns.items()}, flush=True)
    for length in options.contexts:
        arms.reset()
        prompts = [[rng.randrange(10, 200_000) for _ in range(length)] for _ in range(28)]
        arms.generate(prompts)
        prompts = [ids + [rng.randrange(10, 200_000) for _ in range(64)] for ids in prompts]
        arms.generate(prompts, max_tokens=65)
        decode: dict[int, list[float]] = {1: [], 4: []}
        for _ in range(options.rounds):
            for freq in (1, 4):
                arms.choose(freq)
                arms.generate(prompts, max_tokens=4)
                decode[freq] += [decode_milliseconds(arms, prompts) for _ in range(2)]
        result[f"decode_28x{length}_ms"] = decode
        result[f"indexer_floor_28x{length}_ms"] = {freq: floor_milliseconds(arms.num_sparse, freq, [length] * 28) for freq in (1, 4)}
        print("decode", length, {freq: statistics.median(times) for freq, times in decode.items()}, flush=True)
        save()
        for freq in (1, 4):
            arms.choose(freq)
            result[f"kernels_28x{length}_reuse_{freq}"] = kernels(arms, prompts)
        save()
    result["calls"] = {"choices": arms.reuse.num_choices, "reads": arms.reuse.num_reads}
    save()
    print(json.dumps({key: value for key, value in result.items() if not key.startswith("kernels")}), flush=True)


if __name__ == "__main__":
    main()
