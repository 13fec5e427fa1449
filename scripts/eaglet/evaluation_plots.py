"""The four plots of an evaluation, as PNG: acceptance, accepted share by position, speed, and the training that led there.

Drawn from the figures alone, so the same figures give the same bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eaglet.files import atomic_path

NAMES = ("acceptance.png", "positions.png", "speed.png", "training.png")
LABELS = {"untrained": "untrained", "prompt_lookup": "prompt lookup", "chain": "trained, as a chain"}
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]  # Okabe and Ito's, for every eye


def draw(folder: str | Path, acceptance: Mapping, speed: Mapping, log: Sequence[Mapping]) -> None:
    """Write the plots.  acceptance, speed: the contents of acceptance.json and speed.json; log: lines of drafter/log.jsonl."""
    figures = (_acceptance(acceptance), _positions(acceptance), _speed(speed), _training(log))
    for name, figure in zip(NAMES, figures, strict=True):
        save(figure, Path(folder) / name)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, without what would differ from run to run."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120, metadata={"Software": None})


def new_axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """A figure of the house's look, and its axes with these labels."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def _bars(axes, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], form: str) -> None:
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        places = [i + (number - (len(series) - 1) / 2) * width for i in range(len(groups))]
        bars = axes.bar(places, [v or 0 for v in values], width, label=label, color=COLOURS[number % len(COLOURS)])
        axes.bar_label(bars, [form.format(v) if v is not None else "–" for v in values], fontsize=8, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _acceptance(report: Mapping) -> Figure:
    figure, axes = new_axes("Acceptance length", "", "tokens per verification")
    groups = [*report["datasets"].values(), report]
    series = {"trained": [g["acceptance_length"] for g in groups]}
    for name in report["baselines"]:
        series[LABELS.get(name, name)] = [g["baselines"][name]["acceptance_length"] for g in groups]
    _bars(axes, [*report["datasets"], "all"], series, "{:.2f}")
    axes.axhline(1, color="black", linewidth=0.8)
    return figure


def _positions(report: Mapping) -> Figure:
    figure, axes = new_axes("Accepted share by draft position", "draft position", "share of verifications")
    for number, (name, figures) in enumerate([*report["datasets"].items(), ("all", report)]):
        shares = figures["accepted_share"]
        style = {"color": "black", "linestyle": "--"} if name == "all" else {"color": COLOURS[number % len(COLOURS)]}
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name, **style)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, report["draft_tokens"] + 1))
    axes.legend(frameon=False)
    return figure


def _speed(speed: Mapping) -> Figure:
    title = f"Speed with and without the drafter: {speed['speedup']}× ({speed['where']})"
    figure, axes = new_axes(title, "", "tokens per second")
    axes.title.set_fontsize(10)
    groups = speed.get("batches") or {**speed["datasets"], "all": speed}
    series = {
        label: [group[key]["tokens_per_second"] for group in groups.values()]
        for label, key in (("with drafter", "with_drafter"), ("without", "without_drafter"))
    }
    _bars(axes, list(groups), series, "{:.1f}")
    return figure


def _training(log: Sequence[Mapping]) -> Figure:
    figure, axes = new_axes("Training: loss and accuracy of the first step", "optimizer step", "cross-entropy")
    right = axes.twinx()
    right.set_ylabel("accuracy")
    right.set_ylim(0, 1)
    right.spines["top"].set_visible(False)
    steps = [line for line in log if "loss" in line]
    heldout = [line for line in log if "heldout" in line]
    at = [line["step"] for line in steps]
    axes.plot(at, [line["loss"][0] for line in steps], color=COLOURS[0], linewidth=1, label="loss, training")
    right.plot(at, [line["accuracy"][0] for line in steps], color=COLOURS[1], linewidth=1, label="accuracy, training")
    at = [line["step"] for line in heldout]
    axes.plot(at, [line["heldout"]["loss"][0] for line in heldout], "o-", color=COLOURS[0], label="loss, held out")
    right.plot(
        at, [line["heldout"]["accuracy"][0] for line in heldout], "o-", color=COLOURS[1], label="accuracy, held out"
    )
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], frameon=False, loc="upper right", fontsize=8)
    return figure
