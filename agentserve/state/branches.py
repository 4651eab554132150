"""A session's branches as records, and records as branches of the ledger. Plain and synchronous; what is read or written is elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentserve.nodes import Node
from agentserve.sessions import MAX_TIPS, Namespace, Session
from agentserve.state.codec import StoredNode, encode_node, key_of

LEAST_RECORDS = 1024
"""No shorter list is worth cutting."""


@dataclass(slots=True)
class Written:
    """What is known of a session's list: its first record, its length, how far it was read, and the keys of the nodes that stand there.

    Longer than `long`, it may hold much that is dead.
    """

    first: bytes = b""
    length: int = 0
    num_read: int = 0
    keys: dict[Node, bytes] = field(default_factory=dict)
    long: int = LEAST_RECORDS

    def is_mostly_dead(self, session: Session) -> bool:
        """Whether most records are of branches that the session has given up. Looks at all of them only when their number has grown."""
        if self.length <= self.long:
            return False
        self.long = max(LEAST_RECORDS, 4 * len(branches(session)))
        return self.length > self.long


@dataclass(frozen=True, slots=True)
class Encoded:
    """Records, parents first, and the keys of their nodes."""

    records: list[bytes]
    keys: dict[Node, bytes]


def branches(session: Session) -> dict[Node, None]:
    """The nodes of all branches of a session, parents first, the latest branch last."""
    return {node: None for tip in session.tips for node in tip.path()}


def unwritten(session: Session, keys: Mapping[Node, bytes]) -> list[Node]:
    """The nodes of its branches that have no key yet, parents first. Costs what is new."""
    new: dict[Node, None] = {}
    for tip in session.tips:
        branch = []
        for node in _upwards(tip):
            if node in keys or node in new:
                break
            branch.append(node)
        new.update(dict.fromkeys(reversed(branch)))
    return list(new)


def encode(nodes: Iterable[Node], keys: Mapping[Node, bytes]) -> Encoded:
    """Records of `nodes`, parents first; `keys` has those of parents that are not among them."""
    encoded = Encoded([], {})
    for node in nodes:
        parent = b"" if node.parent is None else encoded.keys.get(node.parent) or keys[node.parent]
        record = encode_node(node, parent)
        encoded.records.append(record)
        encoded.keys[node] = key_of(record)
    return encoded


def leads(tip: Node) -> Sequence[bytes]:
    """The digests of client messages under which the request that `tip` answered is known."""
    return next((tuple(node.chains) for node in _upwards(tip) if node.chains), ())


@dataclass(frozen=True, slots=True)
class Grafted:
    """Whether branches were added to the ledger, and whether all that was read could be."""

    any: bool
    all: bool


def graft(namespace: Namespace, session: Session, stored: Sequence[StoredNode], keys: dict[Node, bytes]) -> Grafted:
    """Make the stored branches branches of the session; `keys` learns their nodes'. Branches that are there already stay as they are."""
    alive = branches(session)
    by_key = {key: node for node, key in keys.items() if node in alive}
    records = {one.key: one for one in stored}
    parents = {one.parent for one in stored}
    ends = [one for one in records.values() if one.generated and one.key not in parents][-MAX_TIPS:]
    num_added = num_lost = 0
    for end in ends:
        path = _path(end, records, by_key)
        if path is None:
            num_lost += 1
            continue
        node = by_key.get(path[0].parent)
        for one in path:
            node = by_key[one.key] = namespace.ledger.graft(one.node(node))
            keys[node] = one.key
        assert node is not None
        if node not in alive:
            namespace.own(node, session)
            namespace.advance(session, node)
            alive.update(dict.fromkeys(node.path()))
            num_added += 1
    return Grafted(num_added > 0, num_lost == 0)


def _path(end: StoredNode, records: Mapping[bytes, StoredNode], known: Mapping[bytes, Node]) -> list[StoredNode] | None:
    """The records that lead to `end` from a head or a known node; None if one is missing."""
    path = [end]
    while (parent := path[-1].parent) and parent not in known:
        if parent not in records:
            return None
        path.append(records[parent])
    path.reverse()
    return path


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
