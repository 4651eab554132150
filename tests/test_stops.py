"""Stop strings never reach the client, in any chunking of the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.stops import StopCutter
from model.chat import CallStart, ReasoningDelta, TextDelta
from model.conversation import AssistantItem


def shown(stop: tuple[str, ...], pieces: list[str]) -> tuple[str, str]:
    cutter = StopCutter(stop)
    deltas = [delta for piece in pieces for delta in cutter.feed([TextDelta(piece)])]
    deltas += cutter.finish([])
    return "".join(d.text for d in deltas if isinstance(d, TextDelta)), cutter.item(AssistantItem("".join(pieces))).text


@pytest.mark.case("PAR-06")
@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_before_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    ends = [at for at in map(text.find, stop) if at >= 0]
    # The first stop that is complete ends the answer; a longer one that began earlier but is not complete by then does not.
    complete = min((text.find(s) + len(s) for s in stop if s in text), default=None)
    got, item = shown(tuple(stop), pieces)
    assert got == item
    assert text.startswith(got)
    if not ends:
        assert got == text
    else:
        assert complete is not None
        assert len(got) <= complete
        assert not any(s in got for s in stop)


@pytest.mark.case("PAR-06")
def test_a_half_stop_string_is_shown_when_the_answer_ends() -> None:
    assert shown(("fox jumps",), ["The quick fox", " ju"]) == ("The quick fox ju", "The quick fox ju")


def test_other_deltas_keep_their_place() -> None:
    cutter = StopCutter(("XY",))
    out = cutter.feed([ReasoningDelta("r"), TextDelta("aX"), CallStart(0, "c", "f")])
    assert out == [ReasoningDelta("r"), TextDelta("a"), TextDelta("X"), CallStart(0, "c", "f")]
