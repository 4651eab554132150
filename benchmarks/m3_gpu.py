"""Index reuse on a GPU: the real vLLM and M3's layers at full width, with and without reuse, beside the gate.

    python -m benchmarks.m3_gpu --out FILE.json --eager           both arms in turn
    python -m benchmarks.m3_gpu --out FILE.json --arms 1          with CUDA graphs: one arm a process

Needs a CUDA device and vLLM with M3's NVIDIA model. Weights are random, drawn so that activations keep their size; layers and experts are
fewer than M3's so that one device holds them.
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
from tempfile import mkdtemp
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
from model.m3.sharding import Shard
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
        elif "bias" in name:  # of the router: wide, so that near ties between experts are rare and two implementations choose alike
            parameter.data.normal_(0, 1.0)


class Arms:
    """The engine and the switch between arms."""

    def __init__(self, eager: bool, num_layers: int, num_experts: int, utilization: float, freq: int) -> None:
        m3.MiniMAXGemmaRMSNorm.forward = _norm
        self.num_sparse = num_layers - NUM_DENSE
        self.reuse = IndexReuse(fixed_plan(self.num_sparse, freq))
        self.captured = freq
        install(m3.MiniMaxM3SparseAttention, self.reuse)
        folder = write_model(Path(mkdtemp(prefix="m3-layers-")), num_layers, num_experts)
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
        """Switch to an arm. With graphs there is one arm a process: what was captured stays captured."""
        assert self.eager or freq == self.captured
        self.reuse.plan = fixed_plan(self.num_sparse, freq)

    def reset(self) -> None:
        self.llm.llm_engine.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], **options: Any) -> tuple[float, list[Any]]:
        options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "detokenize": False} | options
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], SamplingParams(**options), use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - began, out


def reference_hidden(model: Any, ids: list[int], plan: ReusePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states by the reference, with the engine's own weights: [tokens, hidden]; and each row's routing margin.

    The margin is the least distance, over all layers, between the last expert that was chosen and the first that was not: [tokens].
    """
    text = model.language_model if hasattr(model, "language_model") else model
    inner = text.model
    parameters = dict(inner.named_parameters())
    positions = torch.arange(len(ids), device="cuda")
    rule = SparseRule()
    hidden = parameters["embed_tokens.weight"][torch.tensor(ids, device="cuda")].to(torch.bfloat16)
    choices: list[torch.Tensor] = []
    margins = torch.full((len(ids),), float("inf"), device="cuda")
    for number in range(len(inner.layers)):
        own = {name.removeprefix(f"layers.{number}."): value for name, value in parameters.items() if name.startswith(f"layers.{number}.")}
        hidden = hidden + _attention(own, hidden, positions, rule, plan, choices, sparse=number >= NUM_DENSE)
        normed = gemma_norm(hidden, own["post_attention_layernorm.weight"])
        if number >= NUM_DENSE:
            margins = torch.minimum(margins, _routing_margin(own, normed))
        hidden = hidden + _mlp(own, normed, sparse=number >= NUM_DENSE)
    return gemma_norm(hidden, parameters["norm.weight"]), margins


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
    shard = Shard(MINIMAX_M3, 1)
    sizes = [shard.query_size, shard.kv_size, shard.kv_size] + ([shard.index_query_size, MINIMAX_M3.index_dim] if sparse else [])
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


def _find(own: dict[str, torch.Tensor], *words: str) -> torch.Tensor:
    return next(value for name, value in own.items() if all(word in name for word in words))


def _routing_margin(own: dict[str, torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
    scores = torch.sigmoid(normed.float() @ _find(own, "moe.gate", "weight").float().T) + _find(own, "correction_bias").float()
    best = scores.topk(ExpertRule().top_k + 1, -1).values
    return best[:, -2] - best[:, -1]


def _mlp(own: dict[str, torch.Tensor], normed: torch.Tensor, sparse: bool) -> torch.Tensor:
    rule = ExpertRule()
    if not sparse:
        gate, up = (normed @ _find(own, "mlp", "gate_up").T).chunk(2, -1)
        return swiglu_oai(gate, up, rule).to(normed.dtype) @ _find(own, "mlp", "down").T
    weights = ExpertWeights(
        router=_find(own, "moe.gate", "weight"),
        bias=_find(own, "correction_bias"),
        gate_up=_find(own, "w13_weight"),
        down=_find(own, "w2_weight"),
        shared_gate_up=_find(own, "shared", "gate_up"),
        shared_down=_find(own, "shared", "down"),
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


GATE = Thresholds(least_cosine=0.99, largest_relative_error=0.15, least_top1=0.95)
"""For bf16 through all layers of two implementations, over rows whose routing is clear."""
CLEAR_MARGIN = 0.01
"""Router scores that lie closer may change places between two bf16 implementations: such a row takes another expert."""
ALL_CHOSEN = MINIMAX_M3.topk_blocks * MINIMAX_M3.block_size
"""Up to here every block is chosen; behind it near ties among blocks can fall either way too."""


def gate(arms: Arms, freq: int, rng: random.Random) -> dict[str, Any]:
    """The engine's hidden states and logits of a prompt against the reference's with the same plan, and against no reuse."""
    arms.choose(freq)
    arms.reset()
    ids = [rng.randrange(10, 200_000) for _ in range(GATE_TOKENS)]
    with hidden_states(arms) as seen:
        arms.generate([ids], prompt_logprobs=1)
    ours = max(seen, key=len).float()
    expected, margins = reference_hidden(arms.model, ids, fixed_plan(arms.num_sparse, freq))
    expected, clear = expected[: len(ours)].float(), margins[: len(ours)] > CLEAR_MARGIN
    text = arms.model.language_model if hasattr(arms.model, "language_model") else arms.model
    head = next(value for name, value in text.named_parameters() if "lm_head" in name).float()
    rows = torch.nonzero(clear[:ALL_CHOSEN])[-256:, 0]
    late = torch.nonzero(clear[ALL_CHOSEN:])[:, 0] + ALL_CHOSEN
    cosine = torch.nn.functional.cosine_similarity(ours, expected, dim=-1)
    report = _words(compare(ours[rows] @ head.T, expected[rows] @ head.T, GATE)) | {
        "rows": len(rows),
        "clear_share": clear.float().mean().item(),
        "cosine_median": cosine.median().item(),
        "cosine_median_where_blocks_are_left_out": cosine[late].median().item(),
        "cosine_p10_where_blocks_are_left_out": cosine[late].quantile(0.1).item(),
    }
    if freq > 1:
        plain, _ = reference_hidden(arms.model, ids, fixed_plan(arms.num_sparse))
        changed = torch.nn.functional.cosine_similarity(ours, plain[: len(ours)].float(), dim=-1)
        report["cosine_median_to_no_reuse"] = changed[late].median().item()
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
    parser.add_argument("--arms", type=int, nargs="+", default=[1, 4], help="Reuse periods; with graphs one a process.")
    parser.add_argument("--gate-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32_768, 65_536])
    options = parser.parse_args()
    rng = random.Random(0)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "eager": options.eager, "layers": options.layers}

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1))

    arms = Arms(options.eager, options.layers, options.experts, 0.7, options.arms[0])
    with torch.inference_mode():
        result["gate"] = {f"reuse_{freq}": gate(arms, freq, rng) for freq in options.arms}
    print(json.dumps(result["gate"]), flush=True)
    save()
    if options.gate_only:
        return
    prefix = [rng.randrange(10, 200_000) for _ in range(TURN_CACHED)]
    arms.generate([prefix])
    turns: dict[int, list[float]] = {freq: [] for freq in options.arms}
    for _ in range(options.rounds):
        for freq in options.arms:
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
        decode: dict[int, list[float]] = {freq: [] for freq in options.arms}
        for _ in range(options.rounds):
            for freq in options.arms:
                arms.choose(freq)
                arms.generate(prompts, max_tokens=4)
                decode[freq] += [decode_milliseconds(arms, prompts) for _ in range(2)]
        result[f"decode_28x{length}_ms"] = decode
        result[f"indexer_floor_28x{length}_ms"] = {freq: floor_milliseconds(arms.num_sparse, freq, [length] * 28) for freq in options.arms}
        print("decode", length, {freq: statistics.median(times) for freq, times in decode.items()}, flush=True)
        save()
        for freq in options.arms:
            arms.choose(freq)
            result[f"kernels_28x{length}_reuse_{freq}"] = kernels(arms, prompts)
        save()
    result["calls"] = {"choices": arms.reuse.num_choices, "reads": arms.reuse.num_reads}
    save()
    print(json.dumps({key: value for key, value in result.items() if not key.startswith("kernels")}), flush=True)


if __name__ == "__main__":
    main()
