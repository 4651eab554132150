"""The engine plugin's parts that need no vLLM: what it reads, what it refuses, and its prefix tree over blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Fate, Pool
from admission.returns import ReturnModel
from agentserve.engines.hints import NoHints, PluginHints, SessionHint, TurnHints, engine_hints
from agentserve.engines.plugin.forest import Forest
from agentserve.engines.plugin.nodes import Branch, Session
from agentserve.engines.plugin.options import MODULE, POLICY_NAMES, PluginOptions, scheduler_args, transfer_config
from agentserve.engines.plugin.supported import PluginUnsupported, check_output, check_queue, check_scheduler, check_version
from agentserve.engines.plugin.wire import XARG, BadHint, PluginState, read_batch, read_turn, xargs
from agentserve.starting import restarted
from prefix_cache.mirror import Mirror


@dataclass(eq=False)
class FakeBlock:
    block_id: int
    ref_cnt: int = 0
    block_hash: object = field(default_factory=object)


class Chains:
    """A forest, and requests that hold blocks of it."""

    def __init__(self, policy: str = "dead_first", num_blocks: int = 100) -> None:
        self.blocks = [FakeBlock(number) for number in range(num_blocks)]
        ticks = itertools.count(1)
        ranked = EVICTION_POLICIES[policy].build(Pool(num_blocks, ReturnModel()))
        self.forest = Forest(num_blocks, ranked, lambda: float(next(ticks)))
        self.branches: dict[str, Branch] = {}

    def branch(self, name: str) -> Branch:
        return self.branches.setdefault(name, Branch(Session(name), ""))

    def run(self, name: str, *block_ids: int) -> list[FakeBlock]:
        path = [self.blocks[block_id] for block_id in block_ids]
        for block in path:
            block.ref_cnt += 1
        branch = self.branch(name)
        self.forest.hold(self.forest.trace(path, branch, len(path)), branch)
        return path

    def end(self, path: list[FakeBlock]) -> None:
        for block in path:
            block.ref_cnt -= 1
        self.forest.release([block for block in reversed(path) if block.ref_cnt == 0])
        self.forest.check_integrity()

    def take(self, num_blocks: int) -> list[int]:
        taken = [block.block_id for block in self.forest.take(num_blocks)]
        self.forest.check_integrity()
        return taken


def test_a_chain_leaves_from_its_deep_end_and_a_shared_head_last() -> None:
    chains = Chains("lru")
    chains.end(chains.run("a", 1, 2, 3, 4))
    chains.end(chains.run("b", 1, 2, 5, 6))
    assert chains.take(5) == [4, 3, 6, 5, 2]
    assert chains.take(9) == [1]


def test_running_blocks_are_never_offered() -> None:
    chains = Chains()
    chains.end(chains.run("a", 1, 2, 3))
    running = chains.run("b", 1, 2)
    assert chains.take(9) == [3]
    chains.end(running)
    assert chains.take(9) == [2, 1]


def test_a_head_lives_while_one_of_its_sessions_does() -> None:
    chains = Chains()
    chains.end(chains.run("a", 1, 2))
    chains.end(chains.run("b", 1, 3))
    chains.end(chains.run("c", 7, 8))
    for name in ("a", "b"):
        branch = chains.branch(name)
        for node in list(branch.nodes):
            chains.forest.set_fate(node, branch, Fate.ENDED)
        assert chains.forest.node_of[1] is not None
        assert chains.forest.node_of[1].extent.fate is (Fate.LIVE if name == "a" else Fate.ENDED)
    assert sorted(chains.take(3)) == [1, 2, 3]
    assert chains.take(9) == [8, 7]


def test_blocks_that_a_preempted_request_had_generated_hang_on_its_prompt() -> None:
    chains = Chains("lru")
    path = chains.run("a", 1, 2)
    more = [chains.blocks[3], chains.blocks[4]]
    for block in more:
        block.ref_cnt = 1  # vLLM gave it these later, and tells nobody
    chains.end([*path, *more])
    assert chains.take(9) == [4, 3, 2, 1]


def test_what_waits_is_protected_until_nothing_else_is_left() -> None:
    chains = Chains("lru")
    chains.end(chains.run("a", 1, 2))
    chains.end(chains.run("b", 3, 4))
    node = chains.forest.node_of[1]
    assert node is not None
    chains.forest.protect("request", [node])
    assert chains.take(2) == [4, 3]
    chains.end(chains.run("c", 5, 6))
    chains.forest.unprotect("request")
    assert chains.take(2) == [2, 1]


def test_of_blocks_that_the_engine_has_twice_the_copy_off_the_path_goes() -> None:
    chains = Chains("lru")
    first, second = chains.run("a", 1, 2), chains.run("b", 11, 12)
    chains.end(first)
    chains.end(second)
    chains.end(chains.run("c", 1, 12))  # the engine looked up one copy of each
    assert chains.take(4) == [2, 11, 12, 1]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_of_the_table_orders_blocks(policy: str) -> None:
    chains = Chains(policy)
    for session in range(8):
        chains.end(chains.run(str(session), 0, *range(10 * session + 1, 10 * session + 9)))
    taken = chains.take(40)
    assert len(taken) == len(set(taken)) == 40
    chains.forest.switch(EVICTION_POLICIES["lru"].build(Pool(100)))
    assert len(chains.take(100)) == 25


def test_hints_survive_the_wire_and_bad_ones_say_what_is_wrong() -> None:
    hints = TurnHints(branch_id="b", echoes=False, others=(SessionHint(session_id="s", fate=Fate.ENDED, start_tokens=3),))
    assert read_turn(xargs(hints)[XARG]) == hints
    assert read_turn({"branch_id": "b"}) == TurnHints(branch_id="b")
    for bad in ("{", '{"fate": "lost"}', 7):
        with pytest.raises(BadHint):
            read_turn(bad)
    with pytest.raises(BadHint, match="session_id"):
        read_batch(b'{"hints": [{}]}')


async def _nothing() -> None:
    hints = PluginHints("http://127.0.0.1:1")
    await hints.start()  # nobody listens
    hints.tell(SessionHint(session_id="s", fate=Fate.ENDED), SessionHint(session_id="t"))
    carried = read_turn(hints.xargs(TurnHints(branch_id="b"))[XARG])
    assert [hint.session_id for hint in carried.others] == ["s", "t"]
    assert read_turn(hints.xargs(TurnHints())[XARG]).others == ()
    assert await hints.state() is None
    await hints.close()


@pytest.mark.anyio
async def test_without_routes_hints_travel_along_with_the_next_request() -> None:
    await _nothing()
    assert isinstance(engine_hints("off", "http://127.0.0.1:1"), NoHints)
    assert isinstance(engine_hints("lru", "http://127.0.0.1:1"), PluginHints)


class PluginRoutes:
    """The plugin's routes as a vLLM that has just been started has them. `num_refusals`: so often it is too busy to answer."""

    def __init__(self) -> None:
        self.num_refusals = 0
        self.start()

    def start(self) -> None:
        self.policy, self.parameters = "class_hazard", dict[str, float]()

    async def answer(self, request: web.Request) -> web.Response:
        if self.num_refusals:
            self.num_refusals -= 1
            return web.Response(status=503)
        if request.method == "POST":
            batch = read_batch(await request.read())
            self.policy, self.parameters = batch.policy or self.policy, dict(batch.parameters)
        counts = dict.fromkeys(PluginState.__dataclass_fields__, 0)
        told = {name: count for name, count in counts.items() if name.startswith("num_")}
        shown = {**told, "policy": self.policy, "parameters": self.parameters, "is_ordering": True}
        return web.Response(body=msgspec.json.encode(shown), content_type="application/json")


@pytest.mark.anyio
async def test_the_policy_in_force_is_set_again_in_an_engine_that_was_started_again() -> None:
    plugin, application, mirror = PluginRoutes(), web.Application(), Mirror(16)
    application.router.add_route("*", "/{path:.*}", plugin.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hints = PluginHints(f"http://127.0.0.1:{runner.addresses[0][1]}")
    with capture_logs() as logs:
        try:
            await hints.start()
            await restarted(mirror, hints)  # nothing was chosen: the flag holds
            assert plugin.policy == "class_hazard"
            await hints.switch("ttl", {"queue_seconds": 2.0})
            plugin.start()
            plugin.num_refusals = 1
            await restarted(mirror, hints)
            assert (plugin.policy, plugin.parameters) == ("ttl", {"queue_seconds": 2.0})
        finally:
            await hints.close()
            await runner.cleanup()
    assert [line["policy"] for line in logs if line["event"] == "eviction policy set again"] == ["ttl"]


@pytest.mark.parametrize(
    ("extra", "match"),
    [({"policy": "farthest_next_use"}, "no policy"), ({"polcy": "lru"}, "no option 'polcy'"), ({"lookahead_blocks": "x"}, "int")],
)
def test_options_that_make_no_sense_are_refused(extra: dict[str, object], match: str) -> None:
    with pytest.raises(PluginUnsupported, match=match):
        PluginOptions.read(extra)


def test_the_configuration_for_vllm_reads_back() -> None:
    config = msgspec.json.decode(transfer_config(PluginOptions("ttl", {"queue_seconds": 2.0})))
    assert config["kv_connector_module_path"] == MODULE
    assert PluginOptions.read(config["kv_connector_extra_config"]) == PluginOptions("ttl", {"queue_seconds": 2.0})


def test_for_the_scheduler_it_stands_in_a_section_of_its_own() -> None:
    asked = PluginOptions("ttl", {"queue_seconds": 2.0}, lookahead_blocks=3)
    words = scheduler_args(asked)
    additional = msgspec.json.decode(words[words.index("--additional-config") + 1])
    assert PluginOptions.of_scheduler({"another": 1, **additional}) == asked
    assert PluginOptions.of_scheduler(None) == PluginOptions()
    for section in ({"polcy": "lru"}, "lru"):
        with pytest.raises(PluginUnsupported, match=r"additional_config"):
            PluginOptions.of_scheduler({"agentserve": section})


def test_a_scheduler_that_is_not_as_known_is_refused() -> None:
    class Known:
        def add_request(self, request: object) -> None: ...
        def schedule(self, throttle_prefills: bool = False) -> None: ...
        def _free_request(self, request: object, delay_free_blocks: bool = False) -> None: ...

    class Renamed(Known):
        def schedule(self, budget: int) -> None: ...  # type: ignore[override] # what it is refused for

    @dataclass
    class Output:
        scheduled_new_reqs: list[object]
        scheduled_cached_reqs: object
        preempted_req_ids: set[str]

    @dataclass
    class Cached:
        resumed_req_ids: set[str]

    @dataclass
    class New:
        req_id: str

    check_scheduler(Known, None)
    check_output(Output, New, Cached)
    with pytest.raises(PluginUnsupported, match="schedule does not take"):
        check_scheduler(Renamed, None)
    with pytest.raises(PluginUnsupported, match="has no add_request"):
        check_scheduler(object, None)
    with pytest.raises(PluginUnsupported, match="Known has no resumed_req_ids"):
        check_output(Output, New, Known)


def test_beside_another_connector_it_stands_in_front_of_it() -> None:
    other = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    both = msgspec.json.decode(transfer_config(PluginOptions(), beside=msgspec.json.encode(other).decode()))
    assert (both["kv_connector"], both["kv_role"], both["kv_load_failure_policy"]) == ("MultiConnector", "kv_both", "recompute")
    ours, theirs = both["kv_connector_extra_config"]["connectors"]
    assert ours["kv_connector_module_path"] == MODULE
    assert theirs == other


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "unknown"])
def test_versions_that_it_was_not_written_for_are_refused(version: str) -> None:
    check_version("0.26.0")
    check_version("0.33.1rc1")
    with pytest.raises(PluginUnsupported, match="start without it"):
        check_version(version)


def test_a_queue_with_a_method_more_or_less_is_refused() -> None:
    class Less:
        def popleft(self) -> None: ...

    class More(Less):
        def popleft_n(self, n: int) -> None: ...

        def shuffle(self) -> None: ...

    with pytest.raises(PluginUnsupported, match="has no popleft_n"):
        check_queue(Less)
    with pytest.raises(PluginUnsupported, match="does not know: shuffle"):
        check_queue(More)
