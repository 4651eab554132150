"""What is known of a turn before the engine answers, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentserve.cache import Estimate
from agentserve.canonical.canonicaliser import Effect
from agentserve.divergence import Divergence, divergence, volatile
from agentserve.engines import Usage
from agentserve.heads import HeadBreak
from agentserve.places import Place
from agentserve.retention import Ask
from agentserve.sessions import Namespace, Relation, Session, TurnKind
from model.conversation import AssistantItem
from prefix_cache.hits import TurnHits


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a turn before the engine answers. `hits.actual` is unknown yet."""

    session_id: str
    kind: TurnKind
    num_prompt_tokens: int
    num_encoded_tokens: int
    """Tokens that had to be tokenised for this turn."""
    hits: TurnHits
    canonicalised: Mapping[str, Effect] = field(default_factory=dict)
    """What each canonicaliser rule that fired did to the head."""
    edited_message: int | None = None
    """Where the client changed its history: messages behind the head that are as they were before."""
    divergence: Divergence | None = None
    """Where the prompt leaves the session's history."""
    head_break: HeadBreak | None = None
    """Where a head that is new leaves the known one that is most like it."""
    since: PromptChange | None = None
    """What has changed since the answer that the client names; None if it names none."""


@dataclass(frozen=True, slots=True)
class PromptChange:
    """How a prompt differs from that of an earlier answer. `divergence` None: it goes on from it; not `found`: that answer is not known."""

    found: bool
    divergence: Divergence | None = None


@dataclass(slots=True)
class Times:
    """Of one turn, seconds of the server's clock."""

    asked: float
    granted: float = 0.0
    first_token: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a turn ended. `usage` None: the engine did not say, as when the client left."""

    item: AssistantItem
    finish_reason: str
    stop_reason: str | int | None
    num_generated_tokens: int
    usage: Usage | None
    hits: TurnHits
    num_reasoning_tokens: int = 0
    """Tokens of the engine's steps that began with reasoning."""


def plan_of(ask: Ask) -> Plan:
    """What is known of a turn that is about to run."""
    place, relation = ask.place, ask.relation
    return Plan(
        ask.session.id,
        relation.kind,
        ask.estimate.num_prompt_tokens,
        place.num_encoded_tokens,
        ask.replica.books.preview(ask.estimate, relation),
        place.form.effects,
        place.num_known if relation.kind is TurnKind.EDITED else None,
        _divergence(ask.session, place, relation, ask.estimate),
        place.head_break,
        _since(ask.namespace, ask.session, place, ask.options.since),
    )


def _divergence(session: Session, place: Place, relation: Relation, estimate: Estimate) -> Divergence | None:
    """Where the prompt leaves what its session had, or what was known under a head that differs in volatile content only."""
    if estimate.volatile_tokens:
        return volatile(estimate.ceiling, estimate.volatile_tokens)
    if relation.kind in (TurnKind.EDITED, TurnKind.RETRY):
        history = session.nearest_tip(place.matched)[0]
    elif relation.kind is TurnKind.INEXACT and session.tip is not None and session.tip.head is not place.node.head:
        history = session.tip  # under a head that was known before, with what was answered under another
    else:
        return None
    return divergence(history, place.node) if history is not None else None


def _since(namespace: Namespace, session: Session, place: Place, answer_id: str | None) -> PromptChange | None:
    """What has changed since the prompt of the answer with this id."""
    if answer_id is None:
        return None
    answer = namespace.answered(answer_id, session)
    if answer is None or answer.parent is None:
        return PromptChange(found=False)
    return PromptChange(True, divergence(answer.parent, place.node))
