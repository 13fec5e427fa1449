"""What a capture that is under way has done so far, told from its files by a process that has no part in it.

Rows are counted from the journal as it grows: those whose request key is the one that this run's prompts and settings make, so
that answers of other runs and settings are not taken for this one's.  A prompt is rendered only when a journal line
with its sample_id has come.  Nothing is locked and nothing is written, so a capture cannot be disturbed.  Where a
dataset is finished, its report says the rest.  This module knows no screen.
"""

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eaglet.client import Client, Expected, Failure
from eaglet.endpoint import Connection, connect, look
from eaglet.errors import EagletError, ServerError
from eaglet.files import read_json
from eaglet.journal import damage
from eaglet.lease import state_of_endpoint
from eaglet.rendering import Renderer
from eaglet.row_request import Requests
from eaglet.turn_format import TurnFormat

RATE_WINDOW = 300  # seconds of the past from which speed is told
SERVER_SECONDS = 5  # to wait for the server, which answers late under load
QUIET = 120  # seconds without a new line after which a capture without a leased server is no longer called running


class JournalTail:
    """The whole lines that a journal has gained since the last look."""

    def __init__(self, path: Path):
        self.path, self.offset, self.damaged = path, 0, 0

    def read(self) -> Iterator[dict]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self.offset += len(line)
                if damage(line[:-1]):
                    self.damaged += 1
                else:
                    yield json.loads(line)


class PromptKeys:
    """sample_id -> the request key that this run asks with, made when it is first wanted."""

    def __init__(self, path: Path, requests: Requests, renderer: Renderer):
        self.path, self.requests, self.renderer = path, requests, renderer
        self.offsets: dict[str, int] = {}  # of each prompt's line, in bytes
        self._keys: dict[str, str | None] = {}
        offset = 0
        with path.open("rb") as stream:
            for line in stream:
                if not line.isspace():
                    self.offsets[json.loads(line)["sample_id"]] = offset
                offset += len(line)

    def __len__(self) -> int:
        return len(self.offsets)

    def get(self, sample_id: str) -> str | None:
        """None for a sample that is no prompt of this run, or has no room for an answer."""
        if sample_id not in self.offsets:
            return None
        if sample_id not in self._keys:
            with self.path.open("rb") as stream:
                stream.seek(self.offsets[sample_id])
                record = json.loads(stream.readline())
            ids = self.renderer.prompt_ids(record["messages"], record["tools"], record["template_arguments"])
            request = self.requests.make(sample_id, ids)
            self._keys[sample_id] = request.key if request else None
        return self._keys[sample_id]


@dataclass
class Progress:
    """One dataset, as far as it is known."""

    dataset: str
    state: str = "no prompts"  # no prompts | waiting | running | done
    total: int | None = None  # prompts
    done: int = 0
    output_tokens: int = 0
    max_tokens: int | None = None
    finish_reasons: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)  # rows set aside, by reason
    damaged_lines: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0

    @property
    def rows_left(self) -> float | None:
        """Rows still to be answered; with a cap, about as many as it leaves room for."""
        if self.total is None:
            return None
        if self.state == "done":
            return 0
        left = max(0, self.total - self.done - self.refused.total())
        if self.max_tokens is not None and self.done:
            left = min(left, max(0, self.max_tokens - self.output_tokens) / (self.output_tokens / self.done))
        return left

    @property
    def seconds_left(self) -> float | None:
        if self.rows_left == 0:
            return 0.0
        return self.rows_left / self.rows_per_second if self.rows_left and self.rows_per_second else None

    def as_json(self) -> dict:
        return {
            "dataset": self.dataset,
            "state": self.state,
            "rows": {
                "total": self.total,
                "done": self.done,
                "refused": dict(sorted(self.refused.items())),
                "left": None if self.rows_left is None else round(self.rows_left),
            },
            "output_tokens": {"done": self.output_tokens, "cap": self.max_tokens},
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "rows_per_second": round(self.rows_per_second, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds_left": None if self.seconds_left is None else round(self.seconds_left),
            "damaged_lines": self.damaged_lines,
        }


class DatasetWatch:
    """Follows one dataset of a run."""

    def __init__(
        self, dataset: str, run_dir: Path, journal: Path, requests: Requests, renderer: Renderer, cap: int | None
    ):
        self.run_dir, self.requests, self.renderer = run_dir, requests, renderer
        self.tail = JournalTail(journal)
        self.progress = Progress(dataset, max_tokens=cap)
        self._prompts = run_dir / "prompts" / f"{dataset}.jsonl"
        self._prompts_seen: tuple | None = None
        self._keys: PromptKeys | None = None
        self._counted: set[str] = set()
        self._recent: deque[tuple[float, int]] = deque()  # (time in seconds, output tokens) of rows

    def look(self, now: float) -> Progress:
        """The state at `now`, in seconds since the epoch."""
        self._look_at_prompts()
        report = self.run_dir / "raw" / f"{self.progress.dataset}.report.json"
        if self._keys is not None:
            for entry in self.tail.read():
                self._count(entry)
        self.progress.damaged_lines = self.tail.damaged
        if report.is_file():
            self._take_report(read_json(report))
        elif self._keys is None:
            self.progress.state = "no prompts"
        else:
            leased = has_server(self.run_dir / "endpoints" / f"{self.progress.dataset}.json")
            self.progress.state = "running" if leased or self._has_grown(now) else "waiting"
        self._measure(now)
        return self.progress

    def _has_grown(self, now: float) -> bool:
        journal = self.tail.path
        return journal.is_file() and now - journal.stat().st_mtime < QUIET

    def _look_at_prompts(self) -> None:
        """Start anew when the prompts file has come or changed."""
        found = self._prompts.stat() if self._prompts.is_file() else None
        seen = (found.st_mtime_ns, found.st_size) if found else None
        if seen == self._prompts_seen:
            return
        self._prompts_seen, self._counted, self._recent = seen, set(), deque()
        self._keys = PromptKeys(self._prompts, self.requests, self.renderer) if found else None
        self.tail = JournalTail(self.tail.path)
        total = len(self._keys) if self._keys else None
        self.progress = Progress(self.progress.dataset, total=total, max_tokens=self.progress.max_tokens)

    def _count(self, entry: Mapping[str, Any]) -> None:
        key = entry.get("request_key")
        if key is None or key in self._counted or key != self._keys.get(entry["sample_id"]):
            return
        if entry["kind"] == "refused":
            self.progress.refused[entry["reason"]] += 1
        else:
            tokens = len(entry["output_ids"])
            self.progress.done += 1
            self.progress.output_tokens += tokens
            self.progress.finish_reasons[entry["finish_reason"]] += 1
            self._recent.append((entry["time"], tokens))
        self._counted.add(key)

    def _take_report(self, report: Mapping[str, Any]) -> None:
        """What the stage itself says, in place of what was counted."""
        progress = self.progress
        progress.state, progress.done = "done", report["rows"]["out"]
        progress.output_tokens = report["tokens"]["output"]
        progress.finish_reasons = Counter(report["finish_reasons"])
        progress.refused = Counter(report["rows"]["dropped"])

    def _measure(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_WINDOW:
            self._recent.popleft()
        progress = self.progress
        if progress.state != "running" or not self._recent:
            progress.rows_per_second = progress.tokens_per_second = 0.0
            return
        seconds = max(1.0, now - self._recent[0][0])
        progress.rows_per_second = len(self._recent) / seconds
        progress.tokens_per_second = sum(tokens for _, tokens in self._recent) / seconds


def total(parts: Sequence[Progress]) -> dict:
    """Sums over the datasets; `seconds_left` as if the server's speed were shared by what is left."""
    rate = sum(part.tokens_per_second for part in parts)
    waiting = [part for part in parts if part.state != "done"]
    answered = sum(part.done for part in parts)
    mean = sum(part.output_tokens for part in parts) / answered if answered else None
    left = [part.rows_left for part in waiting]
    known = rate and mean and None not in left
    return {
        "rows": {"total": sum(part.total or 0 for part in parts), "done": answered},
        "output_tokens": sum(part.output_tokens for part in parts),
        "tokens_per_second": round(rate, 1),
        "seconds_left": 0 if not waiting else round(sum(left) * mean / rate) if known else None,
    }


def has_server(endpoint: Path) -> bool:
    """Whether a server lives behind an endpoint file, ready or not; a workflow that was killed leaves the file behind."""
    try:
        return endpoint.is_file() and state_of_endpoint(endpoint) is not None
    except ServerError:  # it is being written
        return False


class ServerWatch:
    """Asks the run's server how it is, without keeping it."""

    def __init__(self, run_dir: Path, url: str | None, token_env: str | None):
        self.run_dir, self.url, self.token_env = run_dir, url, token_env
        self._client: Client | None = None

    def look(self) -> dict:
        """{health, url, tokens_per_second, running, queued}; health is none | starting | answers | late | silent."""
        try:
            connection = self._connection()
            if connection is None:
                return self._told("starting" if any(map(has_server, self._endpoints())) else "none")
            if self._client is None or self._client.connection != connection:
                expected = Expected(0, frozenset())  # nothing is generated
                self._client = Client(
                    connection, expected, max_in_flight=1, request_timeout=SERVER_SECONDS, give_up_after=0
                )
            said = self._client.get("/server_info", SERVER_SECONDS)
        except Failure as failure:
            return self._told("late" if failure.kind == "timeout" else "silent", problem=failure.message)
        except EagletError as error:
            return self._told("silent", problem=str(error))
        states = said.get("internal_states") or []
        return self._told(
            "answers",
            url=connection.url,
            tokens_per_second=_sum(states, "last_gen_throughput"),
            running=_sum(states, "num_running_reqs"),
            queued=_sum(states, "num_queue_reqs"),
        )

    def _connection(self) -> Connection | None:
        if self.url:
            with connect(url=self.url, token_env=self.token_env) as connection:  # no lease: nothing to let go of
                return connection
        return next((found for path in self._endpoints() if has_server(path) and (found := look(path))), None)

    def _endpoints(self) -> list[Path]:
        return sorted((self.run_dir / "endpoints").glob("*.json"))

    @staticmethod
    def _told(health: str, **more: Any) -> dict:
        unknown = dict.fromkeys(("url", "tokens_per_second", "running", "queued", "problem"))
        return {"health": health, **unknown, **more}


def _sum(states: Sequence[Mapping], name: str) -> float | None:
    """Over the server's data-parallel parts; None where none says it."""
    values = [state[name] for state in states if isinstance(state.get(name), int | float)]
    return sum(values) if values else None


class RunWatch:
    """Follows a run: its datasets and its server.  `config` is checked; outputs are below `run_dir` and `store`."""

    def __init__(self, config: Mapping[str, Any], run_dir: Path, store: Path):
        server = config["server"]
        turn_format = TurnFormat.load(run_dir / "target" / "turn_format.json")
        requests = Requests(turn_format, config["sampling"], server["context_length"])
        renderer, journals = Renderer(turn_format.target), store / "generations" / turn_format.fingerprint
        self.run = config["run"]
        self.server = ServerWatch(run_dir, server["url"], server["token_env"])
        self.datasets = [
            DatasetWatch(name, run_dir, journals / f"{name}.jsonl", requests, renderer, block["max_tokens"])
            for name, block in sorted(config["datasets"].items())
        ]

    def look(self, now: float) -> dict:
        """Everything as JSON says it, at `now` in seconds since the epoch."""
        parts = [watch.look(now) for watch in self.datasets]
        return {
            "run": self.run,
            "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
            "server": self.server.look(),
            "datasets": [part.as_json() for part in parts],
            "total": total(parts),
        }
