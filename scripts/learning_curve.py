"""Learning curve: acceptance against the number of training rows, and whether more rows would help.

Reads what `train` and `evaluate` wrote for shares of the training rows and for all of them; every drafter was trained
with the same settings and epochs and evaluated on the same held-out rows.  Writes learning_curve.json, .csv and .png.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from eaglet import program
from eaglet.errors import EvaluationFailed, RecordError
from eaglet.evaluation_plots import COLOURS, new_axes, save
from eaglet.files import read_json, write_json, write_text
from eaglet.provenance import recorded
from eaglet.tables import aligned

FIGURES, TABLE, PLOT = "learning_curve.json", "learning_curve.csv", "learning_curve.png"
CERTAIN = 2  # standard errors: a smaller difference is called chance


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    files = {name: Path(options.output) / name for name in (FIGURES, TABLE, PLOT)}
    with recorded(
        options.provenance,
        stage="learning_curve",
        name="learning_curve",
        params={},
        inputs={"reports": options.reports, "acceptance": options.acceptance},
        outputs={name.replace(".", "_"): path for name, path in files.items()},
    ):
        curve = learning_curve(options.reports, options.acceptance)
        write_json(files[FIGURES], curve)
        write_text(files[TABLE], curve_csv(curve))
        save(plot(curve), files[PLOT])
        print("\n".join([*table(curve), "", curve["judgement"]]))


def _parser():
    parser = program.parser(__doc__)
    parser.add_argument(
        "--reports", required=True, nargs="+", metavar="FILE", help="report.json of two drafters or more"
    )
    parser.add_argument(
        "--acceptance", required=True, nargs="+", metavar="FILE", help="acceptance.json of each, in that order"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="learning_curve/, the folder to write")
    return parser


def learning_curve(reports: Sequence[str], acceptances: Sequence[str]) -> dict:
    """learning_curve.json: a point for each drafter by ascending share, and what the last doubling of the rows gave.

    Raises RecordError where the files do not make pairs, EvaluationFailed where an evaluation counted nothing.
    """
    if len(reports) != len(acceptances) or len(reports) < 2:
        raise RecordError(
            f"{len(reports)} reports and {len(acceptances)} acceptance files; a curve needs two drafters or more, each with both"
        )
    trained = [read_json(path) for path in reports]
    points = sorted((point(r, path) for r, path in zip(trained, acceptances, strict=True)), key=lambda p: p["share"])
    gain = gain_between(*points[-2:])
    return {
        "epochs": trained[0]["settings"]["epochs"],
        "heldout_rows": trained[0]["rows"]["heldout"],
        "points": points,
        "gain": gain,
        "judgement": judgement(gain, *points[-2:]),
    }


def point(report: Mapping, path: str) -> dict:
    """What one drafter was trained on and what came of it; report: drafter/report.json, path: its acceptance.json."""
    measured = read_json(path)
    if not measured["verifications"]:
        raise EvaluationFailed(f"{path}: no verification was counted; raise evaluation.max_new_tokens")
    return {
        "share": report["settings"]["row_share"],
        "rows": report["rows"]["train"],
        "tokens": report["tokens"]["train"],
        "optimizer_steps": report["optimizer_steps"],
        "heldout_coverage": report["draft_vocab"]["coverage"]["all"]["heldout"],
        "heldout_accuracy": report["heldout"]["accuracy"][0],
        "acceptance_length": measured["acceptance_length"],
        "standard_error": round(standard_error(measured), 4),
        "verifications": measured["verifications"],
        "datasets": {name: of["acceptance_length"] for name, of in measured["datasets"].items()},
    }


def standard_error(measured: Mapping) -> float:
    """Of an acceptance length, as if its verifications were drawn one by one.

    The accepted share of position i is nearly P(accepted ≥ i), so E[accepted²] = Σ (2i-1) P(accepted ≥ i).
    """
    shares = measured["accepted_share"]
    square = sum((2 * i + 1) * share for i, share in enumerate(shares))
    return math.sqrt(max(0.0, square - sum(shares) ** 2) / measured["verifications"])


def gain_between(fewer: Mapping, more: Mapping) -> dict:
    """{from_share, to_share, tokens, relative, chance}: the difference of acceptance, and how much of it may be chance."""
    tokens = more["acceptance_length"] - fewer["acceptance_length"]
    return {
        "from_share": fewer["share"],
        "to_share": more["share"],
        "tokens": round(tokens, 4),
        "relative": round(tokens / fewer["acceptance_length"], 4),
        "chance": round(CERTAIN * math.hypot(fewer["standard_error"], more["standard_error"]), 4),
    }


def judgement(gain: Mapping, fewer: Mapping, more: Mapping) -> str:
    """One sentence on whether more rows would help."""
    told = (
        f"from {fewer['rows']:,} to {more['rows']:,} rows acceptance went from {fewer['acceptance_length']:.2f} to "
        f"{more['acceptance_length']:.2f} ({gain['tokens']:+.2f}, {gain['relative']:+.1%}; chance accounts for about "
        f"±{gain['chance']:.2f} at {more['verifications']:,} verifications)"
    )
    if gain["tokens"] > gain["chance"]:
        return f"Acceptance is still rising: {told}. More rows of this kind should raise it further."
    if gain["tokens"] < -gain["chance"]:
        return f"Acceptance fell: {told}. More rows of this kind do not help; look at what the added rows are."
    return f"No clear gain: {told}. To see a smaller one, hold out more rows (heldout.rows_per_dataset)."


def curve_csv(curve: Mapping) -> str:
    """A line for each share and dataset, `all` first."""
    text = io.StringIO()
    about = ["share", "rows", "tokens", "optimizer_steps"]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*about, "dataset", "acceptance_length"])
    for one in curve["points"]:
        for dataset, length in {"all": one["acceptance_length"], **one["datasets"]}.items():
            writer.writerow([*(one[name] for name in about), dataset, length])
    return text.getvalue()


def table(curve: Mapping) -> list[str]:
    """The points for people."""
    datasets = list(curve["points"][0]["datasets"])
    heading = ["share", "rows", "tokens", "optimizer steps", "acceptance", "±", *datasets]
    rows = [
        [
            *(one[name] for name in ("share", "rows", "tokens", "optimizer_steps")),
            f"{one['acceptance_length']:.3f}",
            f"{one['standard_error']:.3f}",
            *(one["datasets"][name] and f"{one['datasets'][name]:.3f}" for name in datasets),
        ]
        for one in curve["points"]
    ]
    return aligned([heading, *rows])


def plot(curve: Mapping) -> Figure:
    """Acceptance over the logarithm of the rows: each dataset, and all with bars of one standard error."""
    points = curve["points"]
    rows = [one["rows"] for one in points]
    figure, axes = new_axes(
        "Acceptance length by training rows", "training rows of all datasets", "tokens per verification"
    )
    for number, name in enumerate(points[0]["datasets"]):
        lengths = [one["datasets"][name] for one in points]
        axes.plot(rows, lengths, "o-", color=COLOURS[number % len(COLOURS)], linewidth=1, label=name)
    lengths, errors = ([one[key] for one in points] for key in ("acceptance_length", "standard_error"))
    axes.errorbar(rows, lengths, errors, marker="o", color="black", linestyle="--", capsize=3, label="all")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [f"{count:,}" for count in rows])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    program.run(main)
