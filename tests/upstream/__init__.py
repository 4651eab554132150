"""A scripted upstream: looks like vLLM 0.32 over HTTP and ZMQ, answers what a test says, and logs what it was asked.

    async with Upstream([Script(say="Done."), Script(status=503, retry_after_seconds=2)]) as upstream:
        ...                                     # upstream.url, upstream.requests[0].prompt_ids

Synchronous callers use `with in_thread(Upstream(...)) as upstream`. With a `KvModel` it keeps a block cache and publishes its events.
"""

from tests.upstream.cache import BlockCache, KvModel, NoRoom
from tests.upstream.script import ByteRenderer, FormatRenderer, Renderer, Script, UsageOverride
from tests.upstream.server import LoggedRequest, Upstream, in_thread

__all__ = [
    "BlockCache",
    "ByteRenderer",
    "FormatRenderer",
    "KvModel",
    "LoggedRequest",
    "NoRoom",
    "Renderer",
    "Script",
    "Upstream",
    "UsageOverride",
    "in_thread",
]
