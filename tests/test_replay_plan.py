"""What a replay sends and when: prompts out of block ids, and AgentX's driving rules, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replays.generator import GeneratorSettings, generate_sessions
from replays.plan import CACHE_BUST_TOKENS, MESSAGE_TOKENS, Part, PlannedCall, TreePlan, plan_session
from replays.play import Answer, TreePlay
from replays.prompts import Assistant, PromptWriter
from replays.text import Words, words
from replays.traces import Request, Session, Stream, session_from_weka


def request(start: float, num_tokens: int, ids: list[int], *, out: int = 64, seconds: float = 1.0, order: int = 0) -> Request:
    return Request(order, start, seconds, num_tokens, out, np.array(ids, dtype=np.int64), "")


def tree(root: list[Request], *subagents: list[Request], head_tokens: int = 0) -> Session:
    lines = tuple(Stream(f"agent-{index}", tuple(line)) for index, line in enumerate(subagents))
    return Session("s", 64, Stream("", tuple(root), head_tokens), lines)


def ids(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def writer(session: Session, *, scale: float = 1.0, assistant: Assistant = "canned", play: int = 0, run: str = "run") -> PromptWriter:
    return PromptWriter(run, "m", played(session, scale=scale, play=play), assistant)


def played(session: Session, *, scale: float = 1.0, play: int = 0, time_scale: float = 1.0, idle_cap: float = 300.0) -> TreePlay:
    return TreePlay(plan_session(session, scale), play, now=0.0, time_scale=time_scale, idle_cap_seconds=idle_cap)


def messages(prompt: PromptWriter, number: int) -> list[dict[str, str]]:
    return msgspec.json.decode(prompt.messages(prompt.play.plan.calls[number]), type=list[dict[str, str]])


def text_of(sent: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in sent)


@pytest.fixture(scope="module")
def generated() -> list[Session]:
    made = generate_sessions(GeneratorSettings(12, seed=1, max_turns=40, token_scale=0.25))
    return [session_from_weka(one, Path("generated")) for one in made]


class TestText:
    def test_the_word_list_is_a_power_of_two_of_distinct_words(self) -> None:
        assert len(set(words())) == len(words()) == 512

    def test_equal_ids_give_equal_words_and_the_first_other_id_other_ones(self) -> None:
        passage = Words(0, 256, 256)
        left, right = (
            passage.render(np.array(blocks), block_size=64, scale=1.0, salt=1, filler=0).split() for blocks in ([1, 2, 3, 4], [1, 2, 9, 4])
        )
        assert left[:128] == right[:128]
        assert sum(one != other for one, other in zip(left[128:192], right[128:192], strict=True)) > 55
        assert left[192:] == right[192:]

    @given(st.integers(1, 300), st.sampled_from([1.0, 0.5, 1 / 3, 1 / 16, 1 / 64, 1 / 100]))
    def test_a_passage_may_be_written_in_pieces(self, cut: int, scale: float) -> None:
        blocks = np.arange(1, 1000)
        whole = Words(0, 301, 64_000).render(blocks, block_size=64, scale=scale, salt=1, filler=0).split()
        pieces = [
            word
            for part in (Words(0, cut, 64_000), Words(cut, 301 - cut, 64_000))
            for word in part.render(blocks, block_size=64, scale=scale, salt=1, filler=0).split()
        ]
        assert pieces == whole

    def test_words_beyond_the_ids_are_the_fillers(self) -> None:
        passage = Words(0, 128, 128)
        one, two = (passage.render(np.array([7]), block_size=64, scale=1.0, salt=1, filler=filler).split() for filler in (1, 2))
        assert one[:64] == two[:64]
        assert one[64:] != two[64:]


class TestPrompts:
    def test_an_extended_prompt_appends_an_answer_and_a_message(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10)), request(9, 1280, ids(20))]))
        first, second = messages(prompt, 0), messages(prompt, 1)
        assert [message["role"] for message in second] == ["user", "assistant", "user"]
        assert second[:1] == first
        assert not prompt.play.plan.calls[1].edits

    def test_the_partial_last_block_keeps_its_text_when_it_fills_up(self) -> None:
        prompt = writer(tree([request(0, 700, [*ids(10), 90]), request(9, 1280, [*ids(10), 91, *ids(9, 200)])]))
        assert messages(prompt, 1)[:1] == messages(prompt, 0)
        assert not prompt.play.plan.calls[1].edits

    def test_a_declared_head_is_a_system_message(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10))], head_tokens=256))
        sent = messages(prompt, 0)
        assert [message["role"] for message in sent] == ["system", "user"]
        assert len(sent[0]["content"].split()) == 256 - MESSAGE_TOKENS

    def test_a_cut_keeps_the_shared_blocks_and_counts_as_an_edit(self) -> None:
        session = tree([request(0, 640, ids(10)), request(9, 1280, ids(20)), request(20, 700, [*ids(8), *ids(2, 500)])])
        prompt = writer(session)
        before, after = text_of(messages(prompt, 1)).split(), text_of(messages(prompt, 2)).split()
        kept = next(place for place, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
        assert prompt.play.plan.calls[2].edits
        assert 8 * 64 - CACHE_BUST_TOKENS - MESSAGE_TOKENS <= kept <= 8 * 64

    def test_a_side_request_does_not_break_the_main_line(self) -> None:
        session = tree([request(0, 640, ids(10)), request(5, 128, ids(2, 900)), request(9, 1280, ids(20))])
        prompt = writer(session)
        assert messages(prompt, 2)[:1] == messages(prompt, 0)

    def test_subagents_of_one_kind_share_their_head(self) -> None:
        agents = [[request(2, 640, [*ids(8, 50), *ids(2, 100 * place)], order=place)] for place in (1, 2)]
        prompt = writer(tree([request(0, 640, ids(10))], *agents))
        one, two = (text_of(messages(prompt, number)).split() for number in (1, 2))
        assert one[: 8 * 64 - CACHE_BUST_TOKENS - MESSAGE_TOKENS] == two[: 8 * 64 - CACHE_BUST_TOKENS - MESSAGE_TOKENS]
        assert one != two

    def test_of_two_calls_at_once_none_holds_the_others_answer(self) -> None:
        agents = [[request(2, 512, ids(8, 50), seconds=5)], [request(2.4, 640, [*ids(8, 50), *ids(2, 200)], order=1)]]
        prompt = writer(tree([request(0, 640, ids(10))], *agents))
        one, two = messages(prompt, 1), messages(prompt, 2)
        assert [message["role"] for message in two] == ["user"]
        assert text_of(two).split()[: len(text_of(one).split())] == text_of(one).split()
        assert prompt.play.plan.calls[2].follows is None

    def test_a_call_that_had_ended_may_be_continued_by_another_stream(self) -> None:
        agents = [[request(2, 512, ids(8, 50))], [request(9, 640, [*ids(8, 50), *ids(2, 200)], order=1)]]
        prompt = writer(tree([request(0, 640, ids(10))], *agents))
        assert [message["role"] for message in messages(prompt, 2)] == ["user", "assistant", "user"]
        assert prompt.play.plan.calls[2].follows == 1

    def test_a_cut_message_goes_on_in_other_words_without_an_answer_between(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10)), request(9, 700, [*ids(8), *ids(2, 500)])]))
        assert [message["role"] for message in messages(prompt, 1)] == ["user"]
        assert prompt.play.plan.calls[1].edits

    def test_the_servers_template_shortens_the_head_down_to_one_word(self) -> None:
        session = tree([request(0, 640, ids(10))], head_tokens=256)
        for template_tokens, expected in ((0, 250), (200, 50), (400, 1)):
            plan = plan_session(session, 1.0, template_tokens)
            system, user = plan.calls[0].parts
            assert system.words.count == expected
            assert user.words.start + user.words.count == max(640, 400 + 1)

    def test_each_play_has_its_own_marker_in_front_of_the_first_user_message(self) -> None:
        session = tree([request(0, 640, ids(10)), request(9, 1280, ids(20))], [request(5, 256, ids(4, 700))], head_tokens=128)
        marks = {}
        for run, play in (("a", 0), ("a", 1), ("b", 0)):
            prompt = writer(session, play=play, run=run)
            users = [next(m["content"] for m in messages(prompt, number) if m["role"] == "user") for number in range(3)]
            assert len({content.split()[0] for content in users}) == 1
            marks[run, play] = users[0].split()[0]
            assert users[0].startswith(marks[run, play] + "\n\n")
            assert sum(marks[run, play] in message["content"] for message in messages(prompt, 2)) == 1
        assert len(set(marks.values())) == 3
        assert all(mark.startswith("[rid:") and len(mark) == len("[rid:]") + 12 for mark in marks.values())

    def test_two_runs_share_no_text(self) -> None:
        session = tree([request(0, 640, ids(10))], head_tokens=320)
        one, two = (messages(writer(session, run=run), 0)[0]["content"].split() for run in ("a", "b"))
        assert sum(left == right for left, right in zip(one, two, strict=True)) < 10

    @pytest.mark.parametrize("scale", [1.0, 1 / 4, 1 / 16])
    def test_prompts_are_as_long_as_the_trace_says_times_scale(self, generated: list[Session], scale: float) -> None:
        written = planned = 0.0
        for session in generated:
            for call in plan_session(session, scale).calls:
                written += sum(part.words.count + MESSAGE_TOKENS for part in call.parts) + CACHE_BUST_TOKENS
                planned += call.request.num_prompt_tokens * scale
        assert written == pytest.approx(planned, rel=0.1 if scale < 0.1 else 0.02)

    def test_unedited_calls_keep_every_message_of_the_call_before(self, generated: list[Session]) -> None:
        num_checked = 0
        for session in generated:
            plan = plan_session(session, 1 / 16)
            for numbers in plan.streams:
                for before, after in pairwise(numbers):
                    if not plan.calls[after].edits:
                        kept: tuple[Part, ...] = plan.calls[before].parts
                        assert plan.calls[after].parts[: len(kept)] == kept
                        num_checked += 1
        assert num_checked > 100

    def test_the_request_has_the_fields_that_agentx_sends(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10), out=320)]), scale=1 / 64)
        call = prompt.play.plan.calls[0]
        body = msgspec.json.decode(prompt.body(call))
        assert {key: value for key, value in body.items() if key != "messages"} == {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 5,
            "ignore_eos": True,
        }
        assert msgspec.json.decode(prompt.body(call, max_tokens=1))["max_completion_tokens"] == 1

    def test_output_is_at_least_one_token(self) -> None:
        assert plan_session(tree([request(0, 640, ids(10), out=0)]), 1 / 64).calls[0].max_tokens == 1


class TestLiveAnswers:
    def test_the_servers_answer_stands_where_the_canned_one_would(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10)), request(9, 1280, ids(20))]), assistant="live")
        prompt.play.answers[0] = Answer({"role": "assistant", "content": "hello", "reasoning": "because"})
        sent = messages(prompt, 1)
        assert sent[1] == {"role": "assistant", "content": "hello", "reasoning": "because"}
        assert sent[2]["role"] == "user"

    def test_calls_are_answered_by_tool_results_in_their_order(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10)), request(9, 1280, ids(20)), request(19, 1920, ids(30))]), assistant="live")
        prompt.play.answers[0] = Answer({"role": "assistant", "content": None, "tool_calls": []}, ("one", "two"))
        for number in (1, 2):
            results = msgspec.json.decode(prompt.messages(prompt.play.plan.calls[number]))[2:4]
            assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", "one"), ("tool", "two")]
            assert len(results[0]["content"].split()) > 100

    def test_canned_mode_ignores_answers(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10)), request(9, 1280, ids(20))]))
        prompt.play.answers[0] = Answer({"role": "assistant", "content": "hello"})
        assert "hello" not in text_of(messages(prompt, 1))

    def test_an_answer_that_is_missing_is_canned(self) -> None:
        prompt = writer(tree([request(0, 640, ids(10)), request(9, 1280, ids(20))]), assistant="live")
        assert messages(prompt, 1)[1]["role"] == "assistant"
        assert len(messages(prompt, 1)[1]["content"].split()) == 64 - MESSAGE_TOKENS


def numbers(calls: list[PlannedCall]) -> list[int]:
    return [call.number for call in calls]


class TestOrder:
    def test_idle_time_counts_from_our_completion(self) -> None:
        play = played(tree([request(0, 64, [1], seconds=2), request(12, 128, [1, 2])]))
        play.start(play.due(0.0)[0])
        assert play.next_due() is None
        play.finish(play.plan.calls[0], 50.0)
        assert play.next_due() == 60.0
        assert play.due(59.9) == []
        assert numbers(play.due(60.0)) == [1]

    def test_time_scale_divides_gaps(self) -> None:
        play = played(tree([request(0, 64, [1], seconds=2), request(12, 128, [1, 2])]), time_scale=10)
        play.start(play.plan.calls[0])
        play.finish(play.plan.calls[0], 5.0)
        assert play.next_due() == 6.0

    def test_a_subagent_starts_at_its_offset_and_its_parent_joins_it(self) -> None:
        # Calls by number: 0 the parent's, 1 the agent's (3 s after it), 2 the parent's again (1 s after the agent's end).
        play = played(tree([request(0, 64, [1]), request(10, 128, [1, 2])], [request(4, 64, [50], seconds=5)]))
        play.start(play.plan.calls[0])
        play.finish(play.plan.calls[0], 100.0)
        assert play.due(102.9) == []
        assert numbers(play.due(103.0)) == [1]
        play.start(play.plan.calls[1])
        assert play.due(1000.0) == []
        play.finish(play.plan.calls[1], 1000.0)
        assert play.next_due() == 1001.0
        assert numbers(play.due(1001.0)) == [2]

    def test_calls_that_overlapped_do_not_wait_for_each_other(self) -> None:
        play = played(tree([request(0, 64, [1]), request(5, 128, [1, 2], seconds=9)], [request(6, 64, [50], seconds=20)]))
        play.start(play.plan.calls[0])
        play.finish(play.plan.calls[0], 0.0)
        assert numbers(play.due(100.0)) == [1, 2]

    def test_a_tree_is_never_idle_longer_than_its_cap(self) -> None:
        play = played(tree([request(0, 64, [1]), request(5000, 128, [1, 2])]), idle_cap=300, time_scale=10)
        play.start(play.plan.calls[0])
        play.finish(play.plan.calls[0], 7.0)
        assert play.next_due() == 37.0

    def test_the_cap_does_not_count_while_something_is_in_flight(self) -> None:
        play = played(tree([request(0, 64, [1]), request(5000, 128, [1, 2])], [request(3, 64, [50], seconds=9000)]), idle_cap=300)
        play.start(play.plan.calls[0])
        play.finish(play.plan.calls[0], 0.0)
        play.start(play.plan.calls[1])
        assert play.due(4000.0) == []
        assert numbers(play.due(4999.0)) == [2]

    def test_a_jump_brings_everything_nearer(self) -> None:
        play = played(tree([request(0, 64, [1]), request(101, 128, [1, 2])]))
        play.start(play.plan.calls[0])
        play.finish(play.plan.calls[0], 0.0)
        play.jump(90.0)
        assert play.next_due() == 10.0

    def test_a_full_context_ends_its_stream_only(self) -> None:
        play = played(tree([request(0, 64, [1]), request(30, 128, [1, 2])], [request(5, 64, [50]), request(9, 128, [50, 51])]))
        play.start(play.plan.calls[0])
        play.finish(play.plan.calls[0], 0.0)
        play.start(play.plan.calls[1])
        play.finish(play.plan.calls[1], 5.0, ends_stream=True)
        assert numbers(play.due(1000.0)) == [3]
        play.start(play.plan.calls[3])
        play.finish(play.plan.calls[3], 1000.0)
        assert play.drained

    def test_a_play_is_drained_when_its_subagents_are(self) -> None:
        play = played(tree([request(0, 64, [1])], [request(5, 64, [50])]))
        drained = []
        for call in play.plan.calls:
            play.start(call)
            drained.append(play.drained)
            play.finish(call, 0.0)
            drained.append(play.drained)
        assert drained == [False, False, False, True]
        assert play.next_due() is None


class TestWarmup:
    SESSION = tree(
        [request(0, 64, [1]), request(10, 128, [1, 2]), request(90, 192, [1, 2, 3])],
        [request(12, 64, [50]), request(20, 128, [50, 51])],
        [request(30, 64, [60]), request(70, 128, [60, 61])],
        [request(80, 64, [70])],
    )

    def test_primers_are_the_last_calls_of_the_streams_that_live_at_the_start_point(self) -> None:
        play = played(self.SESSION)
        primers = play.skip_to(50.0, now=0.0)
        assert [(primer.stream, primer.index) for primer in primers] == [(0, 1), (2, 0)]

    def test_after_warmup_each_stream_has_its_full_idle_time_before_it(self) -> None:
        play = played(self.SESSION)
        play.skip_to(50.0, now=0.0)
        play.resume(1000.0)
        assert play.next_due() == 1000.0 + 39.0
        assert [(call.stream, call.index) for call in play.due(1039.0)] == [(2, 1)]

    def test_without_idle_time_calls_still_wait_for_each_other(self) -> None:
        play = played(self.SESSION)
        play.skip_to(50.0, now=0.0)
        assert [(call.stream, call.index) for call in play.possible()] == [(2, 1)]

    def test_a_start_before_everything_has_no_primers(self) -> None:
        play = played(self.SESSION)
        assert play.skip_to(0.0, now=0.0) == []
        assert numbers(play.possible()) == [0]


def random_trees() -> st.SearchStrategy[Session]:
    calls = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20), st.integers(1, 5)), min_size=1, max_size=5)

    def build(lines: list[list[tuple[float, float, int]]]) -> Session:
        made = [
            [request(start, 64 * count, ids(count, 10 * place), seconds=seconds, order=place) for start, seconds, count in sorted(line)]
            for place, line in enumerate(lines)
        ]
        return tree(made[0], *made[1:])

    return st.lists(calls, min_size=1, max_size=4).map(build)


def play_out(play: TreePlay, latency_seconds: float) -> Iterator[tuple[float, PlannedCall]]:
    """Play to the end on a made-up clock, each call taking `latency_seconds`; yields starts."""
    now = 0.0
    running: list[tuple[float, PlannedCall]] = []
    while not play.drained:
        for call in play.due(now):
            play.start(call)
            running.append((now + latency_seconds, call))
            yield now, call
        next_due = play.next_due()
        times = [end for end, _ in running] + ([next_due] if next_due is not None and next_due > now else [])
        now = max(now, min(times))
        for entry in [entry for entry in running if entry[0] <= now]:
            running.remove(entry)
            play.finish(entry[1], now)


@given(random_trees(), st.floats(0.01, 30))
def test_every_call_is_played_once_in_stream_order_after_what_it_waits_for(session: Session, latency: float) -> None:
    play = played(session)
    started: dict[int, float] = {}
    last_index: dict[int, int] = {}
    for now, call in play_out(play, latency):
        assert call.number not in started
        assert call.index == last_index.get(call.stream, -1) + 1
        assert all(started[number] + latency <= now + 1e-9 for number in call.waits_for)
        started[call.number] = now
        last_index[call.stream] = call.index
    assert len(started) == session.num_requests


@given(random_trees())
def test_what_had_ended_before_a_call_in_the_recording_ends_before_it_in_the_play(session: Session) -> None:
    plan: TreePlan = plan_session(session, 1.0)
    order = [call.number for _, call in play_out(played(session), 5.0)]
    for call in plan.calls:
        for other in plan.calls:
            before = other.request.end_seconds <= call.request.start_seconds and other.request.start_seconds < call.request.start_seconds
            if before:
                assert order.index(other.number) < order.index(call.number)
