"""`python -m agentserve`."""

from __future__ import annotations

from agentserve.cli import main

if __name__ == "__main__":
    main()
