"""A workflow that is killed outright, again and again, ends with the bytes of one that was left alone, and leaves no process."""

import random
import signal
import subprocess
import sys

import pytest
import yaml

from eaglet.digests import file_sha256
from workflow_runs import left_behind

pytestmark = [pytest.mark.workflow, pytest.mark.long]

# Left out: what holds times, hosts or paths of the run by design, and what is made from that.
TIMED = ("provenance", "benchmarks", "logs", "endpoints", "audit")
TIMED_FILES = ("speed.json", "speed.png")


def outputs(workflow) -> dict[str, str]:
    """Path -> SHA-256 of every output that must not depend on what happened on the way."""
    root = workflow.results("")
    files = [p for p in root.rglob("*") if p.is_file() and p.relative_to(root).parts[0] not in TIMED]
    hidden = (workflow.folder / "results/store/hidden").rglob("*.safetensors")
    return {str(p.relative_to(workflow.folder)): file_sha256(p) for p in [*files, *hidden] if p.name not in TIMED_FILES}


def kill_after(workflow, seconds: float) -> bool:
    """Start Snakemake and kill it alone after a while; False if it had ended by then."""
    (workflow.folder / "trial.yaml").write_text(yaml.safe_dump(workflow.config))
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--configfile", "trial.yaml"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=workflow.folder, **quiet)
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True


def test_kills_at_random_moments_change_no_byte_and_leave_no_process(workflow, finished):
    draw = random.Random(5)
    for _ in range(4):
        killed = kill_after(workflow, draw.uniform(6, 25))
        assert left_behind(workflow) == []
        if not killed:
            break
        workflow.run("--unlock")
    workflow.run()
    assert outputs(workflow) == outputs(finished)
