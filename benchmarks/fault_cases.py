"""Kinds of faults that people who run agents against engines report, by label, and the tests that hold each: those marked `case(label)`.

A kind counts as passed when all of its tests pass and `open` is empty; what `open` says is not there yet, or only in a part.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tests"
ENGINE_FIXTURES = frozenset({"engine", "small_engine"})
"""A test that asks for one of these runs on the real vLLM."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind in a few words. `open`: what is missing, and why; empty where nothing is."""

    kind: str
    open: str = ""


@dataclass(frozen=True, slots=True)
class CaseTest:
    """A test function that is marked with `cases`."""

    file: str
    name: str
    cases: tuple[str, ...]
    engine: bool
    slow: bool


CASES: dict[str, Case] = {
    "PFX-01": Case("a billing line at the head that changes with every call"),
    "PFX-03": Case("a token countdown that grows in the system text"),
    "PFX-04": Case("a clock in the system text"),
    "PFX-06": Case("a git status in the system text"),
    "PFX-07": Case("system messages in the middle of a history"),
    "PFX-08": Case("cache marks that wander and flip the form of content"),
    "PFX-09": Case("tools in another order"),
    "PFX-10": Case("schema keys in another order, across sessions too"),
    "PFX-11": Case("tools that come late, go and come back"),
    "PFX-12": Case("an early tool result that is replaced and restored"),
    "PFX-13": Case("a reminder in the newest message that the next history lacks"),
    "PFX-14": Case("a path or id of one session near the head"),
    "PFX-15": Case("thinking levels that change between calls"),
    "TOK-01": Case("generated ids that are not the text's own encoding"),
    "TOK-03": Case("an engine that leaves ids out of its stream"),
    "TOK-04": Case("arguments in another order and spacing"),
    "TOK-05": Case("escapes in arguments that come back"),
    "TOK-07": Case("null, empty and absent content beside calls"),
    "TOK-08": Case("reasoning that the client leaves out"),
    "TOK-09": Case("reasoning that comes back in another field or inline"),
    "TOK-10": Case("generation prompt and rendered history that agree"),
    "TOK-11": Case("white space that clients trim"),
    "TOK-13": Case("an answer cut at its limit, then gone on from"),
    "TOK-14": Case("a call that was cut, in the history"),
    "SES-02": Case("no lock over a stream"),
    "SES-04": Case("regenerated and edited turns as branches"),
    "SES-05": Case("compaction in its forms"),
    "SES-06": Case("agents that start at once on one cold head"),
    "SES-07": Case("side requests beside a main session"),
    "SES-09": Case("state that is gone while the client has its history"),
    "SES-10": Case("whole histories of Responses items without ids"),
    "SES-11": Case("an answer that the user stopped, in the next history"),
    "INP-02": Case("bodies that are not UTF-8"),
    "INP-03": Case("NUL and other control characters"),
    "INP-05": Case("deeply nested JSON"),
    "INP-06": Case("NaN, infinities and repeated keys"),
    "INP-07": Case("call ids that repeat"),
    "INP-08": Case("results of parallel calls in any order"),
    "INP-09": Case("results without calls, calls without results"),
    "INP-10": Case("odd orders of roles, empty messages"),
    "INP-11": Case("images"),
    "INP-12": Case("text that normalisation would change"),
    "INP-13": Case("histories of thousands of messages"),
    "PAR-01": Case("max_tokens missing or null"),
    "PAR-02": Case("max_tokens out of range or of another type"),
    "PAR-03": Case("prompts longer than the context"),
    "PAR-04": Case("n other than 1"),
    "PAR-05": Case("log probabilities"),
    "PAR-06": Case("stop strings over chunk borders"),
    "PAR-07": Case("tenants that share no prefix"),
    "PAR-08": Case("fields that mean nothing to the prompt"),
    "SSE-01": Case("bytes of an engine's stream split inside characters"),
    "SSE-02": Case("every form of an engine's event stream"),
    "SSE-03": Case("silence in queue, prefill and withheld text"),
    "SSE-05": Case("clients that leave in a stream"),
    "SSE-07": Case("usage at the end of a stream"),
    "SSE-08": Case("the grammar and counts of Anthropic's events"),
    "SSE-09": Case("one identity per item of a Responses stream"),
    "SSE-10": Case("slow readers"),
    "HTTP-01": Case("compressed bodies, bombs among them"),
    "HTTP-02": Case("large chunked bodies"),
    "HTTP-03": Case("bodies that end early"),
    "HTTP-04": Case("Expect: 100-continue"),
    "HTTP-06": Case("wrong methods, types, paths and bodies"),
    "HTTP-07": Case("senders that dawdle"),
    "UPS-02": Case("an engine that is dead though healthy"),
    "UPS-03": Case("an engine that says 429 or 503"),
    "UPS-04": Case("a connection that ends before the first byte"),
    "UPS-05": Case("more sessions than the cache holds"),
    "UPS-06": Case("hits that stop while load goes on"),
    "UPS-07": Case("a hot head and balanced load"),
    "KVM-01": Case("gaps in event numbers"),
    "KVM-02": Case("replays that answer late"),
    "KVM-03": Case("event numbers that begin elsewhere or go back"),
    "KVM-04": Case("caches that are cleared, said or unsaid"),
    "KVM-05": Case("blocks that were there before the mirror"),
    "KVM-06": Case("several KV groups with the same hashes"),
    "KVM-07": Case("block sizes that differ from what is expected"),
    "KVM-08": Case("block hashes that are the same in every process"),
    "KVM-09": Case("salt, adapter and image of one name"),
    "KVM-10": Case("ranks that disagree about an external hit"),
    "KVM-11": Case("counts that contradict each other"),
    "KVM-12": Case("a part of a chunk loaded over the engine's blocks"),
    "KVM-13": Case("generated tokens that are offloaded"),
    "KVM-14": Case("preempted tokens that count as hits"),
    "KVM-15": Case("keys that collide"),
    "OPS-02": Case("a breaker that follows its table"),
    "OPS-03": Case("cancelled calls to the store"),
    "OPS-04": Case("failover of the store"),
    "OPS-05": Case("a limit on open files"),
    "OPS-06": Case("clocks that jump"),
    "TRC-01": Case("trace files with bad rows"),
    "TRC-02": Case("where an assistant's text in a replay comes from"),
    "TRC-03": Case("nonces, delays and whose hits they are"),
    "TRC-04": Case("cached tokens that are unknown"),
}


def case_tests() -> list[CaseTest]:
    """Every marked test, by file and line."""
    return [test for file in sorted(FOLDER.glob("test_*.py")) for test in _marked(file)]


def held_by() -> dict[str, list[CaseTest]]:
    """The tests of each label that a test carries; a label may be none of `CASES`."""
    found: dict[str, list[CaseTest]] = {}
    for test in case_tests():
        for case in test.cases:
            found.setdefault(case, []).append(test)
    return found


def _marked(file: Path) -> Iterator[CaseTest]:
    module = ast.parse(file.read_text())
    module_marks = [node for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    all_on_engine = any("pytest.mark.engine" in ast.unparse(node.value) for node in module_marks)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    own_fixtures = {node.name for node in functions if _asks(node) & ENGINE_FIXTURES and not node.name.startswith("test_")}
    for node in functions:
        labels = tuple(label for decorator in node.decorator_list for label in _labels(decorator))
        if labels:
            marks = {ast.unparse(decorator) for decorator in node.decorator_list}
            engine = all_on_engine or "pytest.mark.engine" in marks or bool(_asks(node) & (ENGINE_FIXTURES | own_fixtures))
            yield CaseTest(file.name, node.name, labels, engine, "pytest.mark.slow" in marks)


def _asks(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


def _labels(decorator: ast.expr) -> list[str]:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.case":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []
