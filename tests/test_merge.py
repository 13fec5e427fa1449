"""Rows go where their ids say, so that an edit of one row moves no other, and the manifest accounts for each."""

import json

import pyarrow.parquet as pq
import pytest

import merge
from eaglet.digests import content_key, file_sha256, merkle_root
from eaglet.errors import ConfigError, RecordError
from eaglet.records import RecordWriter, iter_rows, read_metadata, row_digest
from eaglet.shards import assign, place_of

SERVER = {"engine": "transformers"}


def row(name, dataset="a") -> dict:
    raw = {
        "sample_id": content_key(name)[:16],
        "prompt_ids": [len(name)] * 3,
        "output_ids": [*name.encode(), 2],
        "finish_reason": "stop",
        "matched_stop": 2,
        "request_key": content_key([dataset, name]),
        "server": 0,
    }
    return {**raw, "think_end": 1, "row_digest": row_digest(raw)}


def write(folder, dataset, rows, fingerprint="f" * 64):
    path = folder / "checked" / f"{dataset}.parquet"
    with RecordWriter(path, "checked", {"servers": [SERVER], "fingerprint": fingerprint}) as writer:
        writer.write_rows(rows)
    return path


def run(folder, datasets: dict, *, count=3, seed=0, heldout=2):
    """Merge {dataset: names or rows}; returns (manifest, rows of each shard)."""
    rows = {d: [r if isinstance(r, dict) else row(r, d) for r in some] for d, some in datasets.items()}
    paths = [str(write(folder, dataset, some)) for dataset, some in rows.items()]
    params = {"shards": {"count": count, "seed": seed}, "heldout": {"rows_per_dataset": heldout}}
    output = folder / "shards"
    more = ["--output", str(output), "--provenance", str(folder / "provenance.json")]
    merge.main(["--checked", *paths, "--params", json.dumps(params), *more])
    manifest = json.loads((output / "manifest.json").read_text())
    return manifest, [list(iter_rows(output / f"shard-{k}.parquet", "shard")) for k in range(count)]


def names(count, prefix="row"):
    return [f"{prefix} {n}" for n in range(count)]


def test_every_row_is_in_one_shard_as_it_was_checked(tmp_path):
    _, shards = run(tmp_path, {"a": names(20), "b": names(15, "other")})
    found = {r["sample_id"]: r for shard in shards for r in shard}
    assert len(found) == sum(map(len, shards)) == 35
    for dataset, some in (("a", names(20)), ("b", names(15, "other"))):
        for name in some:
            merged = found[row(name)["sample_id"]]
            assert merged == {**row(name, dataset), "dataset": dataset, "split": merged["split"]}


def test_a_rows_shard_and_place_follow_from_its_id(tmp_path):
    _, shards = run(tmp_path, {"a": names(30)}, seed=7)
    for number, shard in enumerate(shards):
        places = [place_of(r["sample_id"], 7) for r in shard]
        assert places == sorted(places)
        assert {place % 3 for place in places} == {number}


def test_an_edited_row_moves_no_other_and_leaves_the_other_shards_as_they_were(tmp_path):
    _, before = run(tmp_path / "before", {"a": names(60)}, count=8)
    _, after = run(tmp_path / "after", {"a": ["edited", *names(60)[1:]]}, count=8)
    gone, new = row("row 0")["sample_id"], row("edited")["sample_id"]

    def places(shards):
        return {r["sample_id"]: k for k, shard in enumerate(shards) for r in shard if r["sample_id"] not in (gone, new)}

    assert places(before) == places(after)
    touched = {place_of(gone, 0) % 8, place_of(new, 0) % 8}
    changed = [
        k
        for k in range(8)
        if file_sha256(tmp_path / f"before/shards/shard-{k}.parquet")
        != file_sha256(tmp_path / f"after/shards/shard-{k}.parquet")
    ]
    assert set(changed) == touched


def test_the_same_rows_give_the_same_bytes_in_whatever_order_they_come(tmp_path):
    run(tmp_path / "one", {"a": names(20), "b": names(9, "other")})
    run(tmp_path / "two", {"b": names(9, "other")[::-1], "a": names(20)[::-1]})
    for k in range(3):
        one, two = (tmp_path / run / f"shards/shard-{k}.parquet" for run in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_each_dataset_gives_its_share_of_heldout_rows(tmp_path):
    manifest, shards = run(tmp_path, {"a": names(20), "b": names(9, "other")}, heldout=4)
    heldout = [r["dataset"] for shard in shards for r in shard if r["split"] == "heldout"]
    assert sorted(heldout) == ["a"] * 4 + ["b"] * 4
    assert {d: m["heldout"] for d, m in manifest["datasets"].items()} == {"a": 4, "b": 4}


def test_heldout_rows_stay_when_other_rows_are_added_except_for_those_displaced():
    few = assign({"a": names(50)}, seed=0, count=1, heldout=10)["a"].heldout
    more = assign({"a": [*names(50), "one more"]}, seed=0, count=1, heldout=10)["a"].heldout
    assert (few != more[:50]).sum() <= 1


def test_a_conversation_of_two_datasets_is_kept_once_and_counted(tmp_path):
    manifest, shards = run(tmp_path, {"b": ["shared", *names(8)], "a": ["shared", "own"], "c": ["shared"]}, heldout=1)
    shared = row("shared")["sample_id"]
    assert [r["dataset"] for shard in shards for r in shard if r["sample_id"] == shared] == ["a"]
    assert manifest["datasets"]["b"]["dropped"] == {"duplicate_of:a": 1}
    assert manifest["duplicates"] == {"b": {shared: "a"}, "c": {shared: "a"}}
    assert json.loads((tmp_path / "provenance.json").read_text())["rows"] == {
        "in": 12,
        "out": 10,
        "dropped": {"duplicate_of:a": 2},
    }


def test_the_manifest_describes_each_shard_and_names_the_checked_files(tmp_path):
    manifest, shards = run(tmp_path, {"a": names(20), "b": names(9, "other")})
    for k, (entry, shard) in enumerate(zip(manifest["shards"], shards, strict=True)):
        path = tmp_path / "shards" / f"shard-{k}.parquet"
        assert entry["path"] == str(path)
        assert entry["sha256"] == file_sha256(path)
        assert entry["rows"] == len(shard) == sum(entry["datasets"].values()) == sum(entry["splits"].values())
        assert entry["prompt_tokens"] == 3 * len(shard)
        assert entry["output_tokens"] == sum(len(r["output_ids"]) for r in shard)
        assert entry["merkle_root"] == merkle_root(r["row_digest"] for r in shard)
    checked = tmp_path / "checked" / "a.parquet"
    assert manifest["datasets"]["a"]["checked"] == str(checked)
    assert manifest["datasets"]["a"]["sha256"] == file_sha256(checked)
    assert manifest["rows"] == 29 and manifest["tokens"] == sum(entry["tokens"] for entry in manifest["shards"])


def test_shards_say_which_servers_answered_their_rows(tmp_path):
    run(tmp_path, {"a": names(5)})
    assert read_metadata(tmp_path / "shards" / "shard-0.parquet", "shard")["servers"] == {"a": [SERVER]}


def test_more_shards_than_rows_leave_some_empty(tmp_path):
    manifest, shards = run(tmp_path, {"a": names(3)}, count=20, heldout=1)
    assert sum(map(len, shards)) == 3
    assert manifest["shards"][[len(s) for s in shards].index(0)]["merkle_root"] == merkle_root([])


def test_what_an_earlier_merge_left_is_removed(tmp_path):
    run(tmp_path, {"a": names(9)}, count=5)
    (tmp_path / "shards" / ".spill-killed").mkdir()
    (tmp_path / "shards" / ".spill-killed" / "0.arrow").write_bytes(b"torn")
    (tmp_path / "shards" / ".shard-0.parquet.77.tmp").write_bytes(b"torn")
    run(tmp_path, {"a": names(9)}, count=2)
    assert sorted(p.name for p in (tmp_path / "shards").iterdir()) == [
        "manifest.json",
        "shard-0.parquet",
        "shard-1.parquet",
    ]


def test_a_row_that_is_not_what_its_digest_says_stops_the_merge(tmp_path):
    rows = [row(name) for name in names(4)]
    rows[2]["output_ids"] = [9]
    with pytest.raises(RecordError, match=rf"a\.parquet: row 3 \({rows[2]['sample_id']}\) has digest"):
        run(tmp_path, {"a": rows})
    assert not list((tmp_path / "shards").glob("*.json"))


def test_an_id_that_comes_twice_in_a_file_stops_the_merge(tmp_path):
    with pytest.raises(RecordError, match=r"a\.parquet: sample_id \w+ stands in 2 rows"):
        run(tmp_path, {"a": ["x", "y", "x"]})


def test_holding_out_every_row_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"heldout\.rows_per_dataset: 8 leaves none of the 3 checked rows to train on"
    ):
        run(tmp_path, {"a": names(2), "b": ["z"]}, heldout=8)


def test_files_of_different_targets_are_not_merged(tmp_path):
    a, b = write(tmp_path, "a", [row("x")]), write(tmp_path, "b", [row("y")], fingerprint="e" * 64)
    with pytest.raises(RecordError, match=r"not of one target.*a\.parquet has f{64}, .*b\.parquet has e{64}"):
        merge.merge({"a": a, "b": b}, {"count": 1, "seed": 0}, {"rows_per_dataset": 0}, tmp_path / "shards")


def test_two_files_of_one_name_are_refused(tmp_path, capsys):
    path = write(tmp_path, "a", [row("x")])
    with pytest.raises(SystemExit):
        merge.main(["--checked", str(path), str(path), "--params", "{}", "--output", str(tmp_path)])
    assert "two files have the same name" in capsys.readouterr().err


def test_long_files_are_cut_into_row_groups_of_the_usual_size(tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "ROW_GROUP", 7)
    _, shards = run(tmp_path, {"a": names(40)}, count=1)
    assert len(shards[0]) == 40
    assert pq.ParquetFile(tmp_path / "shards" / "shard-0.parquet").num_row_groups == 1
