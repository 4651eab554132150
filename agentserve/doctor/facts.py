"""What the checks look at. Everything that could not be read is None: unknown, not fine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentserve.doctor.launch import as_json, find, options
from agentserve.engines.plugin.options import CONNECTOR, SCHEDULER, SECTION
from agentserve.engines.plugin.wire import PluginState
from agentserve.engines.prometheus import samples


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process of this host. `environment`: the names that matter, None if it may not be read; `open_files`: its soft limit."""

    pid: int
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    open_files: int | None = None

    @property
    def options(self) -> dict[str, str]:
        """Its command line, by name."""
        return options(self.arguments)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A vLLM: what it says over HTTP, and its process where that is on this host."""

    url: str
    max_model_len: int | None = None
    metrics: bytes | None = None
    events: Mapping[str, Any] | None = None
    """GET /kv_event_sources."""
    has_token_route: bool | None = None
    """Whether /inference/v1/generate is there."""
    config: Mapping[str, Any] | None = None
    """`vllm_config` of GET /server_info, which a vLLM in development mode has."""
    process: ProcessFacts | None = None
    probe_ids: tuple[int, ...] | None = None
    """The tokens of the probe text, by POST /tokenize."""
    plugin: PluginState | None = None
    """What the eviction plugin says of itself; None without its routes."""

    def told(self, option: str, default: str) -> str | None:
        """A launch option: as /metrics or /server_info tell it, else as the process was started (`default`: vLLM's own); None: unknown."""
        name = option.replace("-", "_")
        for sample in samples(self.metrics or b"", "vllm:cache_config_info"):
            if sample.labels.get(name) not in (None, "None"):
                return sample.labels[name].lower()
        told = find(self.config, name)
        if told is not None:
            return str(told).lower()
        return None if self.process is None else self.process.options.get(option, default)

    def told_json(self, option: str) -> dict[str, Any] | None:
        """A launch option that is a JSON object; empty if it was not given, None if nobody says."""
        if self.config is not None:
            told = find(self.config, option.replace("-", "_"))
            return dict(told) if isinstance(told, Mapping) else {}
        return None if self.process is None else as_json(self.process.options.get(option))

    def count(self, metric: str) -> float | None:
        """A counter's sum over ranks; None if the engine lacks it."""
        found = samples(self.metrics or b"", metric)
        return sum(sample.value for sample in found) if found else None

    @property
    def block_size(self) -> int | None:
        """Tokens of a KV block."""
        told = self.told("block-size", "")
        return int(told) if told and told.isdecimal() else None

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens of the KV pool, without the null blocks."""
        ranks = [sample.labels.get("num_gpu_blocks", "") for sample in samples(self.metrics or b"", "vllm:cache_config_info")]
        if self.block_size is None or not ranks or not all(rank.isdecimal() for rank in ranks):
            return None
        return sum(int(rank) - 1 for rank in ranks) * self.block_size

    @property
    def tier_tokens(self) -> int:
        """What the plugin's exclusive tier holds at most; 0 without one, or where it does not work."""
        if self.plugin is None or self.plugin.tier_off_because or self.block_size is None:
            return 0
        return self.plugin.num_tier_blocks * self.block_size

    @property
    def connectors(self) -> list[dict[str, Any]] | None:
        """The KV connectors that move KV, those inside a MultiConnector too; None if nobody says."""
        configured = self._configured
        return None if configured is None else [one for one in configured if one["kv_connector"] != CONNECTOR]

    @property
    def eviction_plugin(self) -> dict[str, Any] | None:
        """The eviction plugin's options, whichever carries it; None if it is not there, or nobody says."""
        if (self.told("scheduler-cls", "") or "").lower() == SCHEDULER.lower():
            return (self.told_json("additional-config") or {}).get(SECTION) or {}
        ours = next((one for one in self._configured or () if one["kv_connector"] == CONNECTOR), None)
        return None if ours is None else ours.get("kv_connector_extra_config") or {}

    @property
    def _configured(self) -> list[dict[str, Any]] | None:
        told = self.told_json("kv-transfer-config")
        if told is None:
            return None
        inner = find(told, "connectors")
        return [one for one in (inner if isinstance(inner, list) else [told]) if one.get("kv_connector")]


@dataclass(frozen=True, slots=True)
class LmcacheFacts:
    """An LMCache server: GET /config, or its process."""

    config: Mapping[str, Any] | None = None
    process: ProcessFacts | None = None

    def told(self, key: str, option: str, default: str) -> str | None:
        """A setting by its key in /config, else by its launch option."""
        told = find(self.config, key)
        if told is not None:
            return str(told)
        return None if self.process is None else self.process.options.get(option, default)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The agentserve in front: GET /v1/cache, and what its sessions tell. Tokens, seconds."""

    cache: Mapping[str, Any]
    context_tokens: Sequence[int] = ()
    """Of each session."""
    live_tokens: int = 0
    """Contexts of the sessions that had a turn in the last minutes."""
    return_gaps: Sequence[float] = ()
    """From the end of one turn of a session to the start of the next."""

    @property
    def mirror(self) -> Mapping[str, Any] | None:
        """The mirror of its first engine."""
        return self._first.get("mirror")

    @property
    def tier(self) -> str | None:
        """The kind of tier that it was told of, `none` where it was told of none; None: it does not say."""
        return (self._first["offload"] or {"kind": "none"})["kind"] if "offload" in self._first else None

    @property
    def tier_tokens(self) -> int | None:
        """What the tier holds by its events; None where it announces nothing, or there is none."""
        return (self._first.get("offload") or {}).get("announced_tokens")

    @property
    def _first(self) -> Mapping[str, Any]:
        return next(iter(self.cache.get("engines", ())), {})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model folder on this host."""

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    probe_ids: tuple[int, ...] | None = None
    """The tokens of the probe text by the folder's tokenizer."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer in the model's chat format."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything. `concurrency`: turns that are to run at once; `open_files`: the host's hard limit for a process."""

    engines: Sequence[EngineFacts]
    lmcache: Sequence[LmcacheFacts] = ()
    server: ServerFacts | None = None
    model: ModelFacts | None = None
    concurrency: int = 0
    open_files: int | None = None
    unread: Sequence[str] = field(default_factory=tuple)
    """What could not be read, in words."""

    @property
    def engine(self) -> EngineFacts:
        """The first engine."""
        return self.engines[0]
