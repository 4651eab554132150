"""The gate on nano-M3: the reference's own rounding and choices, and a real vLLM on the CPU with index reuse off and on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity

from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.vllm_command import NANO_M3, EmbeddedOptions
from model.m3.config import config_from_json
from model.m3.index_reuse import fixed_plan
from model.nano_m3 import SHAPE, make_nano_m3
from model.reference.causal import Weights, fused, run_backbone
from model.reference.gate import Thresholds, Verdict, compare
from model.reference.stack import overlap

FREQS = (1, 4)
NUM_LOGPROBS = 20
"""What vLLM tells of a step at most, by its default."""
ROUNDING = Thresholds(least_cosine=0.999, largest_relative_error=0.05, least_top1=0.99, tie=0.1)
"""bf16 against fp32 along the same choices. Logits that are each off by that error change places within 0.1 deviations."""
PROMPT_TOKENS = 1_100
FIRST_QUERY = (SHAPE.topk_blocks + 1) * SHAPE.block_size
"""Behind it some block is left out, for every query."""


def nano_weights(folder: Path) -> dict[str, torch.Tensor]:
    """By vLLM's names; the folder is made if need be."""
    make_nano_m3(folder)
    return fused(load_file(folder / "model.safetensors"))


def prompt(seed: int, count: int = PROMPT_TOKENS) -> list[int]:
    """Ids of plain text tokens."""
    rng = random.Random(seed)
    return [rng.randrange(300, 8_000) for _ in range(count)]


def rounding_gate(weights: Weights, freq: int) -> dict[str, Any]:
    """bf16 against fp32 by the reference: logits along the same choices, and how many rows choose another way when free."""
    tokens, plan = torch.tensor(prompt(0)), fixed_plan(SHAPE.num_sparse_layers, freq)
    narrow = run_backbone(SHAPE, weights, tokens, plan, dtype=torch.bfloat16)
    along = run_backbone(SHAPE, weights, tokens, plan, dtype=torch.float32, forced=narrow.choices)
    free = run_backbone(SHAPE, weights, tokens, plan, dtype=torch.float32)
    head = weights["lm_head.weight"]
    verdict = compare(narrow.hidden.float() @ head.T, along.hidden @ head.T, ROUNDING)
    return asdict(verdict) | {
        "largest_expert_regret": along.expert_regret.max().item(),
        "free_least_cosine": cosine_similarity(narrow.hidden.float(), free.hidden, dim=-1).min().item(),
    }


def nano_overlap(weights: Weights) -> list[list[float]]:
    """Shares of blocks that layers have in common. The weights are random: layers of a trained model agree far more."""
    trace = run_backbone(SHAPE, weights, torch.tensor(prompt(1)), fixed_plan(SHAPE.num_sparse_layers))
    return overlap(trace.blocks, FIRST_QUERY)


async def complete(url: str, ids: list[int], num_tokens: int) -> dict[str, Any]:
    """Greedy continuation by the engine itself, with the likeliest tokens of each step."""
    body = {"model": "nano", "prompt": ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": NUM_LOGPROBS}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        return msgspec.json.decode(await response.read(), type=dict[str, Any])


def judge(folder: Path, ids: list[int], answer: dict[str, Any], freq: int) -> Verdict:
    """Each step's likeliest tokens against the reference's, over the prompt and what was generated."""
    config = config_from_json(msgspec.json.decode((folder / "config.json").read_bytes()))
    weights = nano_weights(folder)
    (choice,) = answer["choices"]
    told = choice["logprobs"]["top_logprobs"]
    whole = torch.tensor(ids + choice["token_ids"])
    hidden = run_backbone(config, weights, whole, fixed_plan(config.num_sparse_layers, freq)).hidden[len(ids) - 1 : -1]
    expected = (hidden @ weights["lm_head.weight"].T).log_softmax(-1)
    ours, theirs = torch.empty(len(told), NUM_LOGPROBS), torch.empty(len(told), NUM_LOGPROBS)
    for step, likeliest in enumerate(told):
        best = sorted(((value, int(name.removeprefix("token_id:"))) for name, value in likeliest.items()), reverse=True)[:NUM_LOGPROBS]
        ours[step] = torch.tensor([value for value, _ in best])
        theirs[step] = expected[step, [token for _, token in best]]
    return compare(ours, theirs)


async def engine_gate(cache_folder: Path, freq: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """The real vLLM, one of `freq` layers choosing: its answers to a long prompt, cold and cached, are the reference's."""
    engine = EmbeddedEngine(EmbeddedOptions(cache_folder, model=NANO_M3, index_topk_freq=freq, kv_tokens=32_768), progress=progress)
    ids = prompt(2, 2_200)
    try:
        await engine.start()
        cold = await complete(engine.url, ids, 24)
        warm = await complete(engine.url, ids, 24)
    finally:
        await engine.close()
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    verdicts = [await asyncio.to_thread(judge, engine.model_folder, ids, answer, freq) for answer in (cold, warm)]
    same = cold["choices"][0]["token_ids"] == warm["choices"][0]["token_ids"]
    hit = cached == (len(ids) - 1) // SHAPE.block_size * SHAPE.block_size
    return {
        "passed": all(verdict.passed for verdict in verdicts) and same and hit,
        "cold": asdict(verdicts[0]),
        "cached": asdict(verdicts[1]),
        "greedy_answers_are_equal": same,
        "cached_tokens": cached,
    }
