"""AgentX's own harness against this server: its figures beside ours, for the same requests of the same run.

The harness (agentx-harness) is installed once into an environment of its own. It replays generated sessions, since the published corpora
are not at hand everywhere, on the embedded engine or on the server that `--url` names. Its "theoretical" hit rate follows from the
trace; ours is computed from the trace again, over the requests that its export lists. Its cached tokens are what the server's usage
told it; ours are the server's own books.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.contenders import Contender, ContenderFailed, free_port, install, running
from benchmarks.report import Options, Result, Row
from benchmarks.served_model import prepare
from replays.generator import GeneratorSettings, generate_sessions
from replays.server import ask_model
from replays.theoretical import TheoreticalHit, hit_rate, theoretical_hits
from replays.traces import TraceSet

HARNESS = Contender("agentx-harness", None, "agentx-harness==1.0.12")
SESSIONS = GeneratorSettings(16, seed=42, token_scale=1 / 16, min_turns=10, max_turns=40)
CONCURRENCY = 4
WARMUP_REQUESTS_PER_LANE = 2
IDLE_CAP_SECONDS = 2
DURATION_SECONDS, QUICK_SECONDS = 120, 40
_SPARE_SECONDS = 300
COLUMNS = ("AgentX", "agentserve", "difference")
_COUNTER = re.compile(r"^agentserve_(\w+)_tokens_total ([0-9.e+]+)$", re.MULTILINE)


class Metadata(msgspec.Struct):
    conversation_id: str
    turn_index: int
    benchmark_phase: str


class Metric(msgspec.Struct):
    value: object = None
    """A number, or for some metrics a list of them."""


class Exported(msgspec.Struct):
    """One request in the harness's export."""

    metadata: Metadata
    metrics: dict[str, Metric] = {}
    error: object = None

    def tokens(self, name: str) -> int:
        value = self.metrics.get(name, Metric()).value
        return int(value) if isinstance(value, int | float) else 0


class Percentage(msgspec.Struct):
    avg: float | None = None


class Summary(msgspec.Struct):
    theoretical_prefix_cache_hit: Percentage = msgspec.field(default_factory=Percentage)


@dataclass(frozen=True, slots=True)
class Books:
    """The server's own counts, in tokens since it started."""

    prompt: float
    cached: float
    ceiling_block: float

    @classmethod
    def read(cls, url: str) -> Books:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            counts = {name: float(value) for name, value in _COUNTER.findall(response.read().decode())}
        return cls(counts.get("prompt", 0.0), counts.get("cached", 0.0), counts.get("ceiling_block", 0.0))

    def since(self, before: Books) -> Books:
        return Books(self.prompt - before.prompt, self.cached - before.cached, self.ceiling_block - before.ceiling_block)


@contextmanager
def _server(options: Options, folder: Path) -> Iterator[str]:
    """The server to measure: `options.url`, or one on the embedded engine for as long as the body runs."""
    if options.url:
        yield options.url.rstrip("/")
        return
    port = free_port()
    command = [sys.executable, "-m", "agentserve", "serve", "--port", str(port), "--log-level", "warning"]
    with running([*command, "--cache-folder", str(options.cache_folder)], port, folder / "serve.log", "/ready"):
        yield f"http://127.0.0.1:{port}"


def _write_traces(folder: Path) -> None:
    folder.mkdir()
    for session in generate_sessions(SESSIONS):
        (folder / f"{session.id}.json").write_bytes(msgspec.json.encode(session))


def _profile(python: Path, url: str, tokenizer: Path, traces: Path, out: Path, seconds: int) -> None:
    """Run the harness. Raises ContenderFailed with the end of its output where it does not end well."""
    command = [str(python.with_name("agentx")), "profile", "--url", url, "--endpoint", "/v1/chat/completions", "--model", ask_model(url)]
    command += ["--tokenizer", str(tokenizer), "--input-file", str(traces), "--custom-dataset-type", "weka_trace", "--ui", "none"]
    command += ["--concurrency", str(CONCURRENCY), "--benchmark-duration", str(seconds), "--random-seed", "42"]
    command += ["--warmup-requests-per-lane", str(WARMUP_REQUESTS_PER_LANE), "--trace-idle-gap-cap-seconds", str(IDLE_CAP_SECONDS)]
    # A run this short on made-up traces breaks the scenario's locks, which is said so in its export.
    command += ["--unsafe-override", "--output-artifact-dir", str(out)]
    with Console(stderr=True).status(f"agentx profile, about {seconds + 40} s"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out.parent, timeout=seconds + _SPARE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ContenderFailed(f"the harness did not end within {seconds + _SPARE_SECONDS} s") from None
    if done.returncode:
        raise ContenderFailed(f"the harness ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-1500:]}")


def read_export(folder: Path) -> tuple[Summary, list[Exported]]:
    """What the harness wrote. Raises ContenderFailed where it is not what its version 1.0.12 writes."""
    try:
        lines = (folder / "profile_export.jsonl").read_bytes().splitlines()
        summary = msgspec.json.decode((folder / "profile_export_aiperf.json").read_bytes(), type=Summary)
        return summary, [msgspec.json.decode(line, type=Exported) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise ContenderFailed(f"the harness's export cannot be read: {error}") from error


def _hits(traces: Path) -> dict[tuple[str, int], TheoreticalHit]:
    """Our theoretical hit of each call, by the harness's names for stream and turn."""
    found: dict[tuple[str, int], TheoreticalHit] = {}
    for session in TraceSet(traces):
        for stream, hits in zip(session.streams, theoretical_hits(session), strict=True):
            name = f"{session.id}::sa:{stream.name}" if stream.name else session.id
            found |= {(name, index): hit for index, hit in enumerate(hits)}
    return found


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _row(name: str, theirs: float | None, ours: float | None) -> Row:
    return Row(name, dict(zip(COLUMNS, (theirs, ours, None if theirs is None or ours is None else ours - theirs), strict=True)))


def compare(summary: Summary, exported: Sequence[Exported], hits: dict[tuple[str, int], TheoreticalHit], books: Books) -> tuple[Row, ...]:
    """Their figures and ours. Raises ContenderFailed where the export names a call that the trace does not have, or no call at all."""
    good = [record for record in exported if record.error is None]
    profiled = [(r.metadata.conversation_id, r.metadata.turn_index) for r in good if r.metadata.benchmark_phase == "profiling"]
    unknown = [call for call in profiled if call not in hits]
    if unknown or not profiled:
        raise ContenderFailed(
            f"{len(profiled)} profiled calls in the export, {len(unknown)} of them not in the trace, such as {unknown[:1]}"
        )
    ours = hit_rate(hits[call] for call in profiled)
    prompt, cached = (sum(record.tokens(name) for record in good) for name in ("usage_prompt_tokens", "usage_prompt_cache_read_tokens"))
    return (
        Row("profiled requests", {"AgentX": len(profiled)}),
        Row("failed requests", {"AgentX": len(exported) - len(good)}),
        _row("theoretical prefix hit, %", summary.theoretical_prefix_cache_hit.avg, None if ours is None else 100 * ours),
        _row("prompt tokens, with warm-up", prompt, books.prompt),
        _row("actual prefix hit, %, with warm-up", _percent(cached, prompt), _percent(books.cached, books.prompt)),
        _row("ceiling in whole blocks, %, with warm-up", None, _percent(books.ceiling_block, books.prompt)),
    )


def measure(options: Options) -> Result:
    """Profile the server with the harness, and read its export."""
    python = install(HARNESS, options.cache_folder)
    prepare(options.cache_folder / "nano")
    seconds = QUICK_SECONDS if options.quick else DURATION_SECONDS
    with tempfile.TemporaryDirectory(prefix="agentserve-agentx-") as name:
        folder = Path(name)
        traces, out = folder / "traces", folder / "export"
        _write_traces(traces)
        with _server(options, folder) as url:
            before = Books.read(url)
            _profile(python, url, options.cache_folder / "nano", traces, out, seconds)
            books = Books.read(url).since(before)
        rows = compare(*read_export(out), _hits(traces), books)
    return Result(
        title="AgentX's harness against agentserve",
        columns=COLUMNS,
        rows=rows,
        notes=(
            f"{SESSIONS.num_sessions} generated sessions at 1/{1 / SESSIONS.token_scale:.0f} of their tokens, seed {SESSIONS.seed}; "
            f"{CONCURRENCY} live for {seconds} s. The harness sends canned answers, so no generated token can be a hit.",
        ),
        versions={"agentserve": version("agentserve"), "agentx-harness": HARNESS.requirement or ""},
    )
