"""Each admission policy does what its sentence says: who is let in, who waits and for how long, and that rules change while turns run."""

from __future__ import annotations

import pytest

from admission.choice import PolicyParameterError
from admission.policies import ADMISSION_POLICIES
from admission.policies.gate import Gate
from admission.policies.line import TenantShares
from admission.policies.trimming import Trimming
from admission.requests import AdmissionRequest, Grant, Limits, Outlook
from admission.tickets import Ticket, TicketBook

THOUSAND = Limits(capacity_tokens=1000)


def gate(name: str, limits: Limits = THOUSAND, outlook: Outlook | None = None, **values: float) -> Gate:
    return ADMISSION_POLICIES[name](
        TicketBook(),
        limits,
        {"alpha": 1.0, **({"over_commit": 0.0} if name == "working_set" else {}), **values} if name != "fcfs" else values,
        outlook,
    )


def ask(policy: Gate, session: str, tokens: int, now: float, *, resident: int = 0, tenant: str | None = None) -> Ticket | None:
    """The ticket of a turn of `tokens`, so many of them resident; None when it waits under the id session@now."""
    answer = policy.offer(AdmissionRequest(f"{session}@{now:g}", session, tokens - resident, resident, tenant=tenant), now)
    return answer.ticket if isinstance(answer, Grant) else None


def let_in(policy: Gate, session: str, tokens: int, now: float) -> Ticket:
    ticket = ask(policy, session, tokens, now)
    assert ticket is not None
    return ticket


def ids(grants: list[Grant]) -> list[str]:
    return [grant.request_id for grant in grants]


class Returns:
    """An outlook that is known."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def seconds_to_return(self, session_id: str, now: float, horizon_seconds: float) -> float:
        return min(self.seconds[session_id], horizon_seconds)


@pytest.mark.parametrize("name", ADMISSION_POLICIES)
def test_every_policy_says_what_it_does_and_refuses_what_it_does_not_know(name: str) -> None:
    choice = ADMISSION_POLICIES[name]
    assert len(choice.about) > 20
    defaults = choice.parameters()
    for knob, row in choice.knobs().items():
        assert row.low <= getattr(defaults, knob) <= row.high
        with pytest.raises(PolicyParameterError, match=knob):
            choice(TicketBook(), THOUSAND, {knob: row.high * 2 + 1})
    with pytest.raises(PolicyParameterError, match="there are"):
        choice(TicketBook(), THOUSAND, {"no_such_knob": 1})


@pytest.mark.parametrize("name", sorted(ADMISSION_POLICIES.keys() - {"fcfs"}))
def test_a_turn_starts_while_there_is_room_whatever_its_size(name: str) -> None:
    policy = gate(name)
    first = let_in(policy, "a", 900, 0.0)
    let_in(policy, "huge", 5000, 0.0)
    assert ask(policy, "b", 1, 1.0) is None, "what is in use is above the budget"
    assert policy.state().in_use_tokens == 5900
    assert ids(policy.returned(first, 2.0)) == [], "the huge one alone is above it"


@pytest.mark.parametrize("name", sorted(ADMISSION_POLICIES.keys() - {"fcfs"}))
def test_tenants_take_turns_in_the_queue(name: str) -> None:
    policy = gate(name, quantum_tokens=200, hold_seconds=3600)
    running = [let_in(policy, "first", 1000, 0.0)]
    for number in range(8):
        ask(policy, f"flood{number}", 200, 1.0 + number, tenant="flood")
    for number in range(2):
        ask(policy, f"small{number}", 200, 20.0 + number, tenant="small")
    policy.session_ended("first", 30.0)
    policy_order = ids(policy.returned(running[0], 30.0))
    assert policy_order[0].startswith("flood")
    assert policy_order.index("small0@20") <= 2
    assert policy_order.index("small1@21") <= 4


@pytest.mark.parametrize("name", ADMISSION_POLICIES)
def test_one_cold_prefill_runs_at_a_time_and_warm_turns_pass_it(name: str) -> None:
    policy = gate(name, Limits(capacity_tokens=100_000), cold_tokens=500)
    first = let_in(policy, "cold1", 800, 0.0)
    assert ask(policy, "cold2", 800, 1.0) is None
    assert ask(policy, "cold3", 800, 2.0) is None
    assert ask(policy, "warm", 800, 3.0, resident=700) is not None
    assert ids(policy.prefilled(first, 4.0)) == ["cold2@1"]
    assert policy.prefilled(first, 4.0) == []
    assert policy.state().num_cold == 1
    assert ids(policy.returned(first, 5.0)) == []
    assert policy.num_waiting == 1


def test_prefix_first_prefers_what_is_resident_and_lets_nobody_starve() -> None:
    policy = gate("prefix_first", Limits(max_running=1, capacity_tokens=10_000), ageing_tokens_per_second=10, hold_seconds=3600)
    ticket = let_in(policy, "a", 100, 0.0)
    ask(policy, "new", 1000, 1.0)
    ask(policy, "back", 1000, 2.0, resident=900)
    (grant,) = policy.returned(ticket, 3.0)
    assert grant.request_id == "back@2"
    ask(policy, "later", 1000, 200.0, resident=900)
    (grant,) = policy.returned(grant.ticket, 201.0)
    assert grant.request_id == "new@1", "199 s of waiting count for more than 900 tokens"


def test_a_held_turn_goes_past_the_target_when_its_time_has_come() -> None:
    policy = gate("working_set", hold_seconds=60)
    for name in ("a", "b"):
        policy.returned(let_in(policy, name, 500, 0.0), 1.0)
    assert ask(policy, "c", 400, 2.0) is None
    assert policy.due_seconds == 56.0, "nine tenths of the limit"
    assert ids(policy.due(56.0)) == ["c@2"]
    assert policy.state().num_members == 2, "an idle member made room"


def test_members_pass_and_others_wait_at_a_turns_start() -> None:
    policy = gate("working_set")
    for name in ("a", "b"):
        policy.returned(let_in(policy, name, 500, 0.0), 1.0)
    assert ask(policy, "c", 100, 2.0) is None
    again = let_in(policy, "a", 500, 3.0)
    assert policy.due_seconds is not None
    assert policy.due(4.0) == policy.returned(again, 4.5) == []
    let_in(policy, "a", 520, 5.0)
    assert policy.due_seconds == 5.0, "b has left for what a has grown, and with it there is room"
    assert ids(policy.due(5.0)) == ["c@2"]


def test_over_commitment_drops_the_idle_member_that_is_expected_back_last() -> None:
    policy = gate("working_set", outlook=Returns({"soon": 5.0, "late": 500.0, "later": 400.0}))
    for name in ("later", "soon", "late"):
        policy.returned(let_in(policy, name, 300, 0.0), 1.0)
    policy.returned(let_in(policy, "soon", 500, 2.0), 3.0)
    assert [name for name in ("soon", "late", "later") if policy.is_member(name)] == ["soon", "later"]


def test_a_newcomer_pushes_no_member_out() -> None:
    policy = gate("working_set", over_commit=0.3)
    policy.returned(let_in(policy, "a", 900, 0.0), 1.0)
    newcomer = let_in(policy, "b", 300, 2.0)
    assert ask(policy, "c", 10, 3.0) is None
    policy.returned(newcomer, 4.0)
    assert policy.is_member("a")
    policy.returned(let_in(policy, "b", 1100, 5.0), 6.0)
    assert policy.is_member("a"), "the margin has room for the largest"
    let_in(policy, "a", 1050, 7.0)
    assert not policy.is_member("b"), "growth beyond the margin does"


def test_running_members_are_never_dropped() -> None:
    policy = gate("working_set")
    first = let_in(policy, "a", 800, 0.0)
    let_in(policy, "b", 800, 0.0)
    policy.returned(first, 1.0)
    assert not policy.is_member("a")
    assert policy.is_member("b")


def test_an_ended_session_gives_its_place_to_the_next() -> None:
    policy = gate("working_set")
    policy.returned(let_in(policy, "a", 1000, 0.0), 1.0)
    assert ask(policy, "b", 1000, 2.0) is None
    assert ids(policy.session_ended("a", 3.0)) == ["b@2"]
    policy.session_ended("b", 4.0)
    (ticket,) = [policy._book._tickets[number] for number in policy._running]
    policy.returned(ticket, 5.0)
    assert policy.state().num_members == 0


def test_an_idle_time_that_was_capped_does_not_cost_the_place() -> None:
    """A capped gap overshoots the cap by milliseconds: a member that leaves at the cap loses its blocks as it comes back."""
    capped = Limits(capacity_tokens=1000, longest_idle_seconds=300)
    policy = gate("working_set", capped, tau_seconds=300, hold_seconds=3600)
    policy.returned(let_in(policy, "a", 1000, 0.0), 0.0)
    assert ask(policy, "b", 1000, 1.0) is None
    policy.due(300.1)
    assert policy.is_member("a")
    policy.due(331.0)
    assert not policy.is_member("a")


def test_a_parallel_turn_of_a_session_that_is_let_in_passes_too() -> None:
    policy = gate("working_set")
    first = let_in(policy, "a", 1000, 0.0)
    ask(policy, "b", 400, 1.0)
    ask(policy, "b", 100, 2.0)
    policy.session_ended("a", 3.0)
    assert ids(policy.returned(first, 3.0)) == ["b@1", "b@2"]


def test_the_tier_counts_where_it_is_exclusive() -> None:
    policy = gate("working_set", Limits(capacity_tokens=1000, tier_tokens=1000), tier_share=0.5)
    assert policy.state().budget_tokens == 1500


def test_a_rule_changes_while_turns_run_and_wait_and_no_ticket_is_lost() -> None:
    book = TicketBook()
    policy = ADMISSION_POLICIES["fcfs"](book, Limits(max_running=2, capacity_tokens=1000))
    tickets = [let_in(policy, name, 400, 0.0) for name in ("a", "b")]
    ask(policy, "c", 100, 1.0)
    ask(policy, "d", 100, 2.0, resident=90)
    limits = Limits(max_running=2, capacity_tokens=1000)
    assert policy.change_rule(ADMISSION_POLICIES["prefix_first"].rule(limits, {"ageing_tokens_per_second": 1}), 3.0) == []
    assert (policy.num_waiting, book.num_tickets, policy.state().running_tokens) == (2, 2, 800)
    (grant,) = policy.returned(tickets[0], 4.0)
    assert grant.request_id == "d@2"
    open_limits = Limits(capacity_tokens=1000)
    policy.change_rule(ADMISSION_POLICIES["working_set"].rule(open_limits), 5.0)
    (last,) = policy.returned(tickets[1], 6.0)
    for ticket in (grant.ticket, last.ticket):
        policy.returned(ticket, 7.0)
    policy.check_integrity()
    assert (book.num_tickets, book.charged_tokens, policy.num_waiting) == (0, 0, 0)


def test_idle_sessions_keep_their_places_when_parameters_change() -> None:
    policy = gate("working_set")
    for second, name in enumerate(("a", "b")):
        policy.returned(let_in(policy, name, 400, float(second)), second + 1.0)
    assert policy.change_rule(ADMISSION_POLICIES["working_set"].rule(THOUSAND, {"alpha": 0.7, "tau_seconds": 100}), 5.0) == []
    assert (policy.state().in_use_tokens, policy.state().num_members) == (800, 2)
    assert ask(policy, "c", 400, 6.0) is None
    assert ids(policy.due(101.0)) == ["c@6"], "the first of them has been idle for as long as the new rule allows"
    policy.change_rule(ADMISSION_POLICIES["fcfs"].rule(THOUSAND), 102.0)
    assert policy.state().in_use_tokens == 400
    policy.check_integrity()


def test_only_what_members_miss_trims_the_target_and_slowly() -> None:
    policy = gate("working_set", trim_step=0.01, quantum_tokens=0, hold_seconds=3600)
    outsider = let_in(policy, "a", 100, 0.0)
    for second in range(0, 200, 10):
        policy.answered(outsider, 1000, 900, float(second))
    assert policy.state().target_share == 1.0, "it was no member when it asked: that its blocks were gone says nothing"
    policy.returned(outsider, 200.0)
    member = let_in(policy, "a", 100, 201.0)
    for second in range(201, 201 + 190, 10):
        policy.answered(member, 1000, 900, float(second))
    assert policy.state().target_share == pytest.approx(0.97), "three minutes, three steps"


def test_the_target_rises_only_while_somebody_waits_and_within_its_bounds() -> None:
    trimming = Trimming(0.9, 0.05)
    for minute in range(10):
        trimming.answered(10_000, 0, False, minute * 61.0)
    assert trimming.share == 0.9
    for minute in range(10, 30):
        trimming.answered(10_000, 0, True, minute * 61.0)
    assert trimming.share == pytest.approx(1.05)
    for minute in range(30, 60):
        trimming.answered(10_000, 1000, True, minute * 61.0)
    assert trimming.share == pytest.approx(0.7)


def test_a_tenant_that_has_used_its_share_waits_until_the_others_have() -> None:
    shares = TenantShares(100)
    chosen = []
    for _ in range(12):
        tenant = shares.choose({"early": 0.0, "late": 1.0})
        chosen.append(tenant)
        shares.use(tenant, 50)
    assert chosen[:4] == ["early", "early", "late", "late"]
    assert chosen.count("early") == 6


def test_whoever_is_still_resident_comes_in_at_once_and_whoever_is_not_waits() -> None:
    policy = gate("working_set")
    policy.returned(let_in(policy, "a", 1000, 0.0), 1.0)
    assert ask(policy, "gone", 400, 2.0, resident=100) is None
    assert ask(policy, "kept", 400, 3.0, resident=390) is not None, "its blocks are there: to hold it back would only lose them"
