"""Settings: one class, from which flags, environment names and the reference page derive."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentserve.errors import SetupError
from agentserve.settings import environment_name, flag, leaves, load


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, _ in leaves():
        monkeypatch.delenv(environment_name(path), raising=False)


@pytest.mark.parametrize("content", [b"port = ", b"host = '\xff\xfe'"], ids=["bad TOML", "bad UTF-8"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "agentserve.toml"
    file.write_bytes(content)
    with pytest.raises(SetupError, match=r"agentserve\.toml"):
        load({}, file)


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "agentserve.toml"
    file.write_text('port = 1\nhost = "file"\nmodel_name = "file"\n[engine]\nkv_tokens = 1024\n')
    monkeypatch.setenv("AGENTSERVE_PORT", "2")
    monkeypatch.setenv("AGENTSERVE_HOST", "environment")
    monkeypatch.setenv("AGENTSERVE_ENGINE__BLOCK_SIZE", "64")
    settings = load({("port",): "3"}, file)
    assert (settings.port, settings.host, settings.model_name) == (3, "environment", "file")
    assert (settings.engine.kv_tokens, settings.engine.block_size, settings.engine.url) == (1024, 64, None)


@pytest.mark.parametrize(
    ("content", "named"),
    [("prot = 1", "--prot"), ("[engine]\nurll = 'x'", "--engine-urll"), ("port = 70000", "--port"), ("port = ", "settings")],
)
def test_a_wrong_file_is_refused_by_the_name_at_fault(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "agentserve.toml"
    file.write_text(content)
    with pytest.raises(SetupError, match=named):
        load({}, file)


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSERVE_PROT", "1")
    with pytest.raises(SetupError, match="AGENTSERVE_PROT"):
        load({})


def test_a_config_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no config file"):
        load({}, tmp_path / "missing.toml")


def test_every_setting_has_a_description_and_a_flag_of_its_own() -> None:
    flags = [flag(path) for path, _ in leaves()]
    assert len(set(flags)) == len(flags)
    assert all(info.description for _, info in leaves())


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "settings.md").read_text()
    for path, info in leaves():
        assert f"`{flag(path)}`" in page, f"{flag(path)} is missing: run `make docs`"
        assert environment_name(path) in page
        assert str(info.description) in page


@pytest.mark.parametrize("given", ["k1,k2", "k1 k2", ["k1", "k2"], ["k1,k2"]])
def test_lists_may_be_given_with_commas_or_several_times(given: object) -> None:
    settings = load({("api_keys",): given, ("canonicalise", "off"): given})
    assert [key.get_secret_value() for key in settings.api_keys] == ["k1", "k2"]
    assert settings.canonicalise.off == ("k1", "k2")


def test_lists_in_the_environment_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSERVE_API_KEYS", "k1,k2")
    assert [key.get_secret_value() for key in load({}).api_keys] == ["k1", "k2"]
