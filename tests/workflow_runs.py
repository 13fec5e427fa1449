"""Runs Snakemake itself in a test, in a copy of the code, on the tiny taught target and two local datasets."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from eaglet.config import ROOT
from eaglet.records import read_table

CODE = ["Snakefile", "rules", "scripts", "config", "profiles", "envs", "docs"]
QUESTIONS = {
    "apples": [
        "What is the capital of France?",
        "Write a short list.",
        "add a and b",
        "a walk in the rain",
        "three things",
    ],
    "pears": ["Complete this Python function.", "Answer the question.", "Paris", "Write a list of three things."],
}


@dataclass
class Run:
    """What one call of Snakemake did."""

    status: int
    output: str
    jobs: list[str]  # "rule" or "rule wildcard", in the order in which they started

    def stages(self) -> set[str]:
        """The rules that ran, less the target rules and the services."""
        return {job.split()[0] for job in self.jobs} - {"all", "data", "drafter", "serve"}


class Workflow:
    """A folder with the code, a config and two datasets, in which Snakemake can be run and its work counted."""

    def __init__(self, folder: Path, target: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in CODE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        shutil.copytree(target, folder / "model")
        for name, questions in QUESTIONS.items():
            self.write_dataset(name, questions)
        self.config = {
            "run": "trial",
            "target": {"model": "model", "dtype": "float32"},
            "server": {"linger": 2},
            "sampling": {"temperature": 0.7, "max_new_tokens": 48, "seed": 0},
            "datasets": {name: {"source": {"path": f"{name}.jsonl"}, "format": "messages"} for name in QUESTIONS},
            "validation": {"max_bad_fraction": 0.5},
            "shards": {"count": 2},
            "heldout": {"rows_per_dataset": 1},
            "drafter": {"draft_vocab_size": 64, "ttt_steps": 2, "epochs": 1},
            "evaluation": {"draft_tokens": 2, "max_new_tokens": 16},
            "resources": {"threads": 1},
        }

    def write_dataset(self, name: str, questions: list[str]) -> None:
        lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in questions]
        (self.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def snakemake(self, *arguments: str, timeout: float = 300) -> Run:
        """Run Snakemake on the present config; never raises on failure: look at `status` and `output`."""
        (self.folder / "trial.yaml").write_text(yaml.safe_dump(self.config))
        command = [sys.executable, "-m", "snakemake", "--configfile", "trial.yaml", "--cores", "2", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        return Run(done.returncode, done.stdout, _jobs(done.stdout))

    def run(self, *arguments: str) -> Run:
        """Run Snakemake and expect success."""
        done = self.snakemake(*arguments)
        assert done.status == 0, done.output[-6000:]
        return done

    def results(self, path: str) -> Path:
        return self.folder / "results" / "trial" / path

    def generated(self) -> int:
        """Generations in all journals so far."""
        journals = (self.folder / "results/store/generations").rglob("*.jsonl")
        return sum('"output_ids"' in line for journal in journals for line in journal.read_text().splitlines())

    def checked(self) -> set[tuple[int, ...]]:
        """The token ids of each row that validation let through."""
        files = self.results("checked").glob("*.parquet")
        rows = [row for path in files for row in read_table(path, "checked").to_pylist()]
        return {(*row["prompt_ids"], *row["output_ids"]) for row in rows}

    def captured(self) -> int:
        """Rows in the hidden store so far."""
        return len(list((self.folder / "results/store/hidden").rglob("*.safetensors")))


def left_behind(workflow: Workflow, patience: float = 60) -> list[str]:
    """Command lines of processes that still work in the workflow's folder after `patience` seconds."""
    deadline = time.monotonic() + patience
    while (found := _at_work(workflow)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def _at_work(workflow: Workflow) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(workflow.folder):
                found.append(" ".join(process.cmdline()) or process.name())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _jobs(output: str) -> list[str]:
    jobs = []
    for block in re.finditer(r"^ *(?:local)?rule (\w+):\n((?: +\S.*\n)*)", output, re.M):
        wildcards = re.search(r"^ +wildcards: \w+=(\S+)$", block[2], re.M)
        jobs.append(f"{block[1]} {wildcards[1]}" if wildcards else block[1])
    return jobs
