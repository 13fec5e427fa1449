"""A provenance file says what a job read and wrote, and a later change to it is noticed."""

import json

import pytest

from eaglet.digests import file_sha256
from eaglet.errors import AuditFailed
from eaglet.provenance import read_provenance, recorded


@pytest.fixture
def provenance(tmp_path):
    """The provenance file of a job that read one file and wrote a folder of two."""
    (tmp_path / "in.txt").write_text("in")
    (tmp_path / "out").mkdir()
    path = tmp_path / "provenance.json"
    params = {"layers": (1, 2), 3: "three"}
    with recorded(
        path,
        stage="merge",
        name="merge",
        params=params,
        inputs={"raw": tmp_path / "in.txt"},
        outputs={"shards": tmp_path / "out"},
    ) as job:
        (tmp_path / "late.txt").write_text("late")
        job.read("source", tmp_path / "late.txt")
        (tmp_path / "out" / "b").write_text("b")
        (tmp_path / "out" / "a").write_text("a")
        job.count(5, 3, {"too_long": 2})
    return path


def test_names_every_file_with_its_digest(provenance):
    written = read_provenance(provenance)
    folder = provenance.parent
    assert [(i["role"], i["path"], i["sha256"]) for i in written["inputs"]] == [
        ("raw", str(folder / "in.txt"), file_sha256(folder / "in.txt")),
        ("source", str(folder / "late.txt"), file_sha256(folder / "late.txt")),
    ]
    assert [o["path"] for o in written["outputs"]] == [str(folder / "out" / "a"), str(folder / "out" / "b")]
    assert written["rows"] == {"in": 5, "out": 3, "dropped": {"too_long": 2}}
    assert written["params"] == {"layers": [1, 2], "3": "three"}


def test_a_failed_job_leaves_no_provenance(tmp_path):
    path = tmp_path / "provenance.json"
    with pytest.raises(ZeroDivisionError), recorded(path, stage="s", name="n", params={}, inputs={}, outputs={}):
        raise ZeroDivisionError
    assert not path.exists()


def test_rows_must_add_up(tmp_path):
    with (
        pytest.raises(AssertionError, match="1 unaccounted"),
        recorded(tmp_path / "p", stage="s", name="n", params={}, inputs={}, outputs={}) as job,
    ):
        job.count(3, 1, {"empty": 1})


def test_every_flipped_byte_is_noticed(provenance):
    data = provenance.read_bytes()
    for place in range(len(data)):
        provenance.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(AuditFailed):
            read_provenance(provenance)


def test_a_rewritten_value_is_noticed(provenance):
    written = json.loads(provenance.read_text())
    provenance.write_text(json.dumps(written | {"stage": "raw"}, indent=2) + "\n")
    with pytest.raises(AuditFailed, match="does not belong to its seal"):
        read_provenance(provenance)
