"""A capture that is killed outright, again and again, ends with the same bytes and has asked for each row once."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from capturing import SETTINGS, run_generate, write_prompts
from eaglet.journal import verify
from scripted_server import ScriptedServer

ROOT = Path(__file__).resolve().parents[1]
ROWS, KILLS, IN_FLIGHT = 240, 10, 4
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def server(tmp_path, tiny_format):
    """A server process that writes down each prompt it is asked for, and answers within 20 ms."""
    tiny_format.save(tmp_path / "turn_format.json")
    command = [sys.executable, ROOT / "tests/scripted_server.py", "--turn-format", tmp_path / "turn_format.json"]
    command += ["--port-file", tmp_path / "port", "--log", tmp_path / "asked.jsonl", "--delay", "0.02"]
    running = subprocess.Popen(command, env=ENVIRONMENT)
    while not (tmp_path / "port").exists():
        assert running.poll() is None
        time.sleep(0.05)
    yield f"http://127.0.0.1:{(tmp_path / 'port').read_text()}"
    running.terminate()
    running.wait()


@pytest.fixture(scope="module")
def processes(tiny_renderer):
    """Starts processes that have imported already what this one has to render a prompt: twelve times that takes a minute."""
    context = multiprocessing.get_context("forkserver")
    heavy = [name for name in sys.modules if name.split(".")[0] in ("transformers", "accelerate", "torch", "sympy")]
    context.set_forkserver_preload(["generate", *heavy])
    return context


def start(processes, folder: Path, url: str, name: str) -> multiprocessing.Process:
    params = {"sampling": SETTINGS, "max_tokens": None, "context_length": None}
    tuning = {"max_in_flight": IN_FLIGHT, "render_samples": 0}
    arguments = [
        *("--dataset", "d", "--prompts", folder / "prompts.jsonl", "--turn-format", folder / "turn_format.json"),
        *("--url", url, "--params", json.dumps(params), "--tuning", json.dumps(tuning), "--store", folder / name),
        *("--output", folder / name / "d.parquet", "--report", folder / name / "d.report.json"),
    ]
    made = processes.Process(target=run_generate, args=([str(argument) for argument in arguments],))
    made.start()
    return made


def finish(process: multiprocessing.Process) -> None:
    process.join()
    assert process.exitcode == 0


def asked(folder: Path) -> Counter:
    return Counter((folder / "asked.jsonl").read_text().splitlines())


def lines_of_journal(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("d.jsonl"))


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_repeat_only_what_was_in_flight(tmp_path, server, processes):
    write_prompts(tmp_path / "prompts.jsonl", ROWS)
    finish(start(processes, tmp_path, server, "undisturbed"))
    once = asked(tmp_path)
    (tmp_path / "asked.jsonl").write_text("")  # the server appends to it
    disturbed, chance = tmp_path / "disturbed", random.Random(0)
    for _ in range(KILLS):
        goal = lines_of_journal(disturbed) + chance.randrange(1, ROWS // (KILLS + 2))
        running = start(processes, tmp_path, server, "disturbed")
        while lines_of_journal(disturbed) < goal:  # so that each kill meets a capture that is working
            assert running.is_alive()
            time.sleep(chance.uniform(0, 0.02))
        running.kill()
        running.join()
    finish(start(processes, tmp_path, server, "disturbed"))

    for name in ("d.parquet", "d.report.json"):
        assert (disturbed / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    assert list(disturbed.glob(".*")) == []
    (journal,) = disturbed.rglob("d.jsonl")
    assert verify(journal) == []
    again = asked(tmp_path)
    probe = max(again, key=again.get)
    assert set(again) == set(once) and again[probe] == KILLS + 1
    repeated = sum(times - 1 for prompt, times in again.items() if prompt != probe)
    assert repeated <= KILLS * IN_FLIGHT


def test_sigterm_ends_a_capture_at_once_though_a_server_never_answers(tmp_path, tiny_format, tiny_renderer, processes):
    tiny_format.save(tmp_path / "turn_format.json")
    write_prompts(tmp_path / "prompts.jsonl", 30)
    with ScriptedServer(tiny_format, tiny_renderer) as server:
        server.faults = lambda number, body: "hang" if number > 10 else None
        running = start(processes, tmp_path, server.url, "ended")
        while server.requests < 10 + IN_FLIGHT:
            assert running.is_alive()
            time.sleep(0.02)
        began = time.monotonic()
        running.terminate()
        running.join()
    assert running.exitcode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10
    (journal,) = (tmp_path / "ended").rglob("d.jsonl")
    assert verify(journal) == [] and lines_of_journal(tmp_path) == 10  # a server and nine rows; the probe is none
    assert not list(tmp_path.rglob("*.parquet*"))
