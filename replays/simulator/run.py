"""One simulation: options in, report out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import EvictionPolicy, Pool
from admission.lifecycle import Lifecycle
from admission.policies import ADMISSION_POLICIES
from admission.requests import Limits
from admission.returns import ReturnModel, ReturnParameters
from admission.tickets import TicketBook
from replays.simulator.anatomy import Anatomy
from replays.simulator.chains import Branch
from replays.simulator.clock import Clock
from replays.simulator.closed_loop import ClosedLoop
from replays.simulator.cost import Profile
from replays.simulator.engine import Engine
from replays.simulator.fates import Fates, Knowledge
from replays.simulator.fixed_shape import engines_of
from replays.simulator.lives import Lives
from replays.simulator.loop import Loop, LoopOptions
from replays.simulator.open_loop import OpenLoop
from replays.simulator.options import EngineOptions
from replays.simulator.outcomes import Outcome
from replays.simulator.pieces import PooledExtent
from replays.simulator.placement import PLACEMENTS
from replays.simulator.pool import BlockPool
from replays.simulator.profiles import find_profile
from replays.simulator.report import SimulationReport, make_report
from replays.simulator.scripts import Script
from replays.simulator.server import Server
from replays.simulator.tiers import CpuTier, TierOptions, lru


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What to simulate. Capacity None: the profile's."""

    policy: str = "lru"
    parameters: Mapping[str, float] = field(default_factory=dict)
    admission: str = "fcfs"
    admission_parameters: Mapping[str, float] = field(default_factory=dict)
    profile: str = "nominal"
    capacity_tokens: int | None = None
    block_size: int = 128
    max_num_seqs: int | None = None
    """None: twice the concurrency, as the published recipes set it; in an open loop the profile's own."""
    num_replicas: int = 1
    placement: str = "in_turn"
    tier: TierOptions | None = None
    """A CPU tier under each engine that prefills."""
    context_tokens: int | None = None
    """The model's limit, as far as the server knows it; prompts are not cut to it."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    loop: LoopOptions = field(default_factory=LoopOptions)
    sample_seconds: float = 30.0


@dataclass(eq=False)
class Simulation:
    """The parts of one run, joined. `run` may be called once."""

    scripts: Sequence[Script]
    options: SimulationOptions

    def __post_init__(self) -> None:
        options = self.options
        self.profile: Profile = find_profile(options.profile)
        self.clock = Clock()
        self.outcomes: list[Outcome] = []
        self.engine_options = engine_options(options, self.profile)
        self.tiers: list[CpuTier] = []
        self.returns = ReturnModel(ReturnParameters(longest_gap_seconds=options.loop.idle_cap))
        self._lives = Lives(Lifecycle(self.returns, context_tokens=options.context_tokens), options.knowledge.ends)
        self.anatomy = Anatomy(options.sample_seconds)
        if options.num_replicas > 1 and self.profile.prefill is not None:
            raise ValueError(f"profile {self.profile.name!r} has prefill and decode apart, which is simulated with one replica only")
        engines: list[Engine] = []
        for _ in range(options.num_replicas):
            made, handover = engines_of(self.profile, self._engine)
            engines += made
        capacity = self.engine_options.num_blocks * options.block_size * options.num_replicas
        self.server = Server(
            self.clock,
            engines,
            ADMISSION_POLICIES[options.admission](
                TicketBook(),
                limits_of(options, capacity),
                options.admission_parameters,
                self._lives.lifecycle,
            ),
            self._lives,
            self.profile.front_seconds,
            self.outcomes.append,
            handover=handover,
            on_ended=self.anatomy.ended,
            placement=PLACEMENTS[options.placement],
        )
        kind = ClosedLoop if options.loop.arrivals is None else OpenLoop
        self.loop: Loop = kind(self.clock, self.server, self.scripts, options.loop)

    def _uses(self, branch: Branch, now: float) -> Iterator[tuple[float, int]]:
        return self.loop.uses(branch, now)

    def _engine(self, profile: Profile) -> Engine:
        options = self.options
        settings = engine_options(options, profile)
        choice = EVICTION_POLICIES[options.policy]
        fates = Fates(options.knowledge, self._uses if choice.needs_future else None, self._lives.is_left)
        if options.tier is None or profile is not (self.profile.prefill or self.profile):
            return Engine(
                settings, BlockPool(settings.num_blocks, self._policy(settings.num_blocks), fates, self.anatomy.evicted), profile.cost
            )
        policy = self._policy if options.tier.exclusive else lru
        tier = CpuTier(options.tier, settings.block_size, profile.cost, settings.drops_last_block, policy, fates)
        self.tiers.append(tier)

        def evicted(branch: Branch, start: int, end: int, extent: PooledExtent, now: float) -> None:
            self.anatomy.evicted(branch, start, end, extent, now)
            tier.evicted(branch, start, end, extent, now)

        pool = BlockPool(settings.num_blocks, self._policy(settings.num_blocks), fates, evicted, tier.stored)
        return Engine(settings, pool, profile.cost, loader=tier)

    def _policy(self, num_blocks: int) -> EvictionPolicy:
        return EVICTION_POLICIES[self.options.policy].build(Pool(num_blocks, self.returns), self.options.parameters)

    def run(self) -> SimulationReport:
        self.loop.start()
        self.anatomy.watch(self.clock, self.server, self.loop)
        self.clock.run()
        return make_report(self.options, self.loop, self.server, self.outcomes, self.anatomy)


def limits_of(options: SimulationOptions, capacity_tokens: int) -> Limits:
    """What the admission policy is told of the engines and of the tiers under them, which count where they are exclusive."""
    tier = options.tier
    tier_tokens = tier.capacity_tokens * options.num_replicas if tier is not None and tier.exclusive else None
    return Limits(capacity_tokens=capacity_tokens, longest_idle_seconds=options.loop.idle_cap, tier_tokens=tier_tokens)


def engine_options(options: SimulationOptions, profile: Profile) -> EngineOptions:
    """The engine of `profile` as `options` want it."""
    capacity = options.capacity_tokens or profile.capacity_tokens
    is_open = options.loop.arrivals is not None
    return replace(
        profile.engine,
        num_blocks=capacity // options.block_size,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs or (profile.engine.max_num_seqs if is_open else 2 * options.loop.concurrency),
    )


def simulate(scripts: Sequence[Script], options: SimulationOptions) -> SimulationReport:
    """Play `scripts` by `options`. The same arguments give the same report."""
    return Simulation(scripts, options).run()
