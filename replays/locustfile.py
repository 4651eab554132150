"""The replay as a locust file: `locust -f replays/locustfile.py --host URL -u 8 --replay-traces FOLDER …`.

One locust user is one lane. It runs headless, with the web UI, and over distributed workers, where each worker plays its share of
the sessions and its records go to the master with locust's own reports. `agentserve replay` runs it headless in a child process.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import gevent
import msgspec
from locust import User, events, task
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from replays.client import ChatClient, Reply
from replays.formats import open_traces
from replays.lanes import Conductor, Draw
from replays.metrics import parse_metrics
from replays.options import ReplayOptions, from_namespace, option_fields, parse_scale
from replays.records import End, Entry, Header, Phase, Record, write_entries
from replays.row_faults import RowFaults, say_rows
from replays.script import TOOLS, ToolScript, embedded_model_folder
from replays.server import ask_engine, ask_model, get

_PROGRESS_SECONDS = 5.0
_MAX_CONNECTIONS = 4096


def add_arguments(parser: ArgumentParser) -> None:
    """locust's command line and web form gain the replay's options; each can also be set by AGENTSERVE_REPLAY_<NAME>."""
    group: Any = parser.add_argument_group("agent session replay")
    for name, default, kind, text in (
        ("traces", "", str, "Folder of .json traces, a .json file, or .jsonl with one session a line."),
        ("records", "", str, "File to write the records to when the replay ends."),
        ("metrics_url", "", str, "Where the engine's metrics are; empty: /metrics of the host."),
        ("run", "", str, "Name of the run in cache-bust lines; empty: a new one each time."),
        *option_fields(),
    ):
        words: dict[str, Any] = {"help": text, "default": default, "env_var": f"AGENTSERVE_REPLAY_{name.upper()}"}
        if kind is bool:
            words["action"] = "store_true"
        elif isinstance(kind, tuple):
            words["choices"] = kind
        else:
            words["type"] = parse_scale if name == "scale" else kind
        group.add_argument(f"--replay-{name.replace('_', '-')}", **words)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Replay:
    """One replay in one locust process: a master collects, a worker plays, a local runner does both."""

    def __init__(self, environment: Any) -> None:
        namespace: Namespace = environment.parsed_options
        self._environment = environment
        self.options: ReplayOptions = from_namespace(namespace)
        self._traces = Path(namespace.replay_traces)
        self._records_path = Path(namespace.replay_records) if namespace.replay_records else None
        self._is_alone = not namespace.replay_run  # `agentserve replay` names the run, and has told of bad rows before
        self._run = namespace.replay_run or uuid4().hex[:8]
        self._url = str(environment.host or namespace.host or "").rstrip("/")
        self._metrics_url = namespace.replay_metrics_url or f"{self._url}/metrics"
        self._entries: list[Entry] = []
        self._phase: Phase = "warmup"
        self._faults = RowFaults(strict=False)
        self._num_sent = self._num_failed = self._num_workers_done = 0
        self._plays = not isinstance(environment.runner, MasterRunner)
        self._collects = not isinstance(environment.runner, WorkerRunner)
        self.conductor: Conductor | None = None
        self._client: ChatClient | None = None
        self._helpers: list[gevent.Greenlet] = []

    def start(self, num_lanes: int) -> None:
        """Look at traces and server, then wait for the lanes. Raises OSError when there is no server, ValueError for what cannot be."""
        script = self._script()
        traces = open_traces(self._traces, faults=self._faults)
        model = self.options.model or ask_model(self._url)
        if self._collects:
            self._entries.append(self._header(model, num_lanes))
            self._helpers.append(gevent.spawn(self._sample))
            self._helpers.append(gevent.spawn(self._show_progress))
        if self._plays:
            first, step = self._share()
            live = self.options.assistant == "live"
            self._client = ChatClient(self._url, concurrency=_MAX_CONNECTIONS, keep_answers=live)
            draw = Draw(traces, first, step, self.options.once, self._faults)
            template_tokens = self._client.template_tokens(model, {"tools": TOOLS} if script is not None else {})
            self.conductor = Conductor(
                self.options, draw, self._client, model, self._run, self.add, self.end, script=script, template_tokens=template_tokens
            )

    def _script(self) -> ToolScript | None:
        if self.options.script == "none":
            return None
        if self.options.assistant != "live":
            raise ValueError("--script tools needs --assistant live: canned answers call no tools")
        return ToolScript.load(Path(self.options.model_folder) if self.options.model_folder else embedded_model_folder())

    def _share(self) -> tuple[int, int]:
        """(this process's number, how many play)."""
        runner = self._environment.runner
        if not isinstance(runner, WorkerRunner):
            return 0, 1
        return max(0, runner.worker_index), max(1, self._environment.parsed_options.expect_workers or 1, runner.worker_index + 1)

    def _header(self, model: str, num_lanes: int) -> Header:
        options = self.options
        return Header(
            engine=ask_engine(self._url, model),
            trace=self._traces.name,
            seed=options.seed,
            concurrency=num_lanes,
            scale=options.scale,
            time_scale=options.time_scale,
            assistant=options.assistant,
            url=self._url,
            marker=options.marker,
            delays="zero" if options.drops_idle_times else "kept",
        )

    def add(self, record: Record, reply: Reply) -> None:
        """Keep a record, and let locust count it."""
        self._keep(record)
        self._environment.events.request.fire(
            request_type="POST",
            name=f"{record.phase} turn",
            response_time=(record.ended - record.started) * 1000,
            response_length=reply.num_bytes,
            exception=RuntimeError(record.error) if record.error else None,
            context={},
        )

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        if isinstance(entry, Record):
            self._phase = entry.phase
            self._num_sent += 1
            self._num_failed += entry.error is not None

    def end(self, end: End) -> None:
        """Profiling is over in this process."""
        self._entries.append(end)
        runner = self._environment.runner
        if isinstance(runner, WorkerRunner):
            runner.send_message("replay_done", msgspec.to_builtins(self.take_entries()))
        else:
            gevent.spawn(self._finish)

    def take_entries(self) -> list[Entry]:
        taken, self._entries = self._entries, []
        return taken

    def receive(self, entries: list[Any]) -> None:
        """Entries that a worker sent."""
        for entry in msgspec.convert(entries, list[Entry]):
            self._keep(entry)

    def worker_done(self, entries: list[Any]) -> None:
        self.receive(entries)
        self._num_workers_done += 1
        if self._num_workers_done >= self._environment.runner.worker_count:
            gevent.spawn(self._finish)

    def _finish(self) -> None:
        """Stop the users; headless, also the process. In the web UI the replay can be started again."""
        self.write()
        options = self._environment.parsed_options
        if getattr(options, "headless", False) or getattr(options, "autoquit", -1) >= 0:
            self._environment.runner.quit()
        else:
            self._environment.runner.stop()

    def write(self) -> None:
        """Write what was collected, once."""
        for helper in self._helpers:
            helper.kill()
        if self._collects and self._entries:
            self._look()  # a run shorter than the interval has a sample too, and each run the state that it left
        if self._collects and self._records_path is not None and self._entries:
            write_entries(self._records_path, self.take_entries())
        if self._plays and self._is_alone:
            for line in say_rows(self._faults.report()):
                _say(line)
        if self._client is not None:
            self._client.close()

    def _sample(self) -> None:
        while True:
            self._look()
            gevent.sleep(self.options.sample_interval)

    def _look(self) -> None:
        """Take one sample of the engine's metrics."""
        body = get(self._metrics_url)
        if body is not None:
            phase = self.conductor.phase if self.conductor is not None else self._phase
            self._entries.append(parse_metrics(body.decode(errors="replace"), time=monotonic(), phase=phase))

    def _show_progress(self) -> None:
        started = monotonic()
        while True:
            gevent.sleep(_PROGRESS_SECONDS)
            in_flight = f", {self.conductor.num_in_flight} in flight" if self.conductor is not None else ""
            _say(f"{self._phase}: {monotonic() - started:.0f} s, {self._num_sent} requests{in_flight}, {self._num_failed} failed")


_REPLAYS: dict[int, tuple[Any, Replay]] = {}
"""The replay of each locust environment: locust hands its listeners nothing else to keep state by."""


def start_replay(environment: Any, **_: object) -> None:
    """At test start: build the replay, or stop with exit code 2 and a message."""
    replay = Replay(environment)
    _REPLAYS[id(environment)] = (environment, replay)
    try:
        replay.start(int(environment.parsed_options.num_users or 1))
    except (OSError, ValueError, msgspec.DecodeError) as error:
        _say(f"error: {error}")
        environment.process_exit_code = 2
        gevent.spawn(environment.runner.quit)


def expect_lanes(**_: object) -> None:
    """All users are there. (The event's own count is of all processes together.)"""
    for environment, replay in _REPLAYS.values():
        if replay.conductor is not None:
            replay.conductor.expect(environment.runner.user_count)


def stop_replay(environment: Any, **_: object) -> None:
    """At the end, however it came: write what there is."""
    if id(environment) in _REPLAYS:
        _REPLAYS[id(environment)][1].write()


class LaneUser(User):  # type: ignore[misc]  # locust has no types
    """One lane."""

    @task  # type: ignore[untyped-decorator]  # locust has no types
    def play(self) -> None:
        """Play session trees until the replay is over."""
        _, replay = _REPLAYS[id(self.environment)]
        if replay.conductor is not None:
            replay.conductor.add_lane().run()
        raise StopUser()


def send_report(client_id: str, data: dict[str, Any]) -> None:
    """A worker's report to the master carries its new records."""
    for _, replay in _REPLAYS.values():
        data["replay_entries"] = msgspec.to_builtins(replay.take_entries())


def take_report(client_id: str, data: dict[str, Any]) -> None:
    """The master takes the records out of a worker's report."""
    for _, replay in _REPLAYS.values():
        replay.receive(data.get("replay_entries", []))


def prepare(environment: Any, **_: object) -> None:
    """At locust's own start: the message by which workers end the replay."""
    if isinstance(environment.runner, MasterRunner):
        environment.runner.register_message("replay_done", lambda environment, msg: _REPLAYS[id(environment)][1].worker_done(msg.data))


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(prepare)
events.test_start.add_listener(start_replay)
events.spawning_complete.add_listener(expect_lanes)
events.quitting.add_listener(stop_replay)
events.report_to_master.add_listener(send_report)
events.worker_report.add_listener(take_report)
