"""The plugin's part for MiniMax-M3: where a model of its architecture is loaded, vLLM takes `m3_model` for it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

ARCHITECTURE = "MiniMaxM3SparseForCausalLM"
MODEL = "agentserve.engines.plugin.m3_model:M3ForCausalLM"
_VISION = "vllm.transformers_utils.processors.minimax_m3"


def register_m3() -> None:
    """Tell vLLM's registry. On ROCm, whose M3 has index reuse of its own, nothing is done."""
    from vllm import ModelRegistry  # vLLM is there when it calls its plugins, and its import is theirs to pay
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        return
    if current_platform.is_cpu():
        do_without_torchvision()
    ModelRegistry.register_model(ARCHITECTURE, MODEL)


def do_without_torchvision() -> None:
    """M3's text backbone imports names of its image processor, which needs torchvision; where that is missing they are empty classes."""
    if find_spec("torchvision") is None:
        sys.modules.setdefault(_VISION, _Vision(_VISION))


class _Vision(ModuleType):
    MIN_SHORT_SIDE_PIXEL = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
