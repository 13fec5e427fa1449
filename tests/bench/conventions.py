"""Acceptance with eaglet's conventions of loss and mask against the peers', on the data of a finished run.

    python tests/bench/conventions.py --run-dir results/demo --scratch /tmp/conventions --seeds 0 1 2

For each seed two drafters are trained from the same first weights on the same rows in the same order, with the run's own settings:
one with eaglet's defaults, one as SpecForge does it (`skip_first_target: true`, `outside_vocabulary: drop`).  Both are
evaluated on the run's held-out rows.  What lies in the scratch folder is not made again.  Start it in the folder that Snakemake
ran in.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from eaglet.config import ROOT
from eaglet.files import read_json
from eaglet.provenance import read_provenance
from eaglet.tables import aligned

CONVENTIONS = {
    "eaglet": {"skip_first_target": False, "outside_vocabulary": "keep"},
    "peers": {"skip_first_target": True, "outside_vocabulary": "drop"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, metavar="FOLDER", help="results/{run}, evaluated")
    parser.add_argument("--scratch", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    found = {name: [] for name in CONVENTIONS}
    for seed in options.seeds:
        for name, convention in CONVENTIONS.items():
            report = acceptance(options.run_dir, options.scratch, seed, name, convention)
            found[name].append(report["acceptance_length"])
            print(json.dumps({"seed": seed, "conventions": name, **summary(report)}), flush=True)
    print("\n".join(table(options.seeds, found)))


def acceptance(run: Path, scratch: Path, seed: int, name: str, convention: dict) -> dict:
    """acceptance.json of a drafter that was trained with the run's settings but for the seed and the convention."""
    trained, evaluated = (
        read_provenance(run / "provenance" / job) for job in ("train/train.json", "evaluate/evaluate.json")
    )
    folder, store = scratch.resolve() / f"{name}-{seed}", scratch.resolve() / "store"
    if (report := folder / "evaluation" / "acceptance.json").is_file():
        return read_json(report)
    if not store.is_dir():  # one of its own, so that checkpoints stay in the scratch folder
        store.mkdir(parents=True)
        (store / "hidden").symlink_to((run.parent / "store" / "hidden").resolve())
    inputs = by_role(trained)
    data = ["--manifest", *inputs["manifest"], "--shards", *inputs["shards"], "--turn-format", *inputs["turn_format"]]
    params = {**trained["params"], **convention, "seed": seed}
    outputs = ["--store", str(store), "--output", str(folder / "drafter")]
    folder.mkdir(exist_ok=True)
    call(folder, "train", *data, "--indexes", *inputs["indexes"], "--params", json.dumps(params), *outputs)
    params = {**evaluated["params"], "seed": seed, "speed_rows": 1, "min_acceptance": None}
    outputs = ["--drafter", str(folder / "drafter"), "--output", str(folder / "evaluation")]
    call(folder, "evaluate", *data, "--params", json.dumps(params), *outputs)
    return read_json(report)


def by_role(job: dict) -> dict[str, list[str]]:
    """The inputs of a job, as named from the folder that the run was made in."""
    paths: dict[str, list[str]] = {}
    for entry in job["inputs"]:
        paths.setdefault(entry["role"], []).append(entry["path"])
    return paths


def call(folder: Path, program: str, *arguments: str) -> None:
    """Run a program of scripts/; what it says goes to a log in `folder`."""
    command = [sys.executable, str(ROOT / "scripts" / f"{program}.py"), *arguments]
    with open(folder / f"{program}.log", "wb") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def summary(report: dict) -> dict:
    datasets = {name: of["acceptance_length"] for name, of in report["datasets"].items()}
    return {"acceptance_length": report["acceptance_length"], "verifications": report["verifications"], **datasets}


def table(seeds: list[int], found: dict[str, list[float]]) -> list[str]:
    """Acceptance length by seed and on average, and eaglet's as a multiple of the peers'."""
    rows = [[str(seed), *lengths] for seed, *lengths in zip(seeds, *found.values(), strict=True)]
    rows.append(["mean", *(round(statistics.mean(lengths), 4) for lengths in found.values())])
    return aligned([["seed", *found, "ratio"], *([*row, f"{row[1] / row[2]:.4f}"] for row in rows)])


if __name__ == "__main__":
    main()
