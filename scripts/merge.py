"""Merge all datasets' checked rows into shuffled shards with a train and a held-out split, and write their manifest.

    python scripts/merge.py --checked results/demo/checked/humaneval.parquet results/demo/checked/notes.parquet \\
        --params '{"shards": {"count": 4, "seed": 0}, "heldout": {"rows_per_dataset": 8}}' --output results/demo/shards

A file's name, less `.parquet`, is its dataset's.  Where a row goes follows from its id alone (eaglet.shards), so that a shard
changes only when one of its own rows does; for this reason a shard names no file that it was made from: manifest.json
does, by SHA-256.  The digest of each row is computed again on the way.

Two passes, so that memory is that of the largest shard and not of the run: the first reads ids only, the second sends each
row to a file of its shard below the output folder, which is then sorted and written.
"""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eaglet import program
from eaglet.digests import file_sha256, merkle_root
from eaglet.errors import ConfigError, RecordError
from eaglet.files import write_json
from eaglet.progress import progress
from eaglet.provenance import recorded
from eaglet.records import (
    ROW_GROUP,
    SHARD,
    RecordWriter,
    iter_tables,
    read_metadata,
    read_table,
    row_digests,
)
from eaglet.shards import Assignment, assign

SPILL = SHARD.append(pa.field("place", pa.uint64()))
SPLITS = np.array(["train", "heldout"])


def read_sample_ids(checked: Mapping[str, Path]) -> dict[str, list[str]]:
    """dataset -> ids in the order of its file.  Raises RecordError when an id comes twice in one file."""
    found = {}
    for dataset, path in checked.items():
        found[dataset] = read_table(path, "checked", ["sample_id"])["sample_id"].to_pylist()
        for sample_id, times in Counter(found[dataset]).most_common(1):
            if times > 1:
                raise RecordError(
                    f"{path}: sample_id {sample_id} stands in {times} rows, expected one; remove the file and run its "
                    "stages again"
                )
    return found


def checked_tables(path: Path) -> Iterator[pa.Table]:
    """The file's row groups, each row's digest verified.  Raises RecordError with the row's number and id."""
    start = 1
    for table in iter_tables(path, "checked"):
        said = table["row_digest"].to_pylist()
        for number, (found, digest) in enumerate(zip(row_digests(table), said, strict=True), start):
            if found != digest:
                raise RecordError(
                    f"{path}: row {number} ({table['sample_id'][number - start]}) has digest {found}, and its row_digest says "
                    f"{digest}: the row is not the one that was checked; remove the file and run its stages again"
                )
        start += len(table)
        yield table


def scatter(checked: Mapping[str, Path], assignments: Mapping[str, Assignment], spills: Sequence[Path]) -> None:
    """Send each kept row to the spill file of its shard, with its dataset, split and place."""
    rows = sum(len(assignment.shard) for assignment in assignments.values())
    with ExitStack() as stack, progress(total=rows, what="merge") as bar:
        writers = [stack.enter_context(pa.ipc.new_file(str(path), SPILL)) for path in spills]
        for dataset, path in checked.items():
            assignment, start = assignments[dataset], 0
            for table in checked_tables(path):
                part = slice(start, start + len(table))
                columns = [
                    *table.columns,
                    pa.array([dataset] * len(table), pa.string()),
                    pa.array(SPLITS[assignment.heldout[part].astype(int)], pa.string()),
                    pa.array(assignment.place[part], pa.uint64()),
                ]
                placed = pa.Table.from_arrays(columns, schema=SPILL)
                for shard in np.unique(assignment.shard[part]):
                    if shard >= 0:
                        writers[shard].write_table(placed.take(np.flatnonzero(assignment.shard[part] == shard)))
                start += len(table)
                bar.update(len(table))


def write_shard(spill: Path, path: Path, metadata: Mapping[str, Any]) -> dict:
    """Sort a spill file's rows by place into a shard; returns its entry in the manifest."""
    digests, prompt_tokens, output_tokens = [], 0, 0
    datasets, splits = Counter(), Counter()
    with pa.memory_map(str(spill)) as source, RecordWriter(path, "shard", metadata) as writer:
        rows = pa.ipc.open_file(source).read_all()
        order = pc.sort_indices(rows, sort_keys=[("place", "ascending"), ("sample_id", "ascending")])
        for start in range(0, len(order), ROW_GROUP):
            table = rows.take(order.slice(start, ROW_GROUP)).select(SHARD.names)
            writer.write_table(table)
            digests += table["row_digest"].to_pylist()
            prompt_tokens += pc.sum(pc.list_value_length(table["prompt_ids"])).as_py()
            output_tokens += pc.sum(pc.list_value_length(table["output_ids"])).as_py()
            datasets.update(table["dataset"].to_pylist())
            splits.update(table["split"].to_pylist())
        del rows  # lets go of the memory map before it is closed
    return {
        "path": path.as_posix(),
        "sha256": file_sha256(path),
        "rows": len(digests),
        "tokens": prompt_tokens + output_tokens,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "datasets": dict(sorted(datasets.items())),
        "splits": {split: splits[split] for split in SPLITS.tolist()},
        "merkle_root": merkle_root(digests),
    }


def read_origin(checked: Mapping[str, Path]) -> dict:
    """{fingerprint of the target, servers of each dataset}.  Raises RecordError when files are of different targets."""
    about = {dataset: read_metadata(path, "checked") for dataset, path in checked.items()}
    targets = {dataset: metadata.get("fingerprint") for dataset, metadata in about.items()}
    if len(set(targets.values())) > 1:
        raise RecordError(
            "the checked files are not of one target, and a drafter learns from one: "
            + ", ".join(f"{checked[dataset]} has {target}" for dataset, target in targets.items())
            + "; run generate and validate again for those that are out of date"
        )
    return {
        "fingerprint": next(iter(targets.values())),
        "servers": {dataset: metadata.get("servers", []) for dataset, metadata in about.items()},
    }


def clear(output: Path) -> None:
    """Remove what an earlier merge left: shards, of which there may have been more, and what a kill left behind."""
    for left in [*output.glob("shard-*.parquet"), *output.glob(".shard-*.tmp")]:
        left.unlink()
    for left in output.glob(".spill-*"):
        shutil.rmtree(left)


def merge(checked: Mapping[str, Path], shards: Mapping[str, int], heldout: Mapping[str, int], output: Path) -> dict:
    """Write the shards and return the manifest.  `shards` is {count, seed}, `heldout` is {rows_per_dataset}."""
    count, seed = shards["count"], shards["seed"]
    assignments = assign(read_sample_ids(checked), seed=seed, count=count, heldout=heldout["rows_per_dataset"])
    kept = sum(int((a.shard >= 0).sum()) for a in assignments.values())
    if kept == sum(int(a.heldout.sum()) for a in assignments.values()):
        raise ConfigError(
            f"heldout.rows_per_dataset: {heldout['rows_per_dataset']} leaves none of the {kept} checked rows to train on; make it "
            "smaller, or find in checked/*.report.json why so few rows came through"
        )
    origin = read_origin(checked)
    output.mkdir(parents=True, exist_ok=True)
    clear(output)
    with tempfile.TemporaryDirectory(dir=output, prefix=".spill-") as scratch:
        spills = [Path(scratch) / f"{shard}.arrow" for shard in range(count)]
        scatter(checked, assignments, spills)
        entries = []
        for shard, spill in enumerate(progress(spills, what="write shards", unit="shard")):
            metadata = {"shard": shard, "count": count, "seed": seed, **origin}
            entries.append(write_shard(spill, output / f"shard-{shard}.parquet", metadata))
            spill.unlink()
    return {
        "fingerprint": origin["fingerprint"],
        "seed": seed,
        "rows_per_dataset_heldout": heldout["rows_per_dataset"],
        "rows": sum(entry["rows"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "merkle_root": merkle_root(entry["merkle_root"] for entry in entries),
        "datasets": {
            dataset: {
                "checked": path.as_posix(),
                "sha256": file_sha256(path),
                "rows_in": len(assignments[dataset].shard),
                "rows_out": int((assignments[dataset].shard >= 0).sum()),
                "dropped": assignments[dataset].dropped(),
                "heldout": int(assignments[dataset].heldout.sum()),
            }
            for dataset, path in checked.items()
        },
        "duplicates": {
            dataset: dict(sorted(a.duplicates.items())) for dataset, a in assignments.items() if a.duplicates
        },
        "shards": entries,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = program.parser(__doc__, params='{"shards": {"count", "seed"}, "heldout": {"rows_per_dataset"}}')
    parser.add_argument("--checked", required=True, nargs="+", type=Path, metavar="FILE", help="one for each dataset")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FOLDER", help="for shard-{k}.parquet and manifest.json"
    )
    arguments = parser.parse_args(argv)
    checked = {path.stem: path for path in sorted(arguments.checked, key=lambda path: path.stem)}
    if len(checked) < len(arguments.checked):
        parser.error("--checked: two files have the same name, and a file's name is its dataset's")
    shards, heldout = arguments.params["shards"], arguments.params["heldout"]
    manifest = arguments.output / "manifest.json"
    written = [arguments.output / f"shard-{shard}.parquet" for shard in range(shards["count"])]
    with recorded(
        arguments.provenance,
        stage="merge",
        name="merge",
        params=arguments.params,
        inputs={"checked": list(checked.values())},
        outputs={"shards": written, "manifest": manifest},
    ) as job:
        made = merge(checked, shards, heldout, arguments.output)
        write_json(manifest, made)
        dropped: Counter = Counter()
        for dataset in made["datasets"].values():
            dropped.update(dataset["dropped"])
        job.count(sum(dataset["rows_in"] for dataset in made["datasets"].values()), made["rows"], dropped)
    print(
        f"{made['rows']} rows, {made['tokens']} tokens in {shards['count']} shards {dict(dropped) or ''}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    program.run(main)
