"""The whole workflow on a tiny target: from prompts to a drafter with a measured acceptance length."""

import json
import re

import pytest

from eaglet.records import iter_rows, read_table

pytestmark = pytest.mark.workflow


def test_every_stage_runs_and_a_second_run_has_nothing_to_do(finished):
    assert finished.first.stages() == {
        "turn_format", "prompts", "generate", "validate", "merge", "hidden_states", "train", "serve_script", "evaluate",
        "audit",
    }  # fmt: skip
    again = finished.run()
    assert again.jobs == [] and "Nothing to be done" in again.output


def test_every_prompt_ends_with_the_opening_marker_and_every_finished_row_has_one_closing_marker(finished):
    turn_format = json.loads(finished.results("target/turn_format.json").read_text())
    opening, closing = turn_format["opening"]["ids"], turn_format["closing"]["ids"]
    assert turn_format["owner"] == "prompt"
    rows = [row for d in ("apples", "pears") for row in iter_rows(finished.results(f"raw/{d}.parquet"), "raw")]
    assert len(rows) == 9
    assert all(row["prompt_ids"][-len(opening) :] == opening for row in rows)
    checked = [
        row for d in ("apples", "pears") for row in iter_rows(finished.results(f"checked/{d}.parquet"), "checked")
    ]
    ended = [row for row in checked if row["finish_reason"] == "stop"]
    assert len(ended) >= 5
    for row in ended:
        assert row["output_ids"].count(closing[0]) == 1
        assert row["output_ids"][-1] in turn_format["end_of_turn_ids"]


def test_rows_add_up_from_prompts_to_shards(finished):
    raw = sum(read_table(finished.results(f"raw/{d}.parquet"), "raw").num_rows for d in ("apples", "pears"))
    checked = sum(read_table(finished.results(f"checked/{d}.parquet"), "checked").num_rows for d in ("apples", "pears"))
    bad = sum(
        read_table(finished.results(f"quarantine/{d}.parquet"), "quarantine").num_rows for d in ("apples", "pears")
    )
    shards = [read_table(finished.results(f"shards/shard-{k}.parquet"), "shard") for k in range(2)]
    assert checked + bad == raw == 9
    assert sum(table.num_rows for table in shards) == checked
    assert sum(table["split"].to_pylist().count("heldout") for table in shards) == 2


def test_the_acceptance_is_measured_and_the_report_written(finished):
    assert json.loads(finished.results("evaluation/acceptance.json").read_text())
    page = finished.results("audit/report.html").read_text()
    assert "apples" in page and "pears" in page


def test_no_process_of_the_workflow_is_left(finished):
    import psutil

    left = [
        p.info
        for p in psutil.process_iter(["pid", "cmdline"])
        if str(finished.folder.parent.parent) in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []


def test_what_tunes_a_jobs_own_server_is_no_param_of_it(workflow):
    """Snakemake compares params, and neither hidden states nor an evaluation depend on a time-out."""
    workflow.config["server"] = {"engine": "sglang", "arguments": {"random-seed": 1}, "request_timeout": 1234}
    workflow.config["hidden_states"] = {"backend": "sglang"}
    workflow.config["resources"] = {"gpu": 1}
    plan = workflow.run("--dry-run").output
    sections = [json.loads(text) for text in re.findall(r"--server '(.*?)' ", plan)]
    assert len(sections) == 4  # two shards, the evaluation, serve.sh
    assert all(section.keys() == {"engine", "python", "arguments", "environment"} for section in sections)


def test_a_wrong_config_is_refused_before_any_work(workflow):
    workflow.config["server"]["arguments"] = {"reasoning-parser": "kimi_k2"}
    workflow.config["server"]["engine"] = "sglang"
    done = workflow.snakemake()
    assert done.status != 0
    assert "server.arguments.reasoning-parser: is refused: a reasoning parser restructures" in done.output
    assert not (workflow.folder / "results").exists()
