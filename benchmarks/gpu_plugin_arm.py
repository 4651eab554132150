"""One engine of `benchmarks.gpu_plugin`: vLLM with or without the plugin, and the sessions that it is asked, one request at a time.

Weights are drawn so that answers hang on what is attended to, which vLLM's dummies do not. With several ranks each has its own shard.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from agentserve.engines.plugin import control
from agentserve.engines.plugin.options import SCHEDULER, PluginOptions, transfer_config
from benchmarks.gpu_plugin_model import KV_NUMBERS, VOCABULARY, write_model

NUM_LIVE, NUM_ENDED, NUM_TURNS, NUM_ANSWERED = 8, 4, 4, 12
"""Sessions that come back, others in a round that end with their only turn, rounds, and tokens of an answer."""
MAX_MODEL_LEN = 12_288


@dataclass(frozen=True, slots=True)
class Arm:
    """How an engine is started. `carrier`: `none`, `scheduler` or `connector`; `prompt_blocks` of each session's first turn."""

    carrier: str = "none"
    has_tier: bool = False
    breaks: str = ""
    """What fails on the last rank in the end: `store` or `load`."""
    block_size: int = 16
    num_blocks: int = 1024
    prompt_blocks: int = 125
    is_async: bool = True
    dtype: str = "float32"
    """In bf16 vLLM itself answers differently when a prompt is computed in other pieces, in its batch-invariant mode too."""
    failure_policy: str = "fail"
    other_memory: bool = False
    """Overwrite the last rank's tier first: a check of the checks."""


@dataclass(slots=True)
class Asked:
    """A request and what became of it."""

    name: str
    num_prompt_tokens: int
    num_cached_tokens: int
    ids: list[int]
    seconds: float
    num_loaded_blocks: int


@dataclass(slots=True)
class Session:
    name: str
    ids: list[int]
    answer: list[int] = field(default_factory=list)
    """To its newest prompt, `ids`."""


class Engine:
    """vLLM in this process, its workers in their own where there are several."""

    def __init__(self, arm: Arm, tp: int) -> None:
        self.arm, self.tp = arm, tp
        self.kv_bytes = KV_NUMBERS * (4 if arm.dtype == "float32" else 2)
        tier_bytes = arm.num_blocks // 4 * arm.block_size * self.kv_bytes if arm.has_tier else 0
        options = PluginOptions(tier_bytes=tier_bytes)
        carried: dict[str, Any] = {}
        if arm.carrier == "scheduler":
            carried = {"scheduler_cls": SCHEDULER, "additional_config": {"agentserve": {"policy": options.policy}}}
        elif arm.carrier == "connector":
            config = json.loads(transfer_config(options))  # noqa: TID251 # vLLM wants it decoded
            carried = {"kv_transfer_config": config | {"kv_load_failure_policy": arm.failure_policy}}
        if arm.dtype == "float32":
            carried["attention_backend"] = "TRITON_ATTN"  # FlashAttention knows no float32
        self.llm = LLM(
            model=str(write_model()),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            dtype=arm.dtype,
            block_size=arm.block_size,
            num_gpu_blocks_override=arm.num_blocks + 1,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN,  # a prompt is one step
            max_num_seqs=8,
            gpu_memory_utilization=0.6,
            tensor_parallel_size=tp,
            async_scheduling=arm.is_async,
            disable_custom_all_reduce=True,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
            **carried,
        )
        self.llm.collective_rpc(draw_weights)

    def state(self) -> dict[str, Any]:
        answer = control.handle("")
        return json.loads(answer["body"]) if answer["status"] == 200 else {}  # noqa: TID251 # as above

    def facts(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        return {
            "runner": "V2" if config.use_v2_model_runner else "V1",
            "async": bool(config.scheduler_config.async_scheduling),
            "scheduler": str(config.scheduler_config.scheduler_cls),
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "kv_shapes": self.llm.collective_rpc(kv_shapes),
        }

    def speeds(self) -> dict[str, float | None]:
        """GB/s over all ranks, and microseconds a token, as the plugin itself measures them."""
        ordering: Any = control.current
        if ordering is None or not self.arm.has_tier:
            return {}
        speeds = ordering.tier.speeds
        stored, loaded, computed = speeds.seconds_per_stored_token, speeds.seconds_per_loaded_token, speeds.seconds_per_computed_token
        return {
            "store_gb_per_second": self.kv_bytes / stored / 1e9 if stored else None,
            "load_gb_per_second": self.kv_bytes / loaded / 1e9 if loaded else None,
            "load_microseconds_per_token": 1e6 * loaded if loaded else None,
            "compute_microseconds_per_token": 1e6 * computed if computed else None,
            "num_declined": speeds.num_declined,
        }

    def ask(self, session: Session, fate: str = "live") -> Asked:
        hints = json.dumps({"session_id": session.name, "branch_id": "", "fate": fate})
        params = SamplingParams(max_tokens=NUM_ANSWERED, temperature=0, ignore_eos=True, detokenize=False, extra_args={"agentserve": hints})
        before, began = self.state().get("num_loaded_blocks", 0), time.perf_counter()
        try:
            out: Any = self.llm.generate([TokensPrompt(prompt_token_ids=session.ids)], params, use_tqdm=False)[0]
            ids, cached = list(out.outputs[0].token_ids), out.num_cached_tokens or 0
        except Exception as error:  # noqa: BLE001 # vLLM has failed the request, which is what is looked for
            print(f"{session.name} failed: {error!r}", flush=True)
            ids, cached = [], 0
        seconds = time.perf_counter() - began
        loaded = self.state().get("num_loaded_blocks", 0) - before
        session.answer = ids
        return Asked(session.name, len(session.ids), cached, ids, seconds, loaded)


def draw_weights(worker: Any) -> None:
    """On each rank: in place, as graphs are captured already."""
    from vllm.distributed import get_tensor_model_parallel_rank

    torch.manual_seed(1 + get_tensor_model_parallel_rank())
    for name, parameter in worker.model_runner.get_model().named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif "embed" in name:
            parameter.data.normal_(0, 1.0)
        else:  # keys and queries are wide, so that attention looks at few tokens
            parameter.data.normal_(0, (2.0 if "qkv" in name else 1.0) * parameter.shape[-1] ** -0.5)


def kv_shapes(worker: Any) -> list[Any]:
    tensor = worker.model_runner.kv_caches[0]
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


def _is_last_rank() -> bool:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return bool(get_tensor_model_parallel_rank() == get_tensor_model_parallel_world_size() - 1)


def break_copies(worker: Any, direction: str, last: Callable[[], bool] = _is_last_rank) -> bool:
    """On the last rank alone no store (or load) succeeds any more."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def broken(*numbers: Any) -> Any:
        raise RuntimeError("broken by the benchmark")

    if last():
        setattr(get_kv_transfer_group()._worker.memory, direction, broken)
    return last()


def overwrite_memory(worker: Any, last: Callable[[], bool] = _is_last_rank) -> bool:
    """On the last rank alone what the tier keeps is replaced by something else."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if last():
        torch.cuda.synchronize()
        get_kv_transfer_group()._worker.memory.kept.fill_(0x3C)
    return last()


def ids_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCABULARY) for _ in range(count)]


class Play:
    """The sessions, the same for every arm."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = random.Random(0)
        self._length = engine.arm.prompt_blocks * engine.arm.block_size + 5
        self.live = [Session(f"live {number}", ids_of(self.rng, self._length)) for number in range(NUM_LIVE)]

    def turns(self) -> list[list[Asked]]:
        """Each round: every live session's next turn, and sessions that end between them."""
        rounds = []
        for turn in range(NUM_TURNS):
            asked = []
            for number, session in enumerate(self.live):
                if turn:  # whatever was answered, so that every arm is asked the same
                    session.ids = [*session.ids, *ids_of(self.rng, 64 + NUM_ANSWERED)]
                asked.append(self.engine.ask(session))
                if number % (NUM_LIVE // NUM_ENDED) == 1:
                    other = Session(f"ended {turn} {number}", ids_of(self.rng, self._length))
                    asked.append(self.engine.ask(other, fate="ended"))
            rounds.append(asked)
        return rounds

    def again(self) -> dict[str, Any]:
        """Every live session's last prompt once more, with others between: which answers are those of before?"""
        same, loaded, cached, wrong = 0, 0, 0, []
        for session in self.live:
            expected = list(session.answer)
            asked = self.engine.ask(session)
            session.answer = expected
            same += asked.ids == expected
            loaded += asked.num_loaded_blocks
            cached += asked.num_cached_tokens
            if asked.ids != expected:
                wrong.append({"name": asked.name, "loaded": asked.num_loaded_blocks, "ids": asked.ids, "expected": expected})
            self.engine.ask(Session(f"other {self.rng.random()}", ids_of(self.rng, self._length)), fate="ended")
        return {"same": same, "of": len(self.live), "loaded_blocks": loaded, "cached_tokens": cached, "wrong": wrong}


def run(arm: Arm, tp: int) -> dict[str, Any]:
    """Everything that is asked of one engine."""
    began = time.perf_counter()
    engine = Engine(arm, tp)
    found: dict[str, Any] = {"arm": asdict(arm), "tp": tp, "start_seconds": time.perf_counter() - began, "facts": engine.facts()}
    engine.ask(Session("warm", list(range(10, 10 + arm.prompt_blocks * arm.block_size))), fate="ended")
    play = Play(engine)
    found["rounds"] = [[asdict(asked) for asked in turn] for turn in play.turns()]
    found["state"], found["speeds"] = engine.state(), engine.speeds()
    if arm.has_tier:
        found["again"] = play.again()
        found["speeds"] = engine.speeds()
    if arm.other_memory:
        engine.llm.collective_rpc(overwrite_memory)
        found["overwritten"] = play.again()
        found["was_reset"] = engine.llm.reset_prefix_cache()
        found["after_reset"] = [play.again(), play.again()]
    if arm.breaks:
        engine.llm.collective_rpc(break_copies, args=(arm.breaks,))
        found["broken"] = [play.again(), play.again()]
        found["state_after"] = engine.state()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", required=True, help="An Arm as JSON.")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = run(Arm(**json.loads(options.arm)), options.tp)  # noqa: TID251 # the arm's own
    options.out.write_text(json.dumps(found))
    os._exit(0)  # nothing is left to be said, and workers take seconds to end


if __name__ == "__main__":
    main()
