"""The generate program: what it reports is decided by prompts and journal, what happened on the way is provenance."""

import json

import pytest

import generate
from capturing import SETTINGS, write_prompts
from eaglet.errors import ConfigError
from eaglet.provenance import read_provenance
from scripted_server import ScriptedServer, once

ROWS = 12


@pytest.fixture
def server(tiny_format, tiny_renderer):
    with ScriptedServer(tiny_format, tiny_renderer) as running:
        yield running


@pytest.fixture
def run(tmp_path, tiny_format, server):
    """Runs the program with some flags changed; returns the report."""
    tiny_format.save(tmp_path / "turn_format.json")
    write_prompts(tmp_path / "prompts.jsonl", ROWS)

    def run(*flags, url=server.url, params=None, tuning=None):
        given = {"sampling": SETTINGS, "max_tokens": None, "context_length": None, **(params or {})}
        generate.main(
            [
                *("--dataset", "d", "--prompts", f"{tmp_path}/prompts.jsonl", "--url", url),
                *("--turn-format", f"{tmp_path}/turn_format.json", "--params", json.dumps(given)),
                *("--tuning", json.dumps({"max_in_flight": 4, "render_samples": 2, **(tuning or {})})),
                *("--store", f"{tmp_path}/store", "--output", f"{tmp_path}/d.parquet"),
                *("--report", f"{tmp_path}/d.report.json", "--provenance", f"{tmp_path}/p.json", *flags),
            ]
        )
        return json.loads((tmp_path / "d.report.json").read_text())

    return run


def test_the_report_says_what_the_raw_file_holds_and_what_not(run):
    report = run(params={"max_tokens": 60})
    rows, tokens = report["rows"], report["tokens"]
    assert rows["in"] == ROWS == rows["out"] + rows["dropped"]["beyond_cap"]
    assert 0 < tokens["output"] <= tokens["cap"] == 60
    assert report["finish_reasons"] == {"stop": rows["out"]}
    assert [server["engine"] for server in report["servers"]] == ["sglang"]


def test_retries_stand_in_the_provenance_and_leave_the_report_as_it_was(tmp_path, run, server):
    undisturbed = run()
    raw = (tmp_path / "d.parquet").read_bytes()
    next((tmp_path / "store").rglob("d.jsonl")).unlink()
    server.faults = once("reset", "busy", "busy")
    assert run() == undisturbed and (tmp_path / "d.parquet").read_bytes() == raw
    facts = read_provenance(tmp_path / "p.json")["facts"]
    assert facts["failures"] == {"busy": 2, "connection_lost": 1}
    assert facts["requests_sent"] == ROWS + 1 + 3  # the probe, and what was asked again
    assert facts["rows_answered"] == ROWS


def test_a_token_is_sent_and_written_nowhere(tmp_path, run, server, monkeypatch):
    server.token = "very-secret-token"
    monkeypatch.setenv("EAGLET_TOKEN", server.token)
    run("--token-env", "EAGLET_TOKEN")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if b"very-secret" in path.read_bytes()]


def test_a_password_in_the_address_is_refused(run, server):
    with pytest.raises(ConfigError, match=r"server\.url.*server\.token_env"):
        run(url=server.url.replace("http://", "http://user:hidden@"))
    assert server.requests == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning": {"max_in_fligth": 4}}, "unknown max_in_fligth"),
        ({"params": {"sampling": {"temperature": 0.7}}}, "sampling: top_p, top_k"),
    ],
)
def test_wrong_params_are_refused_before_any_work(run, server, changes, message):
    with pytest.raises(ConfigError, match=message):
        run(**changes)
    assert server.requests == 0
