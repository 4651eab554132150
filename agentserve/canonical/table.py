"""The rules by name, in the order in which they apply. A new rule: its function in a module beside this one, and a row here."""

from __future__ import annotations

from agentserve.canonical.dates import find_clocks, find_dates
from agentserve.canonical.git_status import find_git_status
from agentserve.canonical.lines import find_billing_lines, find_session_lines, find_token_countdowns
from agentserve.canonical.order import order_memories, order_reminders
from agentserve.canonical.rules import Action, Rule, cutting
from agentserve.canonical.tools import drop_cache_control, order_schema_keys, order_tools

_ROWS = (
    Rule(
        "billing_line",
        Action.DROP,
        "Its hash changes on every request and stands before everything else.",
        "lines that begin with `x-anthropic-billing-header:`",
        cutting(find_billing_lines),
    ),
    Rule(
        "token_countdown",
        Action.DROP,
        "It changes on every request, and stale values pile up behind it.",
        "`<total_tokens>N tokens left</total_tokens>`, `Token usage: N/N; N remaining`, whole lines like `Context left: N %`",
        cutting(find_token_countdowns),
    ),
    Rule(
        "git_status",
        Action.MOVE,
        "It changes with every edit that the agent makes.",
        "`gitStatus:` or a `Git status` heading with the lines that git writes below it; `<git_status>` blocks",
        cutting(find_git_status),
    ),
    Rule(
        "clock",
        Action.MOVE,
        "It changes every minute or second.",
        "a label such as `Current time:` or `The current date and time is` with a time of day, to the end of its sentence",
        cutting(find_clocks),
    ),
    Rule(
        "date",
        Action.MOVE,
        "It changes at midnight, and it keeps sessions of two days from sharing a head.",
        "a label such as `Today's date:` or `Today is` with a date, to the end of its sentence",
        cutting(find_dates),
    ),
    Rule(
        "session_lines",
        Action.MOVE,
        "They keep sessions from sharing a head.",
        "whole lines such as `Log file: …`, `Session ID: …`, `Working directory: …`, `Scratchpad: …`",
        cutting(find_session_lines),
        default=False,
    ),
    Rule(
        "memory_order",
        Action.ORDER,
        "A similarity search brings the same memories in another order.",
        "bullets of one list between `<memories>` tags and their kin, dated lines below `User Context:`",
        order_memories,
    ),
    Rule(
        "reminder_order",
        Action.ORDER,
        "Hooks that run side by side write their reminders in any order.",
        "neighbouring `<system-reminder>` or `<reminder>` blocks",
        order_reminders,
    ),
    Rule(
        "cache_control",
        Action.DROP,
        "A mark for another provider's cache; it rolls from turn to turn.",
        "`cache_control` in a tool's schema (beside it, and in messages, no dialect reads it)",
        drop_cache_control,
    ),
    Rule(
        "schema_keys",
        Action.ORDER,
        "Clients build schemas from hash maps; the order of keys has no meaning.",
        "keys of tool schemas; never the order of list values such as `required` and `enum`",
        order_schema_keys,
    ),
    Rule(
        "tool_order",
        Action.PIN,
        "Tool servers answer and reconnect in any order.",
        "the order of a set of tools; another set is another head",
        order_tools,
    ),
)

CANONICAL_RULES: dict[str, Rule] = {rule.name: rule for rule in _ROWS}
"""Every rule there is; `--canonicalise-off` and `--canonicalise-on` take these names."""
