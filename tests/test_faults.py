"""Whatever befalls the server or the network, the raw file is that of an undisturbed capture, byte by byte."""

import random
import resource
import threading
import time
from dataclasses import replace

import pytest

from capturing import FAST, Url, capture, write_prompts
from eaglet import client as client_module
from eaglet.errors import CaptureError, GuardError, StoreError
from eaglet.journal import entries, verify
from scripted_server import CORRUPTIONS, ScriptedServer, sometimes

ROWS = 60


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(client_module, "LONGEST_DELAY", 0.05)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", ROWS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_format, tiny_renderer, prompts):
    """The bytes of the raw file when nothing happens."""
    with ScriptedServer(tiny_format, tiny_renderer) as server:
        raw, _ = capture(tmp_path_factory.mktemp("undisturbed"), prompts, tiny_format, server.url)
    return raw.read_bytes()


@pytest.fixture
def server(tiny_format, tiny_renderer):
    with ScriptedServer(tiny_format, tiny_renderer) as running:
        yield running


def answered_rows(folder):
    return [entry["request_key"] for entry in entries(folder / "generations" / "d.jsonl") if entry["kind"] == "row"]


def assert_each_row_once(folder):
    keys = answered_rows(folder)
    assert len(keys) == len(set(keys)) == ROWS


@pytest.mark.parametrize("fault", ["reset", "cut", "truncated", "busy", "server_error", *CORRUPTIONS])
def test_a_fault_on_many_requests_changes_nothing(tmp_path, tiny_format, server, prompts, undisturbed, fault):
    server.faults = sometimes(fault, 0.25)
    server.faults(0, {})
    raw, made = capture(tmp_path, prompts, tiny_format, server.url)
    assert raw.read_bytes() == undisturbed
    assert made.answered == ROWS and server.requests > ROWS + 5
    assert_each_row_once(tmp_path)


def test_requests_that_hang_are_timed_out_and_asked_again(tmp_path, tiny_format, server, prompts, undisturbed):
    server.faults = sometimes("hang", 0.1)
    raw, _ = capture(tmp_path, prompts, tiny_format, server.url, tuning=replace(FAST, request_timeout=0.2))
    assert raw.read_bytes() == undisturbed


def test_all_faults_together_change_nothing(tmp_path, tiny_format, server, prompts, undisturbed):
    chance, names = random.Random(3), ["reset", "cut", "truncated", "busy", "server_error", *CORRUPTIONS]
    server.faults = lambda number, body: chance.choice(names) if chance.random() < 0.2 else None
    raw, _ = capture(tmp_path, prompts, tiny_format, server.url)
    assert raw.read_bytes() == undisturbed
    assert_each_row_once(tmp_path)


def test_a_server_that_dies_and_comes_back_loses_and_repeats_nothing(
    tmp_path, tiny_format, server, prompts, undisturbed
):
    server.delay = lambda: 0.01

    def blink():
        server.stop()
        time.sleep(0.2)
        server.start()

    died = threading.Event()

    def fault(number, body):
        if number in (15, 40):
            died.set()
            threading.Thread(target=blink).start()

    server.faults = fault
    raw, _ = capture(tmp_path, prompts, tiny_format, server.url)
    assert died.is_set() and server.starts >= 2
    assert raw.read_bytes() == undisturbed
    assert_each_row_once(tmp_path)


def test_a_server_that_never_comes_back_is_given_up_with_everything_kept(
    tmp_path, tiny_format, server, prompts, undisturbed
):
    server.faults = lambda number, body: threading.Thread(target=server.stop).start() if number == 30 else None
    with pytest.raises(CaptureError, match=r"has given no answer .*journal; run again"):
        capture(tmp_path, prompts, tiny_format, server.url, tuning=replace(FAST, give_up_after=0.5))
    kept = len(answered_rows(tmp_path))
    assert kept >= 15 and not (tmp_path / "d.parquet").exists()
    server.faults = lambda number, body: None
    server.start()
    raw, made = capture(tmp_path, prompts, tiny_format, server.url)
    assert raw.read_bytes() == undisturbed
    assert made.reused == kept and made.answered == ROWS - kept


def test_a_lease_whose_server_has_ended_stops_at_once(tmp_path, tiny_format, server, prompts):
    connection = Url(server.url)

    def end():
        connection.lives = False
        server.stop()

    server.faults = lambda number, body: threading.Thread(target=end).start() if number == 30 else None
    began = time.monotonic()
    with pytest.raises(CaptureError, match=r"has ended .*journal; run again"):
        capture(tmp_path, prompts, tiny_format, connection, tuning=replace(FAST, give_up_after=60))
    assert time.monotonic() - began < 10
    server.start()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("server_info", "kv_cache_dtype", "fp8_e5m2"), "--kv-cache-dtype: not set before, 'fp8_e5m2' now"),
        (("model_info", "weight_version", "2"), "weight_version: 'default' before, '2' now"),
        (("server_info", "version", "9"), "version changed from 0.0-scripted to 9"),
    ],
)
def test_a_server_that_comes_back_as_another_stops_the_capture_before_its_answers_count(
    tmp_path, tiny_format, server, prompts, change, message
):
    place, name, value = change

    def blink():
        server.stop()
        getattr(server, place)[name] = value
        server.start()

    server.delay = lambda: 0.01
    server.faults = lambda number, body: threading.Thread(target=blink).start() if number == 30 else None
    with pytest.raises(GuardError) as caught:
        capture(tmp_path, prompts, tiny_format, server.url)
    assert message in str(caught.value) and "kept" in str(caught.value)
    facts = [entry["facts"] for entry in entries(tmp_path / "generations" / "d.jsonl") if entry["kind"] == "server"]
    assert len(facts) == 1 and 0 < len(answered_rows(tmp_path)) <= 30


def test_a_full_disk_stops_the_capture_with_a_sound_journal(tmp_path, tiny_format, server, prompts, undisturbed):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    server.faults = lambda number, body: (
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard)) if number == 2 else None
    )
    try:
        with pytest.raises(StoreError, match=r"d\.jsonl.*no room is left on the disk"):
            capture(tmp_path, prompts, tiny_format, server.url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert verify(tmp_path / "generations" / "d.jsonl") == []
    kept = len(answered_rows(tmp_path))
    assert 0 < kept < ROWS
    server.faults = lambda number, body: None
    raw, made = capture(tmp_path, prompts, tiny_format, server.url)
    assert raw.read_bytes() == undisturbed and made.reused == kept


def test_a_disk_that_is_full_when_the_raw_file_is_written_is_told(tmp_path, tiny_format, server, prompts, undisturbed):
    capture(tmp_path, prompts, tiny_format, server.url)[0].unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(StoreError, match=r"d\.parquet.*make room and run again"):
            capture(tmp_path, prompts, tiny_format, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["generations"]
    assert capture(tmp_path, prompts, tiny_format, None)[0].read_bytes() == undisturbed


def test_an_interrupt_keeps_what_was_answered(tmp_path, tiny_format, server, prompts, undisturbed, monkeypatch):
    from eaglet.capture import Capture

    honest, taken = Capture._take_answer, []

    def interrupted(self, bar):
        honest(self, bar)
        taken.append(1)
        if len(taken) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Capture, "_take_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture(tmp_path, prompts, tiny_format, server.url)
    monkeypatch.undo()
    kept = len(answered_rows(tmp_path))
    assert 20 <= kept < ROWS
    raw, made = capture(tmp_path, prompts, tiny_format, server.url)
    assert raw.read_bytes() == undisturbed and made.reused == kept
    assert_each_row_once(tmp_path)
