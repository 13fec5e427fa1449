"""drafter/serve.sh: the flags that SGLang gets, and that the script finds the drafter wherever its folder is."""

import json
import os
import shlex
import shutil
import subprocess

import pytest

import serve_script as stage
from eaglet.serve_script import eagle_arguments, serve_script
from eaglet.targets import Target
from tiny_shard import tiny_turn_format

PARAMS = {"draft_tokens": 3, "tree": None}


def test_the_flags_count_the_known_token_as_sglang_does():
    assert eagle_arguments("d", PARAMS)["speculative-num-draft-tokens"] == 4
    tree = eagle_arguments("d", {**PARAMS, "tree": {"branches": 4, "tokens": 15}})
    assert (tree["speculative-eagle-topk"], tree["speculative-num-draft-tokens"]) == (4, 16)


def test_the_script_serves_the_target_with_its_drafter():
    server = {
        "python": "/opt/my env/python",
        "arguments": {"tensor-parallel-size": 8, "enable-metrics": True, "enable-mixed-chunk": False},
        "environment": {"NCCL_DEBUG": "WARN"},
    }
    script = serve_script(Target("moonshotai/Kimi-K2.5", revision="a" * 40, trust_remote_code=True), PARAMS, server)
    words = shlex.split(script[script.index("exec") :])
    assert words[1:4] == ["/opt/my env/python", "-m", "sglang.launch_server"]
    assert words[words.index("--revision") + 1] == "a" * 40 and "--trust-remote-code" in words
    assert words[words.index("--tensor-parallel-size") + 1] == "8" and "--enable-metrics" in words
    assert "--enable-mixed-chunk" not in words and "export NCCL_DEBUG=WARN\n" in script
    assert not any("reasoning" in word for word in words)


def test_flags_and_variables_are_written_as_the_workflows_own_server_gets_them():
    server = {
        "arguments": {"json-model-override-args": {"a": 1}, "cuda-graph-bs": [1, 2]},
        "environment": {"SGLANG_X": True},
    }
    script = serve_script(Target("owner/model", revision="a" * 40), PARAMS, server)
    words = shlex.split(script[script.index("exec") :])
    assert words[words.index("--json-model-override-args") + 1] == '{"a": 1}'
    assert words[words.index("--cuda-graph-bs") + 1 :][:2] == ["1", "2"]
    assert "export SGLANG_X=1\n" in script


@pytest.fixture
def drafter(tmp_path, tiny_target):
    """A folder with serve.sh alone, made for an interpreter that prints its arguments, and the turn format's path."""
    python = tmp_path / "python that tells"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    turn_format = tmp_path / "turn_format.json"
    tiny_turn_format(tiny_target).save(turn_format)
    stage.main(
        [
            *("--turn-format", str(turn_format), "--params", json.dumps(PARAMS)),
            *("--server", json.dumps({"python": str(python)}), "--output", str(tmp_path / "drafter" / "serve.sh")),
            *("--provenance", str(tmp_path / "provenance.json")),
        ]
    )
    return tmp_path / "drafter"


def started(script, *arguments, cwd):
    return subprocess.run([script, *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_script_runs_from_anywhere_and_after_a_move(drafter, tmp_path):
    words = started(drafter / "serve.sh", cwd="/")
    assert words[words.index("--speculative-draft-model-path") + 1] == str(drafter)
    moved = tmp_path / "taken away" / "my drafter"
    shutil.move(drafter, moved)
    words = started(os.path.join(".", "serve.sh"), "--port", "30001", cwd=moved)
    assert words[words.index("--speculative-draft-model-path") + 1] == str(moved)
    assert words[-2:] == ["--port", "30001"]


def test_a_target_in_a_local_folder_can_be_named_anew(drafter, tiny_target):
    assert "serve.sh --model-path FOLDER" in (drafter / "serve.sh").read_text()
    words = started(drafter / "serve.sh", "--model-path", "/elsewhere", cwd=drafter)
    assert (
        words[words.index("--model-path") + 1] == str(tiny_target) and words[-1] == "/elsewhere"
    )  # the last one counts


def test_the_job_is_written_down(drafter, tmp_path):
    job = json.loads((tmp_path / "provenance.json").read_text())
    assert (job["stage"], job["name"]) == ("train", "serve_script")
    assert [output["path"] for output in job["outputs"]] == [(drafter / "serve.sh").as_posix()]
