"""Content codings: what was packed comes out again in any chunking, and no body fills the memory."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.codings import CODINGS, MAX_CODINGS, STEP_BYTES, ZSTD_WINDOW_LOG, Unpacking, codings
from agentserve.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}
LARGE_BYTES = 300_000_000

every_coding = pytest.mark.parametrize("name", PACKERS)


def pack(names: Sequence[str], data: bytes) -> bytes:
    for name in names:
        data = PACKERS[name](data)
    return data


def unpack(names: Sequence[str], data: bytes, cuts: Sequence[int] = (), max_bytes: int = 1 << 30) -> bytes:
    unpacking = Unpacking(names, max_bytes)
    ends = [0, *sorted(cut * len(data) // 100 for cut in cuts), len(data)]
    outputs = [output for start, end in pairwise(ends) for output in unpacking.feed(data[start:end])]
    unpacking.finish()
    assert all(len(output) <= STEP_BYTES for output in outputs)
    return b"".join(outputs)


def bomb(name: str) -> bytes:
    """300 MB of zeros, packed without ever being in memory."""
    packer = zstd.ZstdCompressor() if name == "zstd" else zlib.compressobj(wbits=zlib.MAX_WBITS if name == "deflate" else 31)
    zeros = bytes(1_000_000)
    return b"".join(packer.compress(zeros) for _ in range(LARGE_BYTES // len(zeros))) + packer.flush()


def test_every_coding_has_a_packer_here() -> None:
    assert set(PACKERS) == set(CODINGS)


@given(
    st.lists(st.sampled_from(list(PACKERS)), min_size=1, max_size=MAX_CODINGS),
    st.lists(st.binary(max_size=300) | st.integers(1, 2 * STEP_BYTES).map(bytes), max_size=4),
    st.lists(st.integers(0, 100), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_what_was_packed_comes_out_in_any_chunking(names: list[str], parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    assert unpack(names, pack(names, data), cuts) == data


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_streams_that_follow_each_other_are_one_body(name: str) -> None:
    assert unpack([name], pack([name], b"one ") + pack([name], b"two"), range(100)) == b"one two"


def test_deflate_without_its_zlib_frame_is_read_too() -> None:
    data = b'{"a": 1}' * 1000
    assert unpack(["deflate"], zlib.compress(data, wbits=-zlib.MAX_WBITS), [1, 2, 50]) == data


@pytest.mark.slow
@pytest.mark.case("HTTP-01")
@every_coding
def test_a_bomb_is_refused_within_a_step_of_the_limit(name: str) -> None:
    packed = bomb(name)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge, match="1000000"):
            sum(map(len, Unpacking([name], 1_000_000).feed(packed)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_a_bomb_inside_another_coding_is_refused_as_well() -> None:
    with pytest.raises(BodyTooLarge):
        unpack(["gzip", "gzip"], gzip.compress(bomb("gzip")), max_bytes=1_000_000)


def test_a_zstd_window_beyond_8_mb_is_refused() -> None:
    options: dict[int, int] = {zstd.CompressionParameter.window_log: ZSTD_WINDOW_LOG + 1, zstd.CompressionParameter.content_size_flag: 0}
    packer = zstd.ZstdCompressor(options=options)
    with pytest.raises(InvalidRequest, match="zstd"):
        unpack(["zstd"], packer.compress(b"{") + packer.compress(b"}") + packer.flush())


@pytest.mark.case("HTTP-01")
@every_coding
def test_a_broken_stream_is_the_clients_fault(name: str) -> None:
    whole = pack([name], b'{"messages": []}' * 100)
    for broken in (b"", whole[:-1], whole[:4], b"{}", whole + b"tail", whole[:9] + b"\xff\xff" + whole[11:]):
        with pytest.raises(InvalidRequest, match=name):
            unpack([name], broken)


def test_codings_are_read_from_their_header() -> None:
    assert codings("") == codings("identity") == []
    assert codings("GZIP, identity ,zstd") == ["gzip", "zstd"]
    for wrong in ("br", "gzip;q=1", "gzip, compress", ", ".join(["gzip"] * (MAX_CODINGS + 1))):
        with pytest.raises(UnsupportedMediaType):
            codings(wrong)
