"""`audit.py`: an untouched run passes, one flipped byte anywhere is found and named, and a row can be followed to its source."""

import json
import random
import shutil
from pathlib import Path

import pytest

import audit
from eaglet.errors import AuditFailed, RecordError
from eaglet.files import read_json
from eaglet.records import iter_rows
from synthetic_run import AUDIT, HOSTILE, RUN, audit_run, build_synthetic_run


def verify(capsys, *options: str) -> dict:
    """What `audit.py verify --json` says."""
    capsys.readouterr()
    status = audit.main(["verify", "--run-dir", str(RUN), "--json", *options])
    said = json.loads(capsys.readouterr().out)
    assert status == (0 if said["holds"] else 1)
    return said


def test_an_untouched_run_passes(demo_run, capsys):
    said = verify(capsys)
    assert said["holds"]
    assert said["checked"] == {
        "jobs": 13, "files": said["checked"]["files"], "prompts": 21, "raw": 21, "checked": 19, "shards": 19, "hidden": 19
    }  # fmt: skip


KINDS = {
    "source": "notes.jsonl",
    "target": "model/tokenizer.json",
    "turn format": "results/demo/target/turn_format.json",
    "prompts": "results/demo/prompts/notes.jsonl",
    "prompts report": "results/demo/prompts/notes.report.json",
    "journal": "results/store/generations/*/notes.jsonl",
    "raw": "results/demo/raw/notes.parquet",
    "checked": "results/demo/checked/notes.parquet",
    "quarantine": "results/demo/quarantine/notes.parquet",
    "shard": "results/demo/shards/shard-1.parquet",
    "manifest": "results/demo/shards/manifest.json",
    "index": "results/demo/hidden/shard-0.index.parquet",
    "hidden states": "results/store/hidden/*/*.safetensors",
    "drafter": "results/demo/drafter/model.safetensors",
    "training log": "results/demo/drafter/log.jsonl",
    "serving script": "results/demo/drafter/serve.sh",
    "acceptance": "results/demo/evaluation/acceptance.json",
    "provenance of target": "results/demo/provenance/target/turn_format.json",
    "provenance of generate": "results/demo/provenance/generate/notes.json",
    "provenance of evaluate": "results/demo/provenance/evaluate/evaluate.json",
    "provenance of audit": "results/demo/provenance/audit/audit.json",
    "lineage": "results/demo/audit/lineage.json",
    "report page": "results/demo/audit/report.html",
    "crate": "results/demo/audit/ro-crate-metadata.json",
}


@pytest.mark.parametrize("pattern", KINDS.values(), ids=KINDS)
def test_one_flipped_byte_is_found_and_named(pattern, demo_run, capsys):
    path = sorted(Path().glob(pattern))[0]
    data = path.read_bytes()
    for place in [0, len(data) - 1, *random.sample(range(len(data)), 3)]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :])
        said = verify(capsys)
        assert str(path) in {found["file"] for found in said["breaks"]}, f"byte {place} of {path}: {said['breaks']}"
        assert len(said["breaks"]) < 45, "one change must not bury its cause"
    path.write_bytes(data)
    assert verify(capsys)["holds"]


@pytest.mark.parametrize("pattern", KINDS.values(), ids=KINDS)
def test_a_missing_file_is_named(pattern, demo_run, capsys):
    path = sorted(Path().glob(pattern))[0]
    path.unlink()
    assert str(path) in {found["file"] for found in verify(capsys)["breaks"]}


def test_a_file_that_no_job_wrote_is_named(demo_run, capsys):
    (RUN / "shards/extra.parquet").write_bytes(b"whence?")
    assert [found["file"] for found in verify(capsys)["breaks"]] == ["results/demo/shards/extra.parquet"]


def test_a_flipped_prompt_names_the_line(demo_run, capsys):
    path = RUN / "prompts/notes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace("notes 4", "notes 5")
    path.write_text("".join(lines))
    assert "line 5" in {found["row"] for found in verify(capsys)["breaks"] if found["file"] == str(path)}


def test_sampling_reads_so_many_files_of_hidden_states(demo_run, capsys):
    assert verify(capsys, "--sample", "4")["checked"]["hidden"] == 4


def test_a_broken_chain_is_told_for_people(demo_run):
    (RUN / "drafter/model.safetensors").write_text("other weights")
    with pytest.raises(
        AuditFailed, match=r"does not hold in 1 place:\n.*model.safetensors \[train\]: is not what train train wrote"
    ):
        audit.main(["verify", "--run-dir", str(RUN)])


def test_build_refuses_a_broken_chain_and_writes_nothing(demo_run):
    shutil.rmtree(RUN / "audit")
    (RUN / "drafter/model.safetensors").write_text("other weights")
    with pytest.raises(AuditFailed, match="does not hold"):
        audit_run()
    assert not (RUN / "audit").exists()


def test_lineage_is_the_same_wherever_and_whenever_the_jobs_ran(demo_run, capsys, audited_run):
    build_synthetic_run()
    audit_run()
    first, second = (folder / RUN / "audit/lineage.json" for folder in (audited_run, Path()))
    assert first.read_bytes() == second.read_bytes()
    assert verify(capsys)["holds"]


def test_a_run_that_went_on_after_its_audit_is_told(demo_run, capsys):
    build_synthetic_run({"notes": 12, "code": 8})
    breaks = verify(capsys)["breaks"]
    assert any("when the run was audited" in found["problem"] for found in breaks)


def test_a_run_that_was_not_audited_is_told(demo_run, capsys):
    AUDIT.unlink()
    assert [found["file"] for found in verify(capsys)["breaks"]] == [str(AUDIT)]


def test_of_an_unfinished_run_only_the_audit_is_missing(demo_run, capsys):
    for stage in ("audit", "evaluate", "train", "hidden_states", "merge"):
        shutil.rmtree(RUN / "provenance" / stage)
    for folder in ("audit", "evaluation", "drafter", "hidden", "shards"):
        shutil.rmtree(RUN / folder)
    for file in (
        "provenance/validate/notes.json",
        "checked/notes.parquet",
        "checked/notes.report.json",
        "quarantine/notes.parquet",
    ):
        (RUN / file).unlink()
    assert [found["file"] for found in verify(capsys)["breaks"]] == [str(AUDIT)]


def test_a_row_can_be_followed_to_its_source(demo_run, capsys):
    row = next(r for r in iter_rows(RUN / "shards/shard-0.parquet", "shard") if r["dataset"] == "notes")
    audit.main(["row", row["sample_id"], "--run-dir", str(RUN), "--json"])
    (trail,) = json.loads(capsys.readouterr().out)["datasets"]
    assert trail["source"]["file"] == "notes.jsonl"
    source = json.loads(Path("notes.jsonl").read_text().splitlines()[trail["source"]["line"] - 1])
    assert trail["messages"] == source["messages"]
    assert trail["prompt"]["segments"][-1] == {"kind": "marker", "name": "opening", "text": "<think>", "ids": 1}
    assert trail["prompt"]["renders_the_same_now"]
    assert [s["name"] for s in trail["output"]["segments"]] == [None, "closing", None, "end_of_turn"]
    assert trail["request"]["key"] == row["request_key"]
    assert trail["request"]["server"]["engine"] == "synthetic"
    assert trail["shard"] == {
        "file": "results/demo/shards/shard-0.parquet",
        "place": trail["shard"]["place"],
        "split": row["split"],
    }
    assert Path(trail["hidden"]["file"]).is_file()
    assert trail["checks"]["row_digest"] == row["row_digest"]


def test_a_quarantined_row_says_why(demo_run, capsys):
    row = next(iter_rows(RUN / "quarantine/notes.parquet", "quarantine"))
    audit.main(["row", row["sample_id"], "--run-dir", str(RUN)])
    said = capsys.readouterr().out
    assert "outcome: quarantined" in said
    assert "- truncated" in said


def test_a_row_is_shown_with_its_markers_visible(demo_run, capsys):
    row = next(r for r in iter_rows(RUN / "raw/notes.parquet", "raw"))
    audit.main(["row", row["sample_id"], "--run-dir", str(RUN)])
    said = capsys.readouterr().out
    assert "⟦<think>⟧" in said
    assert "⟦</think>⟧" in said
    assert HOSTILE in said


def test_an_unknown_row_is_refused(demo_run):
    with pytest.raises(RecordError, match="in no prompts file"):
        audit.main(["row", "0" * 16, "--run-dir", str(RUN)])


def test_a_shard_says_where_its_rows_came_from(demo_run, capsys):
    audit.main(["shard", "0", "--run-dir", str(RUN), "--json"])
    said = json.loads(capsys.readouterr().out)
    entry = read_json(RUN / "shards/manifest.json")["shards"][0]
    assert (said["sha256"], said["rows"]) == (entry["sha256"], entry["rows"])
    assert {name: d["train"] + d["heldout"] for name, d in said["datasets"].items()} == entry["datasets"]
    assert said["datasets"]["notes"]["dropped"] == {
        "prompts": {"duplicate": 1},
        "generate": {},
        "validate": {"truncated": 1},
    }
    assert said["datasets"]["notes"]["servers"][0]["server"]["engine"] == "synthetic"
    assert {job["job"] for job in said["jobs"]} >= {"generate/notes", "merge/merge", "hidden_states/shard-0"}


def test_an_unknown_shard_is_refused(demo_run):
    with pytest.raises(RecordError, match="no such shard"):
        audit.main(["shard", "9", "--run-dir", str(RUN)])
