"""What this server exports in Prometheus form; docs/reference/metrics.md defines each name.

Counters are sums of tokens, so that a rate is a sum over a sum. No id is ever a label.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from agentserve.plans import Outcome, Plan
from agentserve.sessions import TurnKind
from prefix_cache.hits import Cause

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class _Counted(Collector):
    """A counter that is kept elsewhere."""

    def __init__(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        self._name, self._help, self._read = name, help_text, read

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._help)]

    def collect(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._help, value=self._read())]


class Metrics:
    """One registry per server, built where the server is built."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = self._counter("turns", "Turns that ended with an answer, by how the prompt relates to its history", "kind")
        self.failed_turns = self._counter("failed_turns", "Turns that ended without one, by the error's kind", "kind")
        self.retries = self._counter("retries", "Requests that their client had sent before, by what became of them", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered turns")
        self.encoded_tokens = self._counter("encoded_tokens", "Prompt tokens that had to be tokenised")
        self.generated_tokens = self._counter("generated_tokens", "Generated tokens")
        self.ceiling_tokens = self._counter("ceiling_tokens", "Prompt tokens computed before by any request (exact tokens)")
        self.ceiling_block_tokens = self._counter("ceiling_block_tokens", "The same in whole KV blocks")
        self.predicted_tokens = self._counter("predicted_tokens", "Prompt tokens predicted to be cached, where the mirror is in step")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that the engine took from its cache")
        self.external_predicted_tokens = self._counter(
            "external_predicted_tokens", "Prompt tokens that offload tiers were expected to add to the GPU's hit"
        )
        self.external_tokens = self._counter("external_tokens", "Cached tokens that came from an offload tier")
        self.known_prompt_tokens = self._counter("known_prompt_tokens", "Prompt tokens of turns whose cached tokens the engine reported")
        self.missed_tokens = self._counter("missed_tokens", "Prompt tokens computed by the engine, by cause", "cause")
        self.canonicalised = self._counter("canonicalised", "Matches of a canonicaliser rule in heads of answered turns", "rule")
        self.canonicalised_characters = self._counter(
            "canonicalised_characters", "Characters that these matches cover: dropped, moved or put in order", "rule"
        )
        self.divergences = self._counter("divergences", "Turns that left their history, by what the client changed", "difference")
        self.broken_heads = self._counter("broken_heads", "New heads that left one that is like them, by where they did", "place")
        self.state_loads = self._counter("state_loads", "Questions to Redis about a session, by whether it knew something new", "outcome")
        self.state_saves = self._counter("state_saves", "Sessions written to Redis")
        self.state_response_loads = self._counter(
            "state_response_loads", "Questions to Redis about a Response that is not in memory, by whether it was found", "outcome"
        )
        self.state_response_saves = self._counter("state_response_saves", "Responses written to Redis")
        self.state_failures = self._counter("state_failures", "Calls to Redis that gave nothing, by reason", "reason")
        self.ended_sessions = self._counter(
            "ended_sessions",
            "Sessions that have ended, by how it is known: said, joined to their parent, or inferred from silence or succession",
            "how",
        )
        self.first_token = Histogram(
            "agentserve_time_to_first_token_seconds", "From request to first generated token", registry=self.registry, buckets=SECONDS
        )
        self.queue = Histogram("agentserve_queue_seconds", "Waiting for a ticket", registry=self.registry, buckets=SECONDS)
        self.twin_hold = Histogram(
            "agentserve_twin_hold_seconds",
            "Waiting for a twin that computes the same head, by how it ended",
            ("end",),
            registry=self.registry,
            buckets=SECONDS,
        )
        for cause in Cause:
            self.missed_tokens.labels(cause.value)

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Export a gauge that is read at each scrape."""
        Gauge(f"agentserve_{name}", help_text, registry=self.registry).set_function(read)

    def count(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Export a counter that is kept elsewhere and read at each scrape."""
        self.registry.register(_Counted(f"agentserve_{name}", help_text, read))

    def held(self, seconds: float, was_computed: bool) -> None:
        """Book a wait for a twin."""
        self.twin_hold.labels("computed" if was_computed else "limit").observe(seconds)

    def answered(self, plan: Plan, outcome: Outcome) -> None:
        """Count a finished turn."""
        hits = outcome.hits
        self.turns.labels(plan.kind.value).inc()
        if plan.kind is TurnKind.PASSED:
            self.generated_tokens.inc(outcome.num_generated_tokens)
            return
        self.prompt_tokens.inc(hits.num_prompt_tokens)
        self.encoded_tokens.inc(plan.num_encoded_tokens)
        self.generated_tokens.inc(outcome.num_generated_tokens)
        self.ceiling_tokens.inc(hits.ceiling)
        if hits.ceiling_blocks is not None:
            self.ceiling_block_tokens.inc(hits.ceiling_blocks)
        if hits.predicted is not None:
            self.predicted_tokens.inc(hits.predicted)
        if hits.actual is not None:
            self.cached_tokens.inc(hits.actual)
            self.known_prompt_tokens.inc(hits.num_prompt_tokens)
        if hits.external is not None:
            self.external_tokens.inc(hits.external)
            self.external_predicted_tokens.inc(hits.external_predicted or 0)
        for cause, tokens in (hits.missed or {}).items():
            self.missed_tokens.labels(cause.value).inc(tokens)
        if plan.divergence is not None:
            self.divergences.labels(plan.divergence.difference.value).inc()
        if plan.head_break is not None:
            self.broken_heads.labels("tools" if plan.head_break.line is None else "line").inc()
        for rule, effect in plan.canonicalised.items():
            self.canonicalised.labels(rule).inc(effect.count)
            self.canonicalised_characters.labels(rule).inc(effect.num_characters)

    def text(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"agentserve_{name}", help_text, labels, registry=self.registry)
