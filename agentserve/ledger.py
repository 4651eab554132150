"""The ledger: every history that was ever served, as a tree of steps with the exact token ids that stood for them.

A step is one item, or the tool results that stand together (they share a block, so they are encoded as one text).

A path from a head to a node is a branch; edits, regenerations, retries and sub-agents are branches that share their prefix. Ids are
appended and never changed, so a prompt built from a path starts with what the engine computed for that path before.

A note is a step of the server's own: what the canonicaliser took out of a head, told behind the message that was the newest then. No
client's history holds it, so matching looks through notes, and what follows a message with a note follows the note.

Histories are found in two ways. By bytes: the running digest of the messages as a client sent them leads straight to the node where the
last such request ended, so a turn reads only what is new. By meaning: step by step through the tree, for what the client wrote in
another form. Nothing here renders or tokenises.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

from agentserve.answers import without_inline_thought
from agentserve.canonical.canonicaliser import Form
from agentserve.nodes import NOTE, Node, Step, meaning_of, reasoning_of
from model.conversation import Head, SystemItem, meaning

TWIN = b"twin"
"""Before a `Form.alike` in place of a digest of messages: leads to the latest head of that kind."""

MAX_CHAINS = 8
"""Client forms remembered per node; a client that re-serialises in ever new ways is still matched by meaning."""


class Ledger:
    """The histories of one namespace (one API key). Not thread-safe: used from the event loop only."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_nodes = 0
        self._heads: dict[bytes, list[Node]] = {}
        self._chains: dict[bytes, tuple[Node, Form]] = {}

    def find(self, chain: Sequence[bytes]) -> tuple[Node, Form, int] | None:
        """Where the longest known run of message digests ends, the form of its head, and how many digests it has; None if none is known."""
        for count in range(len(chain), 0, -1):
            known = self._chains.get(chain[count - 1])
            if known is not None:
                return *known, count
        return None

    def find_head(self, key: bytes) -> Node | None:
        """The node of the head with this key; of several (see `graft`) the first."""
        heads = self._heads.get(key)
        return heads[0] if heads else None

    def heads(self) -> Iterator[Node]:
        """The heads that are known, the latest first."""
        for same in reversed(self._heads.values()):
            yield from reversed(same)

    def follow(self, node: Node, step: Step, owner: str | None = None) -> Node | None:
        """The child of `node` that means the same as `step`: the latest of `owner`, else the latest; None if there is none.

        Reasoning must agree where the client sends one; a client that leaves it out matches any. Notes are looked through, latest first.
        A text that begins with its reasoning in a tag is first what it says, then that reasoning and the rest.
        """
        found = self._follow(node, step, owner)
        if found is None and (split := without_inline_thought(step)) is not None:
            found = self._follow(node, split, owner)
        return found

    def answers(self, node: Node) -> Iterator[Node]:
        """The generated children of `node`, those behind its notes too; the latest first."""
        for parent in (*reversed(node.children.get(NOTE, ())), node):
            for same in reversed(parent.children.values()):
                yield from (child for child in reversed(same) if child.generated)

    def _follow(self, node: Node, step: Step, owner: str | None) -> Node | None:
        wanted, reasoning = meaning_of(step), reasoning_of(step)
        found: Node | None = None
        notes = node.children.get(NOTE)
        for parent in (*reversed(notes), node) if notes else (node,):
            for child in reversed(parent.children.get(wanted, ())):
                if reasoning is not None and child.reasoning != reasoning:
                    continue
                if owner is None or child.owner == owner:
                    return child
                found = found or child
        return found

    def tail(self, node: Node) -> Node:
        """The latest note behind `node`, or `node` itself: what a new step follows."""
        notes = node.children.get(NOTE)
        return notes[-1] if notes else node

    def follow_note(self, node: Node, news: Mapping[str, str]) -> Node | None:
        """The note behind `node` that tells `news`."""
        notes = {**node.notes, **news}
        return next((note for note in reversed(node.children.get(NOTE, ())) if note.notes == notes), None)

    def append_note(self, parent: Node, text: str, news: Mapping[str, str], ids: Sequence[int]) -> Node:
        """A note behind `parent` that tells `news`; the one that is there already is returned instead."""
        known = self.follow_note(parent, news)
        if known is not None:
            return known
        node = Node(parent, (SystemItem(text),), array("I", ids))
        node.meaning, node.notes = NOTE, {**parent.notes, **news}
        parent.children.setdefault(NOTE, []).append(node)
        self._count(node, 1)
        return node

    def add_head(self, head: Head, ids: Sequence[int], key: bytes | None = None) -> Node:
        """The node of the head with this key (its own meaning, if none is given); made if it is not known."""
        key = key or meaning(head)
        known = self.find_head(key)
        if known is not None:
            return known
        node = Node(None, head, array("I", ids))
        node.meaning = key
        self._heads[key] = [node]
        self._count(node, 1)
        return node

    def append(self, parent: Node, step: Step, ids: Sequence[int], *, generated: bool = False) -> Node:
        """A new child of `parent`. A generated one is always new; any other that is there already is returned instead."""
        if not generated:
            known = self.follow(parent, step)
            if known is not None:
                return known
        node = Node(parent, step, array("I", ids), generated=generated)
        parent.children.setdefault(node.meaning, []).append(node)
        self._count(node, 1)
        return node

    def graft(self, node: Node) -> Node:
        """Let `node`, which was made for its parent elsewhere, follow it; where the same ids mean the same there already, those stay.

        A head may come with other ids than are known by its key: then it stands beside them, for the branches that come with it.
        """
        children = self._heads if node.parent is None else node.parent.children
        for known in children.get(node.meaning, ()):
            if known.ids == node.ids and (known.reasoning, known.generated) == (node.reasoning, node.generated):
                return known
        children.setdefault(node.meaning, []).append(node)
        self._count(node, 1)
        return node

    def remember(self, chain: bytes, node: Node, form: Form) -> None:
        """Let `chain`, the digest of a client's messages up to `node`, lead to `node` and the form of their head from now on."""
        known = self._chains.get(chain)
        if known is not None and known[0] is node:
            return
        self._chains[chain] = node, form
        node.chains.append(chain)
        if len(node.chains) > MAX_CHAINS:
            self._forget_chain(node.chains.pop(0), node)

    def hold(self, node: Node) -> None:
        """Keep `node` and its path. Every hold needs its `release`."""
        node.holds += 1

    def release(self, node: Node) -> None:
        """Give up a hold; what nobody holds and nothing follows is forgotten, leaf by leaf."""
        assert node.holds > 0, "released more often than held"
        node.holds -= 1
        leaf: Node | None = node
        while leaf is not None and not leaf.holds and not leaf.children:
            leaf = self._drop(leaf)

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first."""
        stack = [head for heads in self._heads.values() for head in heads]
        while stack:
            node = stack.pop()
            yield node
            for same in node.children.values():
                stack.extend(same)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts or links do not agree; for tests and when idle."""
        nodes = list(self.nodes())
        assert self.num_nodes == len(nodes)
        assert self.num_tokens == sum(len(node.ids) for node in nodes)
        for node in nodes:
            assert node.end == len(node.ids) + (node.parent.end if node.parent else 0)
            assert all(child.parent is node for same in node.children.values() for child in same)
            assert node.children or node.holds, "a leaf that nobody holds"
        alive = set(map(id, nodes))
        assert all(id(node) in alive for node, _ in self._chains.values())

    def _drop(self, node: Node) -> Node | None:
        parent = node.parent
        siblings = self._heads if parent is None else parent.children
        same = siblings[node.meaning]
        same.remove(node)
        if not same:
            del siblings[node.meaning]
        for chain in node.chains:
            self._forget_chain(chain, node)
        self._count(node, -1)
        return parent

    def _forget_chain(self, chain: bytes, node: Node) -> None:
        known = self._chains.get(chain)
        if known is not None and known[0] is node:
            del self._chains[chain]

    def _count(self, node: Node, sign: int) -> None:
        self.num_nodes += sign
        self.num_tokens += sign * len(node.ids)
