"""The capture against the real SGLang, on the CPU: what its API is believed to do, it does."""

import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch

from capturing import FAST, SETTINGS, capture, client_of, write_prompts
from eaglet.client import RowRefused
from eaglet.errors import GuardError
from eaglet.journal import entries
from eaglet.records import iter_rows, read_metadata
from eaglet.row_request import RESERVED_TOKENS
from eaglet.server_command import flags_of
from eaglet.server_daemon import free_port
from sglang_cpu import ARGUMENTS, ENVIRONMENT, MARKS, PYTHON

CONTEXT, TOKENS, ROWS = 1024, 24, 24
GREEDY = {**SETTINGS, "temperature": 0.0, "max_new_tokens": TOKENS}
PATIENT = replace(FAST, max_in_flight=4, request_timeout=300, give_up_after=600, start_timeout=900)

pytestmark = MARKS


class Sglang:
    """A real server that can be killed and started again on its port."""

    def __init__(self, model: Path, log: Path, *flags: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.command = [
            *(PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"),
            *("--port", str(self.port), "--dtype", "float32", "--context-length", str(CONTEXT)),
            *flags_of(ARGUMENTS),
            *flags,
        ]

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if requests.get(f"{self.url}/health", timeout=60).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_target):
    running = Sglang(tiny_target, tmp_path_factory.mktemp("sglang") / "log")
    running.start()
    try:
        running.wait()
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", ROWS, tools=False)


@pytest.fixture(scope="module")
def captured(tmp_path_factory, server, tiny_format, prompts):
    """The raw file of an undisturbed greedy capture."""
    raw, _ = capture(
        tmp_path_factory.mktemp("captured"), prompts, tiny_format, server.url, settings=GREEDY, tuning=PATIENT
    )
    return raw


def test_the_ids_are_those_that_transformers_generates(captured, tiny_format):
    model = tiny_format.target.load()
    rows = list(iter_rows(captured, "raw"))
    assert len(rows) == ROWS
    for row in rows:
        prompt = torch.tensor([row["prompt_ids"]])
        ends = list(tiny_format.end_of_turn_ids)
        made = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
        assert row["output_ids"] == made[0, prompt.shape[1] :].tolist()
    (facts,) = read_metadata(captured, "raw")["servers"]
    assert facts["engine"] == "sglang" and facts["version"] and facts["flags"]["dtype"] == "float32"


def test_a_server_killed_in_the_middle_and_started_again_loses_and_repeats_nothing(
    tmp_path, server, tiny_format, prompts, captured
):
    journal = tmp_path / "generations" / "d.jsonl"

    def blink():
        while not journal.exists() or journal.read_bytes().count(b"\n") < ROWS // 3:
            time.sleep(0.01)
        server.kill()
        server.start()

    killer = threading.Thread(target=blink)
    killer.start()
    raw, made = capture(tmp_path, prompts, tiny_format, server.url, settings=GREEDY, tuning=PATIENT)
    killer.join()
    assert made.answered == ROWS
    keys = [entry["request_key"] for entry in entries(journal) if entry["kind"] == "row"]
    assert len(keys) == len(set(keys)) == ROWS
    assert raw.read_bytes() == captured.read_bytes()


def test_the_context_takes_what_the_client_sends_at_most(server, tiny_format):
    server.wait()
    client = client_of(server.url, tiny_format, PATIENT)
    sampling = {"temperature": 0.0, "max_new_tokens": 1}
    longest = [20 + i % 200 for i in range(CONTEXT - RESERVED_TOKENS - 1)]
    assert len(client.generate(longest, sampling).output_ids) == 1
    with pytest.raises(RowRefused):
        client.generate([*longest, 20], sampling)
    room = [20 + i % 200 for i in range(CONTEXT - RESERVED_TOKENS - TOKENS)]
    assert len(client.generate(room, {**sampling, "max_new_tokens": TOKENS, "ignore_eos": True}).output_ids) == TOKENS


def test_tools_that_the_server_renders_otherwise_are_shown_and_the_setting_that_helps(tmp_path, server, tiny_format):
    """The tiny target's template writes `tool`, to which this SGLang adds `defer_loading`."""
    server.wait()
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    with pytest.raises(GuardError, match=r"Set target.tool_fields: \{"):
        capture(tmp_path, prompts, tiny_format, server.url, settings=GREEDY, tuning=PATIENT)
    assert not list(iter_journal_rows(tmp_path))
    adding = replace(tiny_format, target=replace(tiny_format.target, tool_fields={"defer_loading": None}))
    _, made = capture(tmp_path, prompts, adding, server.url, settings=GREEDY, tuning=PATIENT)
    assert made.answered == 3


def iter_journal_rows(folder):
    return [entry for entry in entries(folder / "generations" / "d.jsonl") if entry["kind"] == "row"]


def test_a_reasoning_parser_is_refused(tmp_path, tiny_target, tiny_format, prompts):
    running = Sglang(tiny_target, tmp_path / "log", "--reasoning-parser", "qwen3")
    running.start()
    try:
        running.wait()
        with pytest.raises(GuardError, match=r"--reasoning-parser is set \('qwen3'\)"):
            capture(tmp_path, prompts, tiny_format, running.url, settings=GREEDY, tuning=PATIENT)
    finally:
        running.kill()
    assert not iter_journal_rows(tmp_path)
