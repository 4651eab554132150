"""Stop strings: the client never sees one, though the engine may have generated it whole or in part."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from model.chat import Delta, TextDelta
from model.conversation import AssistantItem


class StopCutter:
    """Withholds text that may be the start of a stop string, and cuts the answer at the first whole one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._hold = max(map(len, stop), default=1) - 1
        self._stop = tuple(stop)
        self._held = ""
        self._shown: list[str] = []
        self._cut = False

    def feed(self, deltas: list[Delta]) -> list[Delta]:
        """What of `deltas` may be shown now."""
        if not self._stop:
            return deltas
        out: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, TextDelta):
                self._show(out, len(self._held))
                out.append(delta)
            elif not self._cut:
                self._held += delta.text
                self._show(out, self._showable())
        return out

    def finish(self, deltas: list[Delta]) -> list[Delta]:
        """The rest, after the last step."""
        out = self.feed(deltas)
        if self._stop:
            self._show(out, len(self._held))
        return out

    def item(self, item: AssistantItem) -> AssistantItem:
        """The answer as the client saw it."""
        return structs.replace(item, text="".join(self._shown)) if self._cut else item

    @property
    def has_cut(self) -> bool:
        """Whether the engine has generated more than the client saw."""
        return self._cut

    def _showable(self) -> int:
        """How many of the held characters may be shown; what follows a stop string is dropped."""
        found = [at for at in map(self._held.find, self._stop) if at >= 0]
        if not found:
            return len(self._held) - self._hold
        self._cut = True
        self._held = self._held[: min(found)]
        return len(self._held)

    def _show(self, out: list[Delta], length: int) -> None:
        if length <= 0:
            return
        text, self._held = self._held[:length], self._held[length:]
        self._shown.append(text)
        out.append(TextDelta(text))
