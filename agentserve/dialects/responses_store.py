"""Responses that clients may go on from by id: bounded, and seen only by the API key that made them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from agentserve.errors import InvalidRequest, NotFound
from agentserve.sessions import Namespace


class Named(msgspec.Struct):
    id: str | None = None


_named = msgspec.json.Decoder(Named)


@dataclass(slots=True, eq=False, weakref_slot=True)
class StoredResponse:
    """One response: its `body` as JSON, and the input and output items that it added to `previous`, each as JSON text.

    `body` None: another server made it, and nobody has asked for it here. `deleted`: by its client, while others may build on it.
    """

    id: str
    session_id: str
    body: bytes | None
    items: tuple[bytes, ...]
    previous: StoredResponse | None
    listed: bool = False
    deleted: bool = False
    num_followers: int = 0

    @property
    def num_bytes(self) -> int:
        """What it holds beside its predecessors."""
        return len(self.body or b"") + sum(map(len, self.items))

    @property
    def held(self) -> bool:
        """Whether it can be asked for, or another builds on it."""
        return self.listed or self.num_followers > 0

    def history(self) -> list[bytes]:
        """All items up to and with its own."""
        return [item for step in (*self.predecessors(), self) for item in step.items]

    def predecessors(self) -> list[StoredResponse]:
        """Those that it builds on, the oldest first."""
        steps: list[StoredResponse] = []
        step = self.previous
        while step is not None:
            steps.append(step)
            step = step.previous
        steps.reverse()
        return steps


class ResponseStore:
    """Holds up to `max_bytes`; the least recently used response can no longer be asked for, and goes when no other builds on it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._listed: OrderedDict[tuple[Namespace, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._listed)

    def add(self, namespace: Namespace, response: StoredResponse) -> None:
        """Keep `response`, and with it those that it builds on."""
        response.listed = True
        self._listed[(namespace, response.id)] = response
        self.num_bytes += response.num_bytes
        self._build_on(response.previous)
        while self.num_bytes > self._max_bytes and self._listed:
            self._unlist(self._listed.popitem(last=False)[1])

    def get(self, namespace: Namespace, response_id: str) -> StoredResponse:
        """The response with this id. Raises NotFound."""
        response = self.find(namespace, response_id)
        if response is None:
            raise response_not_found(response_id)
        return response

    def find(self, namespace: Namespace, response_id: str) -> StoredResponse | None:
        """The response with this id, which counts as used now."""
        response = self._listed.get((namespace, response_id))
        if response is not None:
            self._listed.move_to_end((namespace, response_id))
        return response

    def previous(self, namespace: Namespace, response_id: str) -> StoredResponse:
        """The response that a request goes on from. Raises InvalidRequest: an answer without its context would be worse than none."""
        try:
            return self.get(namespace, response_id)
        except NotFound as error:
            raise InvalidRequest(
                f"Previous response with id {response_id!r} not found: it was not stored, or is no longer kept. "
                "Send the whole history as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error

    def item(self, namespace: Namespace, response_id: str, item_id: str) -> bytes:
        """An item of a response that is kept. Raises InvalidRequest."""
        response = self._listed.get((namespace, response_id))
        for item in response.items if response is not None else ():
            if _named.decode(item).id == item_id:
                return item
        raise InvalidRequest(f"Item with id {item_id!r} not found: send the item itself", param="input", code="item_not_found")

    def delete(self, namespace: Namespace, response_id: str) -> None:
        """Forget a response; those that build on it keep its items. Raises NotFound."""
        if not self.forget(namespace, response_id):
            raise response_not_found(response_id)

    def forget(self, namespace: Namespace, response_id: str) -> bool:
        """The same without an error; whether there was one."""
        response = self._listed.pop((namespace, response_id), None)
        if response is None:
            return False
        response.deleted = True
        self._unlist(response)
        return True

    def _build_on(self, previous: StoredResponse | None) -> None:
        """Keep what a new response builds on, also what was forgotten while its turn was running."""
        while previous is not None:
            held = previous.held
            previous.num_followers += 1
            if held:
                return
            self.num_bytes += previous.num_bytes
            previous = previous.previous

    def _unlist(self, response: StoredResponse) -> None:
        response.listed = False
        step: StoredResponse | None = response
        while step is not None and not step.held:
            self.num_bytes -= step.num_bytes
            step = step.previous
            if step is not None:
                step.num_followers -= 1


def response_not_found(response_id: str) -> NotFound:
    """What is told of a response that is not kept."""
    return NotFound(f"no stored response {response_id!r}", param="response_id", code="response_not_found")
