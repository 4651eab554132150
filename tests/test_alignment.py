"""What whole blocks and chunks leave over."""

from __future__ import annotations

from prefix_cache.alignment import head_padding_gain, reused_tokens


def test_only_whole_units_are_used_again_and_never_the_last_token() -> None:
    assert [reused_tokens(shared, 1000, 128) for shared in (0, 127, 128, 300, 900)] == [0, 0, 128, 256, 896]
    assert reused_tokens(256, 256, 128) == 128
    assert reused_tokens(256, 257, 128) == 256
    assert reused_tokens(5, 1, 128) == 0
    assert reused_tokens(900, 1000, 256) == 768


def test_filling_a_head_pays_when_enough_prompts_share_it() -> None:
    assert head_padding_gain(1280, 128, 10) == 0
    for num_sharers in range(1, 6):
        as_it_is = 1024 + num_sharers * 100
        filled = 1024 + 128
        assert head_padding_gain(1024 + 100, 128, num_sharers) == as_it_is - filled
