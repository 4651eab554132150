"""What alignment costs: only whole units of a prompt are used again, blocks in the engine and chunks where blocks were offloaded."""

from __future__ import annotations


def reused_tokens(num_shared_tokens: int, num_prompt_tokens: int, unit: int) -> int:
    """Tokens of a prompt that need no prefill when its first `num_shared_tokens` were computed before and are all still held.

    Whole units of `unit` tokens, and never the last token: an engine always computes that one.
    """
    return max(0, min(num_shared_tokens, num_prompt_tokens - 1)) // unit * unit


def head_padding_gain(head_tokens: int, unit: int, num_sharers: int) -> int:
    """Prefill tokens saved by filling a head up to a whole unit, over `num_sharers` prompts that begin with it; negative: it costs more.

    The first one computes the filling, each later one finds the head's last part instead of computing it.
    """
    tail = head_tokens % unit
    return (num_sharers - 1) * tail - (unit - tail) if tail else 0
