"""What is said before an engine has started, and when a server has."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentserve.boot import build, running_server
from agentserve.engines import EngineInfo
from agentserve.engines.vllm import VllmEngine
from agentserve.errors import SetupError
from agentserve.serve import announce
from agentserve.settings import load
from model.chat.formats import detect_chat_format
from model.tokenizer import Tokenizer

NOBODY = "http://127.0.0.1:9"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("admission", "policy"), "nope", "no admission policy 'nope'"),
        (("admission", "parameters"), "x", "NAME=VALUE"),
        (("capture",), "/proc/nope", "--capture '/proc/nope' cannot be written"),
        (("state", "url"), "foo://x", "--state-url is no Redis URL"),
        (("canonicalise", "off"), "nope", "unknown canonicaliser rule"),
        (("engine", "chat_format"), "klingon", "unknown chat format 'klingon'"),
        (("engine", "url"), "notaurl", "'notaurl' is no URL of a vLLM"),
        (("engine", "url"), "127.0.0.1:8100", "is no URL of a vLLM"),
        (("engine", "url"), f"{NOBODY}, http://host:port", "'http://host:port' is no URL"),
        (("engine", "url"), "", "names no engine"),
    ],
)
async def test_a_wrong_setting_is_refused_before_an_engine_is_waited_for(path: tuple[str, ...], value: str, said: str) -> None:
    settings = load({("engine", "url"): NOBODY, ("engine", "start_seconds"): "0.1", path: value})
    with pytest.raises(SetupError, match=said):
        async with running_server(settings, lambda text: None):
            pass


def test_the_banner_names_plugin_and_tier_where_they_are_on(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = VllmEngine(NOBODY)
    engine.info = EngineInfo("vllm", "m", 4096, block_size=128, num_blocks=64)
    tokenizer = Tokenizer.load(model_folder)
    plain = load({})
    for settings in (plain, load({("engine", "plugin"): "class_hazard", ("offload", "tier"): "exclusive"})):
        announce(build(settings, engine, tokenizer, detect_chat_format(tokenizer), None), NOBODY)
        said = capsys.readouterr().err
        assert ("eviction plugin: class_hazard" in said) == (settings is not plain)
        assert ("offload tier: exclusive" in said) == (settings is not plain)
