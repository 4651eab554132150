"""The patch that gives M3 index reuse where its platform has none: who runs its indexer, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentserve.engines.plugin.index_reuse import IndexReuse, ReuseUnsupported, install, plan_of
from model.m3.index_reuse import fixed_plan


class Indexer:
    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, query: str) -> str | None:
        return self.forward(query)

    def forward(self, query: str) -> str | None:
        self.ran += 1
        return f"chosen for {query}"


def layers(num_layers: int, reuse: IndexReuse, **attributes: Any) -> list[Any]:
    """Layers of a class that is built as vLLM builds M3's, after the patch."""

    class Attention:
        def __init__(self) -> None:
            self.indexer = Indexer()
            self.topk_indices_buffer = attributes.get("buffer", object())

        def _run_attention(self, query: str) -> str | None:
            return self.indexer(query)

    install(Attention, reuse)
    return [Attention() for _ in range(num_layers)]


def test_only_leaders_run_their_indexer() -> None:
    reuse = IndexReuse(fixed_plan(9, 4))
    built = layers(9, reuse)
    for layer in built:
        layer._run_attention("q")
    assert [layer.indexer.ran for layer in built] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert (reuse.num_choices, reuse.num_reads) == (3, 6)


def test_switched_off_or_at_frequency_one_every_layer_chooses() -> None:
    for reuse in (IndexReuse(fixed_plan(5, 4), enabled=False), IndexReuse(fixed_plan(5))):
        assert [layer._run_attention("q") for layer in layers(5, reuse)] == ["chosen for q"] * 5
        assert reuse.num_reads == 0


def test_what_is_not_built_as_expected_is_refused() -> None:
    with pytest.raises(ReuseUnsupported, match="do not share a buffer"):
        layers(1, IndexReuse(fixed_plan(1)), buffer=None)
    with pytest.raises(ReuseUnsupported, match="_run_attention"):
        install(type("Attention", (), {}), IndexReuse(fixed_plan(1)))
    with pytest.raises(ReuseUnsupported, match="of its own"):
        install(type("Attention", (), {"skip_index_topk": False, "_run_attention": None}), IndexReuse(fixed_plan(1)))


@pytest.mark.parametrize(
    ("switches", "num_leaders"),
    [
        ({"use_index_cache": True, "index_topk_freq": 4}, 3),
        ({"use_index_cache": True, "index_topk_freq": 4, "index_skip_topk_offset": 2}, 4),
        ({"use_index_cache": True, "index_topk_freq": 1}, None),
        ({"use_index_cache": False, "index_topk_freq": 4}, None),
        ({}, None),
    ],
)
def test_the_switch_is_that_of_vllm_on_rocm(switches: dict[str, Any], num_leaders: int | None) -> None:
    plan = plan_of(SimpleNamespace(sparse_attention_config={"sparse_attention_freq": [0, 0, 0] + [1] * 10}, **switches))
    assert (plan.num_leaders if plan else None) == num_leaders
