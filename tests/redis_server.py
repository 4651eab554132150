"""A real Valkey for tests; the benchmarks run the same."""

from benchmarks.ledger.redis_server import RedisServer, running_redis

__all__ = ["RedisServer", "running_redis"]
