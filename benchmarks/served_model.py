"""The nano model whose tokenizer agentserve uses in the benchmarks; made once and kept."""

from __future__ import annotations

from pathlib import Path

from benchmarks.instant_upstream import ANSWER_TEXT
from model.chat.formats import detect_chat_format
from model.nano import make_nano, nano_is_complete
from model.tokenizer import Tokenizer


def prepare(folder: Path) -> list[int]:
    """Make the model folder if it is not there; the ids of the upstream's turn in its tokens: the text, then the stop id."""
    if not nano_is_complete(folder):
        make_nano(folder, max_model_len=1 << 20)
    tokenizer = Tokenizer.load(folder)
    return [*tokenizer.encode(ANSWER_TEXT), detect_chat_format(tokenizer).stop_ids[0]]
