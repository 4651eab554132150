"""Number formats and what they cost in memory."""

from __future__ import annotations

from enum import StrEnum


class Dtype(StrEnum):
    """A storage format. The MX formats carry an 8-bit scale for each group of 32 elements (OCP Microscaling 1.0)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"

    @property
    def bits(self) -> float:
        """For one element, its part of the scale included."""
        return _BITS[self]

    def bytes_of(self, num_elements: int) -> int:
        """Bytes of `num_elements` in a row, rounded up to a whole byte."""
        return -int(-num_elements * self.bits // 8)


_BITS = {Dtype.FP32: 32.0, Dtype.BF16: 16.0, Dtype.FP8: 8.0, Dtype.MXFP8: 8.25, Dtype.MXFP4: 4.25}
