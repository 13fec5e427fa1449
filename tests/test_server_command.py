"""The server's command is exactly what the config says, and never one that would spoil the tokens."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eaglet.config import checked_config
from eaglet.errors import ConfigError
from eaglet.server_command import KEY_FILE, PORT, REFUSED, Tuning, package_versions, server_command, visible_gpus
from eaglet.targets import Target

ROOT = Path(__file__).resolve().parents[1]
KIMI = Target(model="moonshotai/Kimi-K2.5", revision="a" * 40, trust_remote_code=True)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


def sglang(arguments: dict | None = None, target: Target = KIMI, **more: object):
    return server_command({"engine": "sglang", "arguments": arguments or {}, **more}, target, Tuning())


def test_the_command_of_a_large_run_is_spelt_out() -> None:
    command = sglang(
        {"tensor-parallel-size": 8, "mem-fraction-static": 0.88, "enable-metrics": True, "disable-radix-cache": False},
        python="/srv/sglang/bin/python",
        context_length=65536,
        environment={"NCCL_DEBUG": "WARN", "NCCL_NVLS_ENABLE": True},
    )
    assert list(command.argv) == [
        *("/srv/sglang/bin/python", "-m", "sglang.launch_server"),
        *("--model-path", "moonshotai/Kimi-K2.5", "--revision", "a" * 40, "--trust-remote-code"),
        *("--context-length", "65536", "--host", "127.0.0.1", "--port", PORT, "--config", KEY_FILE),
        *("--tensor-parallel-size", "8", "--mem-fraction-static", "0.88", "--enable-metrics"),
    ]
    assert command.environment == {"NCCL_DEBUG": "WARN", "NCCL_NVLS_ENABLE": "1"}
    assert command.on_gpus
    assert command.started(30000, Path("/k.yaml"))[-8:-4] == ["30000", "--config", "/k.yaml", "--tensor-parallel-size"]


def test_values_take_the_forms_that_argparse_reads() -> None:
    words = sglang(
        {"cuda-graph-bs": [1, 2, 4], "model-loader-extra-config": {"a": True}, "dtype": "bfloat16", "x": None}
    )
    assert list(words.argv[-8:]) == [
        *("--cuda-graph-bs", "1", "2", "4", "--model-loader-extra-config", '{"a": true}', "--dtype", "bfloat16")
    ]


@pytest.mark.parametrize(
    "flag",
    [
        *REFUSED,
        "reasoning_parser",
        "--reasoning-parser",
        "Reasoning-Parser",
        "reasoning-pars",
        "reasoning-parser=kimi_k2",
        "enable_strict",
        "allow-auto",
    ],
)
def test_a_flag_that_would_spoil_the_tokens_is_refused_in_any_spelling(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.arguments\..*refused"):
        sglang({flag: "kimi_k2"})


@pytest.mark.parametrize(
    "flag", ["tool-call-parser", "enable-metrics", "context-parallel-size", "hicache-size", "tp-size"]
)
def test_other_flags_pass(flag: str) -> None:
    assert f"--{flag}" in sglang({flag: 1}).argv


def test_what_changes_the_answers_changes_the_fingerprint_and_tuning_does_not() -> None:
    def fingerprint(tuning: dict | None = None, target: Target = KIMI, **params: object) -> str:
        given = {"engine": "transformers", "context_length": 2048, **params}
        return server_command(given, target, Tuning(**(tuning or {}))).fingerprint

    same = fingerprint()
    assert fingerprint({"linger": 1, "max_in_flight": 4, "threads": 1, "restarts": 0}) == same
    different = [
        fingerprint(context_length=4096),
        fingerprint(environment={"A": "1"}),
        fingerprint(target=Target(model="moonshotai/Kimi-K2.5", revision="b" * 40)),
        fingerprint(engine="sglang"),
    ]
    assert len({same, *different}) == 5


def test_the_embedded_engine_takes_none_of_sglangs_flags() -> None:
    with pytest.raises(ConfigError, match=r"server\.engine: sglang"):
        server_command({"engine": "transformers", "arguments": {"tp-size": 2}}, KIMI, Tuning())


def test_a_template_that_sglang_would_not_read_as_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="jinja"):
        sglang(target=Target(model="m", chat_template="templates/kimi.txt"))


def test_an_interpreter_without_sglang_is_named() -> None:
    with pytest.raises(ConfigError, match=r"server\.python: /no/python cannot be run"):
        package_versions("sglang", "/no/python")
    with pytest.raises(ConfigError, match=r"server\.python: .* has not got"):
        package_versions("sglang", sys.executable + "3" if Path(sys.executable + "3").exists() else "/usr/bin/python3")
    assert set(package_versions("transformers", sys.executable)) == {"torch", "transformers", "tokenizers"}


def test_gpus_are_named_by_uuid_where_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho '0, GPU-aa'\necho '1, GPU-bb'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == ("GPU-bb",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ("GPU-aa", "GPU-bb")


def test_a_server_on_the_cpu_claims_no_gpu() -> None:
    assert not sglang({"device": "cpu"}).on_gpus
    assert not server_command({"engine": "transformers"}, KIMI, Tuning()).on_gpus


def test_unknown_tuning_is_refused() -> None:
    with pytest.raises(ConfigError, match="lingr"):
        Tuning.from_params({"lingr": 3})


def test_the_program_prints_the_exact_command() -> None:
    """What it prints is the argv, word for word, once a shell has read it."""
    params = {"engine": "sglang", "arguments": {"tensor-parallel-size": 8}, "environment": {"NCCL_DEBUG": "a b"}}
    words = ["--target", json.dumps(KIMI.as_params()), "--params", json.dumps(params)]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "serve.py", "command", *words], capture_output=True, text=True, check=True
    )
    assert shlex.split(done.stdout.replace("\\\n", " ")) == [
        "NCCL_DEBUG=a b",
        *server_command(params, KIMI, Tuning()).argv,
    ]


@pytest.mark.parametrize("name", ["config", "kimi-k2.5", "qwen3-8b"])
def test_every_shipped_config_gives_a_command(name: str) -> None:
    text = (ROOT / "config" / f"{name}.yaml").read_text().replace("revision: REVISION", f"revision: '{'0' * 40}'")
    config = checked_config(yaml.safe_load(text))
    command = server_command(config["server"], Target.from_params(config["target"]), Tuning())
    assert PORT in command.argv and "--reasoning-parser" not in command.argv
