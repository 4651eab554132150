"""The documentation and the code name the same things: what one has and the other lacks fails here."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.routing import Route

import agentserve
from agentserve.app import build_app
from agentserve.boot import build
from agentserve.canonical.canonicaliser import Effect
from agentserve.cli import build_cli
from agentserve.deliveries import RETRY_HEADER
from agentserve.dialects.account import account as usage_account
from agentserve.dialects.anthropic_errors import ERROR_TYPES
from agentserve.dialects.errors import error_headers
from agentserve.divergence import Difference, Divergence
from agentserve.engines import EngineInfo, Usage
from agentserve.engines.vllm import VllmEngine
from agentserve.errors import AgentserveError, Busy, EngineRefused, SetupError
from agentserve.headers import plan_headers
from agentserve.heads import HeadBreak
from agentserve.identity import Identity
from agentserve.plans import Outcome, Plan
from agentserve.records import TurnRecord
from agentserve.routes.cache import describe_cache, describe_engine, describe_turn
from agentserve.routes.sessions import describe
from agentserve.server import Server
from agentserve.sessions import TurnKind
from agentserve.settings import flag, leaves, load
from benchmarks.__main__ import BENCHMARKS
from benchmarks.fault_cases import CASES, held_by
from docs.__main__ import LISTED, PARTS, ROOT, TREE, pages, written
from model.chat.formats import detect_chat_format
from model.conversation import AssistantItem
from model.tokenizer import Tokenizer
from prefix_cache.hits import Cause, account
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.offload import Offload
from prefix_cache.tiers.ranks import RankLookups
from replays.report import Percentiles, Report, WarmupReport

REFERENCE = ROOT / "docs" / "reference"
CONCEPTS = ROOT / "docs" / "concepts"

_INSIDE_VLLM = "agentserve.engines.plugin."
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)

any_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Server:
    """A server with everything that can be switched on; its engine is never asked."""
    engine = VllmEngine("http://127.0.0.1:9")
    engine.info = EngineInfo("vllm", "m", 4096, block_size=128, num_blocks=64)
    tokenizer = Tokenizer.load(model_folder)
    settings = load({("state", "url"): "redis://127.0.0.1:9", ("capture",): "unused"})
    offload = Offload(128)
    offload.ranks = RankLookups()
    return build(settings, engine, tokenizer, detect_chat_format(tokenizer), Mirror(128), offload)


@pytest.fixture(scope="module")
def whole_app(server: Server) -> FastAPI:
    return build_app(server)


@pytest.fixture
def answered() -> tuple[Plan, Outcome]:
    """A turn of which everything is known."""
    hits = account(
        num_prompt_tokens=100, ceiling=90, block_size=32, actual=32, predicted=64, recomputed_tokens=32, external_predicted=0, external=0
    )
    left = Divergence(Difference.TEXT_CHANGED, 3, "user", 40, 50)
    plan = Plan(
        "s",
        TurnKind.EXACT,
        100,
        10,
        hits,
        {"clock": Effect(1, 20)},
        edited_message=3,
        divergence=left,
        head_break=HeadBreak(1, (), 9, 90, None),
    )
    return plan, Outcome(AssistantItem("x"), "stop", None, 1, Usage(100, 1, 32), hits)


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def rows(page: Path, heading: str | None = None) -> list[list[str]]:
    """The cells of every table row below `heading` (default: of the page), without heads and rules."""
    text = page.read_text()
    if heading is not None:
        text = re.split(rf"^## {re.escape(heading)}\n", text, flags=re.MULTILINE)[1].partition("\n## ")[0]
    lines = text.splitlines()
    heads = {number - 1 for number, line in enumerate(lines) if line.startswith("|---")}
    kept = [line for number, line in enumerate(lines) if line.startswith("| ") and number not in heads]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in kept]


def names(page: Path, heading: str | None = None) -> list[str]:
    """What stands between backticks in the first cell of each table row."""
    return [name for row in rows(page, heading) for name in re.findall(r"`([^`]+)`", row[0])]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """(text, file, anchor) of each link that stays in the repository."""
    for text, target in _LINK.findall(prose(page)):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            yield text, (page.parent / path).resolve() if path else page, anchor


def assert_same(page: Path, documented: Iterable[str], defined: Iterable[str]) -> None:
    """Each name once on the page, and no name that the code does not have."""
    on_page, in_code = Counter(documented), set(defined)
    assert not in_code - set(on_page), f"{page.name} lacks {sorted(in_code - set(on_page))}"
    assert not set(on_page) - in_code, f"{page.name} describes what is not there: {sorted(set(on_page) - in_code)}"
    assert max(on_page.values()) == 1, f"{page.name} says twice: {[name for name, count in on_page.items() if count > 1]}"


@any_page
def test_what_derives_from_the_code_is_up_to_date(page: Path) -> None:
    assert page.read_text() == written(page), "run `make docs`"


def test_every_derived_part_is_shown_once() -> None:
    shown = [name for page in pages() for name in re.findall(r"<!-- derived: (\w+) -->", page.read_text())]
    assert sorted(shown) == sorted(PARTS)


@any_page
def test_links_lead_somewhere(page: Path) -> None:
    for text, target, anchor in links(page):
        assert target.exists(), f"{text!r} leads to {target}"
        assert not anchor or anchor in anchors(target), f"{text!r} leads to a heading that is not there: {anchor!r}"


@any_page
def test_the_tests_that_are_named_exist(page: Path) -> None:
    for text, target, _ in links(page):
        if text.startswith("test_"):
            assert re.search(rf"def {text}\(", target.read_text()), f"no {text} in {target.name}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        found.add(page)
        waiting += [target for _, target, _ in links(page) if target.suffix == ".md" and target not in found]
    assert set(pages()) <= found


def test_the_readmes_tree_has_every_folder_and_no_other() -> None:
    assert all((ROOT / path).exists() for path in TREE), [path for path in TREE if not (ROOT / path).exists()]
    packages = {str(module.parent.relative_to(ROOT)) for name in LISTED for module in (ROOT / name).rglob("*.py")}
    assert packages <= set(TREE), f"describe {packages - set(TREE)} in docs/__main__.py"
    if not (ROOT / ".git").exists():
        pytest.skip("the files at the top are compared in a clone only")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    at_the_top = {path.partition("/")[0] for path in tracked if not path.startswith(".")}
    assert at_the_top <= set(TREE), f"describe {at_the_top - set(TREE)} in docs/__main__.py"


def test_every_metric_is_documented_and_no_other(server: Server) -> None:
    exported = [f"{family.name}_total" if family.type == "counter" else family.name for family in server.metrics.registry.collect()]
    assert_same(REFERENCE / "metrics.md", names(REFERENCE / "metrics.md"), exported)


def test_every_figure_names_the_test_that_holds_it() -> None:
    for page in (REFERENCE / "metrics.md", REFERENCE / "report.md"):
        for row in rows(page):
            assert "](../../tests/test_" in row[-1], f"{page.name}: {row[0]} names no test"
    for row in rows(CONCEPTS / "hit-accounting.md", "Figures of a turn"):
        assert "](../../tests/test_" in row[-1], f"{row[0]} names no test"


def test_every_error_is_documented_with_its_status_type_and_code() -> None:
    documented = {row[0].strip("`"): [cell.replace("`", "") for cell in row[1:4]] for row in rows(REFERENCE / "errors.md", "All errors")}
    defined: dict[str, list[str]] = {}
    for error in _errors():
        defined[error.__name__] = [str(error.status), error.kind, error.code or ""]
    for special in (EngineRefused, SetupError):  # the engine's own status and code; never an answer
        assert documented.pop(special.__name__)
        del defined[special.__name__]
    assert documented == defined


def test_every_type_of_anthropics_form_is_documented() -> None:
    documented = {int(row[0]): row[1].strip("`") for row in rows(REFERENCE / "errors.md", "Anthropic's form")}
    assert documented == ERROR_TYPES


def _errors() -> list[type[AgentserveError]]:
    for module in pkgutil.walk_packages(agentserve.__path__, "agentserve."):
        if module.name.startswith(_INSIDE_VLLM):  # imports vLLM, which takes seconds and may not be installed
            spec = importlib.util.find_spec(module.name)
            assert spec is not None
            assert spec.origin is not None
            assert "agentserve.errors" not in Path(spec.origin).read_text(), f"{module.name} defines none of the server's errors"
        elif not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: list[type[AgentserveError]] = [AgentserveError]
    for error in found:
        found += error.__subclasses__()
    return found


def test_every_response_header_is_documented_and_no_other(answered: tuple[Plan, Outcome]) -> None:
    plan, outcome = answered
    headers = {**plan_headers(plan, outcome.hits), **error_headers(Busy("", retry_after_seconds=1)), RETRY_HEADER: ""}
    assert_same(REFERENCE / "http.md", names(REFERENCE / "http.md", "Response headers"), headers)


def test_every_route_is_documented_and_no_other(whole_app: FastAPI) -> None:
    routes = [route for route in whole_app.routes if isinstance(route, Route)]
    served = {f"{method} {route.path}".replace(":path}", "}") for route in routes for method in (route.methods or set()) - {"HEAD"}}
    assert_same(REFERENCE / "http.md", [name for name in names(REFERENCE / "http.md") if name.split(" ")[0].isupper()], served)


def test_every_field_of_the_usage_and_of_a_session_is_documented(server: Server, answered: tuple[Plan, Outcome]) -> None:
    assert_same(REFERENCE / "http.md", names(REFERENCE / "http.md", "Usage"), usage_account(*answered))
    session = server.namespaces.of(None).resolve(Identity("s"), None, 0.0, lambda: "s")
    shown = describe(session, server.turns.retention.standing(server.namespaces.of(None), session))
    assert_same(REFERENCE / "http.md", names(REFERENCE / "http.md", "Session"), shown)
    hits = next(row for row in rows(REFERENCE / "http.md", "Session") if row[0] == "`hits`")
    assert set(re.findall(r"`(\w+)`", hits[1])) == set(shown["hits"])


def test_every_field_of_a_turn_and_of_the_cache_is_documented(server: Server, answered: tuple[Plan, Outcome]) -> None:
    plan, outcome = answered
    turn = describe_turn(TurnRecord(1, plan.kind, 0.0, 0.0, 0.0, 0.0, "stop", 1, 1, outcome.hits, plan.divergence, plan.head_break))
    assert_same(REFERENCE / "http.md", names(REFERENCE / "http.md", "Turn"), turn)
    left = next(row for row in rows(REFERENCE / "http.md", "Usage") if row[0] == "`divergence`")
    assert set(re.findall(r"`(\w+)`", left[1])) == set(turn["divergence"])
    broken = next(row for row in rows(REFERENCE / "http.md", "Usage") if row[0] == "`head_break`")
    assert set(re.findall(r"`(\w+)`", broken[1])) == set(turn["head_break"])
    engine = describe_engine(server.replicas.first, None)
    cache = describe_cache(server, server.namespaces.of(None), {})
    assert_same(REFERENCE / "http.md", names(REFERENCE / "http.md", "Cache"), [*cache, *engine])
    admission = next(row for row in rows(REFERENCE / "http.md", "Cache") if row[0] == "`admission`")
    assert set(re.findall(r"`(\w+)`", admission[1])) == set(cache["admission"])
    mirror = next(row for row in rows(REFERENCE / "http.md", "Cache") if row[0] == "`mirror`")
    assert set(re.findall(r"`(\w+)`", mirror[1])) == set(engine["mirror"])


def test_every_page_stands_once_in_the_table_of_the_readme() -> None:
    table = (ROOT / "README.md").read_text().partition("\n## Documentation\n")[2].partition("\n## ")[0]
    linked = re.findall(r"\]\((docs/(?:guide|concepts|reference)/[\w-]+\.md)\)", table)
    pages = [
        page.relative_to(ROOT).as_posix() for folder in ("guide", "concepts", "reference") for page in (ROOT / "docs" / folder).glob("*.md")
    ]
    assert sorted(linked) == sorted(pages)


def test_every_miss_cause_and_turn_kind_is_documented_and_no_other() -> None:
    assert names(CONCEPTS / "hit-accounting.md", "Miss causes") == list(Cause)
    assert names(CONCEPTS / "sessions.md", "Turn kinds") == list(TurnKind)
    assert names(CONCEPTS / "hit-accounting.md", "Where a prompt left its history") == list(Difference)


def test_every_key_of_the_report_is_documented_and_no_other() -> None:
    page = REFERENCE / "report.md"
    assert_same(page, names(page), Report.__struct_fields__)
    inside = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows(page)}
    assert inside["warmup"] == set(WarmupReport.__struct_fields__)
    assert inside["ttft_seconds"] == inside["tpot_seconds"] == set(Percentiles.__struct_fields__)


def test_every_command_is_documented_and_no_other() -> None:
    headings = re.findall(r"^## agentserve (\S+)$", (REFERENCE / "cli.md").read_text(), re.MULTILINE)
    assert_same(REFERENCE / "cli.md", headings, [name for name in build_cli() if not name.startswith("-")])


def test_every_kind_of_case_has_tests_or_says_why_not_and_no_test_is_marked_with_another() -> None:
    tests = held_by()
    assert not set(tests) - set(CASES)
    assert not [label for label, case in CASES.items() if not case.open and label not in tests]


def test_every_benchmark_is_documented_and_no_other() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    assert_same(page, re.findall(r"^## (\S+)$", page.read_text(), re.MULTILINE), BENCHMARKS)
    assert_same(page, [_LINK.findall(row[0])[0][0] for row in rows(page)], BENCHMARKS)


@any_page
def test_commands_that_are_shown_use_flags_and_targets_that_exist(page: Path) -> None:
    app, flags = build_cli(), {flag(path) for path, _ in leaves()} | {"--config"}
    for line in _shown_commands(page):
        words = line.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {words[1]!r}"
        elif words[0] == "agentserve" and words[1] != "serve":
            command = app[words[1]]
            command = command[words[2]] if any(not name.startswith("-") for name in command) else command
            known = {name for argument in command.assemble_argument_collection() for name in argument.names}
            assert set(re.findall(r"(?<=\s)--[\w-]+", line)) <= known, line
        used = re.search(r'agentserve serve (.*)|SERVE="(.*?)"', line)
        if used is not None:
            assert set(re.findall(r"(?<!\S)--[a-z-]+", used[1] or used[2])) <= flags, line
    for name in re.findall(r"`(--(?:engine|offload|limits|alignment|sessions|state|canonicalise)-[a-z-]+)`", prose(page)):
        assert name in flags, name


def _shown_commands(page: Path) -> Iterator[str]:
    for kind, block in _FENCE.findall(page.read_text()):
        if kind == "console":
            yield from (line for line in block.replace("\\\n", " ").splitlines() if line)
