"""vLLM's MiniMax-M3 as an out-of-tree model: with index reuse where its configuration asks for it, and with PyTorch kernels on the CPU.

vLLM imports this module when a model of M3's architecture is loaded, and not before.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.models.minimax_m3.common.indexer as m3_indexer
import vllm.models.minimax_m3.common.sparse_attention as m3_attention
import vllm.models.minimax_m3.nvidia.model as m3
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.platforms import current_platform

from agentserve.engines.plugin import m3_kernels
from agentserve.engines.plugin.index_reuse import IndexReuse, OverlapMeter, install, options_of, use_epilogue
from agentserve.engines.plugin.topk_layout import turn_choice_buffers
from model.reference.norms import gemma_norm

_log = init_logger("vllm.agentserve")  # a child of vLLM's logger, else its lines go nowhere


class M3ForCausalLM(m3.MiniMaxM3SparseForCausalLM):  # type: ignore[misc] # vLLM has no types here
    """The text backbone. Raises ReuseUnsupported where reuse is asked for and cannot be."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if current_platform.is_cpu():
            use_cpu_kernels()
        turn_choice_buffers(m3.MiniMaxM3SparseAttention)
        options = options_of(vllm_config.model_config.hf_text_config)
        if options is not None:
            meter = None if options.overlap_file is None else OverlapMeter(options.overlap_file)
            reuse = IndexReuse(options.plan, keeps_keys=options.keeps_keys, meter=meter, log=_log.info)
            install(m3.MiniMaxM3SparseAttention, reuse)
            use_epilogue(m3, reuse)
        super().__init__(vllm_config=vllm_config, prefix=prefix)


def use_cpu_kernels() -> None:
    """Put `m3_kernels` where vLLM's M3 looks for CUDA and Triton, and the two layers that have no CPU form. Again: no change."""
    m3.ops = m3_kernels
    for name in ("minimax_m3_index_decode", "minimax_m3_index_score", "minimax_m3_index_topk"):
        _replace(m3_indexer, name)
    for name in ("minimax_m3_sparse_attn", "minimax_m3_sparse_attn_decode"):
        _replace(m3_attention, name)
    m3.MiniMAXGemmaRMSNorm.forward = _norm
    m3.MiniMaxM3MoE = CpuExperts


def _replace(module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise RuntimeError(f"vLLM's {module.__name__} has no {name}: this version of vLLM is not known to the plugin")
    setattr(module, name, getattr(m3_kernels, name))


def _norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return gemma_norm(x, self.weight, self.variance_epsilon)
    residual = residual + x
    return gemma_norm(residual, self.weight, self.variance_epsilon), residual


class _ExpertWeights(nn.Module):  # type: ignore[misc] # torch has no types here
    """Named as vLLM's loader of M3 has them. w13: [experts, 2 · width, hidden], gate first; w2: [experts, hidden, width]."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(num_experts, 2 * width, hidden), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.empty(num_experts, hidden, width), requires_grad=False)
        self.w13_weight.weight_loader = self._load
        self.w2_weight.weight_loader = self._load

    def _load(self, parameter: Tensor, loaded: Tensor, name: str, *, shard_id: str, expert_id: int) -> None:
        width = self.w2_weight.shape[-1]
        place = {"w1": slice(0, width), "w3": slice(width, 2 * width), "w2": slice(None)}[shard_id]
        parameter.data[expert_id, place].copy_(loaded)


class _Experts(nn.Module):  # type: ignore[misc] # torch has no types here
    """What vLLM's M3 asks of its expert layer beside its weights."""

    def __init__(self, num_experts: int, hidden: int, width: int, reduces: bool) -> None:
        super().__init__()
        self.routed_experts = _ExpertWeights(num_experts, hidden, width)
        self.moe_config = _MoeConfig(skip_final_all_reduce=not reduces)


class _MoeConfig:
    def __init__(self, skip_final_all_reduce: bool) -> None:
        self.skip_final_all_reduce = skip_final_all_reduce


class CpuExperts(nn.Module):  # type: ignore[misc] # torch has no types here
    """M3's mixture of experts on one rank: every expert computes every token, and routing decides what counts. For small sizes."""

    def __init__(self, config: Any, layer_id: int, quant_config: Any = None, reduce_results: bool = True, prefix: str = "") -> None:
        super().__init__()
        if m3.get_tensor_model_parallel_world_size() > 1:
            raise RuntimeError("M3 on the CPU runs on one rank only")
        self.config = config
        width = config.intermediate_size
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.num_local_experts, dtype=torch.float32), requires_grad=False)
        self.experts = _Experts(config.num_local_experts, config.hidden_size, width, reduce_results)
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = m3.MiniMaxM3MLP(
                config, width * config.n_shared_experts, quant_config, reduce_results=False, prefix=f"{prefix}.shared_experts"
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, hidden size]."""
        config, weights = self.config, self.experts.routed_experts
        scores = torch.sigmoid(self.gate(hidden.float()))
        chosen = (scores + self.e_score_correction_bias).topk(config.num_experts_per_tok, -1).indices
        shares = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        shares = shares / shares.sum(-1, keepdim=True) * config.routed_scaling_factor
        gate, up = torch.einsum("th,efh->etf", hidden, weights.w13_weight).chunk(2, -1)
        gate = gate.clamp(max=config.swiglu_limit)
        up = up.clamp(-config.swiglu_limit, config.swiglu_limit)
        inner = gate * torch.sigmoid(config.swiglu_alpha * gate) * (up + config.swiglu_beta) * shares.T[..., None].to(hidden.dtype)
        mixed: Tensor = torch.einsum("etf,ehf->th", inner, weights.w2_weight)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(hidden)
