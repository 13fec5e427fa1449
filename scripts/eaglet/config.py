"""The config: read, checked against config/schema.yaml with defaults filled in, and cross-checked.

Every problem names the key, what was found and what to do, and all problems of a config are reported at once,
before any work.
"""

import copy
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import ValidationError

from eaglet.errors import ConfigError
from eaglet.server_command import by_flag, refused_arguments

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "config" / "schema.yaml"
EMBEDDED_TARGET = "smollm2-135m-think"


def read_config(path: str | Path) -> dict:
    """A config file with defaults filled in.  Raises ConfigError."""
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({error})") from error
    return checked_config(given)


def checked_config(given: Any) -> dict:
    """A copy of `given` with the schema's defaults.  Raises one ConfigError that lists every problem."""
    config = copy.deepcopy(given)
    if not isinstance(config, dict):
        raise ConfigError(f"config: expected keys and values, found {type(config).__name__}")
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    problems = [line for error in _Validator(schema).iter_errors(config) for line in _told(error)]
    problems = list(dict.fromkeys(problems)) or list(_contradictions(config))
    if problems:
        raise ConfigError("the config cannot be used:\n" + "\n".join(f"  - {line}" for line in problems))
    return config


def _refused(validator: Any, reason: str, instance: Any, schema: Mapping) -> Iterator[ValidationError]:
    yield ValidationError(f"is refused: {' '.join(reason.split())}")


def _with_defaults(validator: Any, properties: Mapping, instance: Any, schema: Mapping) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for name, part in properties.items():
            if "default" in part:
                instance.setdefault(name, copy.deepcopy(part["default"]))
    yield from Draft202012Validator.VALIDATORS["properties"](validator, properties, instance, schema)


_Validator = validators.extend(Draft202012Validator, {"x-refused": _refused, "properties": _with_defaults})


def _told(error: ValidationError) -> Iterator[str]:
    """One line for each problem: the key's path, what was found, what is wanted."""
    path = ".".join(str(p) for p in error.absolute_path) or "config"
    if error.validator == "additionalProperties":
        known = list(error.schema.get("properties", {}))
        for name in sorted(set(error.instance) - set(known)):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"
            yield f"{_join(path, name)}: unknown key{hint}"
    elif error.validator == "required":
        yield f"{path}: {error.message.replace('is a required property', 'is required')}"
    elif error.validator == "oneOf" and error.absolute_path and error.absolute_path[-1] == "source":
        found = ", ".join(error.instance) if isinstance(error.instance, dict) else repr(error.instance)
        yield f"{path}: found {found or 'nothing'}; {error.schema['description'].strip()}"
    elif error.validator == "x-refused":
        yield f"{path}: {error.message}"
    elif error.validator == "pattern":
        hint = error.schema.get("description", "").strip()
        yield f"{path}: {error.instance!r} does not match {error.schema['pattern']}{f' ({hint})' if hint else ''}"
    else:
        yield f"{path}: {error.message}"


def _join(path: str, name: str) -> str:
    return name if path == "config" else f"{path}.{name}"


def _contradictions(config: Mapping) -> Iterator[str]:
    """What a schema cannot say: keys that need or exclude each other, and files that must exist."""
    target, server = config["target"], config["server"]
    model = target["model"]
    if model != EMBEDDED_TARGET and not Path(model).is_dir():
        if "/" not in model or model.startswith((".", "/", "~")):
            yield f"target.model: no folder {model}, and it is neither {EMBEDDED_TARGET} nor a hub id (owner/name)"
        elif not target["revision"]:
            yield f"target.revision: the hub id {model} needs a commit (40 hex digits), so that the run can be repeated"
    if target["trust_remote_code"] and not target["revision"]:
        yield "target.trust_remote_code: needs target.revision, so that the code that runs is the code that was read"
    if target["chat_template"] and not Path(target["chat_template"]).is_file():
        yield f"target.chat_template: no file {target['chat_template']}"
    if server["engine"] == "transformers" and server["arguments"] and not server["url"]:
        yield "server.arguments: these are SGLang's flags; set server.engine: sglang or remove them"
    yield from refused_arguments(server["arguments"])
    if config["sampling"]["min_p"] and by_flag(server["arguments"]).get("enable-deterministic-inference"):
        yield (
            f"sampling.min_p: {config['sampling']['min_p']} and server.arguments.enable-deterministic-inference exclude each other: "
            "SGLang cannot follow a seed under min_p, and its scheduler dies of such a request; set one of them to 0 or false"
        )
    if server["token_env"] and not server["url"]:
        yield "server.token_env: only with server.url"
    for name, dataset in config["datasets"].items():
        source = dataset["source"]
        if "path" in source and not Path(source["path"]).is_file():
            yield f"datasets.{name}.source.path: no file {source['path']}"
        if dataset["format"] == "instruction" and not dataset["prompt"]:
            yield f"datasets.{name}.prompt: format instruction needs a prompt, e.g. '{{instruction}}'"
        if dataset["format"] != "instruction" and dataset["prompt"]:
            yield f"datasets.{name}.prompt: only with format instruction"
