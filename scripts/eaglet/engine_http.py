"""The embedded engine behind SGLang's native API: the same paths, fields and errors, so that one client serves both.

Translates between HTTP and `eaglet.engine`; it knows JSON and the tokenizer, and nothing of how tokens are made.
Listens on loopback only.  Not offered, and refused by name: batches in one request, text instead of ids, streaming.
"""

import json
import logging
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import PreTrainedTokenizerBase

from eaglet.engine import Engine, QueueFull, Request, RequestRefused
from eaglet.token_sampling import SamplingParams

LARGEST_BODY = 64 << 20  # bytes
DISCONNECT_POLL = 0.5  # seconds between looks whether the client of a running request is still there
NOT_OFFERED = ("text", "input_embeds", "image_data", "stream", "return_logprob", "return_hidden_states", "lora_path")

log = logging.getLogger("eaglet.engine_http")


class HttpError(Exception):
    """An answer other than 200.  `nested` gives the message the shape {"error": {"message": …}}, as SGLang does."""

    def __init__(self, status: int, message: str, *, nested: bool = False):
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = (
            {"error": {"message": message}}
            if nested
            else {
                "object": "error",
                "message": message,
                "type": HTTPStatus(status).phrase,
                "param": None,
                "code": status,
            }
        )


class EngineServer(ThreadingHTTPServer):
    """Serves one engine on 127.0.0.1.  `facts` is what /server_info says beside the engine's own numbers."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(
        self,
        port: int,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        facts: Mapping[str, Any],
        *,
        api_key: str | None = None,
        patience: float = 120.0,
    ):
        self.engine, self.tokenizer, self.facts = engine, tokenizer, dict(facts)
        self.api_key, self.patience = api_key, patience
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", port), Handler)

    # ---- what the paths answer ---------------------------------------------------------------------------------------

    def generate(self, body: Mapping[str, Any], connected: Callable[[], bool]) -> dict[str, Any]:
        """POST /generate.  Ends the request in the engine when its client has gone."""
        offered = [name for name in NOT_OFFERED if body.get(name)]
        if offered:
            raise HttpError(400, f"the embedded engine does not offer {', '.join(offered)}; send input_ids")
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise HttpError(400, "input_ids must be one list of integers")
        given = body.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise HttpError(400, "sampling_params must be an object")
        began = time.monotonic()
        try:
            request = Request(ids, SamplingParams.from_json(given))
            self.engine.submit(request)
        except ValueError as error:  # RequestRefused among them
            raise HttpError(400, str(error), nested=isinstance(error, RequestRefused)) from error
        except QueueFull as error:
            raise HttpError(503, str(error)) from error
        while not request.done.wait(DISCONNECT_POLL):
            if not connected():
                self.engine.abort(request)
                raise ConnectionResetError("the client has gone")
        reason = request.finish_reason
        if reason["type"] == "abort":
            raise HttpError(reason["status_code"], reason["message"])
        return {
            "text": self.tokenizer.decode(
                request.output_ids, skip_special_tokens=bool(given.get("skip_special_tokens", True))
            ),
            "output_ids": request.output_ids,
            "meta_info": {
                "id": body.get("rid") or uuid.uuid4().hex,
                "finish_reason": reason,
                "prompt_tokens": len(ids),
                "completion_tokens": len(request.output_ids),
                "cached_tokens": 0,
                "weight_version": "default",
                "num_retractions": 0,
                "e2e_latency": time.monotonic() - began,
            },
        }

    def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST /v1/tokenize: `messages` rendered with the model's own chat template, or a plain `prompt`."""
        if "messages" in body:
            try:
                tokens = self.tokenizer.apply_chat_template(
                    [_with_parsed_arguments(message) for message in body["messages"]],
                    tools=body.get("tools"),
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    **(body.get("chat_template_kwargs") or {}),
                )
            except Exception as error:  # a template runs the caller's data, so anything can come out of it
                raise HttpError(400, f"the chat template refuses the conversation: {error}") from error
        elif isinstance(body.get("prompt"), str):
            tokens = self.tokenizer.encode(
                body["prompt"], add_special_tokens=bool(body.get("add_special_tokens", True))
            )
        else:
            raise HttpError(400, "expected messages, or prompt as a string")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.context_length}

    def model_info(self) -> dict[str, Any]:
        """GET /model_info."""
        config = self.engine.model.config
        return {
            "model_path": self.facts["model_path"],
            "tokenizer_path": self.facts["model_path"],
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "model_type": config.model_type,
            "architectures": config.architectures,
            "vocab_size": self.engine.vocab_size,
        }

    def server_info(self) -> dict[str, Any]:
        """GET /server_info."""
        engine = self.engine
        return {
            **self.facts,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "enable_strict_thinking": False,
            "allow_auto_truncate": False,
            "skip_tokenizer_init": False,
            "context_length": engine.context_length,
            "max_running_requests": engine.max_running,
            "max_queued_requests": engine.max_queued,
            "max_total_num_tokens": engine.max_total_tokens,
            "max_req_input_len": engine.context_length - 1,
            "status": "ready",
            "internal_states": [
                {
                    "last_gen_throughput": engine.statistics.tokens_per_second,
                    "num_running_reqs": engine.running,
                    "num_queue_reqs": engine.waiting,
                }
            ],
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("connection from %s broke", client_address, exc_info=True)

    def server_bind(self) -> None:
        # HTTPServer.server_bind asks DNS for this machine's name, which can block for seconds.
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]


class Handler(BaseHTTPRequestHandler):
    """One keep-alive connection."""

    server: EngineServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet

    def do_GET(self) -> None:
        server = self.server
        if self.path.startswith("/health"):
            healthy = not server.closing.is_set() and server.engine.healthy(server.patience)
            self._send(200 if healthy else 503, b"")
        else:
            paths = {
                "/model_info": server.model_info,
                "/get_model_info": server.model_info,
                "/server_info": server.server_info,
                "/get_server_info": server.server_info,
            }
            self._answer(paths.get(self.path))

    def do_POST(self) -> None:
        # The body is read in any case: what stays unread would be taken for the connection's next request.
        length = int(self.headers.get("Content-Length") or 0)
        if length > LARGEST_BODY:
            self.close_connection = True
            return self._answer(_raising(HttpError(413, f"the body has {length} bytes; at most {LARGEST_BODY}")))
        raw = self.rfile.read(length)
        paths = {
            "/generate": lambda: self.server.generate(_json_object(raw), self._connected),
            "/v1/tokenize": lambda: self.server.tokenize(_json_object(raw)),
            "/tokenize": lambda: self.server.tokenize(_json_object(raw)),
        }
        self._answer(paths.get(self.path))

    def _answer(self, call: Callable[[], Mapping[str, Any]] | None) -> None:
        try:
            if not self._authorized():
                status, body = 401, {"error": "Unauthorized"}
            elif call is None:
                raise HttpError(404, f"Not Found: {self.command} {self.path}")
            else:
                status, body = 200, call()
        except HttpError as error:
            status, body = error.status, error.body
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _authorized(self) -> bool:
        wanted = self.server.api_key
        given = self.headers.get("Authorization", "")
        return wanted is None or compare_digest(given.encode(), f"Bearer {wanted}".encode())

    def _connected(self) -> bool:
        """False once the client has closed its end (a request body is already read, so only a close is readable)."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return not readable or self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its tool calls as objects: chat APIs send text, and SGLang gives templates objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            call = {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HttpError(400, f"expected a JSON object, found {type(value).__name__}")
    return value


def _raising(error: HttpError) -> Callable[[], Mapping[str, Any]]:
    def call() -> Mapping[str, Any]:
        raise error

    return call
