"""One server for many jobs, ended with all its processes however the jobs, the workflow or its keepers end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests

from eaglet.endpoint import connect, look
from eaglet.errors import ConfigError, ServerError
from eaglet.lease import attach, current_state
from eaglet.locks import SHARED, Devices, LeaseFiles, acquire, directory, is_held, workflow_alive
from eaglet.processes import MARK
from eaglet.program import WORKFLOW_PID

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TUNING = {"linger": 0.5, "start_timeout": 60, "stop_timeout": 2, "gpu_timeout": 60, "hang_timeout": 60, "restarts": 2}
PATIENCE = 60.0  # seconds; more than enough on a busy machine

SNAKEFILE = """
import os, sys
sys.path.insert(0, {scripts!r})
from eaglet.locks import workflow_alive
lock = workflow_alive()
os.environ["EAGLET_WORKFLOW_PID"] = str(os.getpid())
DATASETS = {datasets!r}

rule all:
    input: expand("out/{{d}}.txt", d=DATASETS)

rule serve:
    output: service("endpoints/{{d}}.json")
    threads: 0
    params: tuning=lambda wildcards: {tuning!r}
    shell: "exec {python} {toy} hold {{output}} server.log {{params.tuning:q}}"

rule consume:
    input: source="in/{{d}}.txt", endpoint="endpoints/{{d}}.json"
    output: "out/{{d}}.txt"
    shell: "{python} {toy} consume {{input.endpoint}} {seconds} {{output}} {fails} 2>&1 | tee consume.{{wildcards.d}}.log"
"""


class House:
    """A working directory with locks of its own, and the toy's events and processes in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.events_path = folder / "events.log"
        self.processes: list[subprocess.Popen] = []
        self.environment = {
            **os.environ,
            "EAGLET_LOCKS": str(folder / "locks"),
            "TOY_EVENTS": str(self.events_path),
            "PYTHONUNBUFFERED": "1",
            WORKFLOW_PID: str(os.getpid()),  # nothing outlives a test run that is killed
        }

    def start(self, *words: str, **toy: object) -> subprocess.Popen:
        environment = {**self.environment, **{f"TOY_{name}": str(value) for name, value in toy.items()}}
        with open(self.folder / f"stderr.{len(self.processes)}", "wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=self.folder,
                env=environment,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
            )
        self.processes.append(process)
        return process

    def stderr(self, process: subprocess.Popen) -> str:
        return (self.folder / f"stderr.{self.processes.index(process)}").read_text()

    def hold(self, name="a", flavour="plain", devices: tuple[str, ...] = (), tuning=(), mode="hold", **toy: object):
        settings = json.dumps({**TUNING, **dict(tuning)})
        toy_serve = TESTS / "toy_serve.py"
        return self.start(toy_serve, mode, f"{name}.json", "server.log", settings, flavour, *devices, **toy)

    def events(self, what: str) -> list[int]:
        """Process ids of the events of one kind."""
        if not self.events_path.exists():
            return []
        lines = [line.split() for line in self.events_path.read_text().splitlines()]
        return [int(pid) for kind, pid in lines if kind == what]

    def state(self) -> dict | None:
        """What the daemon of the one server here says."""
        found = [json.loads(path.read_text()) for path in self.folder.glob("locks/*/*.state.json")]
        return found[0] if found else None

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def left(self) -> list[str]:
        """Processes that belong to this house: servers and their children, daemons, guardians, jobs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TOY_EVENTS") == str(self.events_path) and process.status() != "zombie":
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except psutil.Error:
                continue
        return found

    def workflow(self, datasets: str, seconds: float = 0.0, fails: bool = False, **toy: object) -> subprocess.Popen:
        for name in datasets:
            (self.folder / "in").mkdir(exist_ok=True)
            source = self.folder / "in" / f"{name}.txt"
            source.exists() or source.write_text(name)
        toy_serve = TESTS / "toy_serve.py"
        text = SNAKEFILE.format(
            scripts=str(ROOT / "scripts"),
            datasets=list(datasets),
            python=sys.executable,
            toy=toy_serve,
            tuning=json.dumps({**TUNING, "linger": 60}),  # the end of the workflow cuts it short
            seconds=seconds,
            fails="fail" if fails else "",
        )
        (self.folder / "Snakefile").write_text(text)
        return self.start("-m", "snakemake", "--cores", "2", "--rerun-incomplete", "--quiet", **toy)


def eventually(holds: Callable[[], object], what: str, seconds: float = PATIENCE) -> object:
    deadline = time.monotonic() + seconds
    while not (result := holds()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)
    return result


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    made = House(tmp_path)
    monkeypatch.setenv("EAGLET_LOCKS", str(tmp_path / "locks"))
    monkeypatch.chdir(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    eventually(lambda: not made.left(), f"everything ended; left: {made.left()}")


def test_a_server_that_nobody_wants_is_not_started(house: House) -> None:
    alive = workflow_alive()
    holder = house.hold("a", mode="lazy")
    eventually((house.folder / "a.json").exists, "endpoint")
    time.sleep(1.5)
    assert house.events("start") == [] and house.state() is None
    with connect(house.folder / "a.json") as connection:
        assert requests.get(connection.url, headers=connection.headers, timeout=5).status_code == 200
    assert len(house.events("start")) == 1
    holder.terminate()
    os.close(alive)


# ---- sharing ---------------------------------------------------------------------------------------------------------


def test_three_leases_share_one_server_and_the_last_stops_it(house: House) -> None:
    alive = workflow_alive()
    holders = [house.hold(name) for name in "abc"]
    eventually(lambda: all((house.folder / f"{name}.json").exists() for name in "abc"), "endpoints")
    answers = []
    for name in "abc":
        with connect(house.folder / f"{name}.json") as connection:
            assert connection.alive()
            answers.append(requests.get(connection.url, headers=connection.headers, timeout=5).text)
    assert len(set(answers)) == 1
    for holder in holders:
        holder.terminate()
    eventually(lambda: not house.left(), "everything ended")
    assert len(house.events("start")) == 1
    assert "not needed any more" in house.log()
    os.close(alive)


def test_a_lease_within_the_linger_finds_the_server_running(house: House) -> None:
    alive = workflow_alive()
    first = house.hold("a", tuning={"linger": 10})
    eventually(lambda: house.events("listening"), "the server")
    first.terminate()
    first.wait()
    time.sleep(0.6)
    second = house.hold("b", tuning={"linger": 0})  # tuning is no part of the identity, so it is the same server
    eventually((house.folder / "b.json").exists, "the endpoint")
    with connect(house.folder / "b.json"):
        assert len(house.events("start")) == 1
    os.close(alive)
    second.terminate()
    eventually(lambda: not house.left(), "everything ended")
    assert "the workflow has gone" in house.log()


def test_another_command_is_another_server(house: House) -> None:
    house.hold("a"), house.hold("b", flavour="other")
    eventually(lambda: len(house.events("listening")) == 2, "two servers")


def test_leases_that_come_all_at_once_start_one_server(house: House) -> None:
    for number in range(5):
        house.hold(f"d{number}")
    eventually(lambda: all((house.folder / f"d{n}.json").exists() for n in range(5)), "endpoints")
    for number in range(5):
        with connect(house.folder / f"d{number}.json"):
            pass
    assert len(house.events("start")) == 1


def test_the_endpoint_is_written_before_the_server_is_up(house: House) -> None:
    house.hold("a", START=3)
    eventually((house.folder / "a.json").exists, "the endpoint", 3)
    assert not house.events("listening")
    assert look(house.folder / "a.json") is None


def test_the_key_is_in_no_argv_and_in_no_file_that_others_can_read(house: House) -> None:
    house.hold("a")
    eventually((house.folder / "a.json").exists, "the endpoint")
    with connect(house.folder / "a.json") as connection:
        key = connection.headers["Authorization"].removeprefix("Bearer ")
        assert key not in " ".join(house.left())
        assert key not in repr(connection)
        holding = [p for p in house.folder.rglob("*") if p.is_file() and key in p.read_text(errors="replace")]
    assert holding
    assert all(p.stat().st_mode & 0o077 == 0 and p.parent.parent == directory() for p in holding)


# ---- ways of ending --------------------------------------------------------------------------------------------------


def test_a_consumer_keeps_the_server_when_its_holder_is_killed(house: House) -> None:
    alive = workflow_alive()
    holder = house.hold("a")
    eventually((house.folder / "a.json").exists, "the endpoint")
    with connect(house.folder / "a.json") as connection:
        holder.kill()
        time.sleep(1.5)  # longer than the linger
        assert requests.get(connection.url, timeout=5).ok
    eventually(lambda: not house.left(), "everything ended")
    os.close(alive)


@pytest.mark.parametrize("victim", ["daemon", "guardian", "both"])
def test_whoever_looks_after_the_server_may_be_killed(house: House, victim: str) -> None:
    holder = house.hold("a", tuning={"restarts": 0})
    eventually(lambda: house.events("listening") and (house.state() or {}).get("phase") == "ready", "the server")
    daemon = psutil.Process(house.state()["pid"])
    guardian = daemon.children()[0]
    for process in {"daemon": [daemon], "guardian": [guardian], "both": [daemon, guardian]}[victim]:
        process.kill()
    assert holder.wait(PATIENCE) == 1
    if victim != "both":
        eventually(lambda: not house.left(), "everything ended")
        return
    # What escaped from the server is found by its mark when the next server starts.
    eventually(lambda: len(house.left()) <= 2, "the server itself ended")
    again = house.hold("a")
    eventually(lambda: len(house.events("listening")) == 2, "the next server")
    again.terminate()
    eventually(lambda: not house.left(), "everything ended")


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace_time(house: House) -> None:
    holder = house.hold("a", tuning={"stop_timeout": 0.5}, IGNORE_TERM=1)
    eventually(lambda: house.events("listening"), "the server")
    holder.terminate()
    eventually(lambda: not house.left(), "everything ended")


# ---- faults of the server --------------------------------------------------------------------------------------------


def test_a_server_that_refuses_a_flag_fails_at_once_with_its_own_words(house: House) -> None:
    holder = house.hold("a", REFUSE=1)
    assert holder.wait(PATIENCE) == 1
    assert "unrecognized arguments: --no-such-flag" in house.stderr(holder)
    assert "server.log" in house.stderr(holder)
    assert len(house.events("start")) == 1  # no restart: it would refuse the flag again
    with pytest.raises(ServerError, match="no-such-flag"), connect(house.folder / "a.json"):
        pass


def test_a_server_that_never_gets_healthy_fails_after_the_start_timeout(house: House) -> None:
    holder = house.hold("a", tuning={"start_timeout": 1}, NEVER=1)
    assert holder.wait(PATIENCE) == 1
    assert "not healthy within 1 s" in house.stderr(holder)


def test_a_crashed_server_comes_back_at_the_same_address(house: House) -> None:
    house.hold("a", CRASH=1)
    eventually((house.folder / "a.json").exists, "the endpoint")
    with connect(house.folder / "a.json") as connection:
        first = requests.get(connection.url, headers=connection.headers, timeout=5).text
        (house.folder / "crash").touch()
        eventually(lambda: len(house.events("listening")) == 2, "the second start")
        assert connection.alive()
        time.sleep(0.3)
        second = requests.get(connection.url, headers=connection.headers, timeout=5).text
    assert first.split()[0] != second.split()[0]
    assert first.split()[1:] == second.split()[1:] and "None" not in first  # the same key


def test_a_server_that_keeps_crashing_is_given_up_after_the_restarts(house: House) -> None:
    (house.folder / "crash").touch()
    alive = workflow_alive()
    holder = house.hold("a", tuning={"restarts": 2}, CRASH=2, START=0)
    eventually((house.folder / "a.json").exists, "the endpoint")
    assert holder.wait(PATIENCE) == 1
    os.close(alive)
    assert len(house.events("start")) in (1, 3)  # 1: it crashed before it was seen healthy


def test_a_hung_server_is_started_again(house: House) -> None:
    house.hold("a", tuning={"hang_timeout": 2})
    eventually(lambda: (house.state() or {}).get("phase") == "ready", "the server")
    (house.folder / "hang").touch()
    eventually(lambda: "has not answered /health" in house.log(), "noticed")
    (house.folder / "hang").unlink()
    eventually(lambda: len(house.events("listening")) == 2, "the second start")


# ---- the GPUs --------------------------------------------------------------------------------------------------------


def test_waiting_for_a_gpu_says_who_holds_it_and_ends_in_time(house: House) -> None:
    claimed = Devices(("0", "1")).claim("python train.py")
    holder = house.hold("a", devices=("1",), tuning={"gpu_timeout": 1.5})
    eventually((house.folder / "a.json").exists, "the endpoint")
    told: list[str] = []
    with pytest.raises(
        ServerError, match=r"waited 1\.5 s for the GPUs: GPU 1 is held by process \d+ \(python train\.py"
    ):
        attach(house.folder / "a.json", told.append)
    assert any("waiting: GPU 1 is held by process" in line for line in told)
    assert holder.wait(PATIENCE) == 1
    assert not house.events("start")
    for descriptor in claimed:
        os.close(descriptor)


def test_a_gpu_job_gets_the_gpu_from_a_lingering_server_at_once(house: House) -> None:
    alive = workflow_alive()
    holder = house.hold("a", devices=("GPU-x",), tuning={"linger": 600})
    eventually(lambda: house.events("listening"), "the server")
    holder.terminate()
    holder.wait()
    script = "import os; from pathlib import Path; Path('ran').write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    house.environment["CUDA_VISIBLE_DEVICES"] = "GPU-x"
    job = house.start(ROOT / "scripts" / "serve.py", "gpu", "--", sys.executable, "-c", script)
    assert job.wait(PATIENCE) == 0
    assert (house.folder / "ran").read_text() == "GPU-x"
    assert house.events("exit")  # the server had ended before the job ran
    assert "the GPUs are wanted" in house.log()
    os.close(alive)


def test_devices_are_claimed_together_or_not_at_all(house: House) -> None:
    second = Devices(("1",)).claim("one")
    assert Devices(("0", "1")).claim("both") is None
    assert not is_held(directory() / "device-0")
    os.close(second[0])
    assert len(Devices(("0", "1")).claim("both")) == 2


# ---- a workflow ------------------------------------------------------------------------------------------------------


@pytest.mark.workflow
def test_a_workflow_of_three_datasets_starts_one_server_and_leaves_nothing(house: House) -> None:
    assert house.workflow("abc").wait(180) == 0
    assert len(house.events("start")) == 1
    eventually(lambda: not house.left(), "everything ended", 20)
    (house.folder / "in" / "b.txt").write_text("edited")
    assert house.workflow("abc").wait(180) == 0
    assert len(house.events("start")) == 2 and len(house.events("served")) == 4  # one dataset, one start
    eventually(lambda: not house.left(), "everything ended", 20)


@pytest.mark.workflow
def test_a_failing_consumer_leaves_nothing(house: House) -> None:
    assert house.workflow("a", fails=True).wait(180) != 0
    assert house.events("served")
    eventually(lambda: not house.left(), "everything ended", 20)


@pytest.mark.workflow
@pytest.mark.parametrize(
    ("number", "to_group", "seconds"),
    [
        pytest.param(signal.SIGINT, True, 60, id="ctrl-c"),  # the terminal signals Snakemake and its jobs
        pytest.param(signal.SIGTERM, False, 2, id="sigterm"),  # Snakemake lets running jobs finish
        pytest.param(signal.SIGKILL, False, 60, id="sigkill"),
    ],
)
def test_a_workflow_ended_by_a_signal_leaves_nothing(
    house: House, number: signal.Signals, to_group: bool, seconds: float
) -> None:
    snakemake = house.workflow("a", seconds=seconds)
    eventually(lambda: house.events("served"), "the consumer", 180)
    os.killpg(snakemake.pid, number) if to_group else snakemake.send_signal(number)
    snakemake.wait(60)
    eventually(lambda: not house.left(), f"everything ended; left: {house.left()}", 30)
    if number == signal.SIGKILL:
        assert house.start("-m", "snakemake", "--unlock").wait(180) == 0
        assert house.workflow("a").wait(180) == 0
        assert (house.folder / "out" / "a.txt").exists()
        assert len(house.events("start")) == 2


# ---- addresses and files ---------------------------------------------------------------------------------------------


def test_a_token_comes_from_the_environment_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    with connect(url="http://gpu:30000/", token_env="MY_TOKEN") as connection:
        assert connection.url == "http://gpu:30000"
        assert connection.headers == {"Authorization": "Bearer s3cret"}
        assert "s3cret" not in repr(connection) and "s3cret" not in connection.describe()
        assert connection.alive()
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ConfigError, match="MY_TOKEN is not set"), connect(url="http://gpu:1", token_env="MY_TOKEN"):
        pass


def test_a_file_that_is_no_endpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="not an endpoint file"), connect(tmp_path / "absent.json"):
        pass


def test_a_folder_of_locks_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("EAGLET_LOCKS", str(tmp_path / "open"))
    with pytest.raises(ServerError, match="belong to you alone"):
        directory()


def test_the_state_of_a_daemon_that_is_gone_does_not_count(house: House) -> None:
    files = LeaseFiles(directory(), "f" * 64)
    files.state.write_text(json.dumps({"pid": os.getpid(), "phase": "ready"}))
    assert current_state(files) is None  # nobody holds the server lock
    lock = acquire(files.server, SHARED)
    assert current_state(files) is None
    os.close(lock)
    assert MARK not in os.environ
