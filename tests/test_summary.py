"""The table at the end of a run, also of one that has not ended."""

import shutil

import pytest

import summary
from eaglet.errors import AuditFailed


def test_tells_rows_tokens_acceptance_and_the_report(demo_run, capsys):
    summary.main(["--run-dir", str(demo_run)])
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == [
        "dataset",
        "read",
        "prompts",
        "generated",
        "checked",
        "train",
        "held",
        "out",
        "tokens",
        "acceptance",
    ]
    rows = {line.split()[0]: line.split()[1:] for line in said[2:5]}
    assert rows["notes"][:6] == ["13", "12", "12", "11", "10", "1"]
    assert rows["all"][:6] == ["23", "21", "21", "19", "17", "2"]
    assert rows["all"][-1] == "1.90"
    assert said[-2:] == ["drafter  results/demo/drafter", "report   results/demo/audit/report.html"]


def test_tells_how_far_an_unfinished_run_has_come(demo_run):
    for stage in ("merge", "hidden_states", "train", "evaluate"):
        shutil.rmtree(demo_run / "provenance" / stage)
    (demo_run / "provenance/generate/code.json").unlink()
    for folder in ("audit", "evaluation"):
        shutil.rmtree(demo_run / folder)
    said = summary.summary(demo_run).splitlines()
    assert said[2].split() == ["code", "10", "9", "–", "8", "–", "–", "–", "–"]
    assert said[-1] == "report   not yet: the run has not been audited (6 jobs have ended)"


def test_a_run_that_has_not_begun_is_refused(tmp_path):
    with pytest.raises(AuditFailed, match="no job has ended here"):
        summary.main(["--run-dir", str(tmp_path)])
