"""The parts of a running server, built in one place and handed down."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from agentserve.cache import CacheBooks
from agentserve.deliveries import Deliveries
from agentserve.dialects.responses_store import ResponseStore
from agentserve.engines import Engine
from agentserve.errors import NotFound, Unauthorized
from agentserve.media import MediaTurns
from agentserve.metrics import Metrics
from agentserve.policies import Policies
from agentserve.replicas import Replicas
from agentserve.sessions import Namespace, Namespaces
from agentserve.settings import Settings
from agentserve.state.responses import StoredResponses
from agentserve.turns import Turns
from model.chat.passthrough import PassThrough


@dataclass(frozen=True, slots=True)
class Server:
    """What the routes work with. `created` in Unix seconds."""

    settings: Settings
    turns: Turns
    namespaces: Namespaces
    metrics: Metrics
    responses: ResponseStore
    deliveries: Deliveries
    media: MediaTurns
    policies: Policies
    created: int
    stored_responses: StoredResponses | None = None

    @property
    def replicas(self) -> Replicas:
        """The engines, each with what is kept for it."""
        return self.turns.replicas

    @property
    def engine(self) -> Engine:
        """The engine that speaks for all where they are alike: one model, one context length, one block size."""
        return self.replicas.first.engine

    @property
    def books(self) -> CacheBooks:
        """The books of that engine. Ceiling and sums are those of all."""
        return self.replicas.first.books

    @property
    def passes_through(self) -> bool:
        """Whether the engine renders every conversation: then nothing is exact here."""
        return self.turns.chat.name == PassThrough.name

    @property
    def model_name(self) -> str:
        """The model's name towards clients."""
        return self.settings.model_name or self.engine.info.model

    def namespace(self, headers: Mapping[str, str]) -> Namespace:
        """The caller's namespace. Raises Unauthorized if keys are configured and none of them was sent."""
        keys = self.settings.api_keys
        if not keys:
            return self.namespaces.of(None)
        sent = _sent_key(headers)
        for key in keys:
            if hmac.compare_digest(sent.encode(), key.get_secret_value().encode()):
                return self.namespaces.of(key.get_secret_value())
        raise Unauthorized("send one of the configured API keys as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raise Unauthorized unless the operator's key was sent; without one in the settings nobody is the operator."""
        key = self.settings.admin_key
        if key is None:
            raise Unauthorized("the operator's routes are closed; start the server with --admin-key to open them")
        if not hmac.compare_digest(_sent_key(headers).encode(), key.get_secret_value().encode()):
            raise Unauthorized("send the operator's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")

    def check_model(self, name: str | None) -> None:
        """Raise NotFound for a model that is not served; no name is fine."""
        if name is not None and name not in (self.model_name, self.engine.info.model):
            raise NotFound(
                f"The model {name!r} does not exist; this server serves {self.model_name!r}.", param="model", code="model_not_found"
            )


def _sent_key(headers: Mapping[str, str]) -> str:
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
