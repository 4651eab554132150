"""docker-compose.yml is valid Compose, and what it says agrees with the programs it starts."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from agentserve.settings import flag, leaves
from deploy.answers import answers
from tests.upstream import Upstream, in_thread

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def load() -> dict[str, Any]:
    """The file with every variable at its default."""
    text = VARIABLE.sub(lambda found: found[2], (ROOT / "docker-compose.yml").read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


SERVICES: dict[str, dict[str, Any]] = load()["services"]


def words(service: str) -> list[str]:
    command: list[str] = SERVICES[service]["command"]
    return command


def flags(service: str) -> dict[str, str]:
    """`--name=value`, `--name value` and `--name` of a command, by name."""
    found: dict[str, str] = {}
    last = ""
    for word in words(service):
        if word.startswith("--"):
            last, _, value = word.partition("=")
            found[last] = value
        elif last:
            found[last] = word
    return found


def test_it_follows_the_compose_schema() -> None:
    schema = msgspec.json.decode((ROOT / "tests/data/compose-spec.json").read_bytes())
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(load())] == []
    broken = load()
    broken["services"]["redis"]["port"] = 6379
    assert [error.message for error in validator.iter_errors(broken)]


def test_every_variable_has_a_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert len(re.findall(r"\$\{", text)) == len(VARIABLE.findall(text)) > 0


def test_each_profile_is_whole() -> None:
    profiles: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service["profiles"]:
            profiles.setdefault(profile, set()).add(name)
    offload = {"agentserve-cpu-offload", "redis"}
    assert profiles == {"cpu": {"agentserve-cpu"}, "cpu-offload": offload, "mi355x": {"redis", "lmcache", "vllm", "agentserve"}}
    for members in profiles.values():
        assert all(set(SERVICES[name].get("depends_on", {})) <= members for name in members)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_a_health_check_and_is_bound_to_loopback(service: str) -> None:
    settings = SERVICES[service]
    assert settings["healthcheck"]["test"][0] == "CMD"
    if settings.get("network_mode") == "host":
        addresses = [flags(service).get(name) for name in ("--host", "--bind") if name in flags(service)]
        assert addresses == ["127.0.0.1"]
    else:
        assert settings["ports"]
        assert all(port.startswith("127.0.0.1:") for port in settings["ports"])


@pytest.mark.parametrize("service", ["agentserve", "agentserve-cpu", "agentserve-cpu-offload"])
def test_every_flag_of_our_own_exists(service: str) -> None:
    known = {flag(path) for path, _ in leaves()}
    assert words(service)[0] == "serve"
    assert set(flags(service)) <= known


@pytest.mark.parametrize("service", ["lmcache", "vllm"])
def test_json_flags_are_json_and_rocm_devices_are_passed(service: str) -> None:
    values = [value for value in flags(service).values() if value.startswith("{")]
    assert values
    assert all(isinstance(msgspec.json.decode(value), dict) for value in values)
    assert SERVICES[service]["devices"] == ["/dev/kfd", "/dev/dri"]
    assert SERVICES[service]["ipc"] == "host"


def test_services_agree_on_ports_sockets_and_model() -> None:
    vllm, ours = flags("vllm"), flags("agentserve")
    events = msgspec.json.decode(vllm["--kv-events-config"])
    assert ours["--engine-url"] == f"http://127.0.0.1:{vllm['--port']}"
    assert (ours["--engine-events"], ours["--engine-events-replay"]) == (events["endpoint"], events["replay_endpoint"])
    assert ours["--engine-model-folder"] == words("vllm")[0]
    assert {"kv-events:/run/vllm"} <= set(SERVICES["vllm"]["volumes"]) & set(SERVICES["agentserve"]["volumes"])
    num_ranks = int(vllm["--tensor-parallel-size"])
    urls = msgspec.json.decode(vllm["--kv-transfer-config"])["kv_connector_extra_config"]["lmcache.mp.server_urls"].split(",")
    assert urls == [f"tcp://127.0.0.1:{5555 + rank}" for rank in range(num_ranks)]
    assert SERVICES["lmcache"]["entrypoint"][-1] == str(num_ranks)
    assert str(msgspec.json.decode(flags("lmcache")["--l2-adapter"])["port"]) == flags("redis")["--port"]
    config = msgspec.json.decode(vllm["--kv-transfer-config"])
    assert config["kv_load_failure_policy"] == "recompute"
    for service in ("agentserve", "agentserve-cpu-offload"):
        assert flags(service)["--offload-url"] == f"redis://127.0.0.1:{flags('redis')['--port']}"
    # A chunk that is no multiple of a block is refused by LMCache.
    assert int(flags("lmcache")["--chunk-size"]) % int(vllm["--block-size"]) == 0
    assert SERVICES["vllm"]["environment"]["PYTHONHASHSEED"] == SERVICES["lmcache"]["environment"]["PYTHONHASHSEED"]


def test_every_file_that_images_are_built_from_exists() -> None:
    for service in SERVICES.values():
        build = service.get("build")
        if build is None:
            continue
        lines = (ROOT / build["dockerfile"]).read_text().splitlines()
        if "target" in build:
            assert any(line.startswith("FROM") and line.endswith(f"AS {build['target']}") for line in lines)
        copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1] if not word.startswith("--")]
        assert copied
        assert all((ROOT / source).exists() for source in copied)
    assert (ROOT / "deploy/lmcache-servers.sh").stat().st_mode & stat.S_IXUSR


def test_the_health_check_follows_the_answer() -> None:
    with in_thread(Upstream()) as upstream:
        assert answers(f"{upstream.url}/health")
        upstream.healthy = False
        assert not answers(f"{upstream.url}/health")
    assert not answers(f"{upstream.url}/health")


@pytest.mark.engine
# Importing torch and vLLM warns of their own affairs.
@pytest.mark.filterwarnings("default")
def test_every_flag_of_vllm_is_one_that_it_takes() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([f"--model={words('vllm')[0]}", *words("vllm")[1:]])
    assert parsed.tensor_parallel_size == 4
    assert parsed.hf_overrides == {"text_config": {"use_index_cache": False, "index_topk_freq": 1}}
