"""Which kinds of faults from the field this server holds: runs the tests that are marked with them, and counts.

    python -m benchmarks.cases [--quick]

A kind passes when each of its tests that ran passed, at least one ran, and nothing of it is open (`fault_cases.py`). A quick run takes one
test of each kind with its first parameters, none that needs the real engine, and a slow one only where there is no other. It runs two
processes beside each other, as many of its tests wait.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.fault_cases import CASES, CaseTest, case_tests
from benchmarks.report import REPOSITORY

LIMIT_SECONDS = 1200.0
QUICK_PROCESSES = 2


class CasesFailed(Exception):
    """The tests could not be run at all."""


@dataclass(frozen=True, slots=True)
class CasesResult:
    """Labels of `fault_cases.CASES`; each is in exactly one of the four."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    """A test of it failed."""
    open: tuple[str, ...]
    """Said to be open, whatever its tests say."""
    not_run: tuple[str, ...]
    """None of its tests ran: they were left out, or skipped here."""
    num_tests: int
    """Tests that ran, by parameter."""
    failures: tuple[str, ...]
    """Their names."""

    @property
    def cases_total(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.open) + len(self.not_run)

    @property
    def cases_passed(self) -> int:
        return len(self.passed)


@dataclass(frozen=True, slots=True)
class _Ran:
    """One test with its parameters; `test` is its file and function."""

    test: tuple[str, str]
    name: str
    passed: bool


def run_cases(quick: bool) -> CasesResult:
    """Run the marked tests.

    Raises:
        CasesFailed: pytest did not get as far as running tests.
    """
    if not quick:
        return _counted(_run(case_tests(), quick=False), case_tests())
    with ThreadPoolExecutor(QUICK_PROCESSES) as beside:
        ran = beside.map(lambda part: _run(part, quick=True), _parts(_one_for_each(case_tests())))
        return _counted([one for part in ran for one in part], case_tests())


def _run(tests: Iterable[CaseTest], *, quick: bool) -> list[_Ran]:
    """Run `tests` in one pytest process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        options += ["-p", "benchmarks.cases"] if quick else []
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test.file}::{test.name}" for test in tests)]
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
        if ended.returncode not in (0, 1) or not report.exists():
            raise CasesFailed(f"pytest ended with {ended.returncode}: {(ended.stdout + ended.stderr)[-2000:]}")
        return _read(report)


def _parts(tests: Sequence[CaseTest]) -> list[list[CaseTest]]:
    """`tests` for each process; those of a module stay together, as they share what it sets up."""
    files = list(dict.fromkeys(test.file for test in tests))
    return [[test for test in tests if files.index(test.file) % QUICK_PROCESSES == part] for part in range(QUICK_PROCESSES)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This module is a plugin of a quick run: of each test only the first parameters are left."""
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
    items[:] = [item for item in items if first[item.nodeid.partition("[")[0]] is item]


def _one_for_each(tests: Iterable[CaseTest]) -> list[CaseTest]:
    """Few tests that hold each kind once, those that are not slow first; in the order of `tests`, so that modules stay together."""
    missing = {label for label, case in CASES.items() if not case.open}
    chosen = []
    for test in sorted((test for test in tests if not test.engine), key=lambda test: test.slow):
        if missing & set(test.cases):
            missing -= set(test.cases)
            chosen.append(test)
    return sorted(chosen, key=lambda test: test.file)


def _read(report: Path) -> list[_Ran]:
    """The tests of a JUnit report that were not skipped."""
    ran = []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            name = case.get("name", "")
            file = Path(case.get("file", "")).name
            failed = case.find("failure") is not None or case.find("error") is not None
            ran.append(_Ran((file, name.partition("[")[0]), name, not failed))
    return ran


def _counted(ran: Iterable[_Ran], tests: Iterable[CaseTest]) -> CasesResult:
    outcomes: dict[tuple[str, str], list[_Ran]] = defaultdict(list)
    for one in ran:
        outcomes[one.test].append(one)
    by_case: dict[str, list[_Ran]] = {label: [] for label in CASES}
    for test in tests:
        for label in test.cases:
            by_case[label] += outcomes[test.file, test.name]
    groups: dict[str, list[str]] = {"passed": [], "failed": [], "open": [], "not_run": []}
    for label, results in by_case.items():
        groups[_group(label, results)].append(label)
    failures = tuple(one.name for results in outcomes.values() for one in results if not one.passed)
    num_tests = sum(len(results) for results in outcomes.values())
    return CasesResult(**{name: tuple(labels) for name, labels in groups.items()}, num_tests=num_tests, failures=failures)


def _group(label: str, results: list[_Ran]) -> str:
    if CASES[label].open:
        return "open"
    if not results:
        return "not_run"
    return "passed" if all(one.passed for one in results) else "failed"


def main() -> int:
    result = run_cases(quick="--quick" in sys.argv[1:])
    print(f"cases_total {result.cases_total}  cases_passed {result.cases_passed}  tests {result.num_tests}")
    for name in ("failed", "open", "not_run", "failures"):
        if getattr(result, name):
            print(f"{name}: {' '.join(getattr(result, name))}")
    return 1 if result.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
