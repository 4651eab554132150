"""The engine's own figures out of its Prometheus text, as vLLM names them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from replays.records import Phase, Sample

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_SUMS = {
    "vllm:num_preemptions_total": "num_preemptions",
    "agentserve_kv_resident_tokens": "kv_resident_tokens",
}
_BY_SOURCE = {
    "local_compute": "num_computed_tokens",
    "local_cache_hit": "num_gpu_hit_tokens",
    "external_kv_transfer": "num_external_hit_tokens",
}


def _capacity_tokens(labels: Mapping[str, str]) -> int | None:
    """Tokens that the KV pool holds: as the engine says, else blocks × size less vLLM's null block."""
    if labels.get("kv_cache_size_tokens", "").isdigit():
        return int(labels["kv_cache_size_tokens"])
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return (int(blocks) - 1) * int(size) if blocks.isdigit() and size.isdigit() else None


def parse_metrics(text: str, *, time: float, phase: Phase) -> Sample:
    """The sample that `text` gives: counters and capacity are summed over engines, usage is their mean; what is absent stays None."""
    sums: dict[str, float] = {}
    usages: list[float] = []
    capacities: list[int] = []
    block_size: int | None = None
    for line in text.splitlines():
        if not line.startswith(("vllm:", "agentserve_kv_resident")):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        name, label_text, value = match.group(1), match.group(2) or "", float(match.group(3))
        if name == "vllm:kv_cache_usage_perc":
            usages.append(value)
        elif name == "vllm:cache_config_info":
            labels = dict(_LABEL.findall(label_text))
            capacity = _capacity_tokens(labels)
            capacities += [] if capacity is None else [capacity]
            block_size = int(labels["block_size"]) if labels.get("block_size", "").isdigit() else block_size
        elif name == "vllm:prompt_tokens_by_source_total":
            field = _BY_SOURCE.get(dict(_LABEL.findall(label_text)).get("source", ""))
            if field is not None:
                sums[field] = sums.get(field, 0.0) + value
        elif name in _SUMS:
            sums[_SUMS[name]] = sums.get(_SUMS[name], 0.0) + value
    return Sample(
        time=time,
        phase=phase,
        kv_usage=sum(usages) / len(usages) if usages else None,
        kv_capacity_tokens=sum(capacities) if capacities else None,
        block_size=block_size,
        num_computed_tokens=sums.get("num_computed_tokens"),
        num_gpu_hit_tokens=sums.get("num_gpu_hit_tokens"),
        num_external_hit_tokens=sums.get("num_external_hit_tokens"),
        num_preemptions=sums.get("num_preemptions"),
        kv_resident_tokens=sums.get("kv_resident_tokens"),
    )
