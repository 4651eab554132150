"""Whatever happens to the process that wanted a guarded command, the command and its children end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentserve.engines import guard
from tests.processes import living, wait_until

GUARD = (sys.executable, "-I", "-S", guard.__file__)


@contextmanager
def guarded(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*GUARD, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        yield process


def family(mark: str) -> list[int]:
    """The processes whose command line holds `mark`, the guard itself left out."""
    return [process.pid for process in living() if mark in process.command and guard.__file__ not in process.command]


@pytest.fixture
def stubborn(tmp_path: Path) -> str:
    """A program that ignores every polite signal, and so does its child."""
    program = tmp_path / "stubborn.py"
    program.write_text(
        textwrap.dedent("""
            import os, signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.fork()
            time.sleep(600)
        """)
    )
    return str(program)


@pytest.fixture
def polite(tmp_path: Path) -> str:
    """A program with a child, that takes its child with it on SIGTERM, as vLLM does."""
    program = tmp_path / "polite.py"
    program.write_text(
        textwrap.dedent("""
            import os, signal, sys, time
            child = os.fork()
            if child:
                signal.signal(signal.SIGTERM, lambda *_: (os.kill(child, signal.SIGKILL), sys.exit(0)))
            time.sleep(600)
        """)
    )
    return str(program)


def close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def test_closing_the_pipe_ends_a_command_that_ignores_sigterm_and_its_children(stubborn: str) -> None:
    with guarded(sys.executable, stubborn) as process:
        assert wait_until(lambda: len(family(stubborn)) == 2, 5)
        close_pipe(process)
        process.wait(guard.GRACE_SECONDS + 2)
        assert wait_until(lambda: not family(stubborn), 1)


def test_a_killed_parent_takes_the_command_and_its_children_with_it(stubborn: str) -> None:
    parent = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", parent, *GUARD, sys.executable, stubborn]) as process:
        assert wait_until(lambda: len(family(stubborn)) >= 2, 5)
        process.kill()
    assert wait_until(lambda: not family(stubborn), 5)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's death on Linux only")
def test_a_killed_guard_takes_the_command_with_it(polite: str) -> None:
    with guarded(sys.executable, polite) as process:
        assert wait_until(lambda: len(family(polite)) == 2, 5)
        process.kill()
        assert wait_until(lambda: not family(polite), 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_the_guard_are_left_to_its_parent(polite: str, number: int) -> None:
    with guarded(sys.executable, polite) as process:
        assert wait_until(lambda: len(family(polite)) == 2, 5)
        os.kill(process.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        close_pipe(process)


@pytest.mark.parametrize(
    ("program", "code"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("print('done')", 0)],
)
def test_the_guard_ends_with_its_command_and_passes_its_code_on(program: str, code: int) -> None:
    with guarded(sys.executable, "-c", program) as process:
        assert process.wait(10) == code


def test_children_of_a_command_that_ended_are_not_left(tmp_path: Path) -> None:
    mark = str(tmp_path / "child")
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])"
    with guarded(sys.executable, "-c", program, mark) as process:
        process.wait(10)
    assert wait_until(lambda: not family(mark), 1)
