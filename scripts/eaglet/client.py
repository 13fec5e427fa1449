"""The one place that speaks HTTP to an inference server: SGLang's native API, one prompt of ids in, ids out.

An answer that leaves this module has been checked: it is whole, its counts agree, it ended by itself with an
end-of-turn id or at its length, and the server that gave it is the one that the guard accepted.  Everything else is one
of three things: the server's trouble, which passes (asked again, later and later); the row's fault (`RowRefused`); or
a reason to stop (`CaptureError`, `GuardError`).  This module knows no journal, no dataset and no rendering.

Threads over pooled connections, not asyncio: at the few hundred requests a second that a server of many GPUs answers,
both cost the same, and a plain blocking call is easier to read and to interrupt.
"""

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool

from eaglet.errors import CaptureError, GuardError

CONNECT_SECONDS = 10
CONTROL_SECONDS = 60  # for everything but /generate
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # seconds between attempts
ROW_ATTEMPTS = 6  # answers to one row that may be wrong, one after another, before it counts as the row's fault
BUSY = {408, 425, 429, 503}
ROW_FAULT = {400, 413, 422}


class Connection(Protocol):
    """What the client needs to know of a server; `eaglet.endpoint.connect` gives one."""

    url: str
    headers: Mapping[str, str]

    def alive(self) -> bool: ...  # False once it is certain that this server will not come back

    def describe(self) -> str: ...  # for messages


class Failure(Exception):
    """An attempt that gave no answer.  `kind` is counted in the provenance; `of_row`: the server did answer, wrongly."""

    def __init__(self, kind: str, message: str, *, of_row: bool = False):
        super().__init__(message)
        self.kind, self.message, self.of_row = kind, message, of_row


class RowRefused(Exception):
    """The row cannot be answered.  `reason` is a code that reports count under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason, self.message = reason, message


class Stopped(Exception):
    """The capture is ending; the request was given up."""


@dataclass(frozen=True, slots=True)
class Answer:
    output_ids: list[int]
    finish_reason: str  # stop | length
    matched_stop: int | None
    text: str | None = None


@dataclass(frozen=True)
class Expected:
    """What every answer of a target must satisfy."""

    vocab_size: int
    end_of_turn_ids: frozenset[int]

    def check(self, answer: Any, prompt_tokens: int, max_new_tokens: int) -> Answer:
        """The checked answer.  Raises Failure of kind `invalid`, `abort` or `nan`; RowRefused for an abort with 400."""
        match answer:
            case {"output_ids": list(ids), "meta_info": {"finish_reason": {"type": str(how)} as finish} as meta}:
                pass
            case _:
                invalid(f"expected output_ids and meta_info with a finish_reason, found {_short(answer)}")
        matched = finish.get("matched")
        if how == "abort":
            if finish.get("status_code") in ROW_FAULT:
                raise RowRefused("refused", str(finish.get("message")))
            raise Failure("abort", f"the server aborted it: {finish.get('message')}", of_row=True)
        if how == "stop" and isinstance(matched, str) and "nan" in matched.lower():
            raise Failure("nan", "sampling met NaN in the logits", of_row=True)
        if meta.get("prompt_tokens") != prompt_tokens:
            invalid(f"{prompt_tokens} prompt ids were sent, the server counted {meta.get('prompt_tokens')}")
        if meta.get("completion_tokens") != len(ids) or not ids:
            invalid(f"{len(ids)} output_ids came, the server counted {meta.get('completion_tokens')}")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if type(i) is not int or not 0 <= i < self.vocab_size)
            invalid(f"output_ids hold {wrong!r}, which is no id of the vocabulary of {self.vocab_size}")
        if how == "stop":
            if matched not in self.end_of_turn_ids or ids[-1] != matched:
                invalid(
                    f"it stopped at {matched!r} with the last id {ids[-1]}; a turn ends with one of "
                    f"{sorted(self.end_of_turn_ids)}. If {matched!r} is right, add it in target.turn_format.end_of_turn_ids"
                )
        elif how != "length":
            invalid(f"finish_reason is {how!r}; expected stop or length")
        elif len(ids) != max_new_tokens:
            invalid(
                f"it ended at a length of {len(ids)} where {max_new_tokens} were allowed: the server's memory for keys "
                "and values is too small for the row. Give it more (--mem-fraction-static, --max-total-tokens), or lower "
                "sampling.max_new_tokens or server.context_length"
            )
        return Answer(ids, how, matched if how == "stop" else None, answer.get("text"))


def invalid(message: str) -> NoReturn:
    raise Failure("invalid", message, of_row=True)


class Client:
    """Sends requests to one server from many threads.

    `give_up_after`: seconds that failures may last without one good answer between them before CaptureError.
    `confirm`, set by the guard's caller, is called after an answer that came over a new TCP connection and before it is
    returned: a new connection may lead to a server that was started anew, with other flags.
    """

    def __init__(
        self,
        connection: Connection,
        expected: Expected,
        *,
        max_in_flight: int,
        request_timeout: float,
        give_up_after: float,
    ):
        self.connection = connection
        self.expected = expected
        self.request_timeout, self.give_up_after = request_timeout, give_up_after
        self.confirm: Callable[[], None] = lambda: None
        self.known_good: tuple[Sequence[int], Mapping[str, Any]] | None = (
            None  # a request that this server has answered
        )
        self.failures: Counter[str] = Counter()  # kind -> attempts
        self.asked = 0  # requests sent to /generate
        self._stop = threading.Event()
        self._failing_since: float | None = None
        self._lock = threading.Lock()
        self._confirmed = 0  # TCP connections made when the server was last confirmed
        self._url = connection.url.rstrip("/")
        self._prepared: dict[tuple[str, str], requests.PreparedRequest] = {}
        self._generate, self._control = _session(connection, max_in_flight), _session(connection, 4)

    def get(self, path: str, timeout: float = CONTROL_SECONDS) -> Any:
        """JSON of a GET, within `timeout` seconds.  Raises Failure, or GuardError when the server has no such path."""
        return self._json(self._control, "GET", path, None, timeout)

    def post(self, path: str, body: Mapping) -> Any:
        """JSON of a POST.  Raises Failure; RowRefused with 400; GuardError when the server has no such path."""
        return self._json(self._control, "POST", path, body, CONTROL_SECONDS)

    def ask(self, body: Mapping) -> Any:
        """JSON of a POST to /generate, unchecked, asked again while the server has trouble.  Raises RowRefused, CaptureError."""
        return self.patiently(lambda: self._json(self._generate, "POST", "/generate", body, self.request_timeout))

    def patiently(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, called again while it raises Failure.  Raises CaptureError when that does not end."""
        for attempt in itertools.count():
            try:
                result = call()
            except Failure as failure:
                self.failures[failure.kind] += 1
                self._back_off(attempt, failure)
            else:
                self._failing_since = None
                return result

    def wait_ready(self, start_timeout: float) -> None:
        """Return once /health answers 200.  Raises CaptureError after `start_timeout` seconds."""
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                with self._control.get(f"{self._url}/health", timeout=(CONNECT_SECONDS, CONTROL_SECONDS)) as reply:
                    if reply.status_code == 200:
                        return
                    _refuse_stranger(reply, "/health")
                    last = f"/health answers {reply.status_code}"
            except requests.RequestException as error:
                last = _failure(error).message
            if not self.connection.alive():
                raise CaptureError(f"{self.connection.describe()} ended before it was ready; its log says why")
            if time.monotonic() - began > start_timeout:
                raise CaptureError(
                    f"{self.connection.describe()} was not ready within {start_timeout:g} s ({last}); see its log, "
                    "or raise server.start_timeout"
                )
            self.pause(min(0.1 * 1.3**attempt, 2.0))

    def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, row_attempts: int = ROW_ATTEMPTS
    ) -> Answer:
        """The checked answer to one prompt, asked as often as the server's trouble needs.

        `sampling` is sent as `sampling_params` as it is and must hold max_new_tokens.  Raises RowRefused, CaptureError,
        GuardError (from `confirm`), Stopped.
        """
        wrong = 0
        for attempt in itertools.count():
            if self._stop.is_set():
                raise Stopped
            try:
                answer = self._attempt(prompt_ids, sampling)
            except Failure as failure:
                self.failures[failure.kind] += 1
                wrong += failure.of_row
                if wrong >= row_attempts and self._answers_others():
                    self._give_row_up(failure)
                self._back_off(attempt, failure)
            except RowRefused:
                self._failing_since = None
                raise
            else:
                self._failing_since = None
                return answer

    def _attempt(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Answer:
        """One request.  Raises Failure, RowRefused, GuardError."""
        self.asked += 1
        body = {"input_ids": list(prompt_ids), "sampling_params": dict(sampling)}
        found = self._json(self._generate, "POST", "/generate", body, self.request_timeout)
        answer = self.expected.check(found, len(prompt_ids), sampling["max_new_tokens"])
        self._confirm_connections()
        return answer

    def _answers_others(self) -> bool:
        """Whether the server answers what it has answered before: then a row that it cannot answer is at fault."""
        if self.known_good is None:
            return True
        try:
            self._attempt(*self.known_good)
        except (Failure, RowRefused):
            return False
        return True

    def stop(self) -> None:
        """Make every waiting and every further request raise Stopped."""
        self._stop.set()

    def pause(self, seconds: float) -> None:
        """Sleep, unless the capture stops meanwhile."""
        if self._stop.wait(seconds):
            raise Stopped

    def _json(self, session: requests.Session, method: str, path: str, body: Mapping | None, timeout: float) -> Any:
        request = self._request(session, method, path)
        if body is not None:
            request.prepare_body(json.dumps(body, separators=(",", ":")).encode("ascii"), None)
        try:
            reply = session.send(request, timeout=(CONNECT_SECONDS, timeout), allow_redirects=False)
        except requests.RequestException as error:
            raise _failure(error) from error
        if reply.status_code == 200:
            try:
                return json.loads(reply.content)
            except ValueError as error:
                raise Failure("broken_json", f"{path} answered with broken JSON ({error})") from error
        message = f"{path} answers {reply.status_code}: {_short(_message(reply))}"
        _refuse_stranger(reply, path)
        if reply.status_code in ROW_FAULT:
            raise RowRefused("refused", message)
        if reply.status_code in BUSY:
            raise Failure("busy", message)
        raise Failure("server_error", message, of_row=reply.status_code == 500)

    def _request(self, session: requests.Session, method: str, path: str) -> requests.PreparedRequest:
        """A request without a body, copied from one that is prepared once: preparing takes a third of a request's CPU."""
        if (method, path) not in self._prepared:
            self._prepared[method, path] = session.prepare_request(requests.Request(method, self._url + path))
        return self._prepared[method, path].copy()

    def _confirm_connections(self) -> None:
        made = self._connections_made()
        if made == self._confirmed:
            return
        with self._lock:
            if made > self._confirmed:
                made = self._connections_made()
                self.confirm()
                self._confirmed = made

    def _connections_made(self) -> int:
        return self._generate.get_adapter(self._url).connections_made

    def _give_row_up(self, failure: Failure) -> NoReturn:
        if failure.kind == "invalid":
            raise CaptureError(
                f"{self.connection.describe()} answers wrongly, and again when asked again: {failure.message}"
            )
        raise RowRefused(failure.kind, failure.message)

    def _back_off(self, attempt: int, failure: Failure) -> None:
        """Wait between half of an exponentially growing delay and all of it, so that threads spread out."""
        if not self.connection.alive():
            raise CaptureError(
                f"{self.connection.describe()} has ended ({failure.message}). Everything answered is in the journal; "
                "run again to go on"
            )
        now = time.monotonic()
        since = self._failing_since = self._failing_since or now
        left = since + self.give_up_after - now
        if left <= 0:
            raise CaptureError(
                f"{self.connection.describe()} has given no answer for {now - since:.0f} s (last: {failure.message}). "
                "Everything answered is in the journal; run again once the server is back, or raise server.give_up_after"
            )
        delay = min(FIRST_DELAY * 2 ** min(attempt, 20), LONGEST_DELAY)
        self.pause(min(random.uniform(delay / 2, delay), left))


class _CountingAdapter(HTTPAdapter):
    """Pooled connections to one server, and how often one was made (urllib3 also renews a dropped one in its place)."""

    def __init__(self, **named: Any):
        super().__init__(**named)
        self.connections_made = 0
        self._pool: HTTPConnectionPool | None = None
        self._lock = threading.Lock()

    def get_connection_with_tls_context(self, *arguments: Any, **named: Any) -> HTTPConnectionPool:
        pool = super().get_connection_with_tls_context(*arguments, **named)
        with self._lock:
            if pool is not self._pool:
                self._pool, pool.ConnectionCls = pool, self._counted(pool.ConnectionCls)
        return pool

    def _counted(self, connection_class: type) -> type:
        adapter = self

        class Counted(connection_class):
            def connect(self) -> None:
                super().connect()
                with adapter._lock:
                    adapter.connections_made += 1

        return Counted


def _session(connection: Connection, connections: int) -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # no proxies and no .netrc: neither may stand between us and the tokens
    session.headers.update({"Content-Type": "application/json", **connection.headers})
    adapter = _CountingAdapter(pool_connections=1, pool_maxsize=connections, max_retries=0)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


def _failure(error: requests.RequestException) -> Failure:
    if isinstance(error, requests.Timeout):
        return Failure("timeout", f"no answer in time ({type(error).__name__})")
    if "refused" in str(error).lower():
        return Failure("connection_refused", "the connection is refused")
    return Failure("connection_lost", f"the connection broke ({type(error).__name__})")


def _refuse_stranger(reply: requests.Response, path: str) -> None:
    """Statuses that no waiting mends."""
    if reply.status_code in (401, 403):
        raise GuardError(
            f"{path} answers {reply.status_code}: the server wants another bearer token; name the environment variable "
            "that holds it in server.token_env"
        )
    if reply.status_code in (404, 405):
        raise GuardError(f"the server has no {path} (status {reply.status_code}); eaglet needs SGLang's native API")


def _message(reply: requests.Response) -> str:
    """The server's own words, of any of the shapes that SGLang gives errors in."""
    try:
        found = json.loads(reply.content)
    except ValueError:
        return reply.text
    match found:
        case {"error": {"message": str(message)}} | {"message": str(message)} | {"detail": str(message)}:
            return message
    return json.dumps(found)


def _short(value: Any, limit: int = 300) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
