"""Who waits, in order: members by arrival, others by rank, tenants with something left of their share before those without."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from admission.requests import Waiting

_Queue: TypeAlias = list[tuple[float, int, Waiting]]


class TenantShares:
    """Deficits of tenants that wait (as in DLPM): each may use a quantum of tokens before those are preferred that have some left.

    Only while somebody waits: without a queue nobody takes anything from anybody. A quantum of 0 tells no tenants apart.
    """

    __slots__ = ("_left", "quantum_tokens")

    def __init__(self, quantum_tokens: float) -> None:
        self.quantum_tokens = quantum_tokens
        self._left: dict[str | None, float] = {}

    def choose(self, heads: Mapping[str | None, float]) -> str | None:
        """Of the tenants whose first turn has this rank, the one that goes next. May hand out quanta; changes state."""
        if not self.quantum_tokens:
            return min(heads, key=heads.__getitem__)
        left = {tenant: self._left.setdefault(tenant, self.quantum_tokens) for tenant in heads}
        most = max(left.values())
        if most <= 0:
            more = (-most // self.quantum_tokens + 1) * self.quantum_tokens
            left = {tenant: value + more for tenant, value in left.items()}
            self._left.update(left)
        return min((tenant for tenant in heads if left[tenant] > 0), key=heads.__getitem__)

    def use(self, tenant: str | None, tokens: int) -> None:
        """Charge a tenant. Changes state."""
        if self.quantum_tokens:
            self._left[tenant] = self._left.get(tenant, self.quantum_tokens) - tokens

    def clear(self) -> None:
        """Nobody waits any more."""
        self._left.clear()


class Line:
    """Waiting turns. `add`, `remove` and `promote` change state; they are O(log n) and a move of memory."""

    __slots__ = ("_by_id", "_by_session", "_members", "_next_number", "_others", "_places")

    def __init__(self) -> None:
        self._by_id: dict[str, Waiting] = {}
        self._by_session: dict[str, list[str]] = {}
        self._places: dict[str, tuple[_Queue, tuple[float, int]]] = {}
        self._members: dict[bool, _Queue] = {False: [], True: []}
        """By whether they are cold."""
        self._others: dict[bool, dict[str | None, _Queue]] = {False: {}, True: {}}
        """The same by tenant."""
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Waiting]:
        """Whoever came first first."""
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def oldest(self) -> Waiting | None:
        return next(iter(self._by_id.values()), None)

    def num_waiting_of(self, session_id: str) -> int:
        return len(self._by_session.get(session_id, ()))

    def add(self, entry: Waiting, rank: float) -> None:
        request = entry.request
        assert request.id not in self._by_id
        self._by_id[request.id] = entry
        self._by_session.setdefault(request.session_id, []).append(request.id)
        self._put(entry, rank)

    def _put(self, entry: Waiting, rank: float) -> None:
        tenant = entry.request.tenant
        queue = self._members[entry.is_cold] if entry.is_member else self._others[entry.is_cold].setdefault(tenant, [])
        key = (entry.asked_seconds if entry.is_member else rank, self._next_number)
        self._next_number += 1
        insort(queue, (*key, entry))
        self._places[entry.request.id] = (queue, key)

    def remove(self, request_id: str) -> Waiting:
        """Asserts that it waits."""
        entry = self._by_id.pop(request_id, None)
        assert entry is not None, f"request {request_id!r} does not wait"
        others = self._by_session[entry.request.session_id]
        others.remove(request_id)
        if not others:
            del self._by_session[entry.request.session_id]
        self._take(entry)
        return entry

    def _take(self, entry: Waiting) -> None:
        queue, key = self._places.pop(entry.request.id)
        del queue[bisect_left(queue, key)]
        if not queue and not entry.is_member:
            self._others[entry.is_cold].pop(entry.request.tenant, None)

    def promote(self, session_id: str) -> None:
        """The session has become a member: what else of it waits goes ahead."""
        for request_id in self._by_session.get(session_id, ()):
            entry = self._by_id[request_id]
            if not entry.is_member:
                self._take(entry)
                self._by_id[request_id] = member = Waiting(entry.request, entry.asked_seconds, is_member=True, is_cold=entry.is_cold)
                self._put(member, 0.0)

    def first_member(self, *, cold: bool) -> Waiting | None:
        """The first member; one that is cold only where `cold` may go."""
        heads = [queue[0] for is_cold, queue in self._members.items() if queue and (cold or not is_cold)]
        return min(heads)[2] if heads else None

    def first_other(self, shares: TenantShares, *, cold: bool) -> Waiting | None:
        """Who goes next of those that are no members."""
        heads: dict[str | None, tuple[float, int, Waiting]] = {}
        for is_cold, queues in self._others.items():
            if cold or not is_cold:
                for tenant, queue in queues.items():
                    heads[tenant] = min(heads.get(tenant, queue[0]), queue[0])
        if not heads:
            return None
        return heads[shares.choose({tenant: head[0] for tenant, head in heads.items()})][2]

    def check_integrity(self) -> None:
        """Assert that everybody stands in exactly one queue."""
        queues = [*self._members.values(), *(queue for by_tenant in self._others.values() for queue in by_tenant.values())]
        assert sum(map(len, queues)) == len(self._by_id) == len(self._places) == sum(map(len, self._by_session.values()))
        for queue in queues:
            assert queue == sorted(queue, key=lambda place: place[:2])
            assert all(self._by_id[entry.request.id] is entry for _, _, entry in queue)
        assert all(queue for by_tenant in self._others.values() for queue in by_tenant.values())
