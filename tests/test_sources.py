"""A source yields its records with their places, tells what a file is from its content, and names what is broken."""

import gzip
import hashlib
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eaglet import sources
from eaglet.errors import SourceError
from eaglet.sources import Record, open_source

ROWS = [{"n": 1, "text": "eins"}, {"n": 2, "text": "zwei"}, {"n": 3, "text": "drei 🦅"}]
COMMIT = "0" * 40


def records(path, **pin):
    return list(open_source({"path": str(path), **pin}, cache=path.parent / "cache").records())


def lines(rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path.read_bytes()


@pytest.mark.parametrize(
    "content",
    [
        lines(ROWS),
        b"\xef\xbb\xbf" + lines(ROWS),
        lines(ROWS).replace(b"\n", b"\r\n"),
        json.dumps(ROWS).encode(),
        b"\xef\xbb\xbf\n " + json.dumps(ROWS, indent=1).encode(),
        gzip.compress(lines(ROWS)),
        gzip.compress(json.dumps(ROWS).encode()),
    ],
    ids=["lines", "byte order mark", "CRLF", "array", "indented array", "gzipped lines", "gzipped array"],
)
def test_what_a_file_is_follows_from_its_content_and_not_its_name(tmp_path, content):
    path = tmp_path / "records.json"
    path.write_bytes(content)
    assert records(path) == [Record(number, row) for number, row in enumerate(ROWS, 1)]


def test_parquet_rows_lose_the_nulls_that_stand_for_absent_keys(tmp_path):
    parquet(tmp_path / "rows.parquet", [{"a": {"x": 1}}, {"a": {"y": [{"p": 1}, {"q": None}]}}])
    assert [r.value for r in records(tmp_path / "rows.parquet")] == [{"a": {"x": 1}}, {"a": {"y": [{"p": 1}, {}]}}]


def test_array_elements_may_be_longer_than_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 16)
    path = tmp_path / "array.json"
    path.write_text(json.dumps(ROWS * 20, indent=2))
    assert [record.value for record in records(path)] == ROWS * 20


def test_a_malformed_line_is_yielded_with_its_problem_and_the_rest_is_read(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": \n\n[1]\n{"n": NaN}\n{"n": "\xff"}\n{"n": 2}\n')
    found = records(path)
    assert [(r.line, r.value) for r in found if r.value] == [(1, {"n": 1}), (7, {"n": 2})]
    assert {r.line: r.problem.split(":")[0].split(" (")[0] for r in found if not r.value} == {
        2: "not JSON",
        4: "expected a JSON object, found list",
        5: "not JSON",
        6: "not JSON",
    }


@pytest.mark.parametrize("cut", [b'[{"n": 1}, {"n": ', b'[{"n": 1}, {n}, {"n": 2}]'], ids=["torn", "malformed"])
def test_a_broken_array_names_the_element(tmp_path, cut):
    path = tmp_path / "array.json"
    path.write_bytes(cut)
    with pytest.raises(SourceError, match=r"array\.json: the JSON array breaks off in element 2"):
        records(path)


@pytest.mark.parametrize(
    "damaged",
    [lambda p: gzip.compress(lines(ROWS * 500))[:-20], lambda p: parquet(p, ROWS)[:-9], lambda p: b'["\xff"]'],
    ids=["gzip", "parquet", "array with bad UTF-8"],
)
def test_a_damaged_file_is_a_source_error_that_names_it(tmp_path, damaged):
    path = tmp_path / "data"
    path.write_bytes(damaged(tmp_path / "whole"))
    with pytest.raises(SourceError, match="data: cannot be read"):
        records(path)


def test_an_empty_file_has_no_records(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n \n")
    assert [r for r in records(tmp_path / "empty.jsonl") if r.value] == []


def test_a_pinned_local_file_must_have_its_digest(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(lines(ROWS))
    digest = hashlib.sha256(lines(ROWS)).hexdigest()
    assert len(records(path, sha256=digest)) == 3
    assert open_source({"path": str(path)}, tmp_path).origin == {"file": str(path), "sha256": digest}
    path.write_bytes(lines(ROWS[:2]))
    with pytest.raises(SourceError, match=f"source.sha256 pins {digest}"):
        records(path, sha256=digest)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"nowhere\.jsonl: no such file"):
        open_source({"path": str(tmp_path / "nowhere.jsonl")}, tmp_path)


def test_a_wheel_member_is_read_from_the_cache_and_its_origin_names_package_version_and_file(tmp_path):
    wheel = tmp_path / "little-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("little/rows.jsonl.gz", gzip.compress(lines(ROWS)))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "cache" / digest).mkdir(parents=True)
    wheel.rename(tmp_path / "cache" / digest / wheel.name)
    block = {"wheel": "little==1.0", "member": "little/rows.jsonl.gz", "sha256": digest}
    source = open_source(block, tmp_path / "cache")
    assert source.origin == {
        "repository": "little",
        "revision": "1.0",
        "file": "little/rows.jsonl.gz",
        "sha256": digest,
    }
    assert [record.value for record in source.records()] == ROWS


def test_a_hub_dataset_is_streamed_at_its_revision(tmp_path, monkeypatch):
    import datasets

    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "train.jsonl").write_bytes(lines(ROWS))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    asked, load = [], datasets.load_dataset

    def load_local(repository, **options):
        asked.append((repository, options["name"], options["revision"]))
        return load(str(tmp_path / "local"), split=options["split"], streaming=options["streaming"])

    monkeypatch.setattr(datasets, "load_dataset", load_local)
    source = open_source({"hub": "some/where", "revision": COMMIT, "split": "train", "subset": None}, tmp_path)
    assert list(source.records()) == [Record(n, row) for n, row in enumerate(ROWS, 1)]
    assert asked == [("some/where", None, COMMIT)]
    assert source.origin == {"repository": "some/where", "revision": COMMIT, "file": "train"}


def test_a_hub_dataset_that_cannot_be_had_says_what_to_check(monkeypatch, tmp_path):
    import datasets

    def refuse(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("it is gated")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(SourceError, match=r"some/where@000000000000/train: .*it is gated.*HF_TOKEN"):
        list(open_source({"hub": "some/where", "revision": COMMIT}, tmp_path).records())


def test_a_hub_id_that_is_also_a_folder_here_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "where").mkdir(parents=True)
    with pytest.raises(SourceError, match=r"use|name it as source\.path"):
        open_source({"hub": "some/where", "revision": COMMIT}, tmp_path)
