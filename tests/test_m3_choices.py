"""The buffer of chosen blocks as M3's kernels and their watchers read it, and what cannot be a choice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # decides whether this file runs
from torch import Tensor

from agentserve.engines.plugin.index_reuse import IndexReuse, OverlapMeter, install
from agentserve.engines.plugin.topk_layout import choices_of, turn_choice_buffers
from benchmarks.m3_choices import Asked, ChoicesBroken, as_mask, check_blocks, check_experts
from model.m3.index_reuse import fixed_plan
from model.reference.sparse_attention import SparseRule, choose_blocks

TOKENS, HEADS, TOPK, BLOCK = 400, 4, 3, 64
RULE = SparseRule(BLOCK, TOPK)
ASKED = Asked(TOKENS, HEADS, BLOCK, TOPK)
QUERY = torch.empty(TOKENS, 1)


def sound_choice() -> Tensor:
    """bool [heads, tokens, blocks]."""
    positions = torch.arange(TOKENS)
    scores = torch.randn(HEADS, TOKENS, ASKED.num_blocks, generator=torch.Generator().manual_seed(0))
    unseen = torch.arange(ASKED.num_blocks) > positions[:, None] // BLOCK
    return choose_blocks(scores.masked_fill(unseen, float("-inf")), positions, RULE)


def ids(mask: Tensor) -> Tensor:
    """As M3's indexer leaves them: [heads, tokens, top k], −1 behind the last."""
    numbers = torch.arange(mask.shape[-1]).masked_fill(~mask, mask.shape[-1]).sort(-1).values[..., :TOPK]
    return numbers.masked_fill(numbers == mask.shape[-1], -1).int()


def by_strides(view: Tensor) -> Tensor:
    """What a Triton kernel makes of its argument, an address and strides: that an axis ends sooner is no obstacle to it."""
    return view.as_strided((HEADS, TOKENS, TOPK), view.stride())


class TakesHeadsFirst:
    """Indexer and attention of vLLM 0.26 on Hopper."""

    topk_indices_buffer: Tensor

    def forward(self, chosen: Tensor) -> None:
        by_strides(self.topk_indices_buffer).copy_(chosen)

    def read(self, buffer: Tensor) -> Tensor:
        return by_strides(buffer)


class TurnsIt:
    """The same of later versions."""

    topk_indices_buffer: Tensor

    def forward(self, chosen: Tensor) -> None:
        by_strides(self.topk_indices_buffer.transpose(0, 1)).copy_(chosen)

    def read(self, buffer: Tensor) -> Tensor:
        return by_strides(buffer.transpose(0, 1))


class Indexer:
    num_index_heads = HEADS

    def __init__(self, impl: Any) -> None:
        self.impl = impl

    def forward(self, query: Tensor, chosen: Tensor) -> None:
        assert len(query) == TOKENS
        self.impl.forward(chosen)


def attention_of(indexer: type[Any], attends: type[Any], shape: tuple[int, int, int] = (TOKENS + 12, HEADS, TOPK)) -> type[Any]:
    """A class that is built as vLLM builds M3's sparse attention; all its layers share one buffer."""
    shared = torch.zeros(shape, dtype=torch.int32)

    class Attention:
        def __init__(self) -> None:
            self.topk_indices_buffer = shared
            self.impl, self.indexer = attends(), Indexer(indexer())
            self.indexer.impl.topk_indices_buffer = shared

        def _run_attention(self, query: Tensor, chosen: Tensor) -> Any:
            self.indexer.forward(query, chosen)
            return self.impl.read(self.topk_indices_buffer)

    return Attention


def test_heads_overwrite_each_other_where_kernels_take_the_buffer_the_wrong_way_round() -> None:
    chosen, layer = ids(sound_choice()), attention_of(TakesHeadsFirst, TakesHeadsFirst)()
    read = layer._run_attention(QUERY, chosen)
    assert float((read != chosen).any(-1).float().mean()) > 0.3
    with pytest.raises(ChoicesBroken, match=r"sparse layer 0: .*first token"):
        check_blocks(layer.topk_indices_buffer[:TOKENS], ASKED, 0)


@pytest.mark.parametrize("indexer", [TakesHeadsFirst, TurnsIt])
@pytest.mark.parametrize("attends", [TakesHeadsFirst, TurnsIt])
def test_each_head_reads_its_own_choice_and_a_watcher_sees_it_token_by_token(indexer: type[Any], attends: type[Any]) -> None:
    attention = attention_of(indexer, attends)
    turn_choice_buffers(attention)
    turn_choice_buffers(attention)  # again: no change
    layer, chosen = attention(), ids(sound_choice())
    assert torch.equal(layer._run_attention(QUERY, chosen), chosen)
    seen = choices_of(layer.topk_indices_buffer, HEADS)[:TOKENS]
    check_blocks(seen, ASKED, 0)
    assert torch.equal(as_mask(seen, ASKED.num_blocks), sound_choice())


def test_a_buffer_that_lies_heads_first_is_left_so() -> None:
    attention = attention_of(TakesHeadsFirst, TakesHeadsFirst, (HEADS, TOKENS + 12, TOPK))
    turn_choice_buffers(attention)
    layer, chosen = attention(), ids(sound_choice())
    assert torch.equal(layer._run_attention(QUERY, chosen), chosen)
    check_blocks(choices_of(layer.topk_indices_buffer, HEADS)[:TOKENS], ASKED, 0)


def test_a_layer_without_a_buffer_is_built_as_it_is() -> None:
    attention = type("Attention", (), {"__init__": lambda self: setattr(self, "indexer", SimpleNamespace())})
    turn_choice_buffers(attention)
    assert not hasattr(attention(), "topk_indices_buffer")


@pytest.mark.parametrize("kernels", [TakesHeadsFirst, TurnsIt])
def test_overlap_is_booked_with_the_last_layer_of_the_only_pass(kernels: type[Any], tmp_path: Path) -> None:
    attention, meter = attention_of(kernels, kernels), OverlapMeter(tmp_path / "overlap.json")
    turn_choice_buffers(attention)
    install(attention, IndexReuse(fixed_plan(3), meter=meter))
    layers = [attention() for _ in range(3)]
    for layer in layers:
        layer._run_attention(QUERY, torch.full((HEADS, TOKENS, TOPK), 9, dtype=torch.int32))
    assert meter.num_passes == 1
    assert (tmp_path / "overlap.json").exists()
    for layer in layers:
        layer._run_attention(QUERY, torch.full((HEADS, TOKENS, TOPK), -1, dtype=torch.int32))
    assert meter.num_passes == 1
    assert meter.ignored == {"a query sees no more blocks than it chooses": 1}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((300, 1), [0, 4, 5], "cannot see, first token 300 of head 1"),
        ((300, 2), [1_000_000, 0, 4], "cannot see"),
        ((10, 0), [0, 1, -1], "cannot see"),
        ((300, 1), [-1, -1, -1], "too few or too many"),
        ((300, 1), [0, 0, 4], "a block twice"),
        ((300, 1), [0, 1, 2], "not its own block"),
    ],
)
def test_what_cannot_be_a_choice_is_named(place: tuple[int, int], value: list[int], message: str) -> None:
    rows = ids(sound_choice()).transpose(0, 1).contiguous()
    check_blocks(rows, ASKED, 2)
    rows[place] = torch.tensor(value, dtype=torch.int32)
    with pytest.raises(ChoicesBroken, match=message):
        check_blocks(rows, ASKED, 2)


def test_rows_of_another_prompt_or_another_type_are_refused() -> None:
    rows = ids(sound_choice()).transpose(0, 1)
    for wrong in (rows[:-1], rows.transpose(0, 1), rows.float()):
        with pytest.raises(ChoicesBroken, match="and not whole numbers of"):
            check_blocks(wrong, ASKED, 0)


def test_routers_of_several_passes_or_of_padded_rows_are_refused() -> None:
    rows = torch.zeros(TOKENS, 4, dtype=torch.int64)
    check_experts([rows, rows], 2, TOKENS, 8)
    for wrong in ([rows] * 4, [rows, rows[:100]], [rows]):
        with pytest.raises(ChoicesBroken, match="routers of"):
            check_experts(wrong, 2, TOKENS, 8)
    with pytest.raises(ChoicesBroken, match="beyond 7"):
        check_experts([rows, rows + 8], 2, TOKENS, 8)
