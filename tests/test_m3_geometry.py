"""MiniMax-M3's sizes on each rank, against vLLM's own figures and the published ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from model.m3.config import MINIMAX_M3, M3Config, config_from_json
from model.m3.dtypes import Dtype
from model.m3.exchange import collectives
from model.m3.index_reuse import ReusePlan, fixed_plan, guarded_plan, index_work, measured_plan
from model.m3.kv import CacheGeometry
from model.m3.memory import GIB, WeightFormat, implied_other_bytes, plan_memory, weight_bytes
from model.m3.shapes import local_shapes
from model.m3.sharding import Shard


def _n(tp: int, name: str) -> int:
    return next(shape.n for shape in local_shapes(Shard(MINIMAX_M3, tp)) if shape.name == name)


@pytest.mark.parametrize(("tp", "n"), [(1, 9856), (2, 4992), (4, 2560), (8, 1536), (16, 1024)])
def test_the_fused_projection_replicates_kv_and_index_heads_where_ranks_outnumber_them(tp: int, n: int) -> None:
    assert _n(tp, "sparse attention qkv + index") == n


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
def test_every_cut_size_adds_up_to_the_whole_with_its_copies(tp: int) -> None:
    shard = Shard(MINIMAX_M3, tp)
    assert shard.num_query_heads * tp == 64
    assert shard.num_kv_heads * tp == 4 * shard.kv_replication
    assert shard.expert_size * tp >= 3072  # padded up, never down
    assert shard.expert_size % 32 == 0
    assert shard.vocab_size * tp >= 200_064


@pytest.mark.parametrize("tp", [0, -1, 3, 5, 6, 128])
def test_sizes_that_do_not_divide_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=r"divide|at least 1|neither"):
        Shard(MINIMAX_M3, tp)


def test_experts_are_cut_or_dealt_out() -> None:
    cut, dealt = Shard(MINIMAX_M3, 4), Shard(MINIMAX_M3, 4, expert_parallel=True)
    assert (cut.num_experts, cut.expert_size) == (128, 768)
    assert (dealt.num_experts, dealt.expert_size) == (32, 3072)
    assert _expert_parameters(cut) == _expert_parameters(dealt)


def _expert_parameters(shard: Shard) -> int:
    return sum(shape.num_parameters for shape in local_shapes(shard) if shape.name.startswith("expert"))


def test_the_fused_shared_expert_does_the_work_of_the_separate_one() -> None:
    shard = Shard(MINIMAX_M3, 4)
    apart = sum(shape.flops(4096) for shape in local_shapes(shard))
    fused = sum(shape.flops(4096) for shape in local_shapes(shard, fuse_shared_expert=True))
    assert fused == pytest.approx(apart)
    with pytest.raises(ValueError, match="expert parallelism"):
        local_shapes(Shard(MINIMAX_M3, 4, expert_parallel=True), fuse_shared_expert=True)


@pytest.mark.parametrize(
    ("kv", "index", "per_rank"),
    [(Dtype.BF16, Dtype.BF16, 45_312), (Dtype.FP8, Dtype.FP8, 22_656), (Dtype.FP8, Dtype.BF16, 29_952)],
)
def test_kv_bytes_are_those_that_vllm_computes_at_tp4(kv: Dtype, index: Dtype, per_rank: int) -> None:
    assert CacheGeometry(Shard(MINIMAX_M3, 4), kv, index).bytes_per_token == per_rank


def test_kv_bytes_match_the_published_ones() -> None:
    published_per_rank = 22_900  # "22.9 KB a token and rank"
    both_fp8 = CacheGeometry(Shard(MINIMAX_M3, 4), Dtype.FP8, Dtype.FP8)
    assert both_fp8.bytes_per_token == pytest.approx(published_per_rank, rel=0.03)
    assert CacheGeometry(Shard(MINIMAX_M3, 4), Dtype.FP8, Dtype.BF16).distinct_bytes_per_token == 76_032


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_index_keys_lie_on_every_rank_and_kv_heads_are_shared_out(tp: int) -> None:
    geometry = CacheGeometry(Shard(MINIMAX_M3, tp))
    assert geometry.index_bytes_per_token == 57 * 128 * 2
    assert geometry.main_bytes_per_token * tp == 60 * 4 * 128 * 2 * max(1, tp // 4)
    assert geometry.distinct_bytes_per_token == 76_032


def test_cache_tensors_do_not_overlap_and_fill_the_block_exactly() -> None:
    geometry = CacheGeometry(Shard(MINIMAX_M3, 4))
    offsets = geometry.block_offsets(num_blocks=10)
    assert len(offsets) == 60 + 57
    ends = sorted(
        (offsets[cache.layer, cache.role], offsets[cache.layer, cache.role] + cache.bytes_per_token * 128 * 10)
        for cache in geometry.layers()
    )
    assert all(end == start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] == geometry.bytes_per_block * 10


PUBLISHED_TOKENS = 6_264_960
MI355X_BYTES = 288 * GIB


def test_the_published_capacity_holds_with_bf16_index_keys_and_not_with_fp8_ones() -> None:
    """48,945 blocks at 0.85. With index K in bf16, vLLM's default, 14 GiB a rank are left for activations, graphs and the draft.

    With fp8 index K the same capacity would leave 56 GiB a rank unused, which no engine leaves.
    """
    shard, weights = Shard(MINIMAX_M3, 4), WeightFormat()

    def other(index: Dtype) -> float:
        geometry = CacheGeometry(shard, Dtype.FP8, index)
        return implied_other_bytes(geometry, weights, device_bytes=MI355X_BYTES, utilization=0.85, tokens=PUBLISHED_TOKENS) / GIB

    assert 5 < other(Dtype.BF16) < 20
    assert other(Dtype.FP8) > 50


def test_the_capacity_of_a_budget_is_the_published_one_within_three_percent() -> None:
    plan = plan_memory(
        CacheGeometry(Shard(MINIMAX_M3, 4)), WeightFormat(), device_bytes=MI355X_BYTES, utilization=0.85, other_bytes=14 * GIB
    )
    assert plan.capacity_tokens == pytest.approx(PUBLISHED_TOKENS, rel=0.03)
    assert plan.capacity_tokens % 128 == 0


@pytest.mark.parametrize(("utilization", "memory_gib", "tp"), [(0.85, 80, 2), (0.1, 288, 4)])
def test_weights_that_do_not_fit_are_said(utilization: float, memory_gib: int, tp: int) -> None:
    with pytest.raises(ValueError, match="no room"):
        plan_memory(CacheGeometry(Shard(MINIMAX_M3, tp)), WeightFormat(), device_bytes=memory_gib * GIB, utilization=utilization)


def test_mx_formats_pay_for_their_scales() -> None:
    shard = Shard(MINIMAX_M3, 4)
    four, eight = (weight_bytes(shard, WeightFormat(dtype, Dtype.BF16)) for dtype in (Dtype.MXFP4, Dtype.MXFP8))
    assert 1.5 < eight / four < 2
    assert Dtype.MXFP4.bytes_of(32) == 17
    assert Dtype.MXFP8.bytes_of(32) == 33


def test_a_decode_step_reduces_one_and_a_half_megabytes_at_128_rows() -> None:
    reduced = {each.num_bytes for each in collectives(Shard(MINIMAX_M3, 4), 128, 128) if each.kind == "all_reduce"}
    assert reduced == {128 * 6144 * 2}
    assert collectives(Shard(MINIMAX_M3, 1), 128, 128) == ()


def test_configurations_are_read_nested_and_flat() -> None:
    text = {
        "num_hidden_layers": 8,
        "intermediate_size": 64,
        "sparse_attention_config": {"sparse_topk_blocks": 4, "sparse_attention_freq": [0, 0, 1, 1, 1, 1, 1, 1]},
    }
    for parsed in (text, {"text_config": text, "hidden_size": 9}):
        config = config_from_json(parsed)
        assert (config.num_hidden_layers, config.num_dense_layers, config.num_sparse_layers) == (8, 2, 6)
        assert (config.expert_intermediate_size, config.topk_blocks, config.hidden_size) == (64, 4, 6144)


@pytest.mark.parametrize("parsed", [{"hidden_size": "6144"}, {"head_dim": -1}, {"num_local_experts": True}, {"moe_layer_freq": [1, 0, 1]}])
def test_configurations_that_cannot_be_are_refused(parsed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"whole number|come first"):
        config_from_json(parsed)


def test_the_published_configuration_is_vllms_default() -> None:
    pytest.importorskip("transformers")
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    assert config_from_json(MiniMaxM3TextConfig().to_dict()) == MINIMAX_M3


def test_a_checkpoint_file_is_read_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentserve.cli import build_cli

    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"text_config": {"num_hidden_layers": 8}}))
    with pytest.raises(SystemExit) as ended:
        build_cli()(["model", "kv", "--tp", "4", "--config", str(tmp_path / "config.json"), "--json"])
    assert not ended.value.code
    printed = msgspec.json.decode(capsys.readouterr().out)
    expected = CacheGeometry(Shard(M3Config(num_hidden_layers=8), 4)).bytes_per_token
    assert printed["sums"][0] == {"sum": "one rank, per token", "bytes": expected}


# Index reuse.


def test_a_fixed_period_chooses_the_leaders_that_vllm_on_rocm_chooses() -> None:
    for freq in (1, 2, 3, 4, 7):
        for offset in (0, 1, 2, 5):
            plan = fixed_plan(57, freq, offset)
            for ordinal in range(57):
                skips = freq > 1 and max(ordinal - offset, 0) % freq != 0
                assert plan.leads(ordinal) != skips
    assert fixed_plan(57).is_off
    assert fixed_plan(57, 4).num_leaders == 15


@pytest.mark.parametrize(("freq", "offset"), [(0, 0), (-1, 0), (2, -1)])
def test_impossible_periods_are_refused(freq: int, offset: int) -> None:
    with pytest.raises(ValueError, match="index_topk_freq"):
        fixed_plan(57, freq, offset)


def test_leaders_by_measured_overlap_never_follow_where_layers_disagree() -> None:
    agree = [[1.0 if abs(i - j) < 3 else 0.2 for j in range(i + 1)] for i in range(12)]
    plan = measured_plan(agree, least_overlap=0.9, longest=8)
    assert plan.leaders == (0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9)
    assert measured_plan(agree, least_overlap=0.9, longest=1).leaders == (0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10)
    assert measured_plan([[1.0], [0.1, 1.0]], 0.9, 8).is_off
    with pytest.raises(ValueError, match="overlap table"):
        measured_plan([[1.0], [0.5]], 0.9, 8)


def test_a_guarded_plan_is_the_loosest_whose_answers_pass() -> None:
    agree = [[1.0 if i == j else 0.85 if i - j == 1 else 0.55 for j in range(i + 1)] for i in range(6)]
    asked: list[int] = []

    def passes(plan: ReusePlan) -> bool:
        asked.append(plan.num_leaders)
        return plan.num_leaders >= 3

    assert guarded_plan(agree, 5, passes).leaders == (0, 0, 2, 2, 4, 4)
    assert asked == [1, 3], "each plan is tried once, the most reuse first"
    assert guarded_plan(agree, 5, lambda plan: False).is_off


def test_index_work_equals_a_count_by_hand() -> None:
    plan = fixed_plan(6, 3)
    work = index_work(
        MINIMAX_M3, plan, num_index_heads=1, query_tokens=[3, 1], context_tokens=[10, 5], dtype=Dtype.BF16, followers_write=False
    )
    pairs = (8 + 9 + 10) + 5  # each query looks at what is before it, itself included
    assert work.flops == 2 * 128 * pairs * 2
    assert work.read_bytes == 15 * 256 * 2
    assert work.write_bytes == 4 * 256 * 2
    assert index_work(MINIMAX_M3, plan, num_index_heads=1, query_tokens=[4], context_tokens=[4]).write_bytes == 4 * 256 * 6
