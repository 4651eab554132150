"""The command line of an LMCache server in its multiprocess form, and what vLLM must be told to use it.

Flags and connector settings as in LMCache 0.5.6: `lmcache server --help` and `integration/vllm/lmcache_mp_connector.py`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from agentserve.engines import lmcache_ranks
from agentserve.engines.child import import_path
from agentserve.errors import SetupError

DEFAULT_REDIS_PORT: Final = 6379
READ_TTL_SECONDS: Final = 7200
"""How long a lookup keeps its chunks locked until they are loaded. LMCache's 300 s end while a turn waits in a full engine's queue."""

# A dead cache server must cost one request seconds, not the five minutes of LMCache's default: vLLM's scheduler waits for it.
_CALL_SECONDS: Final = 10
# Also how long an answer may take: with 1 s a busy machine's server was taken for dead, and found again, every few seconds.
_HEARTBEAT_SECONDS: Final = 5
# By a file of this user's, because every user of the machine can read the arguments.
_WITH_PASSWORD: Final = 'LMCACHE_RESP_PASSWORD="$(cat "$0")"; export LMCACHE_RESP_PASSWORD; exec "$@"'


@dataclass(frozen=True, slots=True)
class LmcacheOptions:
    """What can be chosen of the offload tier. Raises `SetupError` on values that LMCache would refuse."""

    num_bytes: int
    """Memory of the tier, over all ranks."""
    chunk_tokens: int = 256
    """Tokens of a chunk, what the tier keeps or loses as one; a multiple of the engine's block size."""
    block_size: int = 128
    """Of the engine, tokens."""
    url: str | None = None
    """redis://[user:password@]host[:port] of the second level; None: there is none."""

    def __post_init__(self) -> None:
        if self.chunk_tokens % self.block_size:
            raise SetupError(
                f"the offload chunk has {self.chunk_tokens} tokens, and must be a multiple of the engine's block of {self.block_size}: "
                f"--offload-chunk-tokens {max(1, self.chunk_tokens // self.block_size) * self.block_size}"
            )
        if self.url is not None:
            self._check_url(self.url)

    @property
    def password(self) -> str:
        """Of the second level; empty: none."""
        return unquote(urlsplit(self.url or "").password or "")

    @staticmethod
    def _check_url(url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "redis" or not parts.hostname or parts.path not in ("", "/", "/0"):
            raise SetupError("--offload-url must be redis://[user:password@]host[:port]: LMCache's client speaks plain TCP to database 0")


def lmcache_command(options: LmcacheOptions, port: int, http_port: int, password_file: Path) -> list[str]:
    """The command of a server on 127.0.0.1:`port` whose health check is at `http_port`. `password_file` holds `options.password`."""
    values = {
        "host": "127.0.0.1",
        "port": str(port),
        "http-host": "127.0.0.1",
        "http-port": str(http_port),
        "chunk-size": str(options.chunk_tokens),
        "l1-size-gb": str(options.num_bytes / (1 << 30)),
        "l1-read-ttl-seconds": str(READ_TTL_SECONDS),
        "max-workers": "2",  # with one, the ranks' transfers queue behind each other
        "eviction-policy": "LRU",
        "supported-transfer-mode": "lmcache_driven",
    }
    environment = {
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": import_path(),  # for the module below
    }
    second_level: list[str] = []
    if options.url is not None:
        parts = urlsplit(options.url)
        environment["LMCACHE_RESP_USERNAME"] = unquote(parts.username or "")
        adapter = {"type": "resp", "host": parts.hostname, "port": parts.port or DEFAULT_REDIS_PORT, "num_workers": 2}
        second_level = ["--l2-adapter", json.dumps(adapter)]
    return [
        *("sh", "-c", _WITH_PASSWORD, str(password_file)),
        *("env", "-u", "PYTHONDONTWRITEBYTECODE"),
        *(f"{name}={value}" for name, value in environment.items()),
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *(word for name, value in values.items() for word in (f"--{name}", value)),
        *("--no-l1-use-lazy", "--disable-metrics"),  # LMCache's own counters, which nobody reads here
        *("--server-module", json.dumps({"module_path": lmcache_ranks.MODULE})),
        *second_level,
    ]


def connector_args(port: int) -> tuple[str, ...]:
    """vLLM's arguments for the server on 127.0.0.1:`port`."""
    settings = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": port,
        "lmcache.mp.save_decode_cache": True,  # off by default; an agent's next prompt repeats what was generated
        "lmcache.mp.mp_transfer_mode": "lmcache_driven",  # as on GPUs; on a CPU through shared memory
        "lmcache.mp.mq_timeout": _CALL_SECONDS,
        "lmcache.mp.heartbeat_interval": _HEARTBEAT_SECONDS,
    }
    config = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # vLLM's default fails the request when a chunk that was found cannot be loaded
        "kv_connector_extra_config": settings,
    }
    return ("--kv-transfer-config", json.dumps(config))
