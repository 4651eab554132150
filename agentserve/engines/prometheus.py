"""Reads single metrics out of Prometheus text, without parsing the rest of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_KV_USAGE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metric: its labels and its value."""

    labels: dict[str, str]
    value: float


def samples(text: bytes, name: str) -> list[Sample]:
    """Every sample of metric `name` (the full name, such as "vllm:prefix_cache_hits_total"); none if the engine lacks it."""
    line = re.compile(rb"^" + re.escape(name.encode()) + rb"(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
    return [
        Sample(
            labels={key: _ESCAPE.sub(_unescape, value) for key, value in _LABEL.findall((match[1] or b"").decode())},
            value=float(match[2]),
        )
        for match in line.finditer(text)
    ]


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


_SAMPLE = re.compile(rb"^([A-Za-z_:][\w:]*)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)


def sums(text: bytes) -> dict[str, float]:
    """Every metric, summed over its labels."""
    totals: dict[str, float] = {}
    for match in _SAMPLE.finditer(text):
        name = match[1].decode()
        totals[name] = totals.get(name, 0.0) + float(match[2])
    return totals


def kv_cache_usage(text: bytes) -> float | None:
    """The share of KV blocks held by running requests, 0 to 1, as vLLM counts it: a mean over data-parallel ranks.

    Blocks that are cached but free count as free, so an idle engine with a full cache says 0. None: the engine does not say.
    """
    values = [sample.value for sample in samples(text, _KV_USAGE)]
    return sum(values) / len(values) if values else None
