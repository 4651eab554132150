"""The plugin under vLLM's own scheduler and block pool: in LRU order nothing changes, hints change the order, faults change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from admission.eviction.policy import Fate
from agentserve.engines.plugin import control
from agentserve.engines.plugin.options import SCHEDULER, SECTION, PluginOptions, transfer_config
from agentserve.engines.plugin.supported import PluginUnsupported
from agentserve.engines.plugin.wire import PluginState, SessionHint, TurnHints, read_state, xargs
from benchmarks.timed_requests import TimedRequest, timed_requests
from replays.simulator.options import EngineOptions

if TYPE_CHECKING:
    from agentserve.engines.plugin.ordering import Ordering
    from benchmarks.vllm_scheduler import VllmReplay

pytestmark = pytest.mark.engine

BLOCK_SIZE = 16
PLAIN = EngineOptions(num_blocks=260, block_size=BLOCK_SIZE, max_num_batched_tokens=256, max_num_seqs=16)
EAGLE = replace(PLAIN, num_speculative_tokens=3, acceptance_length=2.78, drops_last_block=True)
PREEMPTING: dict[str, Any] = {"num_sessions": 8, "seed": 4, "output_factor": 120, "mean_gap_steps": 50.0}
EVICTING: dict[str, Any] = {"num_sessions": 20, "seed": 3}


def transfer(**extra: Any) -> dict[str, Any]:
    config: dict[str, Any] = msgspec.json.decode(transfer_config(PluginOptions()))
    return config | {"kv_connector_extra_config": extra}


def by_scheduler(**extra: Any) -> dict[str, Any]:
    """What `make_scheduler` is told for the plugin in vLLM's scheduler."""
    return {"scheduler_cls": SCHEDULER, "additional": {SECTION: extra}}


def workload(**settings: Any) -> list[TimedRequest]:
    most = PLAIN.num_blocks * BLOCK_SIZE - 200
    made = timed_requests(block_size=BLOCK_SIZE, **settings)
    return [request for request in made if len(request.token_ids) + request.num_output_tokens < most]


def ordering() -> Ordering:
    """That of the scheduler made last."""
    assert control.current is not None
    return cast("Ordering", control.current)


def replayed(
    replay: VllmReplay,
    requests: list[TimedRequest],
    *,
    each_step: Callable[[int], None] | None = None,
    xargs_of: Callable[[TimedRequest], dict[str, Any] | None] = lambda request: None,
) -> VllmReplay:
    waiting, now = list(reversed(requests)), 0
    while waiting or len(replay.finished_at) < len(requests):
        while waiting and waiting[-1].step <= now:
            one = waiting.pop()
            session_id = f"session {one.number % 7}"
            replay.add(one.number, one.token_ids, one.num_output_tokens, one.output_token, session_id, xargs_of(one))
        replay.step(now)
        if each_step is not None:
            each_step(now)
        now += 1
        assert now < 100_000, "a request never ends"
    return replay


def outcome(replay: VllmReplay) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    return replay.num_hit_tokens, replay.finished_at, replay.preemptions


@pytest.mark.parametrize(
    ("settings", "options", "lookahead"),
    [(EVICTING, PLAIN, 0), (EVICTING, EAGLE, 20), (PREEMPTING, PLAIN, 20), (PREEMPTING, EAGLE, 0)],
    ids=["evicting", "evicting-eagle", "preempting", "preempting-eagle"],
)
def test_in_lru_order_every_request_fares_as_without_the_plugin(
    settings: dict[str, Any], options: EngineOptions, lookahead: int, vllm_side: ModuleType, tmp_path: Path
) -> None:
    requests = workload(**settings)
    plain = replayed(vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path)), requests)
    assert sum(plain.preemptions.values()) > 0 or settings is EVICTING
    ordered: dict[str, Any] = {"policy": "lru", "protected_requests": 0, "lookahead_blocks": lookahead}

    def check(now: int) -> None:
        if now % 23 == 0:
            ordering().check_integrity()

    for carrier in ({"transfer": transfer(**ordered)}, by_scheduler(**ordered)):
        ours = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path, **carrier))
        replayed(ours, requests, each_step=check)
        assert ordering().state().is_ordering
        assert ordering().state().num_evicted_live_blocks > 100
        assert outcome(ours) == outcome(plain)


def _some_hint(rng: random.Random) -> SessionHint:
    return SessionHint(
        session_id=f"session {rng.randrange(8)}",
        branch_id=rng.choice((None, None, "0", "1")),
        start_tokens=rng.choice((0, 0, 30, 200)),
        only_generated=rng.random() < 0.2,
        fate=rng.choice((None, *(fate for fate in Fate if fate is not Fate.PRESUMED))),
        return_class=rng.choice((None, "root/tool:brisk", "sub/end_turn")),
        priority=rng.choice((None, 0, 90)),
        retention_seconds=rng.choice((None, 0.001)),
        awaited_seconds=rng.choice((None, None, 0.0, 5.0)),
    )


def _some_turn(rng: random.Random, request: TimedRequest) -> dict[str, Any]:
    fate = rng.choice((Fate.LIVE, Fate.LIVE, Fate.LIVE, Fate.ENDED, Fate.ONE_SHOT))
    hints = TurnHints(branch_id=rng.choice((None, "0", "1")), fate=fate, echoes=rng.random() < 0.5, others=(_some_hint(rng),))
    return {"agentserve": "no JSON"} if request.number % 10 == 0 else dict(xargs(hints))


@pytest.mark.parametrize(("settings", "options"), [(EVICTING, EAGLE), (PREEMPTING, PLAIN)], ids=["evicting-eagle", "preempting"])
def test_both_carriers_evict_the_same_request_by_request(
    settings: dict[str, Any], options: EngineOptions, vllm_side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = workload(**settings)
    steps = [0]
    monkeypatch.setattr("agentserve.engines.plugin.carrying.monotonic", lambda: steps[0] / 10)

    def fared(**carrier: Any) -> tuple[Any, PluginState]:
        rng = random.Random(5)
        replay = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path, **carrier))

        def hint(now: int) -> None:
            steps[0] = now
            if now % 5 == 0:
                assert control.handle(msgspec.json.encode({"hints": [_some_hint(rng)]}).decode())["status"] == 200

        replayed(replay, requests, each_step=hint, xargs_of=lambda request: _some_turn(rng, request))
        ordering().check_integrity()
        return outcome(replay), ordering().state()

    outcome_of_one, state_of_one = fared(transfer=transfer(policy="class_hazard"))
    outcome_of_other, state_of_other = fared(**by_scheduler(policy="class_hazard"))
    assert outcome_of_other == outcome_of_one
    assert state_of_other == state_of_one
    assert state_of_one.is_ordering
    assert min(state_of_one.num_evicted_dead_blocks, state_of_one.num_evicted_live_blocks) > 50


def test_the_scheduler_that_runs_ahead_carries_it_too(vllm_side: ModuleType, tmp_path: Path) -> None:
    ahead = vllm_side.make_scheduler(PLAIN, tmp_path, schedules_ahead=True, **by_scheduler(policy="lru", protected_requests=0))
    stock = vllm_side.make_scheduler(PLAIN, tmp_path, schedules_ahead=True)
    assert isinstance(ahead, type(stock))
    requests = workload(**EVICTING)
    ours, plain = (replayed(vllm_side.VllmReplay(PLAIN, scheduler), requests) for scheduler in (ahead, stock))
    assert outcome(ours) == outcome(plain)
    assert ordering().state().num_evicted_live_blocks > 50


@pytest.mark.parametrize("policy", ["class_hazard", "priority"])
def test_whatever_is_hinted_the_books_fit_and_running_blocks_stay(policy: str, vllm_side: ModuleType, tmp_path: Path) -> None:
    rng = random.Random(policy)
    options = replace(EAGLE, num_blocks=300)
    replay = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path, transfer(policy=policy)))
    pool = replay.scheduler.kv_cache_manager.block_pool

    def hint_and_check(now: int) -> None:
        batch = {"hints": [_some_hint(rng)], "policy": rng.choice((None, None, "lru", policy))}
        assert control.handle(msgspec.json.encode(batch).decode())["status"] == 200
        if now % 7 == 0:
            ordering().check_integrity()
        held = {
            block
            for request in replay.scheduler.running
            for block in replay.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        }
        assert not held & {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}

    replayed(replay, workload(**PREEMPTING), each_step=hint_and_check, xargs_of=lambda request: _some_turn(rng, request))
    state = ordering().state()
    assert state.is_ordering, state.off_because
    assert state.num_bad_hints > 0
    assert min(state.num_evicted_dead_blocks, state.num_evicted_live_blocks) > 50
    assert sum(replay.preemptions.values()) > 0
    assert pool.get_num_free_blocks() == options.num_blocks


def test_a_fault_turns_the_order_off_and_every_request_still_ends(
    vllm_side: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = workload(**PREEMPTING)
    replay = vllm_side.VllmReplay(PLAIN, vllm_side.make_scheduler(PLAIN, tmp_path, transfer(policy="lru")))
    pool = replay.scheduler.kv_cache_manager.block_pool
    forest = ordering()._retention.forest

    def broken(blocks: Any) -> Any:
        raise ZeroDivisionError("a fault of the plugin")

    def break_it(now: int) -> None:
        if now == 600:
            assert ordering().is_on
            monkeypatch.setattr(forest, "release", broken)

    replayed(replay, requests, each_step=break_it)
    state = read_state(control.handle("")["body"].encode())
    assert (state.is_ordering, state.num_errors, state.policy) == (False, 1, "lru")
    assert "a fault of the plugin" in state.off_because
    assert type(pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"
    assert len(pool.free_block_queue.get_all_free_blocks()) == pool.get_num_free_blocks() == PLAIN.num_blocks


def test_off_touches_nothing_and_nonsense_is_refused(vllm_side: ModuleType, tmp_path: Path) -> None:
    off = vllm_side.make_scheduler(PLAIN, tmp_path, transfer(policy="off"))
    assert type(off.kv_cache_manager.block_pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"
    also_off = vllm_side.make_scheduler(PLAIN, tmp_path, **by_scheduler(policy="off"))
    assert type(also_off.kv_cache_manager.block_pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"
    for extra in ({"policy": "dead_last"}, {"policy": "class_hazard", "parameters": {"horizon": 1}}):
        with pytest.raises(PluginUnsupported):
            vllm_side.make_scheduler(PLAIN, tmp_path, transfer(**extra))
        with pytest.raises(PluginUnsupported):
            vllm_side.make_scheduler(PLAIN, tmp_path, **by_scheduler(**extra))
    with pytest.raises(PluginUnsupported, match="not both"):
        vllm_side.make_scheduler(PLAIN, tmp_path, transfer(), **by_scheduler())


def _turn(replay: VllmReplay, number: int, session: str, tokens: list[int], **hints: Any) -> int:
    """Runs one request; its hit tokens."""
    replay.add(number, tokens, 4, 7, session, dict(xargs(TurnHints(branch_id="", **hints))))
    for now in range(1000):
        replay.step(now)
        if number in replay.finished_at:
            return replay.num_hit_tokens[number]
    raise AssertionError("the request never ends")


def _resident() -> PluginState:
    return ordering().state()


def test_what_is_said_of_sessions_decides_who_is_evicted(vllm_side: ModuleType, tmp_path: Path) -> None:
    options = replace(PLAIN, num_blocks=64)
    tokens = {name: [1000 * (1 + place) + at for at in range(20 * BLOCK_SIZE + 5)] for place, name in enumerate("abcd")}

    def outcome_of(*hints: SessionHint) -> tuple[int, int]:
        """Hits of a and b after c and d have pushed out 20 blocks: a was let go first."""
        replay = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path, transfer(policy="class_hazard")))
        for number, name in enumerate("abc"):
            _turn(replay, number, name, tokens[name])
        for hint in hints:
            ordering()._retention.tell(hint)
        _turn(replay, 4, "d", tokens["d"])
        return _turn(replay, 5, "a", tokens["a"]), _turn(replay, 6, "b", tokens["b"])

    assert outcome_of()[0] < 10 * BLOCK_SIZE
    assert outcome_of(SessionHint(session_id="b", fate=Fate.ENDED))[0] == 20 * BLOCK_SIZE
    assert outcome_of(SessionHint(session_id="a", awaited_seconds=100.0))[0] == 20 * BLOCK_SIZE
    brisk = [SessionHint(session_id=name, return_class="root/tool:brisk") for name in "ac"]
    assert outcome_of(*brisk, SessionHint(session_id="b", return_class="root/end_turn"))[0] == 20 * BLOCK_SIZE
    assert _resident().num_evicted_live_blocks > 0


def test_an_emptied_cache_is_forgotten(vllm_side: ModuleType, tmp_path: Path) -> None:
    replay = vllm_side.VllmReplay(PLAIN, vllm_side.make_scheduler(PLAIN, tmp_path, transfer(policy="lru")))
    tokens = list(range(50 * BLOCK_SIZE))
    _turn(replay, 0, "a", tokens)
    assert replay.scheduler.reset_prefix_cache()
    assert _turn(replay, 1, "b", [5, *tokens[:100]]) == 0
    assert _resident().resident_blocks == {"b": 6}
    ordering().check_integrity()
    assert _turn(replay, 2, "a", tokens) == 0
    assert _turn(replay, 3, "a", tokens) == 49 * BLOCK_SIZE
    for number in (4, 5):
        replay.add(number, tokens[: 20 * (number - 3)], 200, 9, f"running {number}", None)
    for now in range(60):
        replay.step(now)
    assert replay.scheduler.reset_prefix_cache(reset_running_requests=True)
    for now in range(300):
        replay.step(now)
        ordering().check_integrity()
    assert {4, 5} <= replay.finished_at.keys()
    assert _resident().is_ordering, _resident().off_because


def test_cut_tails_and_output_that_never_comes_back_go_first(vllm_side: ModuleType, tmp_path: Path) -> None:
    options = replace(PLAIN, num_blocks=64)
    replay = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path, transfer(policy="dead_first")))
    head, tail = list(range(10 * BLOCK_SIZE)), [5000 + at for at in range(10 * BLOCK_SIZE)]
    _turn(replay, 0, "a", head + tail)
    assert _resident().num_dead_blocks == 0
    _turn(replay, 1, "a", [*head, *(9000 + at for at in range(BLOCK_SIZE + 1))])
    assert _resident().num_dead_blocks == 10
    replay.add(2, [3000 + at for at in range(BLOCK_SIZE)], 4 * BLOCK_SIZE, 8, "b", dict(xargs(TurnHints(echoes=False))))
    for now in range(200):
        replay.step(now)
    assert _resident().num_dead_blocks == 10 + 3  # the last block of the four is not whole
