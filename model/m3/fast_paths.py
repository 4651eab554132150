"""Fast paths, and three different words about each: eligible (its condition holds), configured (somebody asked for it), executed (it ran).

Evidence comes from the engine's command line, environment, log, metrics and, where there is one, a profiler trace. Where a word has no
evidence it is None, which reports print as "not shown": never as a yes, and never as a no.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.m3.sharding import Shard


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of one running engine. Empty or None: not known.

    `flags`: as `model.m3.launch.engine_flags` gives them. `kernels`: names in a profiler trace and how often each ran.
    """

    shard: Shard | None = None
    flags: Mapping[str, Any] | None = None
    environment: Mapping[str, str] | None = None
    log: str | None = None
    metrics: Mapping[str, float] | None = None
    """Sums over all labels, by full name."""
    kernels: Mapping[str, int] | None = None
    decode_tokens: int | None = None
    """Rows of a usual decode step: running sequences times tokens verified for each."""
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """One of the three words. `holds` None: not shown."""

    holds: bool | None
    why: str = ""


NOT_SHOWN = Word(None)


@dataclass(frozen=True, slots=True)
class FastPath:
    """A row of the table: how to find each word."""

    name: str
    eligible: Callable[[EngineFacts], Word]
    configured: Callable[[EngineFacts], Word]
    executed: Callable[[EngineFacts], Word]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What is known of one fast path on one engine."""

    name: str
    eligible: Word
    configured: Word
    executed: Word = field(default=NOT_SHOWN)

    @property
    def is_contradiction(self) -> bool:
        """Asked for, and known not to run or unable to: what costs weeks when nobody looks."""
        return self.configured.holds is True and (self.executed.holds is False or self.eligible.holds is False)


def audit(facts: EngineFacts) -> list[Dispatch]:
    """Every fast path of the table, in its order."""
    return [Dispatch(path.name, path.eligible(facts), path.configured(facts), path.executed(facts)) for path in FAST_PATHS]


# What follows makes words out of evidence.


def _always(_: EngineFacts) -> Word:
    return Word(True)


def _flag(name: str, *, default: bool | None = None) -> Callable[[EngineFacts], Word]:
    def read(facts: EngineFacts) -> Word:
        if facts.flags is None:
            return NOT_SHOWN
        if name in facts.flags:
            return Word(True, f"--{name}")
        if f"no-{name}" in facts.flags:
            return Word(False, f"--no-{name}")
        return NOT_SHOWN if default is None else Word(default, "the engine's default")

    return read


def _variable(name: str, off: tuple[str, ...] = ("0", "false", "none", "")) -> Callable[[EngineFacts], Word]:
    def read(facts: EngineFacts) -> Word:
        if facts.environment is None:
            return NOT_SHOWN
        value = facts.environment.get(name)
        if value is None:
            return Word(False, f"{name} is not set")
        return Word(value.lower() not in off, f"{name}={value}")

    return read


def _logged(yes: str, no: str | None = None) -> Callable[[EngineFacts], Word]:
    """Patterns of the engine's own log. A log without either line says nothing: it may have been cut."""

    def read(facts: EngineFacts) -> Word:
        for pattern, holds in ((yes, True), (no, False)):
            found = re.search(pattern, facts.log or "") if pattern else None
            if found:
                return Word(holds, found[0])
        return NOT_SHOWN

    return read


def _counted(name: str) -> Callable[[EngineFacts], Word]:
    """A counter above zero proves it; zero proves nothing where nothing has run yet."""

    def read(facts: EngineFacts) -> Word:
        value = (facts.metrics or {}).get(name)
        if value is None:
            return NOT_SHOWN
        if value > 0:
            return Word(True, f"{name} = {value:,.0f}")
        generated = (facts.metrics or {}).get("vllm:generation_tokens_total", 0)
        return Word(False, f"{name} = 0 after {generated:,.0f} generated tokens") if generated else NOT_SHOWN

    return read


def _ran(pattern: str) -> Callable[[EngineFacts], Word]:
    """A kernel's name in a profiler trace. A trace without it is evidence that it did not run while the trace was taken."""

    def read(facts: EngineFacts) -> Word:
        if facts.kernels is None:
            return NOT_SHOWN
        count = sum(times for name, times in facts.kernels.items() if re.search(pattern, name, re.IGNORECASE))
        return Word(count > 0, f"{count} launches in the trace")

    return read


def _first(*reads: Callable[[EngineFacts], Word]) -> Callable[[EngineFacts], Word]:
    """The first that shows anything."""

    def read(facts: EngineFacts) -> Word:
        return next((word for word in (each(facts) for each in reads) if word.holds is not None), NOT_SHOWN)

    return read


# The conditions of single paths.

_MIB = 1 << 20
_QUICK_REDUCE_MIN_BYTES = {
    2: {"FP": 2 * _MIB, "INT8": 8 * _MIB, "INT6": 8 * _MIB, "INT4": 8 * _MIB},
    4: {"FP": 8 * _MIB, "INT8": 64 * _MIB, "INT6": 64 * _MIB, "INT4": 16 * _MIB},
    8: {"FP": 16 * _MIB, "INT8": 2048 * _MIB, "INT6": 2048 * _MIB, "INT4": 2048 * _MIB},
}
"""vLLM's built-in table for bf16 by ranks and codec (quick_all_reduce.py); VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB replaces it."""
_QUICK_REDUCE = "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
_QUICK_REDUCE_MIN = "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB"


def _quick_reduce_eligible(facts: EngineFacts) -> Word:
    if facts.shard is None or facts.environment is None or facts.decode_tokens is None:
        return NOT_SHOWN
    codec = facts.environment.get(_QUICK_REDUCE, "NONE").upper()
    table = _QUICK_REDUCE_MIN_BYTES.get(facts.shard.tp)
    if table is None:
        return Word(False, f"not built for {facts.shard.tp} ranks")
    own = facts.environment.get(_QUICK_REDUCE_MIN)
    least = int(float(own) * _MIB) if own else table.get(codec)
    if least is None:
        return NOT_SHOWN
    size = facts.decode_tokens * facts.shard.config.hidden_size * 2
    compared = "at least" if size >= least else "below"
    return Word(size >= least, f"a decode step's all-reduce is {size / _MIB:.1f} MiB, {compared} the {least / _MIB:.0f} MiB it starts at")


def _one_kv_head(facts: EngineFacts) -> Word:
    if facts.shard is None:
        return NOT_SHOWN
    heads = facts.shard.num_kv_heads
    return Word(heads == 1, f"{heads} KV head{'s' if heads > 1 else ''} a rank, one is needed")


def _aiter_indexer_eligible(facts: EngineFacts) -> Word:
    if facts.flags is None:
        return NOT_SHOWN
    dtype = _attention_config(facts).get("indexer_kv_dtype", "bf16")
    return Word(str(dtype).startswith("fp8"), f"index keys in {dtype}, fp8 is needed")


def _attention_config(facts: EngineFacts) -> Mapping[str, Any]:
    config = (facts.flags or {}).get("attention-config", {})
    return config if isinstance(config, Mapping) else {}


def _reuse_configured(facts: EngineFacts) -> Word:
    if facts.flags is None:
        return NOT_SHOWN
    overrides = facts.flags.get("hf-overrides", {})
    overrides = overrides if isinstance(overrides, Mapping) else {}
    nested = overrides.get("text_config", {})
    if _asks_for_reuse(nested):
        leaders = nested.get("index_topk_leaders")
        return Word(True, f"{len(set(leaders))} of {len(leaders)} sparse layers choose" if leaders else _period(nested))
    if _asks_for_reuse(overrides):
        return Word(False, "asked for at the top level, where the text backbone does not see it: nest it under text_config")
    return Word(False, "not asked for")


def _asks_for_reuse(overrides: object) -> bool:
    if not isinstance(overrides, Mapping) or not overrides.get("use_index_cache"):
        return False
    return bool(overrides.get("index_topk_leaders")) or int(overrides.get("index_topk_freq") or 1) > 1


def _period(overrides: Mapping[str, Any]) -> str:
    return f"1 of {overrides['index_topk_freq']} sparse layers chooses"


def _reuse_executed(facts: EngineFacts) -> Word:
    """Fewer indexer than sparse-attention launches in a trace, or the plugin's line. Both families are named in vLLM's M3 kernels."""
    if not facts.kernels:
        return _logged(r"index reuse ran: \d+ of \d+ sparse layers chose")(facts)
    chosen = sum(times for name, times in facts.kernels.items() if re.search(r"index.*(score|topk)", name, re.IGNORECASE))
    attended = sum(
        times for name, times in facts.kernels.items() if re.search(r"sparse_(attn|attention|decode|prefill)", name, re.IGNORECASE)
    )
    if not attended:
        return NOT_SHOWN
    return Word(chosen < attended, f"{chosen} indexer launches beside {attended} of sparse attention")


def _draft(facts: EngineFacts) -> Mapping[str, Any] | None:
    config = (facts.flags or {}).get("speculative-config")
    return config if isinstance(config, Mapping) else None


def _draft_configured(facts: EngineFacts) -> Word:
    if facts.flags is None:
        return NOT_SHOWN
    draft = _draft(facts)
    return Word(draft is not None, f"{draft.get('method')}, {draft.get('num_speculative_tokens')} tokens" if draft else "no draft")


def _draft_backend_configured(facts: EngineFacts) -> Word:
    if facts.flags is None or _draft(facts) is None:
        return NOT_SHOWN
    backend = (_draft(facts) or {}).get("attention_backend")
    return Word(backend is not None, str(backend) if backend else "the target's backend does not reach the draft")


def _is_mxfp8(facts: EngineFacts) -> Word:
    if facts.quantization is None:
        return NOT_SHOWN
    return Word(facts.quantization == "mxfp8", f"weights are {facts.quantization}")


def _shared_expert_eligible(facts: EngineFacts) -> Word:
    if facts.shard is None:
        return NOT_SHOWN
    apart = facts.shard.expert_parallel
    return Word(not apart, "expert parallelism: each rank needs the shared expert whole" if apart else "no expert parallelism")


FAST_PATHS: tuple[FastPath, ...] = (
    FastPath("prefix caching", _always, _flag("enable-prefix-caching", default=True), _counted("vllm:prefix_cache_hits_total")),
    FastPath(
        "graph capture",
        _always,
        lambda facts: NOT_SHOWN if facts.flags is None else Word("enforce-eager" not in facts.flags),
        _logged(r"Graph capturing finished in \d+ secs", r"Enforce eager set[^\n]*"),
    ),
    FastPath(
        "paged sparse attention (AITER)",
        _one_kv_head,
        _variable("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"),
        _first(
            _ran(r"paged_attention|pa_decode|sparse_pa"),
            _logged(r"sparse attention selected \S*[Aa][Ii][Tt][Ee][Rr]\S*", r"sparse attention selected \S+"),
        ),
    ),
    FastPath(
        "AITER indexer",
        _aiter_indexer_eligible,
        _variable("VLLM_ROCM_USE_AITER"),
        _logged(r"indexer: selected AITER[^\n]*", r"indexer: (?:AITER unavailable|selected (?:Triton|MSA))[^\n]*"),
    ),
    FastPath(
        "cross-layer index reuse",
        lambda facts: NOT_SHOWN if facts.shard is None else Word(facts.shard.config.num_sparse_layers > 1),
        _reuse_configured,
        _reuse_executed,
    ),
    FastPath(
        "fused MoE (AITER)",
        _always,
        lambda facts: NOT_SHOWN if facts.flags is None else Word(facts.flags.get("moe-backend") == "aiter"),
        _logged(r"Using '?\S*[Aa][Ii][Tt][Ee][Rr]\S* (?:\w+ )?MoE backend", r"Using '?\S+'? (?:\w+ )?MoE backend"),
    ),
    FastPath(
        "shared expert as one more slot",
        _shared_expert_eligible,
        _variable("VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"),
        _ran(r"num_fused_shared|grouped_topk.*shared"),
    ),
    FastPath(
        "native MXFP8 linear",
        _is_mxfp8,
        lambda facts: NOT_SHOWN if facts.quantization is None else Word(facts.quantization == "mxfp8"),
        _logged(r"Using (?!Emulation)\S+ for MXFP8 GEMM", r"Using Emulation\S+ for MXFP8 GEMM"),
    ),
    FastPath("compressed all-reduce (QuickReduce)", _quick_reduce_eligible, _variable(_QUICK_REDUCE), _ran(r"quick_?reduce|twoshot")),
    FastPath("speculative decoding", _always, _draft_configured, _counted("vllm:spec_decode_num_accepted_tokens_total")),
    FastPath("attention backend of the draft", _always, _draft_backend_configured, lambda _: NOT_SHOWN),
    FastPath(
        "KV offload",
        _always,
        lambda facts: NOT_SHOWN if facts.flags is None else Word("kv-transfer-config" in facts.flags),
        _counted("vllm:external_prefix_cache_hits_total"),
    ),
)
