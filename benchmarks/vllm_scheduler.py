"""vLLM's own scheduler and block pool without a model or a GPU: one step at a time, with sampled tokens that are made up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from replays.simulator.options import EngineOptions

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
}
_MILLI = 1000


def _model_folder(folder: Path, **changes: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(_CONFIG | changes))
    return str(folder)


def make_scheduler(
    options: EngineOptions,
    folder: Path,
    transfer: dict[str, Any] | None = None,
    *,
    scheduler_cls: str | None = None,
    additional: dict[str, Any] | None = None,
    schedules_ahead: bool = False,
) -> Scheduler:
    """The scheduler that vLLM would build for these options; `transfer`, `additional`: its --kv-transfer-config, --additional-config."""
    # Of this process only: its environment is also that of the engines that it starts.
    logging.getLogger("vllm").setLevel(logging.ERROR)  # noqa: TID251 - vLLM logs by it
    model = ModelConfig(model=_model_folder(folder / "model"), skip_tokenizer_init=True, dtype="float32", seed=0)
    parallel = ParallelConfig()
    speculative = None
    if options.num_speculative_tokens:
        draft = _model_folder(folder / "draft", architectures=["LlamaForCausalLMEagle3"])
        speculative = SpeculativeConfig(
            method="eagle3",
            model=draft,
            num_speculative_tokens=options.num_speculative_tokens,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        speculative_config=speculative,
        scheduler_config=SchedulerConfig(
            max_model_len=model.max_model_len,
            is_encoder_decoder=False,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            scheduler_reserve_full_isl=options.full_prompt_must_fit,
            watermark=options.watermark,
            async_scheduling=schedules_ahead,
            scheduler_cls=scheduler_cls,
        ),
        cache_config=CacheConfig(block_size=options.block_size, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(**transfer) if transfer is not None else None,
        additional_config=additional or {},
    )
    config.scheduler_config.async_scheduling = schedules_ahead  # vLLM says that a CPU does not
    num_blocks = options.num_blocks + 1  # the null block
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=options.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    group = KVCacheGroupSpec(["layer"], spec, is_eagle_group=options.drops_last_block)
    made: Scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=options.block_size,
        log_stats=True,
    )
    return made


@dataclass(eq=False)
class VllmReplay:
    """Drives a scheduler step by step; an accepted length of `options.acceptance_length` is met exactly in the mean."""

    options: EngineOptions
    scheduler: Scheduler
    work: Callable[[Any], KVConnectorOutput] | None = None
    """What the workers do with a step's output, where something is to be copied."""
    num_hit_tokens: dict[int, int] = field(default_factory=dict)
    finished_at: dict[int, int] = field(default_factory=dict)
    preemptions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(self.options.block_size, sha256)
        self._credit: dict[str, int] = {}
        self._output_token: dict[str, int] = {}
        self._requests: dict[str, Any] = {}

    def add(
        self,
        number: int,
        token_ids: list[int],
        num_output_tokens: int,
        output_token: int,
        session_id: str | None = None,
        xargs: dict[str, Any] | None = None,
    ) -> None:
        params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, extra_args=xargs)
        params.update_from_generation_config({}, None)
        request = Request(str(number), token_ids, params, None, block_hasher=self._hasher, session_id=session_id)
        self._output_token[str(number)] = output_token
        self._requests[str(number)] = request
        self.scheduler.add_request(request)

    def step(self, now: int) -> None:
        """One step, from the schedule to the outputs, which come at `now + 1`."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        copied = self.work(output) if self.work is not None else None
        if not output.num_scheduled_tokens:
            return
        sampled = [self._sampled(request_id, output) for request_id in output.num_scheduled_tokens]
        ids = list(output.num_scheduled_tokens)
        index = {request_id: place for place, request_id in enumerate(ids)}
        made = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled, kv_connector_output=copied)
        outputs = scheduler.update_from_output(output, made)
        for engine_outputs in outputs.values():
            for one in engine_outputs.outputs:
                if one.prefill_stats is not None:
                    self.num_hit_tokens[int(one.request_id)] = one.prefill_stats.num_cached_tokens
                if one.finish_reason is not None:
                    self.finished_at[int(one.request_id)] = now + 1
                    self.preemptions[int(one.request_id)] = self._requests.pop(one.request_id).num_preemptions
        self._draft(ids, sampled)

    def _sampled(self, request_id: str, output: Any) -> list[int]:
        request = self.scheduler.requests[request_id]
        if request.num_computed_tokens < request.num_tokens:
            return []  # a chunk of the prompt that is not the last
        num_out = 1
        if output.scheduled_spec_decode_tokens.get(request_id):
            credit = self._credit.get(request_id, 0) + round(self.options.acceptance_length * _MILLI)
            num_out, self._credit[request_id] = divmod(credit, _MILLI)
        return [self._output_token[request_id]] * num_out

    def _draft(self, ids: list[str], sampled: list[list[int]]) -> None:
        num_drafts = self.options.num_speculative_tokens
        if num_drafts:
            drafted = [request_id for request_id, tokens in zip(ids, sampled, strict=True) if tokens]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, [[-1] * num_drafts for _ in drafted]))
