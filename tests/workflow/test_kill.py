"""A workflow that is killed outright, again and again, ends with the bytes of one that was left alone, and leaves no process."""

import random
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from eaglet.digests import file_sha256
from workflow_runs import left_behind

pytestmark = [pytest.mark.workflow, pytest.mark.long]

STAGES = ["turn_format", "prompts", "generate", "validate", "merge", "hidden_states", "train", "evaluate", "audit"]
# Left out: what holds times, hosts or paths of the run by design, and what is made from that.
TIMED = ("provenance", "benchmarks", "logs", "endpoints", "audit")
TIMED_FILES = ("speed.json", "speed.png")


def outputs(workflow) -> dict[str, str]:
    """Path -> SHA-256 of every output that must not depend on what happened on the way."""
    root = workflow.results("")
    files = [p for p in root.rglob("*") if p.is_file() and p.relative_to(root).parts[0] not in TIMED]
    hidden = (workflow.folder / "results/store/hidden").rglob("*.safetensors")
    return {str(p.relative_to(workflow.folder)): file_sha256(p) for p in [*files, *hidden] if p.name not in TIMED_FILES}


def kill_in(workflow, stage: str, seconds: float) -> None:
    """Start Snakemake and kill it alone so many seconds after a job of the stage began."""
    (workflow.folder / "trial.yaml").write_text(yaml.safe_dump(workflow.config))
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--configfile", "trial.yaml", "--forcerun", stage]
    with subprocess.Popen(
        command, cwd=workflow.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        told = []
        for line in process.stdout:
            told.append(line)
            if re.match(rf"\s*(local)?rule {stage}:", line):
                time.sleep(seconds)
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError(f"no job of {stage} began:\n{''.join(told)[-4000:]}")


def test_a_kill_in_each_stage_changes_no_byte_and_leaves_no_process(workflow, finished):
    draw = random.Random(5)
    for stage in STAGES:
        kill_in(workflow, stage, draw.uniform(0, 3))
        assert left_behind(workflow) == []
        workflow.run("--unlock")
    workflow.run()
    assert outputs(workflow) == outputs(finished)
