"""All settings, once: flags, environment names and the reference page derive from these classes.

Precedence: flag > environment (`AGENTSERVE_ENGINE__URL`) > file (TOML, `--config`) > default. Unknown names are refused.
Only this module reads the environment.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from agentserve.errors import SetupError

PREFIX = "AGENTSERVE_"
FOREIGN = (f"{PREFIX}REPLAY_", f"{PREFIX}TRACES")
"""Environment names that the replay tools and the tests own."""


class Part(BaseModel):
    """A group of settings; immutable, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _split(value: Any) -> Any:
    """ "a,b" and ["a,b", "c"] as lists of names; anything else is left to the type's own check."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(name for part in value for name in part.replace(",", " ").split())
    return value


Names: TypeAlias = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Keys: TypeAlias = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]
"""Lists: a flag given several times, or names with commas between, in flags and in the environment alike."""


class EngineSettings(Part):
    url: str | None = Field(
        None,
        description="Base URL of a running vLLM, or with commas of several that are alike; without it the embedded CPU engine is started.",
    )
    api_key: SecretStr | None = Field(None, description="Bearer token for the engine.")
    model_folder: Path | None = Field(
        None, description="Folder with the served model's tokenizer; default: the folder that the engine names, if it is on this machine."
    )
    chat_format: str = Field(
        "auto",
        description="Chat format by name; auto: by the control tokens, else the model's template; passthrough: the engine renders.",
    )
    events: str | None = Field(
        None,
        description="ZMQ endpoint of the engine's KV events, of several engines one each; the embedded engine sets its own.",
    )
    events_replay: str | None = Field(None, description="ZMQ endpoint of the engine's KV event replay, of several engines one each.")
    events_topic: str = Field("kv-events", description="Topic of the engine's KV events.")
    start_seconds: float = Field(300.0, gt=0, description="How long to wait for the engine to answer at start, seconds.")
    kv_tokens: int = Field(262_144, ge=256, description="KV capacity of the embedded engine, tokens; small values make evictions happen.")
    block_size: int = Field(128, ge=32, multiple_of=32, description="KV block size of the embedded engine, tokens.")
    plugin: str = Field(
        "off",
        description="Eviction policy of the plugin in the engine, by name; off: plain vLLM. The embedded engine is started with it; "
        "a running one needs the plugin of its own start, and is sent hints unless this is off.",
    )
    plugin_carrier: Literal["scheduler", "connector"] = Field(
        "scheduler",
        description="What brings the plugin into the embedded engine: a subclass of vLLM's scheduler, or a KV connector, which costs more; "
        "with an exclusive tier always the connector, as it moves KV.",
    )
    max_model_len: int = Field(131_072, ge=256, description="Context length of the embedded engine, tokens (cut to its KV capacity).")
    tensor_parallel: int = Field(
        1, ge=1, description="Tensor-parallel ranks of the embedded engine; two are real shards, and slower on a CPU."
    )


class LimitSettings(Part):
    body_bytes: int = Field(64 << 20, ge=1024, description="Largest request body, bytes; above it 413.")
    body_seconds: float = Field(30.0, gt=0, description="A request body must arrive within this time, seconds; else 408.")
    running_turns: int = Field(1024, ge=1, description="Turns at the engine at once; more wait in the queue.")
    queued_turns: int = Field(10_000, ge=0, description="Turns that may wait; above it 429 with Retry-After.")
    keep_alive_seconds: float = Field(5.0, gt=0, description="Longest silence of a stream before a keep-alive comment, seconds.")
    kept_answer_bytes: int = Field(64 << 20, ge=0, description="Whole answers kept for clients that send a request again, bytes.")
    kept_answer_seconds: float = Field(300.0, ge=0, description="How long such an answer is kept, seconds.")
    stored_response_bytes: int = Field(
        256 << 20, ge=0, description="JSON of stored Responses that is kept, bytes; the least recently used go first."
    )


class AlignmentSettings(Part):
    twin_blocks: int = Field(
        8,
        ge=0,
        description="Blocks not yet computed that make two turns twins: the second waits until the first has them; 0: nobody waits.",
    )
    twin_seconds: float = Field(10.0, gt=0, description="Longest that a turn waits for its twin, seconds; then it computes on its own.")


class SessionSettings(Part):
    ledger_tokens: int = Field(256_000_000, ge=1, description="Tokens that all ledgers may hold (15 bytes each); idle sessions go first.")
    idle_seconds: float = Field(6 * 3600.0, gt=0, description="A session unused for this long is forgotten, seconds.")
    turn_records: int = Field(
        50_000, ge=1, description="Turns whose figures are kept for GET /v1/sessions/ID/turns, over all sessions (about 1 kB each)."
    )
    ceiling_tokens: int = Field(512_000_000, ge=1, description="Tokens that the ceiling index remembers (about 5 bytes each).")


class AdmissionSettings(Part):
    policy: str = Field("fcfs", description="Admission policy by name; `agentserve policies` lists them.")
    parameters: Names = Field((), description="Its parameters as NAME=VALUE, with commas between.")
    tier_tokens: int = Field(0, ge=0, description="Tokens of an exclusive offload tier behind the KV cache, which counts as room.")


class StateSettings(Part):
    url: SecretStr | None = Field(
        None,
        description="URL of the Redis or Valkey that holds sessions and Responses, for any server to take the next turn; default: memory.",
    )
    timeout_seconds: float = Field(0.05, gt=0, description="Longest that a turn waits for Redis, seconds; then it goes on from memory.")
    ttl_seconds: float = Field(6 * 3600.0, gt=0, description="A stored session without a turn on any server expires after this, seconds.")


class OffloadSettings(Part):
    tier: Literal["off", "lmcache", "exclusive"] = Field(
        "off",
        description="lmcache: an LMCache server behind the KV cache, started beside the embedded engine; with --engine-url, followed. "
        "exclusive: the engine's plugin keeps what leaves the KV cache.",
    )
    bytes: int = Field(1 << 30, ge=1 << 20, description="Memory of the tier that is started, bytes over all ranks.")
    chunk_tokens: int = Field(
        256, ge=32, description="Tokens of a chunk, which the tier keeps or loses as one: a multiple of the block size."
    )
    url: SecretStr | None = Field(None, description="redis://[user:password@]host[:port] of LMCache's second level; default: memory only.")
    capacity_tokens: int | None = Field(
        None,
        ge=1,
        description="With --engine-url: memory of an LMCache that does not announce what it evicts, tokens; its LRU is then modelled.",
    )


class CanonicaliseSettings(Part):
    mode: Literal["on", "off"] = Field("on", description="off: heads pass exactly as clients send them.")
    off: Names = Field((), description="Rules of the canonicaliser that are off, by name, with commas between.")
    on: Names = Field((), description="Rules that are on though they are not by default, with commas between.")


class Settings(BaseSettings):
    """Everything that can be set. Built once in `__main__`, handed down in parts."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid", nested_model_default_partial_update=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_keys: Keys = Field((), description="Keys that clients may use, with commas between; none: open. Sessions never cross keys.")
    admin_key: SecretStr | None = Field(None, description="Key of the operator's routes under /v1/admin; without one they are closed.")
    share_prefixes: bool = Field(False, description="Let different API keys share cached prefixes (no cache salt).")
    model_name: str | None = Field(None, description="Model name shown to clients; default: the engine's.")
    cache_folder: Path = Field(Path.home() / ".cache" / "agentserve", description="Where the generated nano model is kept.")
    embedded_model: str = Field(
        "nano",
        description="Model of the embedded engine: nano, a small Llama, or nano-m3, MiniMax-M3's own architecture (slower).",
    )
    embedded_index_topk_freq: int = Field(
        1, ge=1, description="With nano-m3, one of so many sparse layers chooses blocks and the others reuse its choice; 1: each chooses."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged (JSON on stderr).")
    capture: Path | None = Field(None, description="Folder in which every turn is recorded without its text, for `agentserve simulate`.")
    capture_file_bytes: int = Field(64 << 20, ge=4096, description="Size from which a file of the capture is followed by another, bytes.")
    capture_total_bytes: int = Field(4 << 30, ge=8192, description="All files of the capture together, bytes; the oldest are removed.")
    engine: EngineSettings = EngineSettings()
    offload: OffloadSettings = OffloadSettings()
    limits: LimitSettings = LimitSettings()
    admission: AdmissionSettings = AdmissionSettings()
    alignment: AlignmentSettings = AlignmentSettings()
    sessions: SessionSettings = SessionSettings()
    state: StateSettings = StateSettings()
    canonicalise: CanonicaliseSettings = CanonicaliseSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file; no dotenv and no secrets folder."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def leaves(model: type[BaseModel] = Settings, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Each setting as (path of names, field): ("engine", "url") is `--engine-url` and `AGENTSERVE_ENGINE__URL`."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Part):
            yield from leaves(info.annotation, (*prefix, name))
        else:
            yield (*prefix, name), info


def flag(path: tuple[str, ...]) -> str:
    """The command-line flag of a setting."""
    return "--" + "-".join(path).replace("_", "-")


def environment_name(path: tuple[str, ...]) -> str:
    """The environment variable of a setting."""
    return PREFIX + "__".join(path).upper()


def load(flags: Mapping[tuple[str, ...], Any], config: Path | None = None) -> Settings:
    """The settings from flags (by path), environment and file.

    Raises SetupError naming the setting at fault, also for an unknown AGENTSERVE_ name in the environment.
    """
    _refuse_unknown_environment()
    if config is not None and not config.is_file():
        raise SetupError(f"no config file at {str(config)!r}")
    nested: dict[str, Any] = {}
    for path, value in flags.items():
        part = nested
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = value

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

    try:
        return FromFile(**nested)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SetupError(f"settings: the config file {str(config)!r} cannot be read as TOML: {error}") from error
    except ValueError as error:
        raise SetupError(_explain(error)) from error


def _refuse_unknown_environment() -> None:
    known = {environment_name(path) for path, _ in leaves()}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known and not name.startswith(FOREIGN):
            raise SetupError(f"unknown setting {name!r} in the environment; `agentserve settings` lists the known ones")


def _explain(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return f"settings: {error}"
    lines = []
    for one in error.errors():
        path = tuple(str(part) for part in one["loc"])
        shown = f" (given: {one['input']!r})" if one["type"] != "extra_forbidden" else ""
        lines.append(f"{flag(path)} ({environment_name(path)}): {one['msg']}{shown}")
    return "settings: " + "; ".join(lines)
