"""The shell script beside a drafter's weights that serves the target with it, and SGLang's flags for a drafter.

The script finds the drafter in its own folder, wherever that was taken, so the two files that SGLang loads and what starts it stay
together.  It names the target as the config does.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglet.server_command import a_flag_a_line, as_text, flags_of, target_flags
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
    exports = [
        f"export {name}={shlex.quote(as_text(value))}\n" for name, value in server.get("environment", {}).items()
    ]
    arguments = {**server.get("arguments", {}), **eagle_arguments(HERE, params)}
    words = [server.get("python", "python"), "-m", "sglang.launch_server"]
    words += [*target_flags(server, target), *flags_of(arguments)]
    quoted = [f'"{word}"' if word == HERE else shlex.quote(word) for word in words]
    command = a_flag_a_line(["exec", *quoted]) + ' \\\n  "$@"\n'
    local = LOCAL_TARGET if Path(target.model).is_dir() else ""
    return "".join([HEAD, local, FIND_DRAFTER, *exports, command])
