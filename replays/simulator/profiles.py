"""Engines that can be simulated, by name."""

from __future__ import annotations

from pathlib import Path

from replays.simulator.cost import CostModel, Profile
from replays.simulator.m3_profiles import m3_profiles
from replays.simulator.options import EngineOptions
from replays.simulator.profile_file import profile_of, read_profile_file

PROFILES: dict[str, Profile] = {
    "nominal": Profile("nominal", 6_264_960, EngineOptions(num_blocks=0), CostModel(0.02, 0.0, 0.0, 1 / 25_000), about="no machine"),
    "light": Profile(
        "light", 4_812_800, EngineOptions(num_blocks=0), CostModel(0.002, 0.0, 0.0, 1 / 70_000), about="no machine: a replay, scaled"
    ),
    **m3_profiles(),
}
"""By name. `nominal` is no machine: 25,000 prefill tokens and 50 steps a second, fitted to nothing. It compares policies, not speeds.
`light` is the embedded CPU engine in a replay of a 64th of the tokens at 15 times the speed, in the trace's own seconds and tokens: so fast
that next to nothing is pinned, and what sessions leave idle decides."""


def find_profile(name: str) -> Profile:
    """The profile of that name, or of that file (.json). Raises ValueError where there is none, ProfileFileError for a bad file."""
    if name in PROFILES:
        return PROFILES[name]
    if name.endswith(".json"):
        return profile_of(read_profile_file(Path(name)))
    raise ValueError(f"there is no profile {name!r}; there are {', '.join(PROFILES)}, and files that `agentserve calibrate` wrote (.json)")
