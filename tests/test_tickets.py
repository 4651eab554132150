"""Tickets come back exactly once, and every admission policy keeps to its contract."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from admission.policies import ADMISSION_POLICIES
from admission.requests import AdmissionPolicy, AdmissionRequest, Grant, Limits, Refusal, Wait
from admission.tickets import Ticket, TicketBook

every_policy = pytest.mark.parametrize("name", ADMISSION_POLICIES)


def request(number: int, charge_tokens: int = 10) -> AdmissionRequest:
    return AdmissionRequest(f"r{number}", f"s{number % 3}", charge_tokens)


def grant_of(policy: AdmissionPolicy, number: int) -> Ticket:
    answer = policy.offer(request(number), now=0.0)
    assert isinstance(answer, Grant)
    return answer.ticket


def test_a_charge_is_returned_when_its_block_ends_in_an_error() -> None:
    book = TicketBook()

    def turn_that_fails() -> None:
        with book.charge("s", 100) as ticket:
            assert (book.num_tickets, book.charged_tokens, ticket.charge_tokens) == (1, 100, 100)
            raise KeyError

    with pytest.raises(KeyError):
        turn_that_fails()
    assert (book.num_tickets, book.charged_tokens) == (0, 0)


def test_a_second_return_asserts() -> None:
    book = TicketBook()
    ticket = book.issue("s", 1)
    book.give_back(ticket)
    with pytest.raises(AssertionError):
        book.give_back(ticket)


def test_sessions_are_counted_once_however_many_tickets_they_hold() -> None:
    book = TicketBook()
    first, second = book.issue("s", 1), book.issue("s", 1)
    assert book.num_sessions == 1
    book.give_back(first)
    assert book.num_sessions == 1
    book.give_back(second)
    assert book.num_sessions == 0


@every_policy
def test_without_limits_every_turn_starts_at_once(name: str) -> None:
    book = TicketBook()
    policy = ADMISSION_POLICIES[name](book, Limits())
    tickets = [grant_of(policy, number) for number in range(100)]
    assert book.charged_tokens == 1000
    for ticket in tickets:
        assert policy.returned(ticket, 1.0) == []
    assert book.charged_tokens == 0


@every_policy
def test_a_return_lets_the_next_in(name: str) -> None:
    policy = ADMISSION_POLICIES[name](TicketBook(), Limits(max_running=1))
    ticket = grant_of(policy, 0)
    assert policy.offer(request(1), 0.0) == Wait(num_ahead=0)
    assert policy.offer(request(2), 0.0) == Wait(num_ahead=1)
    (grant,) = policy.returned(ticket, 1.0)
    assert grant.request_id == "r1"
    assert policy.num_waiting == 1


@every_policy
def test_a_withdrawn_request_is_never_granted(name: str) -> None:
    policy = ADMISSION_POLICIES[name](TicketBook(), Limits(max_running=1))
    ticket = grant_of(policy, 0)
    policy.offer(request(1), 0.0)
    policy.withdraw("r1", 0.5)
    assert policy.returned(ticket, 1.0) == []
    with pytest.raises(AssertionError):
        policy.withdraw("r1", 2.0)


@every_policy
def test_a_full_queue_refuses_and_says_when_to_come_back(name: str) -> None:
    policy = ADMISSION_POLICIES[name](TicketBook(), Limits(max_running=1, max_waiting=1))
    grant_of(policy, 0)
    assert isinstance(policy.offer(request(1), 0.0), Wait)
    refusal = policy.offer(request(2), 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_seconds >= 1
    assert policy.num_waiting == 1


def test_fcfs_tells_the_refused_to_wait_longer_when_turns_are_slow() -> None:
    def retry_after_seconds(seconds_a_turn: float) -> float:
        policy = ADMISSION_POLICIES["fcfs"](TicketBook(), Limits(max_running=1, max_waiting=8))
        ticket = grant_of(policy, 0)
        for number in range(1, 9):
            policy.offer(request(number), 0.0)
        for turn in range(1, 5):
            (grant,) = policy.returned(ticket, turn * seconds_a_turn)
            ticket = grant.ticket
            policy.offer(request(100 + turn), turn * seconds_a_turn)
        refusal = policy.offer(request(200), 5 * seconds_a_turn)
        assert isinstance(refusal, Refusal)
        return refusal.retry_after_seconds

    assert 1 <= retry_after_seconds(0.1) < retry_after_seconds(5) < retry_after_seconds(1000) <= 60


class Policies(RuleBasedStateMachine):
    """Offers, returns and withdrawals in any order, for each policy of the table."""

    name = "fcfs"
    max_running = 3
    max_waiting = 4

    def __init__(self) -> None:
        super().__init__()
        self.book = TicketBook()
        limits = Limits(max_running=self.max_running, max_waiting=self.max_waiting, capacity_tokens=100)
        self.policy = ADMISSION_POLICIES[self.name](self.book, limits)
        self.running: dict[str, Ticket] = {}
        self.waiting: dict[str, int] = {}
        self.now = 0.0
        self.num_offers = 0
        self.requests: dict[str, AdmissionRequest] = {}

    def pass_time(self, seconds: float) -> None:
        """As whoever sleeps for the policy does: it is called whenever it wants to be."""
        until = self.now + seconds
        while (due := self.policy.due_seconds) is not None and due <= until:
            self.now = max(self.now, due)
            self.take(self.policy.due(self.now))
        self.now = until

    def take(self, grants: list[Grant]) -> None:
        for grant in grants:
            assert self.waiting.pop(grant.request_id) == grant.ticket.charge_tokens
            self.running[grant.request_id] = grant.ticket

    @rule(
        charge_tokens=st.integers(0, 60),
        resident_tokens=st.integers(0, 60),
        session=st.integers(0, 5),
        tenant=st.integers(0, 2),
        wait_seconds=st.floats(0, 5),
    )
    def offer(self, charge_tokens: int, resident_tokens: int, session: int, tenant: int, wait_seconds: float) -> None:
        self.pass_time(wait_seconds)
        self.num_offers += 1
        name = f"r{self.num_offers}"
        request = AdmissionRequest(name, f"s{session}", charge_tokens, resident_tokens, tenant=f"t{tenant}")
        self.requests[name] = request
        answer = self.policy.offer(request, self.now)
        if isinstance(answer, Refusal):
            assert len(self.waiting) == self.max_waiting
            return
        self.waiting[name] = charge_tokens
        self.take([answer] if isinstance(answer, Grant) else [])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_a_turn(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.take(self.policy.returned(self.running.pop(name), self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.take(self.policy.withdraw(name, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_avoidable_tokens=st.integers(0, 1000))
    def hear_of_a_turn(self, data: st.DataObject, num_avoidable_tokens: int) -> None:
        ticket = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.take(self.policy.prefilled(ticket, self.now))
        self.take(self.policy.answered(ticket, 1000, num_avoidable_tokens, self.now))

    @rule(session=st.integers(0, 5))
    def end_a_session(self, session: int) -> None:
        self.take(self.policy.session_ended(f"s{session}", self.now))

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @invariant()
    def the_budget_is_exceeded_by_one_request_at_most(self) -> None:
        footprints = [self.requests[name].footprint_tokens for name in self.running]
        budget = self.policy.state().budget_tokens
        assert not footprints or budget is None or sum(footprints) - max(footprints) < budget

    @invariant()
    def nobody_who_waits_is_forgotten(self) -> None:
        waiting = {entry.request.id for entry in self.policy.waiting()}
        assert waiting == set(self.waiting)
        assert not waiting or self.running or self.policy.due_seconds is not None

    @invariant()
    def the_books_agree(self) -> None:
        self.policy.check_integrity()
        assert self.book.num_tickets == len(self.running) <= self.max_running
        assert self.book.charged_tokens == sum(ticket.charge_tokens for ticket in self.running.values())
        assert self.policy.num_waiting == len(self.waiting)

    def teardown(self) -> None:
        for _ in range(1000):
            if self.running:
                self.take(self.policy.returned(self.running.pop(next(iter(self.running))), self.now))
            elif self.waiting:
                assert self.policy.due_seconds is not None
                self.pass_time(self.policy.due_seconds - self.now)
        assert not self.waiting
        assert (self.book.num_tickets, self.book.charged_tokens, self.book.num_sessions) == (0, 0, 0)


class KvBudget(Policies):
    name = "kv_budget"


class PrefixFirst(Policies):
    name = "prefix_first"


class WorkingSet(Policies):
    name = "working_set"


QUICK = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestFcfs = Policies.TestCase
TestFcfs.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestKvBudget = KvBudget.TestCase
TestKvBudget.settings = QUICK
TestPrefixFirst = PrefixFirst.TestCase
TestPrefixFirst.settings = QUICK
TestWorkingSet = WorkingSet.TestCase
TestWorkingSet.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_every_policy_has_a_state_machine() -> None:
    machines: list[type[Policies]] = [Policies, *Policies.__subclasses__()]
    assert {machine.name for machine in machines} == set(ADMISSION_POLICIES)
