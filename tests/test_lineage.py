"""The chain between jobs, and the rows inside it, where each file by itself is in order."""

import json
from pathlib import Path

import pytest

from eaglet import lineage
from eaglet.digests import content_key, file_sha256
from eaglet.files import read_json, write_json
from eaglet.lineage import Break, expected_jobs, read_chain
from eaglet.records import RecordWriter, iter_rows, read_metadata, row_digest
from eaglet.row_checks import check_rows
from synthetic_run import RUN, STORE, _prompts, make_config

CONFIG = "config.json"


def breaks(config: dict | None = None) -> list[Break]:
    """Of the run in the working directory, whatever its audit says."""
    chain = read_chain(RUN, config or read_json(CONFIG))
    lineage.check_files(chain)
    lineage.check_counts(chain)
    check_rows(chain, store=STORE)
    return chain.breaks


def problems(found: list[Break], file: str) -> str:
    return "\n".join(str(b) for b in found if file in b.file)


def forge(path: Path, kind: str, change) -> None:
    """Change the rows of a record file, and its digest wherever it is written down, as a careful forger would."""
    before, rows, metadata = file_sha256(path), list(iter_rows(path, kind)), read_metadata(path, kind)
    change(rows)
    del metadata["kind"]
    with RecordWriter(path, kind, metadata) as writer:
        writer.write_rows(rows)
    for document in [*RUN.rglob("provenance/*/*.json"), RUN / "shards/manifest.json"]:
        replace(document, before, file_sha256(path))


def replace(document: Path, old: str, new: str) -> None:
    """Replace a text in a JSON file and renew its seal, and what names the file itself."""
    text, before = document.read_text(), file_sha256(document)
    if old not in text:
        return
    changed = json.loads(text.replace(old, new))
    if "seal" in changed:
        changed["seal"] = content_key({key: value for key, value in changed.items() if key != "seal"})
    write_json(document, changed)
    for other in RUN.rglob("provenance/*/*.json"):
        replace(other, before, file_sha256(document))


def test_an_untouched_chain_holds(demo_run):
    assert breaks() == []


def test_a_stage_that_read_an_older_version_is_named(demo_run):
    lines = Path("notes.jsonl").read_text().splitlines(keepends=True)
    Path("notes.jsonl").write_text("".join(lines[1:]))
    _prompts("notes")
    found = breaks()
    assert "generate notes read another version than prompts notes wrote" in problems(found, "prompts/notes.jsonl")
    assert "generate did not take in what prompts put out: expected 11, found 12" in problems(
        found, "provenance/generate"
    )


def test_rows_that_do_not_add_up_are_named(demo_run):
    replace(RUN / "provenance/validate/notes.json", '"truncated": 1', '"truncated": 2')
    assert "rows in are not rows out + rows dropped: expected 12, found 13" in problems(breaks(), "validate/notes.json")


def test_a_file_with_fewer_rows_than_its_job_wrote_is_named(demo_run):
    forge(RUN / "checked/notes.parquet", "checked", lambda rows: rows.pop())
    found = breaks()
    assert "rows that validate notes wrote: expected 11, found 10" in problems(found, "checked/notes.parquet")
    assert "is neither checked nor quarantined" in problems(found, "raw/notes.parquet")


def test_a_changed_token_is_found_under_forged_file_digests(demo_run):
    def change(rows):
        rows[2]["output_ids"][0] += 1

    forge(RUN / "shards/shard-0.parquet", "shard", change)
    row = list(iter_rows(RUN / "shards/shard-0.parquet", "shard"))[2]
    (found,) = [b for b in breaks() if b.stage == "merge" and b.row]
    assert (found.row, found.expected, found.found) == (row["sample_id"], row["row_digest"], row_digest(row))


def test_a_changed_token_is_found_under_a_forged_row_digest(demo_run):
    def change(rows):
        rows[2]["output_ids"][0] += 1
        rows[2]["row_digest"] = row_digest(rows[2])

    forge(RUN / "shards/shard-0.parquet", "shard", change)
    said = problems(breaks(), "shards/shard-0.parquet")
    assert "is not the row of checked/" in said
    assert "the rows do not give the Merkle root that the manifest names" in said


def test_a_changed_token_is_found_in_the_journal_when_every_file_is_forged(demo_run):
    def change(rows):
        rows[0]["output_ids"][0] += 1
        if "row_digest" in rows[0]:
            rows[0]["row_digest"] = row_digest(rows[0])

    forge(RUN / "raw/notes.parquet", "raw", change)
    forge(RUN / "checked/notes.parquet", "checked", change)
    assert "is not what the journal says that the server answered" in problems(breaks(), "raw/notes.parquet")


def test_a_changed_prompt_is_found_by_its_request_key(demo_run):
    def change(rows):
        rows[0]["prompt_ids"][-3] += 1

    forge(RUN / "raw/notes.parquet", "raw", change)
    assert "its prompt, sampling and seed are not those of its request key" in problems(breaks(), "raw/notes.parquet")


def test_swapped_rows_are_found(demo_run):
    forge(RUN / "raw/notes.parquet", "raw", lambda rows: rows.insert(0, rows.pop(4)))
    assert "stands out of the order of its prompts" in problems(breaks(), "raw/notes.parquet")


def test_a_row_moved_to_another_shard_is_found(demo_run):
    moved = []
    forge(RUN / "shards/shard-0.parquet", "shard", lambda rows: moved.append(rows.pop()))
    forge(RUN / "shards/shard-1.parquet", "shard", lambda rows: rows.append(moved[0]))
    found = breaks()
    assert f"row {moved[0]['sample_id']} [hidden_states]: is no row of" in problems(found, "hidden/shard-0")
    assert "has no hidden states" in problems(found, "hidden/shard-1")


def test_a_row_under_the_hidden_states_of_another_is_found(demo_run):
    def change(rows):
        for name in ("key", "sha256"):
            rows[0][name], rows[1][name] = rows[1][name], rows[0][name]

    forge(RUN / "hidden/shard-0.index.parquet", "hidden_index", change)
    assert sum("holds the states of other tokens" in b.problem for b in breaks()) == 2


def test_a_forged_source_line_is_found(demo_run):
    replace(RUN / "provenance/prompts/notes.json", file_sha256("notes.jsonl"), "0" * 64)
    said = problems(breaks(), "prompts/notes.jsonl")
    assert "names a source that the job did not read" in said
    assert "row line 1 [" in said


def test_what_an_earlier_config_left_behind_does_no_harm(demo_run):
    config = make_config({"notes": 12}, 2)
    found = breaks(config)
    assert not problems(found, "code.parquet")
    assert "merge did not take in what validate put out" in problems(found, "provenance/merge")


def test_a_job_without_provenance_is_named(demo_run):
    (RUN / "provenance/hidden_states/shard-1.json").unlink()
    found = breaks()
    assert "no provenance: the job has not run" in problems(found, "provenance/hidden_states/shard-1.json")
    assert len(found) == 2  # and hidden_states takes in fewer rows than merge put out


def test_the_provenance_of_another_job_is_named(demo_run):
    path = RUN / "provenance/generate/notes.json"
    path.write_bytes((RUN / "provenance/generate/code.json").read_bytes())
    assert "says that it belongs to another job: expected generate/notes, found generate/code" in problems(
        breaks(), str(path)
    )


def test_a_config_names_its_jobs(demo_run):
    jobs = list(expected_jobs(make_config({"notes": 1, "code": 1}, 2)))
    assert jobs[:3] == [("target", "turn_format"), ("prompts", "code"), ("prompts", "notes")]
    assert [name for stage, name in jobs if stage == "hidden_states"] == ["shard-0", "shard-1"]
    embedded = {"target": {"model": "smollm2-135m-think"}, "datasets": {}, "shards": {"count": 0}}
    assert next(expected_jobs(embedded)) == ("target", "model")


def test_without_a_config_all_jobs_count_in_the_order_of_the_stages(demo_run):
    jobs = list(read_chain(RUN, None).jobs)
    assert jobs == list(expected_jobs(read_json(CONFIG)))


@pytest.mark.parametrize("file", ["shards/manifest.json", "target/turn_format.json", "raw/notes.parquet"])
def test_a_file_of_another_shape_is_a_break_and_no_crash(demo_run, file):
    (RUN / file).write_text('{"shards": 3}')
    assert problems(breaks(), file)
