"""Runs a command so that it cannot outlive the process that wanted it: `python guard.py COMMAND ARG…`, standard library only.

The guard's standard input is a pipe whose other end its parent holds. The pipe ends when the parent closes it and also when the
parent dies in any way, SIGKILL included; the guard then stops the command's whole process group. Should the guard itself be killed,
the kernel ends the command (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def _die_with_guard() -> None:
    if sys.platform == "linux":
        # SIGTERM and not SIGKILL, so that vLLM still ends its own engine process.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Let the command end in its own order, then kill whatever of its group is left."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _end_pipe_on_exit(child: subprocess.Popen[bytes], write_end: int) -> None:
    child.wait()
    os.close(write_end)


def main() -> int:
    # Signals to the guard (a terminal's Ctrl-C, a service manager's stop) are the parent's to act on: it closes the pipe.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_prepare_child)
    exited, write_end = os.pipe()
    threading.Thread(target=_end_pipe_on_exit, args=(child, write_end), daemon=True).start()
    select.select([sys.stdin.fileno(), exited], [], [])
    _stop(child)
    # A shell's convention: 128 + n for a command that signal n ended.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _prepare_child() -> None:
    # Ignored signals stay ignored over exec, so they are handed back their defaults.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _die_with_guard()


if __name__ == "__main__":
    sys.exit(main())
