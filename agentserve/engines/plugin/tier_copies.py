"""Blocks of KV as bytes: where they lie in vLLM's tensors, host memory behind them, and how they get from one to the other.

All blocks of a step are one call of the copy engine, whatever the layers keep in them: no kernel runs and nothing is allocated on the
device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from time import monotonic
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as custom_ops

from agentserve.engines.plugin.supported import PluginUnsupported

Addresses = npt.NDArray[np.int64]
Seconds = Callable[[], float]
"""What a copy took. It waits for the copy."""
Copy = Callable[[Addresses, Addresses, Addresses], Seconds]
"""From addresses to addresses, so many bytes each: made before anything that the engine is given next."""
_QUEUING: Final = "cuda"
"""The type of devices whose copies are queued; PyTorch calls ROCm's so too."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Of each block, bytes that lie together: those of block n begin at `address + n * step`."""

    address: int
    step: int
    size: int


def pieces_of(tensor: torch.Tensor, num_blocks: int) -> list[Piece]:
    """Of a tensor with `num_blocks` blocks along its first or second dimension. Raises PluginUnsupported."""
    # A block of vLLM's may be several of its kernel's.
    at = next((at for at in (0, 1) if at < tensor.dim() and tensor.shape[at] and tensor.shape[at] % num_blocks == 0), -1)
    if at < 0:
        raise PluginUnsupported(f"the offload tier finds no {num_blocks} blocks in a KV cache of shape {tuple(tensor.shape)}")
    factor, width = tensor.shape[at] // num_blocks, tensor.element_size()
    inner = list(zip(tensor.shape[at + 1 :], tensor.stride()[at + 1 :], strict=True))
    size, step = width * prod(shape for shape, _ in inner), width * tensor.stride(at)
    if not _is_dense(inner):
        raise PluginUnsupported(f"the offload tier finds no whole blocks in a KV cache of strides {tensor.stride()}")
    if step == size:
        factor, step, size = 1, factor * step, factor * size
    starts = [tensor.data_ptr() + width * row * tensor.stride(0) for row in range(tensor.shape[0] if at else 1)]
    return [Piece(start + part * step, factor * step, size) for start in starts for part in range(factor)]


class HostMemory:
    """`num_slots` blocks behind those of `tensors`, and the copies between. Raises PluginUnsupported."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_blocks: int, num_slots: int, copy: Copy | None = None) -> None:
        pieces = [piece for tensor in tensors for piece in pieces_of(tensor, num_blocks)]
        self._tensors = tuple(tensors)  # only addresses are used, which must stay theirs
        sizes = np.array([piece.size for piece in pieces], dtype=np.int64)
        self._sizes = sizes[:, None]
        self._device = np.array([(piece.address, piece.step) for piece in pieces], dtype=np.int64).T[:, :, None]
        self.kept = torch.empty(num_slots * int(sizes.sum()), dtype=torch.uint8)
        starts = self.kept.data_ptr() + num_slots * (np.cumsum(sizes) - sizes)
        self._host = np.array([starts, sizes])[:, :, None]
        self.block_bytes = int(sizes.sum())
        self.copy = _copy_for(tensors[0].device, self.kept) if copy is None else copy

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Seconds:
        return self.copy(_addresses(self._device, blocks), _addresses(self._host, slots), self._of(blocks))

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> Seconds:
        return self.copy(_addresses(self._host, slots), _addresses(self._device, blocks), self._of(blocks))

    def _of(self, numbers: Sequence[int]) -> Addresses:
        return np.repeat(self._sizes, len(numbers), axis=1).ravel()


def _addresses(pieces: Addresses, numbers: Sequence[int]) -> Addresses:
    address, step = pieces
    addresses: Addresses = address + step * np.asarray(numbers, dtype=np.int64)
    return addresses.ravel()


def _is_dense(dimensions: list[tuple[int, int]]) -> bool:
    """Whether they fill their memory without gaps, in whatever order."""
    reach = 1
    for shape, stride in sorted((pair for pair in dimensions if pair[0] != 1), key=lambda pair: pair[1]):
        if stride != reach:
            return False
        reach *= shape
    return True


def _copy_for(device: torch.device, memory: torch.Tensor) -> Copy:
    if device.type == "cpu":
        return copy_on_host
    if device.type != _QUEUING:
        raise PluginUnsupported(f"the offload tier does not know how to copy from {device.type}: start without tier_bytes")
    # PyTorch's own pinned memory would take the next power of two.
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        raise PluginUnsupported(f"the offload tier's {memory.numel():,} bytes of host memory cannot be pinned (error {code})")
    return QueuedCopies(device)


def copy_on_host(sources: Addresses, targets: Addresses, sizes: Addresses) -> Seconds:
    begun = monotonic()
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
    taken = monotonic() - begun
    return lambda: taken


class QueuedCopies:
    """Behind what the device has been given so far, and before what it is given next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # a batch of copies cannot be given to the default stream

    def __call__(self, sources: Addresses, targets: Addresses, sizes: Addresses) -> Seconds:
        current = torch.cuda.current_stream(self._device)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            begun.record()
            custom_ops.swap_blocks_batch(*(torch.from_numpy(each) for each in (sources, targets, sizes)))
            ended.record()
        current.wait_event(ended)

        def seconds() -> float:
            ended.synchronize()
            milliseconds: Any = begun.elapsed_time(ended)
            return float(milliseconds) / 1000

        return seconds
