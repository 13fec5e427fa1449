"""The exact command of the inference server, built from the config: which program, which flags, which environment.

Never with a flag that hides, restructures or shortens what the model wrote, however it got into the params: the schema
refuses such flags with the reason, and this module refuses them again, because it is the last to see them.  Knows flags; it
does not know how servers are started, shared or ended.
"""

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from eaglet.digests import content_key, file_sha256
from eaglet.errors import ConfigError
from eaglet.targets import Target

SCRIPTS = Path(__file__).resolve().parents[1]
PORT = "$PORT"  # in an argv: replaced when the server is started
KEY_FILE = "$API_KEY_FILE"  # a YAML file {api-key: …} that only this user can read
KEY_VARIABLE = "EAGLET_API_KEY"
# Idle threads of the embedded engine spin for a moment, then sleep: spinning on, they take the cores from the other jobs
# of the workflow; sleeping at once, they are woken too late for the engine's many small operations.
SHORT_SPIN = {"GOMP_SPINCOUNT": "30000"}
ENGINE_CODE = ("engine.py", "engine_http.py", "token_sampling.py")
PACKAGES = {"transformers": ("torch", "transformers", "tokenizers"), "sglang": ("sglang", "torch", "transformers")}

INTERPRETER_SECONDS = 600

SPOILS = "it would change or hide the tokens that the model wrote"
OURS = "eaglet sets it from target and server"
REFUSED = {
    "reasoning-parser": SPOILS,
    "enable-strict-thinking": SPOILS,
    "allow-auto-truncate": "it silently cuts prompts",
    "preferred-sampling-params": SPOILS,
    "enable-watermark": SPOILS,
    "config": "a file of flags could bring in any of the flags that are refused",
    "api-key": "eaglet makes one for each start",
    "skip-tokenizer-init": "the server must render prompts, so that the rendering can be checked",
    "chat-template": "set target.chat_template",
    "model-path": OURS,
    "model": OURS,
    "tokenizer-path": OURS,
    "revision": OURS,
    "trust-remote-code": OURS,
    "context-length": OURS,
    "host": OURS,
    "port": OURS,
}


@dataclass(frozen=True)
class Tuning:
    """What may change without changing a token, so it is no part of a server's identity."""

    linger: float = 20  # seconds that an unused server waits for another lease
    start_timeout: float = 3600  # seconds until it must be healthy
    gpu_timeout: float = 7200  # seconds to wait for GPUs that others hold
    stop_timeout: float = 30  # seconds between SIGTERM and SIGKILL
    hang_timeout: float = 300  # seconds without a good /health after which it counts as hung
    restarts: int = 3  # times that a lost server is started again
    max_in_flight: int = 32  # rows of the embedded engine's batch
    threads: int | None = None  # CPU threads of the embedded engine

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "Tuning":
        unknown = set(params) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(
                f"--tuning: unknown {', '.join(sorted(unknown))}; known: {', '.join(f.name for f in fields(cls))}"
            )
        return cls(**params)


@dataclass(frozen=True)
class ServerCommand:
    """A server to be started: `argv` with the placeholders of this module, the variables added to the environment.

    `identity` is what its answers depend on.  `tuning_argv` is added to `argv` and is no part of the identity.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    identity: Mapping[str, Any]
    on_gpus: bool = False
    devices: tuple[str, ...] = ()  # the GPUs, once somebody has looked which there are
    tuning_argv: tuple[str, ...] = ()
    takes_key: bool = True  # requests must carry the key of the start, from KEY_FILE or KEY_VARIABLE

    @cached_property
    def fingerprint(self) -> str:
        """Servers with the same fingerprint answer alike, so their leases share one."""
        return content_key([list(self.argv), dict(self.environment), dict(self.identity), list(self.devices)])

    def started(self, port: int, api_key_file: Path) -> list[str]:
        """The argv to execute."""
        values = {PORT: str(port), KEY_FILE: str(api_key_file)}
        return [values.get(word, word) for word in (*self.argv, *self.tuning_argv)]

    def told(self) -> str:
        """The command for people, a flag a line, the environment in front."""
        environment = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return a_flag_a_line([*environment, *map(_quoted, (*self.argv, *self.tuning_argv))])


def a_flag_a_line(words: Iterable[str]) -> str:
    """A shell command of quoted words, broken before each flag and behind each assignment."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--") and (lines[-1].startswith("--") or "=" not in lines[-1]):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n  ".join(lines)


def server_command(params: Mapping[str, Any], target: Target, tuning: Tuning) -> ServerCommand:
    """The command for the server's section of the config.  Raises ConfigError."""
    arguments = dict(params.get("arguments") or {})
    environment = {name: as_text(value) for name, value in (params.get("environment") or {}).items()}
    if problems := list(refused_arguments(arguments)):
        raise ConfigError("\n".join(problems))
    builders = {"transformers": _embedded, "sglang": _sglang}
    engine = params.get("engine", "transformers")
    if engine not in builders:
        raise ConfigError(f"server.engine: found {engine!r}; expected one of {', '.join(builders)}")
    return builders[engine](params, arguments, environment, target, tuning)


def package_versions(engine: str, python: str) -> dict[str, str]:
    """Versions of the packages that decide the engine's answers, in its own interpreter.  Raises ConfigError."""
    names = PACKAGES[engine]
    if python == sys.executable:
        return {name: importlib.metadata.version(name) for name in names}
    return _installed_beside(python, names) or _told_by(python, names, engine)


def _installed_beside(python: str, names: tuple[str, ...]) -> dict[str, str] | None:
    """The versions in the environment that `python` belongs to, read from its folder: the interpreter may take long to start."""
    found = shutil.which(python)
    folders = sorted(map(str, Path(found).parents[1].glob("lib/python3*/site-packages"))) if found else []
    versions = {d.name: d.version for n in names for d in importlib.metadata.distributions(name=n, path=folders)}
    return versions if set(versions) == set(names) else None


def _told_by(python: str, names: tuple[str, ...], engine: str) -> dict[str, str]:
    script = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    try:
        asked = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=INTERPRETER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"server.python: {python} cannot be run ({error}); name an interpreter that has {engine}"
        ) from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(
            f"server.python: {python} has not got what server.engine: {engine} needs ({last}); install it there "
            "(envs/sglang.yaml), or name the interpreter that has it"
        )
    return json.loads(asked.stdout)


def engine_code() -> str:
    """Digest of the embedded engine's own code: 64 hex digits."""
    return content_key([file_sha256(SCRIPTS / "eaglet" / name) for name in ENGINE_CODE])


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that this process may use: UUIDs where nvidia-smi tells them, since Slurm renumbers GPUs per job."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return tuple(name.strip() for name in (chosen or "").split(",") if name.strip())
    by_index = dict(line.split(", ") for line in listed.splitlines())
    if chosen is None:
        return tuple(by_index.values())
    return tuple(by_index.get(name.strip(), name.strip()) for name in chosen.split(",") if name.strip())


def _embedded(
    params: Mapping, arguments: Mapping, environment: Mapping[str, str], target: Target, tuning: Tuning
) -> ServerCommand:
    if arguments:
        raise ConfigError(
            f"server.arguments: {', '.join(sorted(arguments))} are SGLang's flags; set server.engine: sglang or remove them"
        )
    tuned = ["--max-running-requests", str(tuning.max_in_flight)]
    if tuning.threads:
        tuned += ["--threads", str(tuning.threads)]
    return ServerCommand(
        argv=(
            sys.executable,
            str(SCRIPTS / "engine_server.py"),
            *target_flags(params, target),
            "--dtype",
            target.dtype,
            "--port",
            PORT,
        ),
        environment=SHORT_SPIN | environment,
        identity={"code": engine_code()},
        tuning_argv=tuple(tuned),
    )


def _sglang(
    params: Mapping, arguments: Mapping, environment: Mapping[str, str], target: Target, tuning: Tuning
) -> ServerCommand:
    template = target.chat_template
    if template and not template.endswith(".jinja"):
        raise ConfigError(
            f"target.chat_template: SGLang takes {template} for the name of a built-in template; rename it to *.jinja"
        )
    flags = target_flags(params, target)
    if target.dtype != "auto" and "dtype" not in by_flag(arguments):
        flags += ["--dtype", target.dtype]
    return ServerCommand(
        argv=(
            *(params.get("python", "python"), "-m", "sglang.launch_server"),
            *flags,
            *("--host", "127.0.0.1", "--port", PORT, "--config", KEY_FILE),
            *flags_of(arguments),
        ),
        environment=environment,
        identity={},
        on_gpus=by_flag(arguments).get("device") != "cpu",
    )


def target_flags(params: Mapping, target: Target) -> list[str]:
    """The flags that name the target, and the context where the server's section sets one."""
    flags = ["--model-path", target.model]
    if target.revision:
        flags += ["--revision", target.revision]
    if target.trust_remote_code:
        flags += ["--trust-remote-code"]
    if target.chat_template:
        flags += ["--chat-template", target.chat_template]
    if params.get("context_length"):
        flags += ["--context-length", str(params["context_length"])]
    return flags


def by_flag(arguments: Mapping) -> dict[str, Any]:
    """Arguments by the spelling of their flags; what follows a `=` belongs to the value."""
    return {name.strip().lstrip("-").replace("_", "-").lower().split("=")[0]: v for name, v in arguments.items()}


def refused_arguments(arguments: Mapping) -> Iterator[str]:
    """A line for each flag that must not be used, in any spelling; argparse takes abbreviations for the flag."""
    for given, name in zip(arguments, by_flag(arguments), strict=True):
        for refused, reason in REFUSED.items():
            if name == refused or refused.startswith(name):
                known = "" if name == refused else f" (SGLang reads it as --{refused})"
                yield f"server.arguments.{given}: is refused{known}: {reason}. Remove the key"


def flags_of(arguments: Mapping) -> Iterator[str]:
    """`{tensor-parallel-size: 8, enable-metrics: true}` as words; false and null leave a flag out, a list gives several values."""
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if isinstance(value, dict):
            yield json.dumps(value)
        elif value is not True:
            yield from (as_text(v) for v in (value if isinstance(value, list) else [value]))


def as_text(value: Any) -> str:
    """A value of a flag or of an environment variable; yes and no are 1 and 0."""
    return ("1" if value else "0") if isinstance(value, bool) else str(value)


def _quoted(word: str) -> str:
    return word if word in (PORT, KEY_FILE) else shlex.quote(word)
