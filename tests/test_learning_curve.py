"""The learning curve: its points, how much of a difference may be chance, and what is said about it."""

import csv
import json

import pytest

import learning_curve as stage
from eaglet.errors import EvaluationFailed, RecordError


def pair(folder, share, length, verifications=400):
    """(report.json, acceptance.json) of a drafter that was trained on so much."""
    folder = folder / str(share)
    folder.mkdir()
    coverage = {"all": {"heldout": 0.9}}
    report = {
        "settings": {"row_share": share, "epochs": 3},
        "rows": {"train": round(1000 * share), "heldout": 8},
        "tokens": {"train": round(50_000 * share)},
        "optimizer_steps": round(120 * share),
        "draft_vocab": {"coverage": coverage},
        "heldout": {"accuracy": [0.5, 0.4]},
    }
    figures = {"acceptance_length": length, "accepted_share": [0.5, 0.25], "verifications": verifications}
    paths = folder / "report.json", folder / "acceptance.json"
    paths[0].write_text(json.dumps(report))
    paths[1].write_text(json.dumps({**figures, "datasets": {"pears": figures, "apples": figures}}))
    return [str(path) for path in paths]


@pytest.fixture
def drawn(tmp_path):
    """drawn({share: acceptance}): the folder that the program writes."""

    def run(lengths, **more):
        reports, acceptances = zip(*(pair(tmp_path, share, at, **more) for share, at in lengths.items()), strict=True)
        inputs = ["--reports", *reports, "--acceptance", *acceptances]
        provenance = tmp_path / "provenance.json"
        stage.main([*inputs, "--output", str(tmp_path / "curve"), "--provenance", str(provenance)])
        return tmp_path / "curve"

    return run


def test_the_points_stand_in_the_order_of_their_shares(drawn, capsys):
    folder = drawn({1.0: 2.4, 0.25: 1.6, 0.5: 2.0})
    curve = json.loads((folder / "learning_curve.json").read_text())
    assert [(p["share"], p["rows"], p["optimizer_steps"]) for p in curve["points"]] == [
        (0.25, 250, 30),
        (0.5, 500, 60),
        (1.0, 1000, 120),
    ]
    assert curve["epochs"] == 3 and curve["heldout_rows"] == 8
    lines = list(csv.DictReader((folder / "learning_curve.csv").open()))
    assert [line["dataset"] for line in lines] == ["all", "pears", "apples"] * 3
    assert lines[-3]["acceptance_length"] == "2.4" and lines[-1]["acceptance_length"] == "2.4"
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert "1,000" in told and curve["judgement"] in told


def test_the_same_figures_give_the_same_bytes(drawn, tmp_path):
    folder = drawn({0.5: 2.0, 1.0: 2.4})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    inputs = [[str(tmp_path / share / name) for share in ("0.5", "1.0")] for name in ("report.json", "acceptance.json")]
    stage.main(["--reports", *inputs[0], "--acceptance", *inputs[1], "--output", str(folder)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_standard_error_is_that_of_the_accepted_tokens():
    # of four verifications two accept nothing, one a token and one two: mean 0.75, variance 11/16
    measured = {"accepted_share": [0.5, 0.25], "verifications": 4}
    assert stage.standard_error(measured) == pytest.approx((11 / 16 / 4) ** 0.5)


@pytest.mark.parametrize(
    ("half", "whole", "said"),
    [
        (2.0, 2.4, "still rising: from 500 to 1,000 rows acceptance went from 2.00 to 2.40 (+0.40, +20.0%"),
        (2.0, 2.05, "No clear gain"),
        (2.4, 2.0, "Acceptance fell"),
    ],
)
def test_the_last_doubling_of_the_rows_decides_what_is_said(drawn, half, whole, said):
    curve = json.loads((drawn({0.5: half, 1.0: whole}) / "learning_curve.json").read_text())
    assert said in curve["judgement"]
    assert curve["gain"]["tokens"] == pytest.approx(whole - half)
    assert curve["gain"]["chance"] == pytest.approx(2 * 2**0.5 * (11 / 16 / 400) ** 0.5, abs=1e-3)


def test_files_that_make_no_pairs_are_refused(tmp_path):
    report, acceptance = pair(tmp_path, 1.0, 2.0)
    with pytest.raises(RecordError, match="2 reports and 1 acceptance files"):
        stage.learning_curve([report, report], [acceptance])


def test_an_evaluation_that_counted_nothing_names_the_key(drawn):
    with pytest.raises(EvaluationFailed, match=r"acceptance\.json: no verification .* evaluation\.max_new_tokens"):
        drawn({0.5: None, 1.0: None}, verifications=0)
