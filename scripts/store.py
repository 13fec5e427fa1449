"""Look after results/store: how large it is, what no run refers to any more, and whether its files are sound.

    python scripts/store.py sizes
    python scripts/store.py unused             lists; with --remove, removes what it listed
    python scripts/store.py verify             with --remove, removes damaged files, which the next run captures again

A hidden file is in use while a run's index (results/{run}/hidden/) lists it, a journal of generations while a run has the
target and the dataset.  Files that are younger than --older-than hours count as in use: a job that is under way has written
them and not yet its index.  Checkpoints, targets and wheels are caches that are rebuilt when they are missing; `sizes` shows them.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eaglet import program
from eaglet.digests import file_sha256
from eaglet.errors import StoreError
from eaglet.files import readable_size
from eaglet.hidden_store import HiddenStore
from eaglet.progress import progress
from eaglet.records import iter_rows
from eaglet.turn_format import TurnFormat

KINDS = ("hidden", "generations")


@dataclass(frozen=True)
class Item:
    """Something in the store: a file, with its size and age."""

    kind: str
    path: Path
    bytes: int
    hours: float

    @classmethod
    def of(cls, kind: str, path: Path) -> "Item":
        stat = path.stat()
        return cls(kind, path, stat.st_size, (time.time() - stat.st_mtime) / 3600)

    def as_json(self) -> dict:
        return {"kind": self.kind, "path": self.path.as_posix(), "bytes": self.bytes, "hours": round(self.hours, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    results = Path(options.results)
    if not (results / "store").is_dir():
        raise StoreError(f"{results / 'store'}: no such folder; name the results folder with --results")
    return options.do(results, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--results", default="results", help="the folder with the store and all runs (default results)")
    common.add_argument("--json", action="store_true", help="print JSON instead of text")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    sizes = commands.add_parser("sizes", parents=[common], help="bytes and files of each part of the store")
    sizes.set_defaults(do=show_sizes)

    unused = commands.add_parser("unused", parents=[common], help="what no run refers to")
    unused.add_argument(
        "--kind", choices=KINDS, action="append", help="only this kind; may be repeated (default hidden)"
    )
    unused.add_argument("--older-than", type=float, default=24, metavar="HOURS", help="default 24")
    unused.add_argument("--remove", action="store_true", help="remove what is listed")
    unused.set_defaults(do=show_unused)

    verify = commands.add_parser("verify", parents=[common], help="recompute the digests of all hidden files")
    verify.add_argument("--remove", action="store_true", help="remove damaged files")
    verify.set_defaults(do=show_damaged)
    return parser


def show_sizes(results: Path, options: argparse.Namespace) -> int:
    found = sizes(results)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, part in found.items():
            print(f"{name:<14}{part['files']:>10,} files  {readable_size(part['bytes']):>10}")
        print(f"{'free':<14}{'':>10}        {readable_size(shutil.disk_usage(results).free):>10}")
    return 0


def sizes(results: Path) -> dict[str, dict[str, int]]:
    """Part of the store -> {files, bytes}; hidden files apart as used and unused are `unused`'s matter."""
    parts = {}
    for folder in sorted(p for p in (results / "store").iterdir() if p.is_dir()):
        files = [p.stat().st_size for p in folder.rglob("*") if p.is_file()]
        parts[folder.name] = {"files": len(files), "bytes": sum(files)}
    return parts


def show_unused(results: Path, options: argparse.Namespace) -> int:
    kinds = options.kind or ["hidden"]
    items = [item for item in unused(results) if item.kind in kinds and item.hours >= options.older_than]
    if options.remove:
        for item in items:
            item.path.unlink()
    if options.json:
        print(json.dumps([item.as_json() for item in items], indent=2))
    else:
        for item in items:
            print(f"{item.path}  {readable_size(item.bytes)}  {item.hours:.0f} h old")
        verb = "removed" if options.remove else "unused"
        print(f"{verb}: {len(items)} files, {readable_size(sum(item.bytes for item in items))}")
    return 0


def unused(results: Path) -> Iterator[Item]:
    """The files of the store that no run below `results` refers to."""
    store = HiddenStore(results / "store" / "hidden")
    listed = hidden_digests(results)
    for key in store.keys():  # noqa: SIM118 (no mapping)
        if key not in listed:
            yield Item.of("hidden", store.path(key))
    for path in sorted((store.root / "staging").glob("*.safetensors")):  # what a stopped capture has left
        yield Item.of("hidden", path)
    journals = set(used_journals(results))
    for path in sorted((results / "store" / "generations").glob("*/*.jsonl")):
        if (path.parent.name, path.stem) not in journals:
            yield Item.of("generations", path)


def runs(results: Path) -> list[Path]:
    """The folders of the runs."""
    return sorted(p for p in results.iterdir() if p.is_dir() and p.name != "store")


def hidden_digests(results: Path) -> dict[str, set[str]]:
    """Hidden key -> the SHA-256 values that indexes of runs give for its file (one, unless an index is wrong)."""
    found: dict[str, set[str]] = {}
    for run in runs(results):
        for index in sorted((run / "hidden").glob("*.index.parquet")):
            for row in iter_rows(index, "hidden_index", ["key", "sha256"]):
                found.setdefault(row["key"], set()).add(row["sha256"])
    return found


def used_journals(results: Path) -> Iterator[tuple[str, str]]:
    """(target fingerprint, dataset) of every run."""
    for run in runs(results):
        if (run / "target" / "turn_format.json").is_file():
            fingerprint = TurnFormat.load(run / "target" / "turn_format.json").fingerprint
            for prompts in sorted((run / "prompts").glob("*.jsonl")):
                yield fingerprint, prompts.stem


def show_damaged(results: Path, options: argparse.Namespace) -> int:
    problems = damaged(results)
    if options.remove:
        for path in problems:
            path.unlink(missing_ok=True)
    if options.json:
        print(json.dumps({path.as_posix(): problem for path, problem in problems.items()}, indent=2))
    else:
        for problem in problems.values():
            print(problem)
        print(f"{'removed' if options.remove else 'damaged'}: {len(problems)} files")
    return 1 if problems and not options.remove else 0


def damaged(results: Path) -> dict[Path, str]:
    """File -> what is wrong with it, for every hidden file of the store and every one that an index lists."""
    store, listed = HiddenStore(results / "store" / "hidden"), hidden_digests(results)
    problems = {}
    for key in progress(sorted({*store.keys(), *listed}), what="verify hidden files", unit="file"):
        path = store.path(key)
        try:
            store.verify(key)
        except StoreError as error:
            problems[path] = str(error)
            continue
        wanted = listed.get(key, set())
        if wanted and {file_sha256(path)} != wanted:
            problems[path] = f"{path}: its SHA-256 is {file_sha256(path)}, the indexes say {', '.join(sorted(wanted))}"
    return problems


if __name__ == "__main__":
    program.run(main)
