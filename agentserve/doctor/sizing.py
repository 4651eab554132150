"""Room: for one session, for all that are alive, and for their connections."""

from __future__ import annotations

from agentserve.doctor.facts import Facts
from agentserve.doctor.verdict import Check, Verdict, fine, found, unknown

NEARLY_FULL = 0.9
"""Share of the context length from which a session is about to end."""
SPARE_FILES = 64
"""Files that a server holds beside its connections."""


def max_length(facts: Facts) -> Verdict:
    """Sessions must fit the engine's context length."""
    length = facts.engine.max_model_len
    if length is None:
        return unknown("the engine does not say its context length", "use the address of vLLM itself")
    longest = max(facts.server.context_tokens, default=0) if facts.server else 0
    if not longest:
        return unknown(f"context length {length:,}; no sessions are known", "name an agentserve that has served turns with --url")
    if longest >= NEARLY_FULL * length:
        return found(f"the longest session has {longest:,} of {length:,} tokens", "a larger --max-model-len for vLLM, or compact earlier")
    return fine(f"the longest session has {longest:,} of {length:,} tokens")


def kv_capacity(facts: Facts) -> Verdict:
    """The live sessions' contexts must fit the KV pool and the plugin's tier, or they push each other out."""
    capacity = facts.engine.capacity_tokens
    if capacity is None:
        return unknown("the engine does not say its KV capacity", "check that /metrics is served (vllm:cache_config_info)")
    if facts.server is None or not facts.server.context_tokens:
        return unknown(f"KV capacity {capacity:,} tokens; no sessions are known", "name an agentserve that has served turns with --url")
    live, tier = facts.server.live_tokens, facts.engine.tier_tokens
    finding = f"live sessions hold {live:,} tokens, the KV pool {capacity:,}" + (f" and its exclusive tier {tier:,}" if tier else "")
    if live > capacity + tier:
        more = "a larger offload tier (--offload-bytes)" if tier else "an offload tier"
        times = f"{live / (capacity + tier):.1f} times"
        return found(f"{finding} ({times})", f"fewer turns at a time (--limits-running-turns), more KV memory, or {more}")
    return fine(finding)


def open_files(facts: Facts) -> Verdict:
    """Each turn holds two connections at the server and one at the engine."""
    needed = 2 * facts.concurrency + SPARE_FILES
    if facts.open_files is not None and facts.open_files < needed:
        return found(
            f"{facts.concurrency:,} turns need {needed:,} open files, the host allows {facts.open_files:,}",
            f"ulimit -Hn {needed}, or LimitNOFILE",
        )
    needed = facts.concurrency + SPARE_FILES
    limit = facts.engine.process.open_files if facts.engine.process else None
    if limit is not None and limit < needed:
        return found(
            f"{facts.concurrency:,} turns need {needed:,} open files, vLLM may have {limit:,}", f"ulimit -n {needed} before vLLM starts"
        )
    if facts.open_files is None:
        return unknown("this host does not say its limit of open files", "run the doctor on Linux")
    if limit is None:
        return unknown("enough here; vLLM's own limit is not known", "run the doctor on the engine's host, as its user")
    return fine(f"enough for {facts.concurrency:,} turns at once")


CHECKS = (
    Check("max_length", "/v1/models, the server's sessions", max_length),
    Check("kv_capacity", "/metrics, the plugin's state, the server's live sessions", kv_capacity),
    Check("open_files", "limits of this host and of vLLM's process", open_files),
)
