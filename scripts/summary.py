"""Print what a run has come to: rows of each dataset at each stage, tokens, acceptance length, and where the report is.

    python scripts/summary.py --run-dir results/demo

Reads what the finished jobs left behind, so it also tells how far an unfinished run has come.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc

from eaglet import program
from eaglet.errors import AuditFailed
from eaglet.files import read_json
from eaglet.lineage import Chain, read_chain
from eaglet.records import iter_tables
from eaglet.tables import aligned

COLUMNS = ("dataset", "read", "prompts", "generated", "checked", "train", "held out", "tokens", "acceptance")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, metavar="FOLDER", help="results/{run}")
    options = parser.parse_args(arguments)
    print(summary(options.run_dir))


def summary(run: Path) -> str:
    """The table and two lines below it.  Raises AuditFailed where no job of a run has ended."""
    chain = read_chain(run, None)
    if not chain.jobs:
        raise AuditFailed(f"{run}: no job has ended here; start with `snakemake --cores 2`")
    shards, acceptance = _shard_counts(chain), _acceptance(chain)
    rows = [[name, *_counts(chain, name, shards), _length(acceptance.get(name))] for name in chain.datasets]
    if len(rows) > 1:
        totals = [sum(cells) if None not in cells else None for cells in list(zip(*rows, strict=True))[1:-1]]
        rows.append(["all", *totals, _length(acceptance.get("all"))])
    report = run / "audit" / "report.html"
    lines = [*aligned([COLUMNS, *rows]), ""]
    if report.is_file():
        lines.append(f"report   {report}")
    else:
        lines.append(f"report   not yet: the run has not been audited ({len(chain.jobs)} jobs have ended)")
    if chain.job("train", "train"):
        lines.insert(-1, f"drafter  {run / 'drafter'}")
    return "\n".join(lines)


def _counts(chain: Chain, dataset: str, shards: Counter) -> list[int | None]:
    """Rows read, prompts, generated, checked, train, held out, and tokens in the shards; None where a stage has not ended."""
    jobs = {stage: chain.job(stage, dataset) for stage in ("prompts", "generate", "validate")}
    rows = {stage: job and job["rows"] for stage, job in jobs.items()}
    merged = chain.job("merge", "merge") is not None
    return [
        rows["prompts"] and rows["prompts"]["in"],
        *(rows[stage] and rows[stage]["out"] for stage in jobs),
        *(shards[dataset, kind] if merged else None for kind in ("train", "heldout", "tokens")),
    ]


def _shard_counts(chain: Chain) -> Counter:
    """(dataset, train | heldout | tokens) -> number, over the shards."""
    counts: Counter = Counter()
    merge = chain.job("merge", "merge")
    for output in merge["outputs"] if merge else []:
        if output["path"].endswith(".parquet") and Path(output["path"]).is_file():
            for table in iter_tables(output["path"], "shard", ["dataset", "split", "prompt_ids", "output_ids"]):
                lengths = pc.add(*(pc.list_value_length(table[name]) for name in ("prompt_ids", "output_ids")))
                for dataset, split, tokens in zip(
                    table["dataset"].to_pylist(), table["split"].to_pylist(), lengths.to_pylist(), strict=True
                ):
                    counts[dataset, split] += 1
                    counts[dataset, "tokens"] += tokens
    return counts


def _acceptance(chain: Chain) -> dict[str, float]:
    """Acceptance length by dataset, and of all under `all`; empty before the evaluation."""
    path = Path(chain.path("evaluation", "acceptance.json"))
    if not path.is_file():
        return {}
    found = read_json(path)
    lengths = {name: of["acceptance_length"] for name, of in found["datasets"].items()}
    return {**lengths, "all": found["acceptance_length"]}


def _length(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    program.run(main)
