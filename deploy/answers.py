"""Health check of the containers: exit code 0 if every URL given answers 200. Images have Python, but not always curl."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def answers(url: str) -> bool:
    """Whether `url` answers 200 within three seconds."""
    try:
        with urllib.request.urlopen(url, timeout=3) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if all(map(answers, sys.argv[1:])) else 1)
