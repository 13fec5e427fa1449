"""`snakemake learning_curve` on a finished run: shares are trained beside the run's own drafter, which is left alone."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.workflow, pytest.mark.long]


def test_the_curve_adds_drafters_of_shares_and_leaves_the_run_as_it_was(finished):
    done = finished.run("learning_curve")
    assert sorted(done.jobs) == [
        "evaluate_share 0.25", "evaluate_share 0.5", "learning_curve", "train_share 0.25", "train_share 0.5",
    ]  # fmt: skip
    curve = json.loads(finished.results("learning_curve/learning_curve.json").read_text())
    rows = [point["rows"] for point in curve["points"]]
    assert [point["share"] for point in curve["points"]] == [0.25, 0.5, 1.0] and rows == sorted(set(rows))
    own = json.loads(finished.results("evaluation/acceptance.json").read_text())
    assert curve["points"][-1]["acceptance_length"] == own["acceptance_length"]
    assert finished.results("learning_curve/learning_curve.png").is_file()
    for path in ("train/share-0.5", "evaluate/share-0.5", "learning_curve/learning_curve"):
        job = json.loads(finished.results(f"provenance/{path}.json").read_text())
        assert f"{job['stage']}/{job['name']}" == path

    assert finished.run("learning_curve").jobs == []
    assert finished.run().jobs == [], "the run itself is still whole"
    for command in (["audit.py", "verify"], ["summary.py"]):
        program = [sys.executable, f"scripts/{command[0]}", *command[1:], "--run-dir", "results/trial"]
        told = subprocess.run(program, cwd=finished.folder, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr


def test_a_gate_that_the_run_passes_does_not_stop_a_share(finished):
    own = json.loads(finished.results("evaluation/acceptance.json").read_text())
    finished.config["evaluation"]["min_acceptance"] = own["acceptance_length"]
    lines = finished.run("--dry-run", "--printshellcmds", "learning_curve").output.splitlines()
    commands = [line for line in lines if "python scripts/evaluate.py --drafter" in " ".join(line.split())]
    gates = [line for line in commands if "results/trial/learning_curve/" in line]
    assert len(gates) == 2 and all('"min_acceptance": null' in line for line in gates)
