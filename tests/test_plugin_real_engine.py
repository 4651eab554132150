"""A real vLLM with the plugin: the same answers as without it, hints over its own port, and an order that follows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from admission.eviction.policy import Fate
from agentserve.engines.hints import PluginHints, SessionHint, TurnHints
from agentserve.engines.plugin.options import PluginOptions
from agentserve.engines.prometheus import sums
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions, plugin_options, vllm_command
from agentserve.errors import SetupError
from tests.conftest import SMALL_KV_TOKENS
from tests.plugin_site import plugin_entry_points
from tests.real_engine import CACHE_FOLDER, Generated, RealEngine, generated, real_engine
from tests.side_requests import beside, compaction, side_requests

BLOCK = 128


@pytest.fixture(scope="module")
def plugin_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """A vLLM whose KV cache holds 64 blocks of 128 tokens, ordered by the plugin."""
    options = EmbeddedOptions(CACHE_FOLDER, kv_tokens=SMALL_KV_TOKENS, plugin=PluginOptions())
    with plugin_entry_points(tmp_path_factory.mktemp("site")), real_engine(options) as running:
        yield running


async def ask(engine: VllmEngine, name: str, ids: Sequence[int], num_tokens: int, xargs: dict[str, str]) -> Generated:
    return await generated(engine, f"request-{name}-{len(ids)}-{num_tokens}", ids, num_tokens, session_id=name, xargs=xargs)


async def crowded(url: str, hints: PluginHints | None) -> tuple[list[Generated], float]:
    """Three rounds of eight sessions at once, more than fits; their answers, and preemptions."""
    engine = VllmEngine(url)
    await engine.start()
    prompts = [[(13 * session + 7 * at) % 900 for at in range(9 * BLOCK + 40)] for session in range(8)]
    answers: list[Generated] = []
    before = sums(await engine.metrics())["vllm:num_preemptions_total"]
    for turn in range(3):
        fates = [Fate.ENDED if hints is not None and session == turn else Fate.LIVE for session in range(8)]
        carried = [{} if hints is None else dict(hints.xargs(TurnHints(branch_id="", fate=fate))) for fate in fates]
        names = [f"s{session}" for session in range(8)]
        asked = [ask(engine, name, ids, 170 + turn, xargs) for name, ids, xargs in zip(names, prompts, carried, strict=True)]
        answers += await asyncio.gather(*asked)
        for ids, answer in zip(prompts, answers[-8:], strict=True):
            ids += [*answer.ids, 5, 6, 7]
    after = sums(await engine.metrics())["vllm:num_preemptions_total"]
    await engine.close()
    return answers, after - before


@pytest.mark.anyio
async def test_answers_are_the_same_token_for_token_under_eviction_and_preemption(
    small_engine: RealEngine, plugin_engine: RealEngine
) -> None:
    plain, _ = await crowded(small_engine.url, None)
    hints = PluginHints(plugin_engine.url)
    await hints.start()
    ours, num_preemptions = await crowded(plugin_engine.url, hints)
    state = await hints.state()
    await hints.close()
    assert [answer.ids for answer in ours] == [answer.ids for answer in plain]
    assert state is not None
    assert state.is_ordering, state.off_because
    assert state.num_evicted_dead_blocks + state.num_evicted_live_blocks > 50
    assert num_preemptions > 0


@pytest.mark.anyio
async def test_an_end_that_is_told_spares_the_others(plugin_engine: RealEngine) -> None:
    engine, hints = VllmEngine(plugin_engine.url), PluginHints(plugin_engine.url)
    await engine.start()
    await hints.start()
    carried = dict(hints.xargs(TurnHints(branch_id="")))
    prompts = {name: [(at * step) % 900 for at in range(20 * BLOCK + 5)] for name, step in (("x", 3), ("y", 7), ("z", 11), ("w", 17))}
    for name in "xyz":
        await ask(engine, name, prompts[name], 2, carried)
    hints.tell(SessionHint(session_id="y", fate=Fate.ENDED))
    await asyncio.sleep(0.3)
    before = await hints.state()
    await ask(engine, "w", prompts["w"], 2, carried)
    assert before is not None
    assert before.num_dead_blocks >= 20
    assert (await ask(engine, "x", prompts["x"], 3, carried)).num_cached_tokens == 20 * BLOCK
    assert await hints.switch("no such policy", {}) is None
    switched = await hints.switch("ttl", {"queue_seconds": 3.0})
    assert switched is not None
    assert (switched.policy, switched.parameters) == ("ttl", {"queue_seconds": 3.0})
    assert (await ask(engine, "x", prompts["x"], 4, {"agentserve": "no JSON"})).num_cached_tokens == 20 * BLOCK
    after = await hints.state()
    assert after is not None
    assert after.num_bad_hints == before.num_bad_hints + 1
    await hints.close()
    await engine.close()


@pytest.mark.case("SES-07")
@pytest.mark.engine
@pytest.mark.anyio
@pytest.mark.parametrize("is_named", [True, False], ids=["in the session's name", "nameless"])
async def test_side_requests_do_not_push_the_main_session_out(plugin_engine: RealEngine, is_named: bool) -> None:
    with beside(plugin_engine, "class_hazard") as served:
        assert await side_requests(served, is_named=is_named) >= 0.95


@pytest.mark.anyio
async def test_without_the_plugin_the_same_side_requests_do(small_engine: RealEngine) -> None:
    with beside(small_engine, "off") as served:
        assert await side_requests(served, is_named=True) < 0.9


@pytest.mark.case("SES-05")
@pytest.mark.engine
@pytest.mark.anyio
async def test_a_compaction_reuses_what_there_is_and_one_of_the_old_style_leaves_it_alone(plugin_engine: RealEngine) -> None:
    with beside(plugin_engine, "class_hazard") as served:
        shares = await compaction(served)
    assert (shares.in_place, shares.new_session) == (1, 1)
    assert shares.after >= 0.95


@pytest.mark.anyio
async def test_without_the_plugin_summaries_of_the_old_style_cost_the_session_its_place(small_engine: RealEngine) -> None:
    with beside(small_engine, "off") as served:
        shares = await compaction(served)
    assert shares.in_place == 1
    assert shares.after < 0.9


@pytest.mark.anyio
async def test_an_engine_without_the_plugin_says_so(small_engine: RealEngine) -> None:
    hints = PluginHints(small_engine.url)
    await hints.start()
    assert await hints.state() is None
    await hints.close()


def test_the_embedded_engine_is_started_with_the_plugin_only_where_asked(tmp_path: Path, model_folder: Path) -> None:
    other = ("--kv-transfer-config", '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}')

    def command(policy: str, **options: Any) -> str:
        made = EmbeddedOptions(tmp_path, plugin=plugin_options(policy), **options)
        return " ".join(vllm_command(model_folder, 1, made, events_endpoint="ipc://a", replay_endpoint="ipc://b"))

    assert "kv-transfer-config" not in command("off")
    assert "scheduler-cls" not in command("off")
    assert "AgentserveConnector" in command("lru", plugin_carrier="connector")
    assert "MultiConnector" in command("lru", plugin_carrier="connector", extra_args=other)
    scheduled = command("lru", extra_args=other)
    assert "AgentserveScheduler" in scheduled
    assert " ".join(other) in scheduled
    assert "MultiConnector" not in scheduled
    assert "VLLM_PLUGINS=agentserve " in command("lru")
    with pytest.raises(SetupError, match="class_hazard"):
        plugin_options("dead_last")
