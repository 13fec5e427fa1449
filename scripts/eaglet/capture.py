"""The capture of one dataset: which rows are still to be asked, in which order, up to where, and the file they make.

Rows pass through a window in file order: a chunk of prompts is rendered and looked up in the journals, what is missing is
asked in the order of common prefixes (the server's prefix cache then serves system prompts and tool schemas), and rows
leave the window at its front, in file order, into the raw file.  So memory is bounded by the window, the raw file is the
same whatever happened on the way, and the token cap is decided on a prefix of the file.  This module knows prompts,
journals and the client; what a server must be is the guard's matter.

The window trades a little of the prefix cache for memory and for the cap: sorting all 88,000 prompts would join every
common prefix, but would have to hold them, and would ask for rows far behind a cap.
"""

import math
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eaglet import guard
from eaglet.client import Client, RowRefused, Stopped
from eaglet.errors import CaptureError, RecordError, StoreError
from eaglet.guard import Sample
from eaglet.journal import NO_ROOM, Generation, Generations, Refusal
from eaglet.progress import progress
from eaglet.records import RecordWriter, iter_jsonl, iter_tables
from eaglet.rendering import Renderer
from eaglet.row_request import Requests
from eaglet.turn_format import TurnFormat
from eaglet.window import Row, Window

LOOK_AHEAD = 1024  # rows that are ordered among each other
WINDOW_CHUNKS = 4  # chunks between the first unanswered row and the last one that is asked
WRITE_ROWS = 256
LISTED_ROWS = 100  # of the rows set aside, in the report
REFUSED_ROWS, REFUSED_SHARE = 16, 0.1  # more refusals than both: the server is at fault, not the rows


def read_prompts(path: str | Path) -> Iterator[dict]:
    """The records of a prompts file.  Raises RecordError with the line."""
    for number, record in iter_jsonl(path):
        if not isinstance(record.get("sample_id"), str) or not isinstance(record.get("messages"), list):
            raise RecordError(f"{path}:{number}: a prompt has sample_id and messages; run the prompts stage again")
        yield record


def count_prompts(path: str | Path) -> int:
    with open(path, "rb") as stream:
        return sum(not line.isspace() for line in stream)


def choose_samples(path: str | Path, count: int) -> list[Sample]:
    """About `count` prompts for the rendering check, spread over the file and over its kinds.

    Kinds are what templates treat in code of their own: tools, template arguments, earlier tool calls.  Each has a share.
    """
    if not count:
        return []
    kinds: dict[tuple, list[int]] = {}
    for index, record in enumerate(read_prompts(path)):
        called = any(message.get("tool_calls") for message in record["messages"])
        kind = (bool(record.get("tools")), bool(record.get("template_arguments")), called)
        kinds.setdefault(kind, []).append(index)
    share = math.ceil(count / max(1, len(kinds)))
    chosen = {index for indices in kinds.values() for index in indices[:: math.ceil(len(indices) / share)]}
    return [
        Sample(r["sample_id"], r["messages"], r.get("tools"), r.get("template_arguments") or {})
        for index, r in enumerate(read_prompts(path))
        if index in chosen
    ]


class RenderAhead:
    """Rows whose prompts are rendered in a thread, a chunk ahead of their use, so that no server waits for a template."""

    def __init__(self, rows: Iterator[Row]):
        self._rows = rows
        self._ready: deque[Row] = deque()
        self._thread = ThreadPoolExecutor(1, "render")
        self._next = self._thread.submit(self._chunk)
        self.exhausted = False  # everything has been taken

    def __enter__(self) -> "RenderAhead":
        return self

    def __exit__(self, *error: Any) -> None:
        self._thread.shutdown()

    def take(self, count: int) -> list[Row]:
        """Up to `count` rows in file order, fewer only at the end.  Raises what rendering raises."""
        while len(self._ready) < count and (chunk := self._next.result()):
            self._ready.extend(chunk)
            self._next = self._thread.submit(self._chunk)
        taken = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
        self.exhausted = len(taken) < count
        return taken

    def _chunk(self) -> list[Row]:
        return list(islice(self._rows, LOOK_AHEAD))


@dataclass
class Tuning:
    """How hard to try; none of it decides a token."""

    max_in_flight: int = 32
    request_timeout: float = 1800.0
    give_up_after: float = 900.0
    start_timeout: float = 3600.0
    render_samples: int = 16


@dataclass
class Captured:
    """What a capture did.  The first group is decided by prompts and journal; the second differs from run to run."""

    rows_in: int
    rows_out: int = 0
    dropped: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: Counter = field(default_factory=Counter)
    set_aside: list[dict] = field(default_factory=list)  # the first LISTED_ROWS
    servers: list[dict] = field(default_factory=list)

    answered: int = 0
    answered_tokens: int = 0
    refused: int = 0
    reused: int = 0
    borrowed: int = 0
    rendering_compared: int = 0
    seconds: float = 0.0


class Capture:
    """Captures one dataset into `output`.

    `open_client` is called when the first row has to be asked, and not at all when the journals hold every row.
    """

    def __init__(
        self,
        *,
        prompts: str | Path,
        turn_format: TurnFormat,
        requests: Requests,
        max_tokens: int | None,
        generations: Generations,
        open_client: Callable[[], Client],
        tuning: Tuning,
        retry_refused: bool = False,
    ):
        self.prompts, self.turn_format, self.requests = Path(prompts), turn_format, requests
        self.generations, self.journal = generations, generations.journal
        self.tuning, self.retry_refused = tuning, retry_refused
        self.renderer = Renderer(turn_format.target)
        self.client: Client | None = None
        self.result = Captured(rows_in=count_prompts(prompts))
        self._open_client = open_client
        self._window = Window(max_tokens)
        self._facts: dict | None = None  # of the server that answers
        self._server = ""  # their digest
        self._server_index: dict[str, int] = {}
        self._todo: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Row | BaseException] = queue.SimpleQueue()
        self._pending: deque[Row] = deque()  # to be asked, in the order of common prefixes
        self._under_way = 0  # rows handed to the workers
        self._workers: list[threading.Thread] = []
        self._asking_since = 0.0  # monotonic seconds

    def run(self, output: str | Path, what: str, metadata: Mapping[str, Any]) -> Captured:
        """Capture every row up to the cap, then write `output`, a raw file.

        Raises CaptureError, GuardError and StoreError; whatever was answered until then is in the journal.
        """
        output = Path(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        for stale in output.parent.glob(f".{output.name}.*.tmp"):
            stale.unlink()  # left by a kill; that we hold the journal's lock says that nobody writes it
        rows = output.with_name(f"{output.name}.rows")
        began = time.monotonic()
        try:
            with room_for(output):
                with RecordWriter(rows, "raw", {}) as writer:
                    self._capture(writer, what)
                self._finish(rows, output, metadata)
        finally:
            rows.unlink(missing_ok=True)
            self.result.seconds = time.monotonic() - began
        return self.result

    # ---- the loop

    def _capture(self, writer: RecordWriter, what: str) -> None:
        batch: list[Row] = []
        with RenderAhead(self._rendered()) as prompts, progress(total=self.result.rows_in, what=what) as bar:
            try:
                while True:
                    for row in self._window.leave():
                        batch.append(row)
                        if len(batch) == WRITE_ROWS:
                            self._write(writer, batch)
                            batch = []
                    if self._window.cut or (prompts.exhausted and not self._window.rows):
                        break
                    self._hand_out()
                    if not prompts.exhausted and not self._pending and self._has_room():
                        self._enter(prompts.take(self._rows_wanted() or self.tuning.max_in_flight), bar)
                    elif self._under_way:
                        self._take_answer(bar)
                while self._under_way:  # answers on their way are beyond the cap; they are kept for a larger one
                    self._take_answer(bar)
            except BaseException:
                if self.client:
                    self.client.stop()
                raise
            finally:
                self._end_workers()
        self._write(writer, batch)
        self.result.dropped["beyond_cap"] += self.result.rows_in - self.result.rows_out - self.result.dropped.total()

    def _rows_wanted(self) -> int:
        most = max(LOOK_AHEAD, 4 * self.tuning.max_in_flight)
        return self._window.rows_wanted(most, self.tuning.max_in_flight, self.requests.settings["max_new_tokens"])

    def _has_room(self) -> bool:
        """Whether the next chunk may enter: not too far ahead of the first open row, and probably within the cap."""
        if len(self._window.rows) >= WINDOW_CHUNKS * max(LOOK_AHEAD, 4 * self.tuning.max_in_flight):
            return False
        return not self._under_way or self._rows_wanted() > 0

    def _rendered(self) -> Iterator[Row]:
        """Rows with their prompts rendered and their requests made.  Raises CaptureError on ids that would kill a server."""
        vocab_size = self.turn_format.vocab_size
        for index, record in enumerate(read_prompts(self.prompts)):
            sample_id = record["sample_id"]
            row = Row(index, sample_id, np.empty(0, dtype=np.int32))
            try:
                ids = self.renderer.prompt_ids(
                    record["messages"], record.get("tools"), record.get("template_arguments")
                )
            except RecordError as error:
                row.set_aside = ("unrenderable", str(error))
                yield row
                continue
            if not ids or min(ids) < 0 or max(ids) >= vocab_size:
                raise CaptureError(
                    f"{self.prompts}: the prompt of sample {sample_id} holds id {max(ids, default=None)}, and the model has "
                    f"ids below {vocab_size}: tokenizer and model of {self.turn_format.target.model} do not belong together"
                )
            row.prompt_ids, row.request = np.asarray(ids, dtype=np.int32), self.requests.make(sample_id, ids)
            if row.request is None:
                context = self.requests.context_length
                row.set_aside = ("no_room", f"a prompt of {len(ids)} tokens in a context of {context}")
            yield row

    def _enter(self, rows: list[Row], bar: Any) -> None:
        """Take a chunk into the window: what the journals hold is finished at once, the rest will be asked."""
        for row in rows:
            if not row.finished:
                self._look_up(row)
            bar.update(row.finished)
        self._window.add(rows)
        self._pending.extend(sorted((r for r in rows if not r.finished), key=lambda r: r.prompt_ids.tobytes()))

    def _look_up(self, row: Row) -> None:
        key = row.request.key
        if own := self.journal.index.get(key):
            self.result.reused += 1
            row.answer(own)
        elif (refusal := self.journal.index.refusals.get(key)) and not self.retry_refused:
            row.set_aside = (refusal.reason, refusal.message)
        elif (borrowed := self.generations.borrowed(key)) and not guard.differences(self._reference(), borrowed[1]):
            self.result.borrowed += 1
            row.answer(borrowed[0])

    def _hand_out(self) -> None:
        """Keep the workers busy: one request in each, and one waiting for it."""
        if self._pending:
            self._open_server()
        while self._pending and self._under_way < 2 * self.tuning.max_in_flight:
            row = self._pending.popleft()
            if row.index < self._window.limit:
                self._under_way += 1
                self._todo.put(row)

    def _take_answer(self, bar: Any) -> None:
        """Wait for one row; raise what stopped a worker."""
        row = self._done.get()
        if isinstance(row, BaseException):
            raise row
        self._under_way -= 1
        if row.generation is not None:
            self.result.answered += 1
            self.result.answered_tokens += row.tokens
        elif row.set_aside is not None:
            self.result.refused += 1
            self._check_refusals(row.set_aside[1])
        if row.finished:  # and not passed over as beyond the cap
            self._window.finish(row)
            bar.update()
        rate = self.result.answered_tokens / (time.monotonic() - self._asking_since)
        bar.set_postfix_str(f"{rate:,.0f} tok/s", refresh=False)

    def _check_refusals(self, message: str) -> None:
        refused, asked = self.result.refused, self.result.refused + self.result.answered
        if refused > REFUSED_ROWS and refused > REFUSED_SHARE * asked:
            raise CaptureError(
                f"{refused} of {asked} rows were refused, the last with: {message}. That is not the rows' fault. Mend the "
                "cause, then run generate.py once with --retry-refused, or the rows refused so far stay set aside"
            )

    # ---- the workers

    def _work(self) -> None:
        while (row := self._todo.get()) is not None:
            try:
                if row.index < self._window.limit:
                    self._ask(row)
                self._done.put(row)
            except Stopped:
                return
            except BaseException as error:  # told to the main thread, which ends the capture with it
                self._done.put(error)
                return

    def _ask(self, row: Row) -> None:
        key, server = row.request.key, self._server
        try:
            answer = self.client.generate(row.prompt_ids.tolist(), self.requests.sampling(row.request))
        except RowRefused as refused:
            self.journal.append(Refusal(key, row.sample_id, refused.reason, refused.message, server))
            row.set_aside = (refused.reason, refused.message)
            return
        generation = Generation(
            key, row.sample_id, answer.output_ids, answer.finish_reason, answer.matched_stop, server
        )
        self.journal.append(generation)
        row.answer(generation)

    def _end_workers(self) -> None:
        """Workers are daemons: one that waits for an answer does not hold up the end of the program."""
        for _ in self._workers:
            self._todo.put(None)
        for worker in self._workers:
            worker.join(timeout=0.2)

    # ---- the server

    def _open_server(self) -> None:
        """Connect, guard, and start the workers, before the first request."""
        if self.client is not None:
            return
        client = self._open_client()
        client.wait_ready(self.tuning.start_timeout)
        model_info, server_info = client.patiently(lambda: guard.ask(client))
        facts = guard.inspect(model_info, server_info, self.turn_format, self.requests.context_length)
        if before := self._own_facts():
            guard.check_same(
                before,
                facts,
                "Rows of both would be mixed. Start the server as it was, or, to generate the dataset anew, move "
                f"{self.journal.path} aside",
            )
        client.known_good = guard.probe(client, self.renderer, self.turn_format, self.requests.context_length)
        samples = choose_samples(self.prompts, self.tuning.render_samples)
        samples = [s for s in samples if not self.renderer.escapes(s.messages, s.tools)]
        self.result.rendering_compared = guard.cross_check(client, self.renderer, samples)
        client.confirm = lambda: guard.confirm(client, facts)
        self._facts, self._server, self.client = facts, self.journal.append_server(facts), client
        self._asking_since = time.monotonic()
        for number in range(self.tuning.max_in_flight):
            worker = threading.Thread(target=self._work, name=f"ask {number}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def _own_facts(self) -> dict | None:
        """Facts of a server whose rows are in the dataset's own journal."""
        index = self.journal.index
        return next(iter(index.servers.values()), None) if len(index) else None

    def _reference(self) -> dict:
        """The facts that a borrowed row's server must share."""
        if self._facts is None:
            if own := self._own_facts():
                return own
            self._open_server()
        return self._facts

    # ---- the raw file

    def _write(self, writer: RecordWriter, rows: list[Row]) -> None:
        writer.write_rows(record for row in rows if (record := self._record(row)))

    def _record(self, row: Row) -> dict | None:
        """The raw record of a row that left the window, counted; None when it was set aside."""
        if row.set_aside is not None:
            reason, message = row.set_aside
            self.result.dropped[reason] += 1
            if len(self.result.set_aside) < LISTED_ROWS:
                self.result.set_aside.append({"sample_id": row.sample_id, "reason": reason, "message": message})
            return None
        found = row.generation
        self.result.rows_out += 1
        self.result.prompt_tokens += len(row.prompt_ids)
        self.result.output_tokens += row.tokens
        self.result.finish_reasons[found.finish_reason] += 1
        return {
            "sample_id": row.sample_id,
            "prompt_ids": row.prompt_ids,
            "output_ids": found.output_ids,
            "finish_reason": found.finish_reason,
            "matched_stop": found.matched_stop,
            "request_key": found.request_key,
            "server": self._server_index.setdefault(found.server, len(self._server_index)),
        }

    def _finish(self, rows: Path, output: Path, metadata: Mapping[str, Any]) -> None:
        """Copy the rows into the raw file, whose metadata could not be known before the last row."""
        known = dict(self.journal.index.servers)
        for other in self.generations.others:
            known = {**other.servers, **known}
        self.result.servers = [{"digest": digest, **known[digest]} for digest in self._server_index]
        with RecordWriter(output, "raw", {**metadata, "servers": self.result.servers}) as writer:
            for table in iter_tables(rows, "raw"):
                writer.write_table(table)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn "no space left" in the body into a StoreError that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreError(f"{path}: {os.strerror(error.errno)}; make room and run again") from error
        raise
