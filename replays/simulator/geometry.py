"""The time of a step of MiniMax-M3, from its shapes (`model.m3`), a device's limits and the fitted shares of these limits that are reached.

A step is: a constant (launches, the host); the linear layers, each group the slower of reading its weights and doing its sums; attention
over what decoding sequences hold, bound by memory; attention of prefill, bound by sums; and the exchange between ranks. Routed experts are
read only as far as tokens choose them: 1 − (1 − k/E)^n of them for n tokens. Sparse layers look at 17 blocks of K and V whatever the
context, but their indexers read all of its index keys, one layer in `index_topk_freq`. A draft passes over the whole context once a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from model.m3.dtypes import Dtype
from model.m3.exchange import collectives
from model.m3.index_reuse import fixed_plan
from model.m3.kv import CacheGeometry
from model.m3.memory import WeightFormat
from model.m3.shapes import MatrixShape, local_shapes
from model.m3.sharding import Shard
from replays.simulator.cost import StepWork

_MANY = 1 << 20
_INT4_SHARE = 4.25 / 16
"""Bytes of an all-reduce that QuickReduce compresses to INT4, scales included, of those in bf16."""


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of one GPU as its maker states them, dense, per second."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: dict[Dtype, float]
    """By the format of the weights."""
    link_bandwidth: float
    """Bytes to each other GPU, one way."""
    links_shared: bool = False
    """All peers share `link_bandwidth` (a switch); else each has a link of its own."""
    compressed_from_bytes: dict[int, int] = field(default_factory=dict)
    """By tensor-parallel size: from where all-reduces are compressed; never where it is not named."""
    collective_seconds: float = 8e-6
    """Least time of one collective."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What is fitted: seconds of a step that do nothing, and the shares of the device's limits that are reached (0 to 1)."""

    step_seconds: float
    memory_share: float
    """Of memory bandwidth, by weights."""
    compute_share: float
    """Of the weights' format's peak, by linear layers."""
    attention_share: float
    """Of memory bandwidth, by attention of decoding sequences."""
    prefill_attention_share: float = 0.3
    """Of the bf16 peak, by attention of prefill."""


@dataclass(frozen=True, slots=True)
class Build:
    """How M3 lies on its ranks."""

    shard: Shard
    weights: WeightFormat
    kv_dtype: Dtype = Dtype.FP8
    index_dtype: Dtype = Dtype.BF16
    index_topk_freq: int = 1
    num_drafts: int = 0
    """Draft tokens a step; a draft is one dense layer."""

    @property
    def cache(self) -> CacheGeometry:
        return CacheGeometry(self.shard, self.kv_dtype, self.index_dtype)


@dataclass(frozen=True, slots=True)
class _Linear:
    """Linear layers that share a format: bytes of all their weights, and operations a token."""

    num_bytes: float
    flops: float
    peak: float


@dataclass(frozen=True, slots=True)
class GeometryCost:
    """The model for one build on one device."""

    build: Build
    device: Device
    efficiency: Efficiency
    _experts: _Linear = field(init=False)
    _rest: _Linear = field(init=False)
    _draft_bytes: float = field(init=False)
    """Weights read by the passes of the draft."""
    _exchange: float = field(init=False)
    """Seconds a token."""
    _exchange_once: float = field(init=False)
    _compressed_from: int = field(init=False)
    """Tokens from which all-reduces are compressed."""
    _context_bytes: float = field(init=False)
    """Read for each context token of a decoding sequence, however long it is."""
    _selected_bytes: float = field(init=False)
    """Read for each context token that sparse attention chooses."""
    _context_flops: float = field(init=False)
    _selected_flops: float = field(init=False)

    def __post_init__(self) -> None:
        build, device = self.build, self.device
        shard, weights = build.shard, build.weights
        shapes = [shape for shape in local_shapes(shard) if shape.name != "router"]
        experts = [shape for shape in shapes if shape.name.startswith("expert")]
        rest = [shape for shape in shapes if not shape.name.startswith("expert")]
        self._set("_experts", _linear(experts, weights.experts, device))
        self._set("_rest", _linear(rest, weights.linear, device))
        self._set("_draft_bytes", build.num_drafts * _draft_bytes(shapes))
        self._set_exchange()
        self._set_attention()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set_exchange(self) -> None:
        tp, device = self.build.shard.tp, self.device
        one = [c for c in collectives(self.build.shard, 1, 0) if c.num_bytes]
        bandwidth = device.link_bandwidth * (1 if device.links_shared else max(1, tp - 1))
        self._set("_exchange", sum(c.bytes_on_wire(tp) for c in one) / bandwidth)
        self._set("_exchange_once", sum(c.count for c in one) * device.collective_seconds)
        least = device.compressed_from_bytes.get(tp, 0)
        self._set("_compressed_from", -(-least // one[0].num_bytes) if least and one else _MANY)

    def _set_attention(self) -> None:
        build = self.build
        config, shard = build.shard.config, build.shard
        main = 2 * build.kv_dtype.bytes_of(config.head_dim) * shard.num_kv_heads
        index = build.index_dtype.bytes_of(config.index_dim)
        leaders = fixed_plan(config.num_sparse_layers, build.index_topk_freq).num_leaders
        whole = config.num_dense_layers + build.num_drafts
        self._set("_context_bytes", whole * main + leaders * index)
        # Each draft token chooses blocks of its own; their index keys are read once for all of them.
        self._set("_selected_bytes", config.num_sparse_layers * main * (1 + build.num_drafts))
        per_layer = 4.0 * shard.num_query_heads * config.head_dim
        self._set("_context_flops", per_layer * config.num_dense_layers + 2.0 * shard.num_index_heads * config.index_dim * leaders)
        self._set("_selected_flops", per_layer * config.num_sparse_layers)

    @property
    def selected_tokens(self) -> int:
        """Context that a sparse layer looks at, at most."""
        config = self.build.shard.config
        return (config.topk_blocks + config.num_local_blocks) * config.block_size

    def step_seconds(self, work: StepWork) -> float:
        efficiency = self.efficiency
        tokens = work.num_decode + work.num_drafts + work.num_prefill
        return (
            efficiency.step_seconds
            + self._linear_seconds(self._experts, tokens, self._read_share(tokens))
            + self._linear_seconds(self._rest, tokens, 1.0)
            + self._draft_seconds(work)
            + self._exchange_once
            + self._exchange * tokens * (_INT4_SHARE if tokens >= self._compressed_from else 1.0)
            + self._decode_seconds(work)
            + self._prefill_seconds(work)
        )

    def growth_seconds(self, num_decode: int) -> float:
        return num_decode * self._context_bytes / (self.device.memory_bandwidth * self.efficiency.attention_share)

    def _read_share(self, tokens: int) -> float:
        """Of the routed experts, those that some token chose."""
        config = self.build.shard.config
        chosen = config.num_experts_per_tok / config.num_local_experts
        return 1.0 - (1.0 - chosen) ** min(tokens, _MANY)

    def _linear_seconds(self, linear: _Linear, tokens: int, read_share: float) -> float:
        read = linear.num_bytes * read_share / (self.device.memory_bandwidth * self.efficiency.memory_share)
        return max(read, linear.flops * tokens / (linear.peak * self.efficiency.compute_share))

    def _draft_seconds(self, work: StepWork) -> float:
        """Passes of the draft, one after the other, with launches and exchanges of their own."""
        if not work.num_drafts:
            return 0.0
        num_layers, passes = self.build.shard.config.num_hidden_layers, self.build.num_drafts
        once = (self.efficiency.step_seconds + self._exchange_once) / num_layers
        return passes * once + self._draft_bytes / (self.device.memory_bandwidth * self.efficiency.memory_share)

    def _decode_seconds(self, work: StepWork) -> float:
        selected = min(work.decode_context, work.num_decode * self.selected_tokens)
        num_bytes = self._context_bytes * work.decode_context + self._selected_bytes * selected
        return num_bytes / (self.device.memory_bandwidth * self.efficiency.attention_share)

    def _prefill_seconds(self, work: StepWork) -> float:
        selected = min(work.prefill_context, work.num_prefill * self.selected_tokens)
        flops = self._context_flops * work.prefill_context + self._selected_flops * selected
        return flops / (self.device.flops[Dtype.BF16] * self.efficiency.prefill_attention_share)

    def transfer_bytes(self, num_tokens: int) -> int:
        """KV bytes of `num_tokens` on one rank."""
        return self.build.cache.bytes_per_token * num_tokens


def _draft_bytes(shapes: list[MatrixShape]) -> float:
    """Weights of an EAGLE3 draft: a dense layer and an output head, in bf16."""
    layer = sum(s.n * s.k for s in shapes if s.name.startswith(("attention", "dense")))
    return Dtype.BF16.bytes_of(layer + sum(s.n * s.k for s in shapes if s.sampled_only))


def _linear(shapes: list[MatrixShape], dtype: Dtype, device: Device) -> _Linear:
    num_bytes = sum(dtype.bytes_of(shape.num_parameters) for shape in shapes)
    return _Linear(num_bytes, sum(shape.flops(1) for shape in shapes if not shape.sampled_only), device.flops[dtype])


MI355X = Device(
    "MI355X",
    memory_bytes=288 << 30,
    memory_bandwidth=8.0e12,
    flops={Dtype.BF16: 2.5e15, Dtype.FP8: 5.0e15, Dtype.MXFP8: 5.0e15, Dtype.MXFP4: 10.1e15},
    link_bandwidth=76.8e9,
    compressed_from_bytes={2: 8 << 20, 4: 16 << 20},
)
"""AMD's data sheet: HBM3E 8 TB/s, dense peaks, seven Infinity Fabric links of 153.6 GB/s both ways. Compression: vLLM's table for INT4."""
H200 = Device(
    "H200",
    memory_bytes=141 * 10**9,
    memory_bandwidth=4.8e12,
    flops={Dtype.BF16: 989e12, Dtype.FP8: 1979e12},
    link_bandwidth=450e9,
    links_shared=True,
)
"""NVIDIA's data sheet: HBM3e 4.8 TB/s, dense peaks, NVLink 900 GB/s both ways through a switch."""
