"""A server that speaks SGLang's native API, answers at once, and misbehaves on command.

What it answers depends on the prompt and its seed alone, so a disturbed capture can be compared with an undisturbed one,
byte by byte.  One asyncio thread over bare sockets, because half of the faults (a reset in the middle of an answer, a
body that is cut short) are below what HTTP frameworks let one do.  In a test:

    with ScriptedServer(turn_format, renderer) as server:
        server.faults = once("reset")       # a function of (number of the request, body) -> name of a fault, or None

or as a process of its own, for benches and kill tests: `python tests/scripted_server.py --turn-format F --port-file P`.
"""

import argparse
import asyncio
import hashlib
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eaglet.files import write_text
from eaglet.rendering import Renderer
from eaglet.turn_format import TurnFormat

Faults = Callable[[int, dict], str | None]


def once(*names: str) -> Faults:
    """Each fault on one request, the first requests first."""
    left = list(names)
    return lambda number, body: left.pop(0) if left else None


def sometimes(name: str, share: float, seed: int = 0) -> Faults:
    """A fault on a random share of the requests."""
    chance = random.Random(seed)
    return lambda number, body: name if chance.random() < share else None


class ScriptedServer:
    """Serves in a thread.  `asked` counts the prompts that /generate was asked for, `answered` those answered well."""

    def __init__(self, turn_format: TurnFormat, renderer: Renderer | None = None, *, tokens: int | None = None):
        """`tokens`: output tokens of each answer; by default 3 to 40, by the prompt."""
        self.turn_format, self.renderer, self.tokens = turn_format, renderer, tokens
        self.faults: Faults = lambda number, body: None
        self.delay: Callable[[], float] = lambda: 0.0  # seconds before each answer
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.answered: Counter[tuple[int, ...]] = Counter()
        self.sampling: list[dict] = []
        self.starts = 0
        self.requests = 0
        self.keep_record = True
        self.token: str | None = None
        self.model_info: dict[str, Any] = {
            "model_path": turn_format.target.model,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "weight_version": "default",
            "model_type": turn_format.model_type,
            "architectures": [turn_format.architecture],
        }
        self.server_info: dict[str, Any] = {
            "version": "0.0-scripted",
            "context_length": turn_format.context_length,
            "enable_strict_thinking": False,
            "allow_auto_truncate": False,
            "dtype": "float32",
            "random_seed": 1,
        }
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "ScriptedServer":
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, on the same port after a stop."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()
        self.starts += 1
        self.server_info["random_seed"] = self.starts  # what a restart changes without a meaning

    def stop(self) -> None:
        """Die: every connection is reset, the port is closed."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _serve(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop, self._end, self._open = asyncio.get_running_loop(), asyncio.Event(), set()
            listener = await self._loop.create_server(lambda: _Http(self), "127.0.0.1", self.port, reuse_address=True)
            self.port = listener.sockets[0].getsockname()[1]
            ready.set()
            await self._end.wait()
            listener.close()
            for connection in list(self._open):
                connection.transport.abort()

        asyncio.run(serve())

    # ---- what it answers

    def reply(self, method: str, path: str, body: bytes, authorization: str) -> tuple[int, Any, str | None]:
        """(status, JSON, fault)."""
        if path == "/health":
            return 200, {}, None
        if self.token and authorization != f"Bearer {self.token}":
            return 401, {"error": "Unauthorized"}, None
        if path == "/model_info":
            return 200, self.model_info, None
        if path == "/server_info":
            return 200, {**self.server_info, "internal_states": [{}]}, None
        if path == "/v1/tokenize" and self.renderer:
            return 200, self.tokenize(json.loads(body)), None
        if path == "/generate":
            return self.generate(json.loads(body))
        return 404, {"detail": "Not Found"}, None

    def tokenize(self, body: dict) -> dict:
        arguments = body.get("chat_template_kwargs") or {}
        tokens = self.renderer.prompt_ids(body["messages"], body.get("tools"), arguments)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.turn_format.context_length}

    def generate(self, body: dict) -> tuple[int, Any, str | None]:
        ids, sampling = body["input_ids"], body["sampling_params"]
        self.requests += 1
        if self.keep_record:
            self.asked[tuple(ids)] += 1
            self.sampling.append(sampling)
        fault = self.faults(self.requests, body)
        if fault in ERRORS:
            return *ERRORS[fault], None
        output = self.output(ids, sampling)
        answer = {
            "output_ids": output,
            "meta_info": {
                "id": str(self.requests),
                "finish_reason": self.finish_reason(output),
                "prompt_tokens": len(ids),
                "completion_tokens": len(output),
            },
        }
        if self.renderer:
            answer["text"] = self.renderer.decode(output)
        if fault in CORRUPTIONS:
            CORRUPTIONS[fault](answer)
            fault = None
        elif fault is None and self.keep_record:
            self.answered[tuple(ids)] += 1
        return 200, answer, fault

    def output(self, ids: Sequence[int], sampling: dict) -> list[int]:
        """Ids by prompt and seed: reasoning, the closing marker, an answer, the end of the turn."""
        key = hashlib.sha256(json.dumps([ids, sampling.get("sampling_seed")]).encode()).digest()
        wanted = self.tokens or 3 + key[0] % 38
        first = max(
            max(self.turn_format.end_of_turn_ids), *(self.turn_format.closing.ids if self.turn_format.closing else (0,))
        )
        span = self.turn_format.vocab_size - first - 10
        output = [first + 9 + (key[i % 32] * 7 + i) % span for i in range(wanted - 1)]
        if self.turn_format.closing and wanted > 4:
            output[wanted // 2] = self.turn_format.closing.ids[0]
        output.append(min(self.turn_format.end_of_turn_ids))
        return output[: sampling["max_new_tokens"]]

    def finish_reason(self, output: list[int]) -> dict:
        if output[-1] in self.turn_format.end_of_turn_ids:
            return {"type": "stop", "matched": output[-1]}
        return {"type": "length", "length": len(output)}


def _finish(**reason: Any) -> Callable[[dict], None]:
    return lambda answer: answer["meta_info"].update(finish_reason=reason)


def _count(name: str) -> Callable[[dict], None]:
    return lambda answer: answer["meta_info"].update({name: answer["meta_info"][name] + 1})


ERRORS: dict[str, tuple[int, Any]] = {
    "busy": (503, {"object": "error", "message": "The request queue is full.", "code": 503}),
    "server_error": (500, {"object": "error", "message": "scheduler error"}),
    "refused": (400, {"error": {"message": "The input is not allowed."}}),
}
CORRUPTIONS: dict[str, Callable[[dict], None]] = {
    "abort": lambda answer: (
        answer["output_ids"].pop(),
        answer["meta_info"].update(
            finish_reason={"type": "abort", "message": "aborted"}, completion_tokens=len(answer["output_ids"])
        ),
    ),
    "nan": _finish(type="stop", matched="NaN happened"),
    "wrong_count": _count("completion_tokens"),
    "wrong_prompt_count": _count("prompt_tokens"),
    "id_out_of_range": lambda answer: answer["output_ids"].__setitem__(0, 10**7),
    "unknown_stop": lambda answer: (
        answer["output_ids"].__setitem__(-1, 9),
        answer["meta_info"].update(finish_reason={"type": "stop", "matched": 9}),
    ),
    "string_stop": _finish(type="stop", matched="User:"),
    "short_length": _finish(type="length", length=1),
    "unknown_finish": _finish(type="tool_calls"),
    "no_ids": lambda answer: answer.pop("output_ids"),
}
# reset: before any answer; cut: in the middle of the body; truncated: half of the JSON as a whole body; hang: no answer
CONNECTION_FAULTS = {"reset", "cut", "truncated", "hang"}


class _Http(asyncio.Protocol):
    """As much of HTTP/1.1 as pooled clients need: keep-alive, Content-Length."""

    def __init__(self, server: ScriptedServer):
        self.server, self.buffer = server, b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server._open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.server._open.discard(self)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].decode("latin-1")
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:])
            length = int(headers.get("content-length", 0))
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            method, path, _ = head.split(" ", 2)
            authorization = next(
                (line[15:] for line in head.split("\r\n") if line.lower().startswith("authorization: ")), ""
            )
            status, answer, fault = self.server.reply(method, path, body, authorization)
            delay = self.server.delay() if path == "/generate" else 0.0
            if delay:
                self.server._loop.call_later(delay, self.answer, status, answer, fault)
            else:
                self.answer(status, answer, fault)

    def answer(self, status: int, answer: Any, fault: str | None) -> None:
        data = json.dumps(answer, separators=(",", ":")).encode()
        if fault == "truncated":
            data = data[: len(data) // 2]
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        if fault == "hang":
            return
        if fault == "reset":
            self.transport.abort()
        elif fault == "cut":
            self.transport.write(head + data[: len(data) // 2])
            self.transport.close()
        else:
            self.transport.write(head + data)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--turn-format", type=Path, required=True)
    made.add_argument("--port-file", type=Path, required=True, help="where to write the port once it listens")
    made.add_argument("--tokens", type=int, help="output tokens of each answer")
    made.add_argument("--delay", type=float, default=0.0, help="seconds before each answer, at most")
    made.add_argument("--log", type=Path, help="append each prompt that is asked, as a line of JSON")
    args = made.parse_args()
    server = ScriptedServer(TurnFormat.load(args.turn_format), tokens=args.tokens)
    server.keep_record = False
    server.delay = lambda: random.uniform(0, args.delay)
    if args.log:
        log = open(args.log, "a", buffering=1)  # noqa: SIM115 - open as long as the process

        def note(number: int, body: dict) -> None:
            log.write(json.dumps(body["input_ids"]) + "\n")

        server.faults = note
    with server:
        write_text(args.port_file, str(server.port))
        threading.Event().wait()


if __name__ == "__main__":
    main()
