"""The RO-Crate: valid by a checker that is not ours, and true to the run."""

import json
from importlib.resources import files

import pytest
import requests
from rocrate.rocrate import ROCrate
from rocrate_validator import models, services

from eaglet.digests import file_sha256
from eaglet.ro_crate import CONTEXT
from synthetic_run import RUN


@pytest.fixture
def folder(audited_run):
    return audited_run / RUN / "audit"


@pytest.fixture
def without_network(monkeypatch):
    """The one document that the checker fetches, the RO-Crate context, comes from the rocrate package instead."""
    context = (files("rocrate") / "data/ro-crate.jsonld").read_bytes()

    def send(session, request, **options):
        assert request.url == CONTEXT
        response = requests.Response()
        response.status_code, response._content, response.url, response.request = 200, context, request.url, request
        response.headers["Content-Type"] = "application/ld+json"
        return response

    monkeypatch.setattr(requests.Session, "send", send)


def issues(folder, severity):
    settings = models.ValidationSettings(
        rocrate_uri=str(folder), profile_identifier="process-run-crate", requirement_severity=severity, no_cache=True
    )
    return services.validate(settings).get_issues()


def test_is_a_valid_process_run_crate(folder, without_network):
    found = issues(folder, models.Severity.RECOMMENDED)
    assert [issue.message for issue in found if issue.severity == models.Severity.REQUIRED] == []
    unknown = {"url", "URL", "publisher", "absolute URI"}  # an address that eaglet does not know
    assert [i.message for i in found if not any(word in i.message for word in unknown)] == []


def test_the_checker_would_notice(folder, without_network, tmp_path):
    crate = json.loads((folder / "ro-crate-metadata.json").read_text())
    for entity in crate["@graph"]:
        entity.pop("instrument", None)
    (tmp_path / "ro-crate-metadata.json").write_text(json.dumps(crate))
    assert any("instrument" in issue.message for issue in issues(tmp_path, models.Severity.REQUIRED))


def test_says_what_each_job_read_and_wrote(folder, audited_run):
    crate = ROCrate(folder)
    actions = {entity["name"]: entity for entity in crate.get_entities() if entity.type == "CreateAction"}
    assert len(actions) == 13
    action = actions["validate notes"]
    assert [file["name"] for file in action["object"]] == [
        "results/demo/raw/notes.parquet",
        "results/demo/prompts/notes.jsonl",
    ]
    assert action["result"][0]["sha256"] == file_sha256(audited_run / RUN / "checked/notes.parquet")
    assert action["startTime"] <= action["endTime"]
    assert "1 dropped as truncated" in action["description"]
    assert action["instrument"]["softwareVersion"]
