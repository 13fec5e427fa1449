"""Who made a file, from what, with which program: one JSON file for each job, written when the job has succeeded.

Everything that changes from run to run (times, hosts, versions) is in these files alone, so that outputs stay
byte-identical.  Each file carries a seal over the rest of itself, and `audit` names each file's SHA-256 in a provenance
file of its own, so a change to any of them is found.  What the rows and files mean is not known here.
"""

import functools
import importlib.metadata
import json
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
from eaglet.digests import content_key, file_sha256
from eaglet.errors import AuditFailed
from eaglet.files import json_bytes, write_json

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "requests", "numpy", "snakemake")
ROOT = Path(__file__).resolve().parents[2]
KEYS = ("stage", "name", "command", "params", "inputs", "outputs", "rows", "facts", "code", "packages", "host")
TIMES = ("started", "ended")


@dataclass
class Job:
    """What a running program tells its provenance file."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason code -> rows
    facts: dict[str, Any] = field(default_factory=dict)
    found: list[dict] = field(default_factory=list)

    def count(self, rows_in: int, rows_out: int, dropped: Mapping[str, int] | None = None) -> None:
        """Rows read, rows written, rows dropped by reason.  Raises AssertionError unless they add up."""
        self.rows_in, self.rows_out, self.dropped = rows_in, rows_out, dict(sorted((dropped or {}).items()))
        lost = rows_in - rows_out - sum(self.dropped.values())
        if lost:
            raise AssertionError(f"{rows_in} rows in, {rows_out} out, {self.dropped} dropped: {lost} unaccounted for")

    def read(self, role: str, path: str | Path) -> None:
        """Add an input whose path was not known before the job ran, such as a source that had to be fetched first."""
        self.found.extend(_digests({role: path}))


@contextmanager
def recorded(
    path: str | Path | None,
    *,
    stage: str,
    name: str,
    params: Any,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
) -> Iterator[Job]:
    """Run the body as one job; on success write its provenance to `path` (None: write nothing).

    `inputs` and `outputs` map a role to a path or a list of paths; a folder stands for each of its files.  Inputs are
    hashed before the body, outputs after it.  Raises FileNotFoundError for one that does not exist then.
    """
    started, before = _now(), [] if path is None else _digests(inputs)
    job = Job()
    yield job
    if path is None:
        return
    statement = {
        "stage": stage,
        "name": name,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "params": params,
        "inputs": before + job.found,
        "outputs": _digests(outputs),
        "rows": {"in": job.rows_in, "out": job.rows_out, "dropped": job.dropped},
        "facts": job.facts,
        "code": code_version(),
        "packages": package_versions(),
        "host": {"name": socket.gethostname(), "system": platform.platform(), "python": platform.python_version()},
        "started": started,
        "ended": _now(),
    }
    statement = json.loads(json_bytes(statement))  # as a reader will see it: lists for tuples, text for keys
    write_json(path, {**statement, "seal": content_key(statement)})


def read_provenance(path: str | Path) -> dict:
    """A provenance file, checked against its own seal.  Raises AuditFailed with what was found and expected."""
    data = Path(path).read_bytes()
    try:
        written = json.loads(data)
    except ValueError as error:
        raise AuditFailed(f"{path}: not JSON ({error}); expected a provenance file; run its stage again") from error
    if not isinstance(written, dict) or list(written) != [*KEYS, *TIMES, "seal"]:
        found = ", ".join(written) if isinstance(written, dict) else type(written).__name__
        raise AuditFailed(f"{path}: has the keys {found}; expected {', '.join([*KEYS, *TIMES, 'seal'])}")
    statement = {key: value for key, value in written.items() if key != "seal"}
    seal = content_key(statement)
    if seal != written["seal"] or data != json_bytes(written):
        raise AuditFailed(
            f"{path}: the content does not belong to its seal (found {seal}, the file says {written['seal']}): "
            "it was changed after the job had ended; run its stage again"
        )
    return written


def _digests(files: Mapping[str, Any]) -> list[dict]:
    listed = []
    for role, paths in files.items():
        for path in [paths] if isinstance(paths, str | os.PathLike) else paths or []:
            for file in _files(Path(path)):
                listed.append({"role": role, "path": _relative(file), "sha256": file_sha256(file)})
    return listed


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _relative(path: Path) -> str:
    """Relative to the working directory where the file lies below it, so that a copied results/ folder stays valid."""
    absolute = Path(os.path.abspath(path))
    return (absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute).as_posix()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@functools.cache
def code_version() -> dict:
    """{version, commit, clean, sha256}: commit and clean are null outside a git checkout, sha256 is of all of scripts/."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    programs = sorted((ROOT / "scripts").rglob("*.py"))
    return {
        "version": __version__,
        "commit": commit,
        "clean": None if commit is None else git("status", "--porcelain", "--untracked-files=no") == "",
        "sha256": content_key([[p.relative_to(ROOT).as_posix(), file_sha256(p)] for p in programs]),
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
