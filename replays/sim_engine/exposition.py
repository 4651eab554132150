"""The simulated engine's /metrics, under vLLM's names. Seconds are simulated."""

from __future__ import annotations

from collections.abc import Iterator

from replays.sim_engine.core import SimulatedEngine


def metrics_text(engine: SimulatedEngine, model: str) -> str:
    """Classic Prometheus text."""
    text, last = "", ""
    for kind, family, name, labels, value in _samples(engine, model):
        text += "" if family == last else f"# HELP {family} As the simulated engine counts it.\n# TYPE {family} {kind}\n"
        text, last = f"{text}{name}{{{labels}}} {float(value)}\n", family
    return text


def _samples(engine: SimulatedEngine, model: str) -> Iterator[tuple[str, str, str, str, float]]:
    """(type, family, name, labels, value)."""
    labels = f'engine="0",model_name="{model}"'
    for kind, name, value in _plain(engine):
        yield kind, f"vllm:{name}", f"vllm:{name}", labels, value
    totals = engine.totals
    family = "vllm:prompt_tokens_by_source_total"
    computed = totals.num_prompt_tokens - totals.num_hit_tokens - totals.num_external_tokens
    sources = {
        "local_compute": computed,
        "local_cache_hit": totals.num_hit_tokens,
        "external_kv_transfer": totals.num_external_tokens,
    }
    for source, count in sources.items():
        yield "counter", family, family, f'{labels},source="{source}"', count
    for name, total, count in (
        ("time_to_first_token_seconds", totals.ttft_seconds, totals.num_finished),
        ("request_time_per_output_token_seconds", totals.tpot_seconds, totals.num_with_tpot),
    ):
        family = f"vllm:{name}"
        yield "histogram", family, f"{family}_bucket", f'{labels},le="+Inf"', count
        yield "histogram", family, f"{family}_count", labels, count
        yield "histogram", family, f"{family}_sum", labels, total
    options = engine.options
    # vLLM counts its null block too.
    config = f'block_size="{options.block_size}",enable_prefix_caching="True",engine="0",num_gpu_blocks="{options.num_blocks + 1}"'
    yield "gauge", "vllm:cache_config_info", "vllm:cache_config_info", config, 1.0


def _plain(engine: SimulatedEngine) -> Iterator[tuple[str, str, float]]:
    totals, scheduler = engine.totals, engine.engine
    yield "counter", "prefix_cache_queries_total", totals.num_prompt_tokens
    yield "counter", "prefix_cache_hits_total", totals.num_hit_tokens
    yield "counter", "external_prefix_cache_queries_total", 0
    yield "counter", "external_prefix_cache_hits_total", totals.num_external_tokens
    yield "counter", "prompt_tokens_total", totals.num_prompt_tokens
    yield "counter", "generation_tokens_total", totals.num_generated_tokens
    yield "counter", "num_preemptions_total", scheduler.counters.num_preemptions
    yield "gauge", "num_requests_running", len(scheduler.running)
    yield "gauge", "num_requests_waiting", len(scheduler.waiting)
    yield "gauge", "kv_cache_usage_perc", scheduler.pool.usage
    yield "gauge", "simulated_lag_seconds", totals.lag_seconds
