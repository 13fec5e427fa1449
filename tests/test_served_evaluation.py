"""Evaluation through SGLang, with a scripted server in its place: counts and comparison."""

import json
from contextlib import contextmanager

import pytest

import evaluate
from eaglet import served_evaluation
from eaglet.errors import EvaluationFailed
from tiny_shard import build_tiny_shard

PARAMS = {"draft_tokens": 3, "max_new_tokens": 8, "seed": 0, "min_acceptance": None, "tree": None}
SPECULATION = {"spec_verify_ct": 4, "spec_num_correct_drafts": 4, "spec_correct_drafts_histogram": [1, 2, 1, 0]}


@pytest.fixture
def run(tmp_path, tiny_target, monkeypatch):
    """run(meta): evaluate against servers whose drafted answers carry `meta`; returns (folder, flags of each server)."""
    shard, facts = build_tiny_shard(tmp_path, tiny_target, rows=4, max_new_tokens=4)
    (tmp_path / "drafter").mkdir()

    def evaluated(meta):
        started = []

        @contextmanager
        def served(turn_format, server, arguments, log):
            started.append(arguments)
            yield Scripted(meta if arguments else {})

        monkeypatch.setattr(served_evaluation, "served", served)
        flags = ["--drafter", str(tmp_path / "drafter"), "--manifest", str(facts), "--shards", str(shard)]
        flags += ["--turn-format", str(facts), "--params", json.dumps(PARAMS), "--server", '{"engine": "sglang"}']
        evaluate.main([*flags, "--output", str(tmp_path / "evaluation")])
        return tmp_path / "evaluation", started

    return evaluated


class Scripted:
    def __init__(self, meta):
        self.meta = meta

    def ask(self, body):
        changed = bool(self.meta) and len(body["input_ids"]) % 2  # rows of odd length come out otherwise
        return {"output_ids": [5, 6, 8 if changed else 7], "meta_info": self.meta}


def test_acceptance_is_what_sglang_counted(run):
    folder, started = run(SPECULATION)
    assert started[0]["speculative-algorithm"] == "EAGLE3" and started[1] == {}
    report = json.loads((folder / "acceptance.json").read_text())
    assert report["engine"] == "sglang" and report["rows"] == 2
    assert report["acceptance_length"] == 2.0  # (4 verifications + 4 accepted) / 4
    assert report["accepted_share"] == [0.75, 0.25, 0.0]
    assert {row["position"] for row in report["identical"]["rows_that_differ"]} <= {2}
    speed = json.loads((folder / "speed.json").read_text())
    assert set(speed["batches"]) == {"1 at once", "4 at once", "16 at once"}
    assert (folder / "speed.png").exists() and (folder / "acceptance.csv").read_text().count("trained") == 2


def test_a_server_without_its_drafter_fails_the_run(run):
    with pytest.raises(EvaluationFailed, match="runs without the drafter"):
        run({"e2e_latency": 1})
