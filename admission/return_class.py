"""Why a session is idle, as a class of idle times that are alike: root or sub-agent × what the last turn ended with.

A class is a name such as `root/tool:slow:shell`; what follows a colon refines what stands before it, and `@` names a tenant. The recorded
sessions do not name their tools, so that the tool is what refines last. `5~root/tool:slow:shell` is the same class at a level of
`admission.last_turn`: the same idle times, and other odds that the session is over.
"""

from __future__ import annotations

from collections.abc import Iterable

UNKNOWN = "root/unknown"

TOOL_BUCKETS: dict[str, tuple[str, ...]] = {
    "ask": ("askuserquestion", "exitplanmode", "ask_followup_question", "request_user_input", "question"),
    "agent": ("task", "agent", "subagent", "spawn_agent", "new_task", "wait_agent"),
    "shell": ("bash", "shell", "exec", "exec_command", "local_shell", "run_terminal_cmd", "execute_command", "bashoutput", "powershell"),
    "web": ("webfetch", "websearch", "web_search", "web_fetch", "fetch", "browser_action"),
    "mcp": (),
    "other": (),
    "file": (
        *("read", "write", "edit", "multiedit", "glob", "grep", "ls", "notebookedit", "notebookread", "apply_patch", "list", "view"),
        *("read_file", "write_to_file", "replace_in_file", "search_files", "list_files", "list_dir", "str_replace_based_edit_tool"),
    ),
    "note": ("todowrite", "todoread", "update_plan", "toolsearch", "taskupdate", "taskcreate", "tasklist", "skill"),
}
"""Tools of known clients by how long they take, slowest first: a turn that calls several waits for the slowest. Names in lower case."""

_BUCKET_OF = {name: bucket for bucket, names in TOOL_BUCKETS.items() for name in names}
_SLOWNESS = {bucket: position for position, bucket in enumerate(TOOL_BUCKETS)}


def tool_bucket(tools: Iterable[str]) -> str | None:
    """The bucket of the slowest tool called; None when none was."""
    buckets = [_bucket(name.lower()) for name in tools]
    return min(buckets, key=_SLOWNESS.__getitem__) if buckets else None


def _bucket(name: str) -> str:
    return _BUCKET_OF.get(name) or ("mcp" if name.startswith("mcp__") else "other")


def return_class(*, is_subagent: bool, calls_tools: bool, ends_turn: bool) -> str:
    """The class of a turn that has just ended."""
    origin = "sub" if is_subagent else "root"
    why = "tool" if calls_tools else "end_turn" if ends_turn else "unknown"
    return f"{origin}/{why}"


def with_tool(name: str, tools: Iterable[str]) -> str:
    """The class refined by the slowest tool that the turn called, if it called any."""
    bucket = tool_bucket(tools)
    return f"{name}:{bucket}" if bucket else name


def awaits_agent(name: str) -> bool:
    """Whether the turn called a sub-agent, as far as the class says."""
    return name.partition("@")[0].endswith(":agent")


def with_tenant(name: str, tenant: str) -> str:
    return f"{name}@{tenant}"


def with_level(name: str, level: int | None) -> str:
    """The class at a level of `admission.last_turn`; None: as it is."""
    return name if level is None else f"{level}~{name}"


def split_level(name: str) -> tuple[str, int | None]:
    """The class, and the level that stands before it."""
    level, mark, rest = name.partition("~")
    return (rest, int(level)) if mark and level.isdecimal() else (name, None)


def parent_class(name: str) -> str | None:
    """The class that a class refines; None for the last one."""
    base, at, _ = name.rpartition("@")
    if at:
        return base
    coarse, colon, _ = name.rpartition(":")
    if colon:
        return coarse
    origin, _, why = name.partition("/")
    if why and why != "unknown":
        return f"{origin}/unknown"
    return UNKNOWN if name != UNKNOWN else None


def lineage(name: str) -> list[str]:
    """The class and those that it refines: what is seen of it is seen of them all. The common fallbacks are not among them."""
    names = [name]
    while "@" in names[-1] or ":" in names[-1]:
        names.append(names[-1].rpartition("@" if "@" in names[-1] else ":")[0])
    return names
