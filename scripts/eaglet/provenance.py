"""Who made a file, from what, with which program: one JSON file for each job, written when the job has succeeded.

Everything that changes from run to run (times, hosts, versions) is in these files alone, so that outputs stay
byte-identical.  `audit` reads them and recomputes the digests.
"""

import functools
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eaglet import __version__
from eaglet.digests import path_sha256
from eaglet.files import write_json

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "requests", "numpy", "snakemake")
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Job:
    """What a running program tells its provenance file."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason code -> rows
    facts: dict[str, Any] = field(default_factory=dict)

    def count(self, rows_in: int, rows_out: int, dropped: Mapping[str, int] | None = None) -> None:
        """Rows read, rows written, rows dropped by reason.  Raises AssertionError unless they add up."""
        self.rows_in, self.rows_out, self.dropped = rows_in, rows_out, dict(sorted((dropped or {}).items()))
        lost = rows_in - rows_out - sum(self.dropped.values())
        if lost:
            raise AssertionError(f"{rows_in} rows in, {rows_out} out, {self.dropped} dropped: {lost} unaccounted for")


@contextmanager
def recorded(
    path: str | Path | None, *, stage: str, name: str, params: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Iterator[Job]:
    """Run the body as one job; on success write its provenance to `path` (None: write nothing).

    `inputs` and `outputs` map a role to a path or a list of paths; a folder counts with all its files.  Inputs are
    hashed before the body, outputs after it.  Outputs that do not exist afterwards are an error.
    """
    started, before = _now(), _digests(inputs)
    job = Job()
    yield job
    if path is None:
        return
    write_json(
        path,
        {
            "stage": stage,
            "name": name,
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "params": params,
            "inputs": before,
            "outputs": _digests(outputs),
            "rows": {"in": job.rows_in, "out": job.rows_out, "dropped": job.dropped},
            "facts": job.facts,
            "code": code_version(),
            "packages": package_versions(),
            "host": {"name": socket.gethostname(), "system": platform.platform(), "python": platform.python_version()},
            "started": started,
            "ended": _now(),
        },
    )


def _digests(files: Mapping[str, Any]) -> list[dict]:
    listed = []
    for role, paths in files.items():
        for path in [paths] if isinstance(paths, str | os.PathLike) else paths or []:
            listed.append({"role": role, "path": str(path), "sha256": path_sha256(path)})
    return listed


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@functools.cache
def code_version() -> dict:
    """{version, commit, clean}; commit and clean are null outside a git checkout."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return {
        "version": __version__,
        "commit": commit,
        "clean": None if commit is None else git("status", "--porcelain", "--untracked-files=no") == "",
    }


@functools.cache
def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
