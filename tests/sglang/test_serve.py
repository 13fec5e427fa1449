"""The real SGLang through serve.py: it starts, answers with the target's own tokens, refuses what it must, and ends whole."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from eaglet.endpoint import connect
from eaglet.errors import ServerError
from eaglet.processes import MARK
from sglang_cpu import ARGUMENTS, ENVIRONMENT, MARKS, PYTHON

ROOT = Path(__file__).resolve().parents[2]

pytestmark = MARKS


def hold(folder: Path, target: Path, **arguments: object) -> subprocess.Popen:
    params = {
        "engine": "sglang",
        "python": PYTHON,
        "context_length": 512,
        "arguments": {**ARGUMENTS, **arguments},
        "environment": ENVIRONMENT,
    }
    words = ["--target", json.dumps({"model": str(target), "dtype": "float32"}), "--params", json.dumps(params)]
    words += ["--endpoint", str(folder / "endpoint.json"), "--log", str(folder / "server.log")]
    with open(folder / "stderr", "wb") as stderr:
        return subprocess.Popen([sys.executable, ROOT / "scripts" / "serve.py", "hold", *words], stderr=stderr)


def processes(folder: Path) -> list[psutil.Process]:
    """The server's processes, found by the mark that its daemon puts into their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(str(folder)):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("EAGLET_LOCKS", str(tmp_path / "locks"))
    yield tmp_path
    _, left = psutil.wait_procs(processes(tmp_path), timeout=60)
    assert not left


def wait_for_endpoint(folder: Path, holder: subprocess.Popen) -> Path:
    endpoint = folder / "endpoint.json"
    while not endpoint.exists():
        assert holder.poll() is None, (folder / "stderr").read_text()
    return endpoint


def test_it_answers_with_the_targets_own_tokens_comes_back_after_a_kill_and_leaves_nothing(
    folder: Path, tiny_target: Path
) -> None:
    holder = hold(folder, tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    prompts = [[5, 6, 7, 8], list(range(30, 90))]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    with connect(wait_for_endpoint(folder, holder)) as connection, requests.Session() as session:
        assert requests.get(f"{connection.url}/model_info", timeout=30).status_code == 401
        session.headers.update(connection.headers)
        assert session.get(f"{connection.url}/model_info", timeout=30).json()["reasoning_parser"] is None
        assert answers(session, connection.url, prompts) == expected
        first = next(p for p in processes(folder) if "sglang.launch_server" in p.cmdline())
        assert connection.headers["Authorization"].split()[1] not in " ".join(first.cmdline())
        first.kill()
        first.wait()
        while True:  # as the client does: ask again until it answers
            assert connection.alive(), (folder / "server.log").read_text()[-3000:]
            try:
                assert answers(session, connection.url, prompts) == expected
                break
            except requests.ConnectionError:
                continue
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(30) == 128 + signal.SIGTERM


def answers(session: requests.Session, url: str, prompts: list[list[int]]) -> list[list[int]]:
    sampling = {"temperature": 0.0, "max_new_tokens": 16}
    replies = [
        session.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=300)
        for ids in prompts
    ]
    return [reply.json()["output_ids"] for reply in replies]


def test_a_flag_that_it_does_not_know_ends_in_its_own_words(folder: Path, tiny_target: Path) -> None:
    holder = hold(folder, tiny_target, **{"no-such-flag": 1})
    assert holder.wait(600) == 1
    assert "unrecognized arguments: --no-such-flag" in (folder / "stderr").read_text()
    with pytest.raises(ServerError, match="no-such-flag"), connect(folder / "endpoint.json"):
        pass
