"""The patch that gives M3 index reuse where its platform has none: who runs its indexer, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agentserve.cli import build_cli
from agentserve.engines.plugin.index_reuse import IndexReuse, OverlapMeter, ReuseUnsupported, install, options_of, plan_of, use_epilogue
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


@pytest.mark.parametrize(
    ("leaders", "problem"), [([0, 0, 2], "3 leaders for 10"), ([0] * 9 + [5], "cannot read the choice"), (["x"] * 10, "cannot be as")]
)
def test_leaders_that_cannot_be_are_refused(leaders: list[Any], problem: str) -> None:
    with pytest.raises(ReuseUnsupported, match=problem):
        plan_of(asking(use_index_cache=True, index_topk_leaders=leaders))


def asking(**switches: Any) -> SimpleNamespace:
    return SimpleNamespace(sparse_attention_config={"sparse_attention_freq": [0, 0, 0] + [1] * 10}, **switches)


def test_leaders_may_be_named_and_keys_kept() -> None:
    options = options_of(asking(use_index_cache=True, index_topk_leaders=[0, 0, 0, 3, 3, 3, 6, 6, 6, 9]))
    assert options is not None
    assert (options.plan.num_leaders, options.keeps_keys, options.overlap_file) == (4, False, None)
    kept = options_of(asking(use_index_cache=True, index_topk_freq=4, index_cache_keep_keys=True))
    assert kept is not None
    assert kept.keeps_keys
    assert options_of(asking(use_index_cache=False)) is None


def test_overlap_is_measured_only_where_every_layer_chooses() -> None:
    options = options_of(asking(index_overlap_file="o.json"))
    assert options is not None
    assert options.plan.is_off
    assert options.overlap_file == Path("o.json")
    with pytest.raises(ReuseUnsupported, match="leave use_index_cache out"):
        options_of(asking(index_overlap_file="o.json", use_index_cache=True, index_topk_freq=4))


class Kernels:
    """vLLM's kernels, as far as M3's attention asks for them."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def fused_minimax_m3_qknorm_rope_kv_insert(
        self,
        qkv: str,
        index_q_norm_weight: str | None = None,
        index_k_norm_weight: str | None = None,
        slot_mapping: str | None = None,
        index_slot_mapping: str | None = None,
        kv_cache: str | None = None,
        index_cache: str | None = None,
        index_q_out: str | None = None,
        kv_cache_dtype: str = "auto",
        skip_index_branch: bool = False,
    ) -> None:
        self.calls.append({name: value for name, value in locals().items() if name != "self"})

    def other(self) -> str:
        return "untouched"


@pytest.mark.parametrize("keeps_keys", [True, False])
def test_followers_leave_their_index_branch_out_unless_keys_are_kept(keeps_keys: bool) -> None:
    kernels = Kernels()
    module = SimpleNamespace(ops=kernels)

    class Attention:
        def __init__(self) -> None:
            self.indexer, self.topk_indices_buffer = Indexer(), object()

        def _run_attention(self) -> None: ...

        def forward(self) -> None:
            module.ops.fused_minimax_m3_qknorm_rope_kv_insert("qkv", "iq", "ik", "slots", "islots", "kv", "icache", "out", "fp8")

    said: list[str] = []
    reuse = IndexReuse(fixed_plan(5, 4), keeps_keys=keeps_keys, log=said.append)
    install(Attention, reuse)
    use_epilogue(module, reuse)
    built = [Attention() for _ in range(5)]
    for _ in range(2):
        for layer in built:
            layer.forward()
            layer.indexer("q")
    assert module.ops.other() == "untouched"
    assert [call["skip_index_branch"] for call in kernels.calls[:5]] == [
        not keeps_keys and leader != n for n, leader in enumerate([0] * 4 + [4])
    ]
    follower = kernels.calls[1]
    assert (follower["qkv"], follower["slot_mapping"], follower["kv_cache"], follower["kv_cache_dtype"]) == ("qkv", "slots", "kv", "fp8")
    assert (follower["index_cache"], follower["index_slot_mapping"]) == (("icache", "islots") if keeps_keys else (None, None))
    assert said == [f"index reuse ran: 2 of 5 sparse layers chose, index keys of the others {'kept' if keeps_keys else 'left out'}"]


def test_a_kernel_that_cannot_leave_the_branch_out_keeps_the_keys() -> None:
    module = SimpleNamespace(ops=SimpleNamespace(fused_minimax_m3_qknorm_rope_kv_insert=lambda qkv: None))
    before, reuse = module.ops, IndexReuse(fixed_plan(5, 4), keeps_keys=False)
    use_epilogue(module, reuse)
    assert module.ops is before
    assert reuse.keeps_keys


def test_overlap_is_that_of_the_last_queries_and_ready_for_a_plan(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    meter = OverlapMeter(tmp_path / "overlap.json")
    first = torch.stack([torch.arange(4) + 10] * 2)[None].repeat(80, 1, 1)
    half = first.clone()
    half[..., 2:] += 50
    for _ in range(3):
        for ordinal, chosen in enumerate((first, first, half)):
            meter.saw(ordinal, chosen)
        meter.saw(0, first[:3])  # a decode step says nothing, and ends the pass
    found = msgspec.json.decode((tmp_path / "overlap.json").read_bytes())
    assert found == {"num_passes": 3, "overlap": [[1.0], [1.0, 1.0], [0.5, 0.5, 1.0]]}
    early = torch.tensor([[[3, 1, 0, -1]]]).repeat(80, 1, 1)
    for ordinal in range(3):
        meter.saw(ordinal, early)  # all that it sees is chosen
    meter.saw(0, early)
    assert meter.num_passes == 3
    with pytest.raises(SystemExit) as ended:
        build_cli()(["model", "reuse", str(tmp_path / "overlap.json"), "--least-overlap", "0.9", "--json"])
    assert not ended.value.code
