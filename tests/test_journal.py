"""The journal keeps each whole line, whatever ends the process, and finds each damaged one."""

import errno
import fcntl
import os
import resource
import subprocess
import sys

import pytest

from eaglet import journal
from eaglet.errors import CaptureError, StoreError
from eaglet.journal import Generation, Generations, Index, Journal, Refusal, entries, verify

FACTS = {"engine": "sglang", "version": "1", "flags": {}}


def key(number: int) -> str:
    return f"{number:064x}"


def generation(number: int, **changes) -> Generation:
    row = {
        "request_key": key(number),
        "sample_id": f"{number:016x}",
        "output_ids": [number, 5, 2],
        "finish_reason": "stop",
        "matched_stop": 2,
        "server": "f" * 16,
    }
    return Generation(**{**row, **changes})


def filled(path, rows: int = 5):
    with Journal(path) as made:
        for number in range(rows):
            made.append(generation(number))
    return path


def test_what_was_appended_is_read_back(tmp_path):
    path = tmp_path / "d.jsonl"
    refusal = Refusal(key(9), "b" * 16, "refused", "too long: “x”", "f" * 16)
    with Journal(path) as made:
        made.append(generation(1))
        made.append(refusal)
        digest = made.append_server(FACTS)
        assert made.index.get(key(1)) == generation(1)
    with Journal(path) as again:
        assert again.index.get(key(1)) == generation(1)
        assert again.index.get(key(2)) is None
        assert again.index.refusals == {key(9): refusal}
        assert again.index.servers == {digest: FACTS}
        assert len(again.index) == 1 and key(1) in again.index


def test_the_same_server_is_written_once(tmp_path):
    path = tmp_path / "d.jsonl"
    for _ in range(3):
        with Journal(path) as made:
            made.append_server(FACTS)
            made.append_server(dict(reversed(FACTS.items())))
    assert [entry["kind"] for entry in entries(path)] == ["server"]


def test_the_first_answer_to_a_key_counts(tmp_path):
    path = tmp_path / "d.jsonl"
    with Journal(path) as made:
        made.append(generation(1))
        made.append(generation(1, output_ids=[7, 2]))
        assert made.index.get(key(1)) == generation(1)
    assert Index(path).get(key(1)) == generation(1)


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    path = filled(tmp_path / "d.jsonl")
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    torn = whole[: last + cut] if cut > 0 else whole[:-1]
    path.write_bytes(torn)
    assert verify(path) == []
    assert len(list(entries(path))) == 4
    with Journal(path) as again:
        assert len(again.index) == 4
        again.append(generation(4))
    assert [entry["request_key"] for entry in entries(path)] == [key(n) for n in range(5)]
    assert verify(path) == []


@pytest.mark.parametrize("place", ["output_ids", "request_key", "crc32", "kind"])
def test_a_changed_byte_is_found_and_named(tmp_path, place):
    path = filled(tmp_path / "d.jsonl")
    data = bytearray(path.read_bytes())
    start = [i for i, byte in enumerate(data) if byte == ord("\n")][1] + 1  # of the third line
    at = data.index(place.encode(), start) + len(place) + 4
    data[at] ^= 1
    path.write_bytes(data)
    (damage,) = verify(path)
    assert (damage.line, damage.offset) == (3, start)
    with pytest.raises(StoreError, match=r"d\.jsonl:3: damaged line") as caught, Journal(path):
        pass
    assert f"sed -i 3d {path}" in str(caught.value)
    assert len(Index(path)) == 4  # another dataset, which only looks rows up, passes over it


def test_every_single_flipped_bit_of_a_line_is_found(tmp_path):
    line = filled(tmp_path / "d.jsonl", 1).read_bytes()[:-1]
    for at in range(len(line)):
        for bit in range(8):
            flipped = bytearray(line)
            flipped[at] ^= 1 << bit
            assert journal.damage(bytes(flipped)), (at, bit)


def test_a_lost_line_break_is_damage(tmp_path):
    path = filled(tmp_path / "d.jsonl", 3)
    path.write_bytes(path.read_bytes().replace(b"\n", b" ", 1))
    assert [d.line for d in verify(path)] == [1]


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "d.jsonl"
    with Journal(path), pytest.raises(CaptureError, match="another capture is writing"), Journal(path):
        pass


def test_the_lock_goes_with_the_process(tmp_path):
    path = tmp_path / "d.jsonl"
    code = "import sys, os; from eaglet.journal import Journal; Journal(sys.argv[1]).__enter__(); print('locked', flush=True); os.read(0, 1)"
    with subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "scripts"},
    ) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(CaptureError), Journal(path):
            pass
        holder.kill()
        holder.wait()
        with Journal(path):
            pass


def test_disk_full_leaves_a_sound_journal_and_says_so(tmp_path):
    path = filled(tmp_path / "d.jsonl", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path) as made:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))  # the next line does not fit
        try:
            with pytest.raises(StoreError, match="no room is left on the disk"):
                made.append(generation(7, output_ids=list(range(1000))))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(StoreError, match="no room"):  # nothing is written behind a failure
            made.append(generation(8))
    assert path.read_bytes().endswith(b"\n") and verify(path) == []
    with Journal(path) as again:
        assert len(again.index) == 2
        again.append(generation(7))


def test_an_error_of_the_disk_is_told(tmp_path, monkeypatch):
    path = filled(tmp_path / "d.jsonl", 1)

    def broken(descriptor, data):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal(path) as made:
        monkeypatch.setattr(journal.os, "write", broken)
        with pytest.raises(StoreError, match="Input/output error"):
            made.append(generation(2))
        monkeypatch.undo()
    assert verify(path) == []


def test_other_datasets_are_looked_up_and_never_written(tmp_path):
    with Journal(tmp_path / "other.jsonl") as other:
        digest = other.append_server(FACTS)
        other.append(generation(1, server=digest))
        other.append(generation(2, server="0" * 16))  # of a server that is not known
    before = (tmp_path / "other.jsonl").read_bytes()
    with Generations(tmp_path, "d") as generations:
        assert generations.borrowed(key(1)) == (generation(1, server=digest), FACTS)
        assert generations.borrowed(key(2)) is None
        assert generations.borrowed(key(3)) is None
        generations.journal.append(generation(3))
        assert generations.borrowed(key(3)) is None  # it is the dataset's own
    assert (tmp_path / "other.jsonl").read_bytes() == before


def test_a_journal_that_another_capture_is_writing_can_be_read(tmp_path):
    path = filled(tmp_path / "other.jsonl", 3)
    with open(path, "ab") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        writer.write(b'{"kind":"row","request_')
        writer.flush()
        with Generations(tmp_path, "d") as generations:
            assert len(generations.others[0]) == 3


def test_the_index_takes_few_bytes_for_each_row(tmp_path):
    path = filled(tmp_path / "d.jsonl", 2000)
    code = (
        "import sys, tracemalloc; from eaglet.journal import Index; tracemalloc.start(); index = Index(sys.argv[1]);"
        "print(tracemalloc.get_traced_memory()[0] / len(index))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, check=True, env={**os.environ, "PYTHONPATH": "scripts"}
    )
    assert float(told.stdout) < 300
