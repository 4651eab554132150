"""Where commands print: tables to stdout, messages to stderr."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_WIDTH = 180
ERRORS = Console(stderr=True, highlight=False)


def wide_console() -> Console:
    """Where tables go: as wide as the terminal, and wide in a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
