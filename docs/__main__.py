"""`python -m docs`: write the parts of README.md and docs/ that are derived from the code.

A derived part stands between `<!-- derived: NAME -->` and `<!-- end -->`; what NAME yields is in `PARTS`. Everything else is written by
hand, and `tests/test_docs.py` compares its names with the code's.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

from cyclopts import App

from admission.choice import Choice
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from agentserve import turns
from agentserve.canonical.table import CANONICAL_RULES
from agentserve.cli import build_cli
from agentserve.doctor.table import DOCTOR_CHECKS
from agentserve.identity import BODY_FIELDS, IDENTITY_HEADERS, HeaderRow
from agentserve.serve_command import settings_page
from benchmarks.fault_cases import CASES, held_by
from replays.simulator.profile_command import cells
from replays.simulator.profile_command import summary as points_summary
from replays.simulator.published import read_record

ROOT = Path(__file__).parents[1]
SETTINGS_PAGE = ROOT / "docs" / "reference" / "settings.md"
"""Derived as a whole: `agentserve settings` prints it."""

TREE: dict[str, str] = {
    "agentserve": "the server: HTTP, sessions, ledger, engines",
    "agentserve/canonical": "rules for what is volatile in system text and tools",
    "agentserve/dialects": "what clients speak: a request in, an answer out",
    "agentserve/doctor": "what will cost hits or crash: facts, and a check a row",
    "agentserve/engines": "token ids in, token ids out: a running vLLM, or the embedded one",
    "agentserve/engines/plugin": "what runs inside vLLM's own processes",
    "agentserve/routes": "HTTP routes: parse, hand over, write",
    "agentserve/state": "sessions in Redis or Valkey, so that any server can take the next turn",
    "prefix_cache": "blocks, ceiling, mirror of the engine's cache, hit accounting; no I/O",
    "prefix_cache/tiers": "what offload tiers behind the GPU hold",
    "admission": "which turn may start; no I/O",
    "admission/eviction": "which blocks leave first",
    "admission/policies": "admission policies by name",
    "model": "MiniMax-M3's chat format, tokenizer, and the generated nano model; no I/O beyond its folder",
    "model/chat": "conversations to tokens, and generated tokens back",
    "model/m3": "MiniMax-M3's shapes, KV geometry, launch profiles and fast paths; no torch",
    "model/reference": "M3's layers in PyTorch, and the correctness gate; needs torch",
    "model/data": "the nano model's chat template and multilingual text",
    "replays": "recorded or generated agent sessions, driven through a server, and the report",
    "replays/data": "a sample trace and the word list of prompts",
    "replays/formats": "trace formats made of rows: Mooncake, Dynamo, and captures of this server",
    "replays/tuner": "searches policies and parameters on recorded sessions, and judges the best on held-back ones",
    "replays/calibrate": "an engine's speed measured and fitted, for the simulator",
    "replays/sim_engine": "the simulator behind vLLM's HTTP, metrics and KV events",
    "replays/simulator": "vLLM's scheduler and block pool simulated in extents, driven by closed-loop traces",
    "benchmarks": "runnable comparisons, one table each",
    "benchmarks/capacity": "near a full cache: sessions in a closed loop against a real vLLM, with and without the plugin",
    "benchmarks/ledger": "generated sessions, disconnects, long histories, a frozen Redis",
    "tests": "every test; `make test` runs them",
    "tests/upstream": "a scripted vLLM: HTTP and KV events as the real one sends them",
    "tests/data": "files that tests compare with",
    "docs": "guide, concepts, reference; `make docs` writes what derives from code",
    "docs/guide": "how to start, serve a real vLLM, offload, replay, connect clients, operate",
    "docs/concepts": "ledger, sessions, state, canonicaliser, hit accounting, retention, replays, embedded engine",
    "docs/reference": "settings, command line, HTTP, errors, metrics, report, policies, cases from the field",
    "deploy": "images for docker-compose.yml",
    "requirements": "pinned packages: with the CPU engine (all), without (core), LMCache (offload)",
    "docker-compose.yml": "profiles cpu, cpu-offload and mi355x, each a whole deployment",
    "Makefile": "serve, test, replay, bench, check, docs, lock",
    "pyproject.toml": "package, lint, types, import contracts",
    "CHANGELOG.md": "what changed",
    "README.md": "this page",
    "LICENSE": "Apache-2.0",
}
"""Folders and single files of README's tree; modules bring the first sentence of their docstring."""

LISTED = ("agentserve", "prefix_cache", "admission", "model", "replays", "benchmarks")
"""Packages whose modules each have a line."""

_PART = re.compile(r"<!-- derived: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_MAX_SUMMARY = 84
_LEAST_SUMMARY = 18
_PATH_WIDTH = 28


def pages() -> list[Path]:
    """README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(page: Path) -> str:
    """The text that `page` should have now."""
    if page == SETTINGS_PAGE:
        return settings_page()
    return _PART.sub(lambda part: f"<!-- derived: {part[1]} -->\n{PARTS[part[1]]()}<!-- end -->", page.read_text())


def summary(module: Path) -> str:
    """The first sentence of a module's docstring, cut at a colon or comma where it is long; "" without one."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    sentence = re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0].replace("\n", " ").rstrip(".")
    if len(sentence) > _MAX_SUMMARY:
        ends = [sentence.rfind(mark, _LEAST_SUMMARY, _MAX_SUMMARY) for mark in (": ", "; ", ", ")]
        sentence = sentence[: next((end for end in ends if end > 0), len(sentence))]
    return sentence


def tree() -> str:
    """The file tree with a line for each folder, for each module of the packages and for each other file at the top."""
    lines = []
    for path, about in TREE.items():
        if path.count("/") == 0:
            lines.append(_line(path, about, is_folder=(ROOT / path).is_dir()))
            lines += _inside(path)
    return "\n".join(["```text", *lines, "```"]) + "\n"


def _inside(folder: str) -> Iterator[str]:
    modules = sorted((ROOT / folder).glob("*.py")) if folder in LISTED or folder.split("/")[0] in LISTED else []
    for module in modules:
        about = summary(module)
        if module.name != "__init__.py" and about:
            yield _line(str(module.relative_to(ROOT)), about)
    for path, about in TREE.items():
        if path.rpartition("/")[0] == folder:
            yield _line(path, about, is_folder=True)
            yield from _inside(path)


def _line(path: str, about: str, *, is_folder: bool = False) -> str:
    name = "  " * path.count("/") + path.rpartition("/")[2] + "/" * is_folder
    return f"{name:<{_PATH_WIDTH}} {about}"


def walk() -> str:
    """The steps of a turn, as `agentserve/turns.py` says them."""
    steps = next(part for part in (turns.__doc__ or "").split("\n\n") if part.startswith("    1 "))
    return f"```text\n{dedent(steps)}\n```\n"


def identity() -> str:
    """The headers that name a session, in the order in which they are looked for."""
    rows = ["| client | session | parent | only for User-Agent |", "|---|---|---|---|"]
    for row in IDENTITY_HEADERS:
        rows.append(f"| {row.client} | {_session_header(row)} | {_code(row.parent or row.parent_agent)} | {_code(row.user_agent)} |")
    return "\n".join(rows) + "\n"


def _session_header(row: HeaderRow) -> str:
    return f"`{row.session}`, sub-agents `{row.agent}`" if row.agent else f"`{row.session}`"


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""


def rules() -> str:
    """The canonicaliser's rules, in the order in which they apply."""
    rows = ["| rule | action | what it touches | why |", "|---|---|---|---|"]
    for rule in CANONICAL_RULES.values():
        name = f"`{rule.name}`" + ("" if rule.default else " (off by default)")
        rows.append(f"| {name} | `{rule.action}` | {rule.matches} | {rule.reason} |")
    return "\n".join(rows) + "\n"


def checks() -> str:
    """The doctor's checks, in the order in which they are made."""
    rows = ["| check | reads | why |", "|---|---|---|"]
    for check in DOCTOR_CHECKS.values():
        rows.append(f"| `{check.name}` | {check.reads} | {inspect.getdoc(check.look)} |")
    return "\n".join(rows) + "\n"


def commands() -> str:
    """Help of every command but `serve`, whose flags are the settings."""
    app = build_cli()
    names = sorted(name for name in app if not name.startswith("-") and name != "serve")
    return "\n".join(_command(name, app[name]) for name in names)


def _command(name: str, app: App, level: int = 2) -> str:
    heading = f"{'#' * level} agentserve {name}\n\n"
    inner = [each for each in app if not each.startswith("-")]
    if inner:
        return "\n".join([f"{heading}{app.help}\n", *(_command(f"{name} {each}", app[each], level + 1) for each in inner)])
    # Heading and usage line are cyclopts' own, and name the program that asks for them.
    _, _, text = app.generate_docs(heading_level=2).partition("```\n\n")
    return f"{heading}{text.rstrip().replace(str(Path.home()), '~')}\n"


def cases() -> str:
    """Kinds of faults from the field, the tests that hold them, and what is open."""
    tests = held_by()
    rows = ["| | kind | held by | open |", "|---|---|---|---|"]
    for label, case in CASES.items():
        links = [f"[{test.name}](../../tests/{test.file}){' (real engine)' * test.engine}" for test in tests.get(label, ())]
        rows.append(f"| `{label}` | {case.kind} | {', '.join(links)} | {case.open} |")
    return "\n".join(rows) + "\n"


def eviction() -> str:
    """The eviction policies: what each does, what it needs to know, and its parameters with default and range."""
    rows = ["| policy | what leaves first | needs | parameters |", "|---|---|---|---|"]
    for name, choice in EVICTION_POLICIES.items():
        needs = "the future" if choice.needs_future else "return times" if choice.needs_returns else ""
        rows.append(f"| `{name}` | {choice.about} | {needs} | {_knobs(choice)} |")
    return "\n".join(rows) + "\n"


def points() -> str:
    """Published figures beside the simulator's, as `agentserve profiles --write` recorded them."""
    record = read_record()
    rows = ["| point | published | simulated | error | |", "|---|---|---|---|---|"]
    rows += [f"| {row.name} | {' | '.join(cells(row))} |" for row in record]
    return "\n".join([*rows, "", points_summary(record).capitalize() + "."]) + "\n"


def admission() -> str:
    """The admission policies: who goes first, and their parameters with default and range."""
    rows = ["| policy | who may start | parameters |", "|---|---|---|"]
    rows += [f"| `{name}` | {choice.about} | {_knobs(choice)} |" for name, choice in ADMISSION_POLICIES.items()]
    return "\n".join(rows) + "\n"


def _knobs(choice: Choice) -> str:
    defaults = choice.parameters()
    rows = choice.knobs().items()
    return "<br>".join(f"`{name}` {getattr(defaults, name):g} ({row.low:g} to {row.high:g}): {row.about}" for name, row in rows)


def body_fields() -> str:
    """The fields of the body that name a session."""
    lines = ["| field | client |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{'.'.join(row.path)}` | {row.client} |" for row in BODY_FIELDS)])


PARTS: dict[str, Callable[[], str]] = {
    "tree": tree,
    "walk": walk,
    "identity": identity,
    "body_fields": body_fields,
    "rules": rules,
    "commands": commands,
    "cases": cases,
    "checks": checks,
    "admission": admission,
    "eviction": eviction,
    "points": points,
}


def main() -> None:
    """Write every page whose derived parts have changed."""
    for page in pages():
        text = written(page)
        if text != page.read_text():
            page.write_text(text)


if __name__ == "__main__":
    main()
