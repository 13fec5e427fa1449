"""How long `snakemake -n` takes over many datasets and shards, in a run in which nothing has been made yet.

python tests/bench/plan.py                       20 datasets, 64 shards
python tests/bench/plan.py --datasets 5 --shards 8
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from tiny import build_tiny_target  # noqa: E402
from workflow_runs import Workflow  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=int, default=20)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        workflow = Workflow(folder / "run", build_tiny_target(folder / "target"))
        names = [f"dataset-{number}" for number in range(arguments.datasets)]
        for name in names:
            workflow.write_dataset(name, [f"Question {n} of {name}?" for n in range(100)])
        workflow.config["datasets"] = {
            name: {"source": {"path": f"{name}.jsonl"}, "format": "messages"} for name in names
        }
        workflow.config["shards"]["count"] = arguments.shards
        (workflow.folder / "trial.yaml").write_text(yaml.safe_dump(workflow.config), encoding="utf-8")
        command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "rules", "--configfile", "trial.yaml"]
        for _ in range(arguments.times):
            began = time.perf_counter()
            done = subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True, check=True)
            jobs = next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("total"))
            print(
                f"{arguments.datasets} datasets, {arguments.shards} shards: {time.perf_counter() - began:.1f} s ({jobs})"
            )


if __name__ == "__main__":
    main()
