"""Keeps each session's branches in Redis as turns commit, and brings back what another server has added to one.

A record in the store is never trusted beyond its session: its mark must be the one that was asked for, and what it holds is matched by
meaning like everything else. What is stale, damaged or gone costs a turn that is encoded from text, never an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from secrets import token_bytes
from typing import TypeVar
from weakref import WeakKeyDictionary

import structlog
import xxhash

from agentserve.identity import Identity
from agentserve.ledger import Node
from agentserve.prompt import FlatPrompt
from agentserve.sessions import MAX_TIPS, Namespace, Session
from agentserve.state.breaker import Failure
from agentserve.state.codec import SCHEMA, Damaged, Mark, StoredNode, decode, decode_mark, encode_mark, encode_node, key_of
from agentserve.state.commands import Append, Part, append, lead, read, remove
from agentserve.state.link import RedisLink

T = TypeVar("T")

SAVE_TIMEOUT_SECONDS = 2.0
"""No turn waits for this; a whole session may be a megabyte."""
MAX_DIGESTS = 64
"""Messages that other servers' turns may have added to a history before it cannot be found without the session's id."""
LEAST_RECORDS = 1024
"""A list is shortened to what is alive when it is longer than this and four times that."""
LONG_RECORDS_TOKENS = 16_384
"""Above this, records are packed and unpacked off the event loop."""
_LONG_RECORDS_BYTES = 2 * LONG_RECORDS_TOKENS

Recall = Callable[[Sequence[bytes]], Awaitable["Node | None"]]
"""Asks for what is stored of a turn's session, once: the later digests of its history first. The head of what came, if any did."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Written:
    """What is known to stand in the store of one session: its list's first record, how far it was read, and the keys of nodes."""

    first: bytes = b""
    num_read: int = 0
    length: int = 0
    keys: dict[Node, bytes] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Change:
    """What the writer is to do. `done` with whether it was done."""

    run: Callable[[], Awaitable[bool | None]]
    done: asyncio.Future[bool]


class StoredSessions:
    """One per server. `computed` hears which ids an engine has computed, `loaded` and `saved` what became of each load and save."""

    def __init__(
        self,
        link: RedisLink,
        deployment: bytes,
        *,
        ttl_seconds: float,
        timeout_seconds: float,
        computed: Callable[[FlatPrompt, int], None],
        loaded: Callable[[bool], None],
        saved: Callable[[], None],
        failed: Callable[[Failure], None],
    ) -> None:
        self._link = link
        self._deployment = deployment
        self._ttl_milliseconds = int(ttl_seconds * 1000)
        self._timeout_seconds = timeout_seconds
        self._computed = computed
        self._loaded = loaded
        self._saved = saved
        self._failed = failed
        self._written: WeakKeyDictionary[Session, Written] = WeakKeyDictionary()
