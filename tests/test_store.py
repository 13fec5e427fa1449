"""Looking after the store: only what no run refers to is removed, and damage is named."""

import json
import os
import time

import pytest
import torch

import store as store_program
from eaglet.digests import hidden_key
from eaglet.errors import StoreError
from eaglet.hidden_store import HiddenStore
from eaglet.records import RecordWriter
from tiny_shard import tiny_turn_format


@pytest.fixture
def results(tmp_path, tiny_target):
    """A run that refers to rows 0 and 1 of three stored ones, all two days old, and to one of two journals."""
    hidden = HiddenStore(tmp_path / "store/hidden")
    turn_format = tiny_turn_format(tiny_target)
    entries = []
    for number in range(3):
        described = {"fingerprint": turn_format.fingerprint, "layers": [2, 4, 5], "dtype": "bfloat16"}
        key = hidden_key(*described.values(), [number, 5])
        sha256 = hidden.write(key, [number, 5], torch.ones(2, 12), torch.ones(2, 4), described)
        entries.append({"sample_id": f"{number:016x}", "key": key, "tokens": 2, "sha256": sha256})
    with RecordWriter(tmp_path / "demo/hidden/shard-0.index.parquet", "hidden_index", {}) as index:
        index.write_rows(entries[:2])
    (tmp_path / "store/hidden/staging").mkdir()
    (tmp_path / "store/hidden/staging" / f"{entries[0]['key']}.safetensors").write_bytes(b"")
    (tmp_path / "demo/target").mkdir(parents=True)
    turn_format.save(tmp_path / "demo/target/turn_format.json")
    (tmp_path / "demo/prompts").mkdir()
    (tmp_path / "demo/prompts/notes.jsonl").write_text("")
    journals = tmp_path / "store/generations" / turn_format.fingerprint
    journals.mkdir(parents=True)
    for name in ("notes", "gone"):
        (journals / f"{name}.jsonl").write_text("{}\n")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - 48 * 3600,) * 2)
    return tmp_path, hidden, [entry["key"] for entry in entries]


def run(results, *arguments) -> int:
    return store_program.main([arguments[0], "--results", str(results), *arguments[1:]])


def test_only_unreferenced_files_are_removed_and_only_when_told(results):
    folder, hidden, keys = results
    run(folder, "unused")
    assert [hidden.has(key) for key in keys] == [True, True, True]
    run(folder, "unused", "--remove")
    assert [hidden.has(key) for key in keys] == [True, True, False]
    assert not list((folder / "store/hidden/staging").iterdir())  # older than a day: its capture will not go on
    assert len(list((folder / "store/generations").glob("*/*.jsonl"))) == 2  # journals only on request
    run(folder, "unused", "--kind", "generations", "--remove")
    assert [p.name for p in (folder / "store/generations").glob("*/*.jsonl")] == ["notes.jsonl"]


def test_what_a_running_job_has_just_written_is_in_use(results):
    folder, hidden, keys = results
    os.utime(hidden.path(keys[2]))
    run(folder, "unused", "--remove")
    assert hidden.has(keys[2])
    run(folder, "unused", "--remove", "--older-than", "0")
    assert not hidden.has(keys[2])


def test_damage_is_named_and_removed_when_told(results, capsys):
    folder, hidden, keys = results
    assert run(folder, "verify") == 0
    whole = hidden.path(keys[0]).read_bytes()
    hidden.path(keys[0]).write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    hidden.path(keys[1]).unlink()
    capsys.readouterr()
    assert run(folder, "verify", "--json") == 1
    problems = json.loads(capsys.readouterr().out)
    assert set(problems) == {hidden.path(key).as_posix() for key in keys[:2]}
    assert (
        "SHA-256" in problems[hidden.path(keys[0]).as_posix()]
        and "missing" in problems[hidden.path(keys[1]).as_posix()]
    )
    assert run(folder, "verify", "--remove") == 0
    assert not hidden.has(keys[0])


def test_a_sound_file_that_is_not_the_indexs_is_found(results, capsys):
    folder, hidden, keys = results
    row = hidden.read(keys[0])
    metadata = {name: row.metadata[name] for name in ("fingerprint", "layers", "dtype")}
    hidden.write(keys[0], row.token_ids, torch.zeros(2, 12), torch.zeros(2, 4), metadata)
    assert run(folder, "verify") == 1
    assert "the indexes say" in capsys.readouterr().out


def test_sizes_are_told_for_each_part(results, capsys):
    assert run(results[0], "sizes", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hidden"]["files"] == 4 and told["generations"] == {"files": 2, "bytes": 6}


def test_a_folder_without_a_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="--results"):
        run(tmp_path, "sizes")
