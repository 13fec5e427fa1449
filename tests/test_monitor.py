"""The monitor counts this run's rows and no others, disturbs nothing, and says what the server says of itself."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

import monitor
from eaglet import watch
from eaglet.config import ROOT, checked_config
from eaglet.digests import sample_id
from eaglet.endpoint import Connection
from eaglet.errors import ConfigError
from eaglet.files import write_json
from eaglet.journal import Generation, Journal, Refusal
from eaglet.rendering import Renderer
from eaglet.row_request import Requests
from eaglet.watch import JournalTail, RunWatch, ServerWatch
from tiny_shard import tiny_turn_format

NOW = time.time()


class Run:
    """A run's folder with prompts and a journal that tests write to."""

    def __init__(self, folder, target, *, cap=None, server=None):
        self.folder, self.store = folder / "demo", folder / "store"
        self.turn_format = tiny_turn_format(target)
        self.turn_format.save(self.folder / "target" / "turn_format.json")
        self.journal_path = self.store / "generations" / self.turn_format.fingerprint / "d.jsonl"
        source = {"path": str(ROOT / "config" / "config.yaml")}
        self.config = checked_config(
            {
                "run": "demo",
                "target": {"model": str(target)},
                "server": server or {},
                "sampling": {"max_new_tokens": 8},
                "datasets": {"d": {"source": source, "format": "messages", "max_tokens": cap}},
            }
        )
        self.samples: list[tuple[str, list]] = []

    def write_prompts(self, count):
        lines = []
        for number in range(count):
            messages = [{"role": "user", "content": f"a b {number}"}]
            self.samples.append((sample_id(messages, None, {}), messages))
            record = {"sample_id": self.samples[-1][0], "messages": messages, "tools": None, "template_arguments": {}}
            lines.append(json.dumps(record) + "\n")
        path = self.folder / "prompts" / "d.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))

    def key(self, number, **sampling):
        requests = Requests(self.turn_format, {**self.config["sampling"], **sampling}, None)
        sample, messages = self.samples[number]
        return requests.make(sample, Renderer(self.turn_format.target).prompt_ids(messages)).key

    def answer(self, *numbers, tokens=5, finish="stop", **sampling):
        with Journal(self.journal_path) as journal:
            for number in numbers:
                key, sample = self.key(number, **sampling), self.samples[number][0]
                journal.append(Generation(key, sample, [7] * tokens, finish, 2 if finish == "stop" else None, "s"))

    def refuse(self, number, reason):
        with Journal(self.journal_path) as journal:
            journal.append(Refusal(self.key(number), self.samples[number][0], reason, "told", "s"))

    def look(self, seconds_later=10.0):
        return RunWatch(self.config, self.folder, self.store).look(time.time() + seconds_later)

    def dataset(self, **when):
        return self.look(**when)["datasets"][0]


@pytest.fixture
def run(tmp_path, tiny_target):
    made = Run(tmp_path, tiny_target)
    made.write_prompts(6)
    return made


def test_rows_tokens_and_finish_reasons_are_counted_from_the_journal(run):
    run.answer(0, 1)
    run.answer(2, tokens=8, finish="length")
    run.refuse(3, "refused")
    found = run.dataset()
    assert found["state"] == "running"
    assert found["rows"] == {"total": 6, "done": 3, "refused": {"refused": 1}, "left": 2}
    assert found["output_tokens"] == {"done": 18, "cap": None}
    assert found["finish_reasons"] == {"length": 1, "stop": 2}


def test_answers_of_other_settings_and_other_prompts_are_not_this_runs(run):
    run.answer(0, 1, 2, seed=99)
    run.answer(0)
    with Journal(run.journal_path) as journal:
        journal.append(Generation("f" * 64, "0" * 16, [7], "stop", 2, "s"))
    assert run.dataset()["rows"]["done"] == 1


def test_a_second_look_reads_what_has_been_added_since(run):
    seen = RunWatch(run.config, run.folder, run.store)
    run.answer(0)
    assert seen.look(time.time())["datasets"][0]["rows"]["done"] == 1
    run.answer(1, 2)
    assert seen.look(time.time())["datasets"][0]["rows"]["done"] == 3


def test_a_line_that_is_being_written_waits_and_a_damaged_one_is_counted(run):
    run.answer(0, 1)
    whole = run.journal_path.read_bytes()
    first, second = whole.splitlines(keepends=True)
    tail = JournalTail(run.journal_path)
    run.journal_path.write_bytes(first + second[:-5])
    assert len(list(tail.read())) == 1
    run.journal_path.write_bytes(whole + second.replace(b"[7,", b"[8,"))
    assert len(list(tail.read())) == 1
    assert tail.damaged == 1


def test_speed_and_time_left_are_those_of_the_last_minutes(run):
    run.answer(0, 1, 2, tokens=8)
    found = run.dataset(seconds_later=10)
    assert found["tokens_per_second"] == pytest.approx(24 / 10, rel=0.2)
    assert found["seconds_left"] == pytest.approx(10, rel=0.2)
    stalled = run.dataset(seconds_later=4000)
    assert (stalled["state"], stalled["tokens_per_second"], stalled["seconds_left"]) == ("waiting", 0, None)


def test_with_a_cap_the_time_left_is_that_to_the_cap(tmp_path, tiny_target):
    capped = Run(tmp_path, tiny_target, cap=20)
    capped.write_prompts(50)
    capped.answer(0, 1, 2, tokens=5)
    found = capped.dataset(seconds_later=9)
    assert found["output_tokens"] == {"done": 15, "cap": 20}
    assert found["rows"]["left"] == 1
    assert found["seconds_left"] == pytest.approx(3, abs=1)


def test_new_prompts_start_the_count_anew(run):
    seen = RunWatch(run.config, run.folder, run.store)
    run.answer(0, 1)
    assert seen.look(NOW)["datasets"][0]["rows"] == {"total": 6, "done": 2, "refused": {}, "left": 4}
    run.samples = run.samples[:0]
    run.write_prompts(1)
    assert seen.look(NOW)["datasets"][0]["rows"] == {"total": 1, "done": 1, "refused": {}, "left": 0}


def test_a_finished_dataset_is_told_from_its_report(run):
    run.answer(0)
    report = {
        "rows": {"in": 6, "out": 4, "dropped": {"beyond_cap": 2}},
        "tokens": {"prompt": 60, "output": 77, "cap": 80},
        "finish_reasons": {"stop": 4},
    }
    write_json(run.folder / "raw" / "d.report.json", report)
    seen = run.look()
    found = seen["datasets"][0]
    assert (found["state"], found["rows"]["done"], found["seconds_left"]) == ("done", 4, 0)
    assert found["rows"]["refused"] == {"beyond_cap": 2}
    assert seen["total"]["seconds_left"] == 0 and seen["total"]["output_tokens"] == 77


def test_before_prompts_and_journal_there_is_nothing_to_count(tmp_path, tiny_target):
    seen = Run(tmp_path, tiny_target)
    assert seen.dataset()["state"] == "no prompts"
    seen.write_prompts(2)
    assert seen.dataset()["state"] == "waiting"


def test_a_dataset_whose_server_is_leased_is_running_however_long_its_rows_take(run, monkeypatch):
    assert run.dataset()["state"] == "waiting"
    (run.folder / "endpoints").mkdir()
    (run.folder / "endpoints" / "d.json").write_text("{}")
    monkeypatch.setattr(watch, "look", lambda path: None)
    monkeypatch.setattr(watch, "state_of_endpoint", lambda path: {"phase": "ready"})
    assert run.dataset()["state"] == "running"


def test_looking_changes_no_file(run):
    run.answer(0)
    files = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.store.rglob("*") if path.is_file()}
    run.look()
    assert files == {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.store.rglob("*") if path.is_file()
    }


# --- the server ---


@pytest.fixture
def server():
    """The address of a server that answers /server_info with `server.info`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            time.sleep(self.server.delay)
            body = json.dumps(self.server.info).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.delay, made.url = 0.0, f"http://127.0.0.1:{made.server_port}"
    part = {"last_gen_throughput": 400.5, "num_running_reqs": 3}
    made.info = {"internal_states": [part, part]}
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def test_a_running_server_tells_its_own_throughput_summed_over_its_parts(tmp_path, server):
    assert ServerWatch(tmp_path, server.url, None).look() == {
        "health": "answers",
        "url": server.url,
        "tokens_per_second": 801.0,
        "running": 6,
        "queued": None,
        "problem": None,
    }


def test_a_server_that_is_late_or_gone_is_told_so(tmp_path, server, monkeypatch):
    monkeypatch.setattr(watch, "SERVER_SECONDS", 0.1)
    server.delay = 0.5
    assert ServerWatch(tmp_path, server.url, None).look()["health"] == "late"
    gone = ServerWatch(tmp_path, "http://127.0.0.1:9", None).look()
    assert gone["health"] == "silent" and "refused" in gone["problem"]


def test_the_server_behind_an_endpoint_file_is_looked_at_without_a_lease(tmp_path, server, monkeypatch):
    assert ServerWatch(tmp_path, None, None).look()["health"] == "none"
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "d.json").write_text("{}")  # as a killed workflow leaves one
    assert ServerWatch(tmp_path, None, None).look()["health"] == "none"
    monkeypatch.setattr(watch, "state_of_endpoint", lambda path: {"phase": "starting"})
    monkeypatch.setattr(watch, "look", lambda path: None)
    assert ServerWatch(tmp_path, None, None).look()["health"] == "starting"
    monkeypatch.setattr(watch, "look", lambda path: Connection(server.url, {}))
    assert ServerWatch(tmp_path, None, None).look()["health"] == "answers"


# --- the views ---


def command(run, tmp_path, *flags):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run.config))
    monitor.main(["--run-dir", str(run.folder), "--configfile", str(tmp_path / "config.yaml"), *flags])


def test_once_prints_one_line_for_each_dataset_and_a_sum(run, tmp_path, capsys):
    run.answer(0, 1)
    run.refuse(2, "refused")
    command(run, tmp_path, "--once")
    said = capsys.readouterr().out
    assert "server no server yet" in said
    line = next(line for line in said.splitlines() if line.startswith("d "))
    assert line.split()[:4] == ["d", "running", "2/6", "50"]
    assert "stop 2" in line and "refused 1" in line
    assert "2 of 6 rows, 10 tokens" in said


def test_json_is_the_same_for_programs(run, tmp_path, capsys):
    run.answer(0)
    command(run, tmp_path, "--json")
    assert json.loads(capsys.readouterr().out)["datasets"][0]["rows"]["done"] == 1


def test_the_live_view_looks_again_until_it_is_stopped(run, tmp_path, capsys, monkeypatch):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(monitor.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        command(run, tmp_path, "--interval", "0.5")
    assert looks == [0.5, 0.5, 0.5]


def test_the_config_of_another_run_is_refused(run, tmp_path):
    run.config["run"] = "other"
    with pytest.raises(ConfigError, match=r"is the config of run other, and --run-dir is .*demo; name that run's"):
        command(run, tmp_path, "--once")


@pytest.mark.parametrize(
    ("seconds", "told"), [(None, "?"), (7, "7 s"), (306, "5 min 06 s"), (14_700, "4 h 05 min"), (273_600, "3 d 04 h")]
)
def test_durations_are_told_in_two_units(seconds, told):
    assert monitor.duration(seconds) == told


def test_counts_are_told_in_three_or_four_digits():
    assert [monitor.count(n) for n in (950, 12_300, 10_000_000, 1.2e9)] == ["950", "12.3k", "10.0M", "1.2G"]
