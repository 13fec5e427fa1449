"""The shell script beside a drafter's weights that serves the target with it, and SGLang's flags for a drafter.

The script finds the drafter in its own folder, wherever that was taken, so the two files that SGLang loads and what starts it stay
together.  It names the target as the config does.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglet.targets import Target

HERE = "$drafter"  # a variable of the script
HEAD = """\
#!/usr/bin/env bash
# Serve the target with the drafter in this script's folder: serve.sh [MORE SGLANG FLAGS]
"""
LOCAL_TARGET = """\
# The target is a local folder, named as the workflow did; from elsewhere: serve.sh --model-path FOLDER
"""
FIND_DRAFTER = """\
drafter=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"""


def eagle_arguments(drafter: str | Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's flags for a drafter and the config's evaluation section.  Its draft tokens include the last known one."""
    tree = params.get("tree") or {"branches": 1, "tokens": params["draft_tokens"]}
    return {
        "speculative-algorithm": "EAGLE3",  # with EAGLE it accepts nothing, and shows no error
        "speculative-draft-model-path": str(drafter),
        "speculative-num-steps": params["draft_tokens"],
        "speculative-eagle-topk": tree["branches"],
        "speculative-num-draft-tokens": tree["tokens"] + 1,
    }


def serve_script(target: Target, params: Mapping[str, Any], server: Mapping[str, Any]) -> str:
    """The text of serve.sh; params: the config's evaluation section, server: of its own, python, arguments, environment."""
    flags: dict[str, Any] = {"model-path": target.model}
    flags |= {"revision": target.revision} if target.revision else {}
    flags |= {"trust-remote-code": True} if target.trust_remote_code else {}
    flags |= {"chat-template": target.chat_template} if target.chat_template else {}
    flags |= {**server.get("arguments", {}), **eagle_arguments(HERE, params)}
    exports = [f"export {name}={shlex.quote(str(value))}\n" for name, value in server.get("environment", {}).items()]
    words = [
        _flag(name, [] if value is True else value if isinstance(value, list) else [value])
        for name, value in flags.items()
        if value is not None and value is not False
    ]
    start = f"exec {shlex.quote(server.get('python', 'python'))} -m sglang.launch_server"
    command = " \\\n  ".join([start, *words, '"$@"']) + "\n"
    local = LOCAL_TARGET if Path(target.model).is_dir() else ""
    return "".join([HEAD, local, FIND_DRAFTER, *exports, command])


def _flag(name: str, values: list) -> str:
    quoted = (f'"{HERE}"' if value == HERE else shlex.quote(str(value)) for value in values)
    return " ".join([f"--{name.replace('_', '-')}", *quoted])
