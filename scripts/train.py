"""Stage train: an EAGLE-3 drafter from the shards' rows and the stored hidden states.

Writes config.json and model.safetensors as SGLang and vLLM load them, log.jsonl (one line for each optimizer step, one for each
epoch's held-out loss) and report.json.  Goes on from the last checkpoint in the store when it was stopped; the result
has the same bytes then.  On several GPUs start it with `accelerate launch`.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from eaglet import draft_vocab, program
from eaglet.digests import content_key, file_sha256
from eaglet.draft_vocab import DraftVocab
from eaglet.drafter_files import CONFIG, LOG, WEIGHTS, drafter_config, save_drafter
from eaglet.eagle3 import Eagle3Config, Eagle3Drafter, initial_drafter, layer_fits
from eaglet.errors import RecordError
from eaglet.files import write_bytes, write_json
from eaglet.hidden_store import HiddenStore
from eaglet.provenance import recorded
from eaglet.records import iter_rows, iter_tables, read_metadata, read_table
from eaglet.subset import subset
from eaglet.target_weights import embedding_and_head, last_layer
from eaglet.training import Checkpoints, Reader, Sample, Settings, Trainer, Window, compute_dtype, fit, windows
from eaglet.turn_format import TurnFormat

REPORT = "report.json"
LOW_COVERAGE = 0.9  # of held-out output tokens: below it, the drafter cannot write one token in ten
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
CODE = ("eagle3", "training", "draft_vocab", "subset", "target_weights")  # modules whose edit makes a checkpoint stale


@dataclass
class Data:
    """What the shards and indexes say, without the tokens themselves."""

    samples: dict[str, list[Sample]]  # split -> rows in shard order
    counts: dict[tuple[str, str], np.ndarray]  # (split, dataset) -> int64 [V], how often each output token occurs
    layer_ids: tuple[int, int, int]
    fingerprint: str
    outside_share: int  # training rows that were left out


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    accelerator = Accelerator()
    if accelerator.is_main_process:
        with recorded(
            options.provenance,
            stage="train",
            name=Path(options.provenance or "train").stem,  # a share of the rows is a job of its own
            params=options.params,
            inputs={name: getattr(options, name) for name in ("manifest", "shards", "indexes", "turn_format")},
            outputs={name: Path(options.output) / name for name in (CONFIG, WEIGHTS, LOG, REPORT)},
        ) as job:
            facts, counted = train(options, accelerator)
            job.count(*counted)
            job.facts.update(facts)
    else:
        train(options, accelerator)
    accelerator.end_training()


def _parser():
    parser = program.parser(
        __doc__, params="the config's drafter section, and `row_share` to train on that share of the rows"
    )
    parser.add_argument("--manifest", required=True, help="shards/manifest.json")
    parser.add_argument(
        "--shards", required=True, nargs="+", metavar="FILE", help="shards/shard-K.parquet, all of them"
    )
    parser.add_argument(
        "--indexes", required=True, nargs="+", metavar="FILE", help="hidden/shard-K.index.parquet, in that order"
    )
    parser.add_argument("--turn-format", required=True, help="target/turn_format.json")
    parser.add_argument(
        "--tuning",
        type=program.json_object,
        default={},
        metavar="JSON",
        help="checkpoint_every: optimizer steps between two checkpoints; the result does not depend on it",
    )
    parser.add_argument("--store", required=True, help="results/store: hidden states are read there, checkpoints kept")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="drafter/")
    return parser


def train(options, accelerator: Accelerator) -> tuple[dict, tuple]:
    """The stage in one process; returns provenance facts and the arguments of Job.count."""
    started = time.monotonic()
    params, settings = options.params, Settings.from_params(options.params)
    turn_format = TurnFormat.load(options.turn_format)
    embedding, head = embedding_and_head(turn_format.target)
    chosen = None if settings.row_share == 1 else chosen_rows(options.shards, settings)
    data = read_data(options.shards, options.indexes, turn_format, len(embedding), chosen)
    vocab = choose_vocab(data, params.get("draft_vocab_size", 32000))
    config = drafter_config(
        turn_format.target.text_config(),
        draft_vocab_size=len(vocab.ids),
        layer_ids=data.layer_ids,
        vocab_size=len(embedding),
        **{name: params.get(name) for name in SIZES},
    )
    cut = {
        split: [windows(s, settings.max_length, skip_first_target=settings.skip_first_target) for s in samples]
        for split, samples in data.samples.items()
    }
    items = {split: [window for row in rows for window in row] for split, rows in cut.items()}
    if not items["train"]:
        raise RecordError(f"{options.manifest}: no training row has a target; there is nothing to train on")

    layer = last_layer(turn_format.target) if settings.start == "target" else {}
    layer = layer if layer_fits(config, layer) else None
    drafter = initial_drafter(config, embedding, head, torch.from_numpy(vocab.ids), settings.seed, layer)
    dtype = compute_dtype(settings.dtype, accelerator.device)
    reader = Reader(HiddenStore(Path(options.store) / "hidden"), config.hidden_size, settings.ttt_steps, dtype)
    trainer = Trainer(drafter, head[vocab.ids], reader, settings, accelerator, full_head=head)
    key = checkpoint_key(options, settings, config, data, dtype)
    checkpoints = Checkpoints(Path(options.store) / "checkpoints" / key)
    ready = time.monotonic()
    run = fit(trainer, items["train"], items["heldout"], checkpoints, options.tuning.get("checkpoint_every", 200))
    seconds = time.monotonic() - ready

    report = {
        **rows_report(data, cut),
        "optimizer_steps": run["steps"],
        "dtype": str(dtype).removeprefix("torch."),
        "began_with": "the target's last layer" if layer else "random weights",
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "drafter": asdict(config),
        "settings": asdict(settings),
        "draft_vocab": vocab_report(vocab, data),
        "heldout": trainer.measure(items["heldout"]) if items["heldout"] else None,
    }
    if accelerator.is_main_process:
        write_outputs(Path(options.output), drafter, embedding.dtype, checkpoints, report)
        tell(report)
    trained_here = settings.epochs * (1 - run["resumed_from"] / run["steps"]) * report["tokens"]["train"]
    facts = {
        "resumed_from_step": run["resumed_from"],
        "preparation_seconds": round(ready - started, 2),
        "training_seconds": round(seconds, 2),
        "tokens_per_second": round(trained_here / seconds, 1),
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
    }
    outside = {"outside_share": data.outside_share} if settings.row_share < 1 else {}
    total, dropped = sum(report["rows"].values()) + data.outside_share, report["dropped"] | outside
    return facts, (total, total - sum(dropped.values()), dropped)


def rows_report(data: Data, cut: Mapping[str, Sequence[Sequence[Window]]]) -> dict:
    """Rows, tokens and windows by split, and rows that could not be used; cut maps a split to each row's windows."""
    return {
        "rows": {split: len(samples) for split, samples in data.samples.items()},
        "dropped": {"no_target": sum(not row for rows in cut.values() for row in rows)},
        "tokens": {split: sum(s.tokens for s in samples) for split, samples in data.samples.items()},
        "windows": {split: sum(len(row) for row in rows) for split, rows in cut.items()},
        "rows_cut_into_windows": {split: sum(len(row) > 1 for row in rows) for split, rows in cut.items()},
    }


def chosen_rows(shards: Sequence[str], settings: Settings) -> set[str]:
    """The sample_ids of the training rows that are trained on: those of `row_share`."""
    ids: dict[str, list[str]] = {}
    for shard in shards:
        for row in iter_rows(shard, "shard", ["sample_id", "dataset", "split"]):
            if row["split"] == "train":
                ids.setdefault(row["dataset"], []).append(row["sample_id"])
    return subset(ids, settings.row_share, settings.seed)


def read_data(
    shards: Sequence[str], indexes: Sequence[str], turn_format: TurnFormat, vocab_size: int, chosen: set[str] | None
) -> Data:
    """Samples by split, and token counts by split and dataset; of the training rows those that are `chosen` (None: all).

    Raises RecordError where an index does not belong to its shard, or was made from another target.
    """
    samples: dict[str, list[Sample]] = {"train": [], "heldout": []}
    counts: dict[tuple[str, str], np.ndarray] = {}
    described, outside_share = set(), 0
    if len(shards) != len(indexes):
        raise RecordError(
            f"{len(shards)} shards and {len(indexes)} indexes; each shard has one index, in the same order"
        )
    for shard, path in zip(shards, indexes, strict=True):
        metadata = read_metadata(path, "hidden_index")
        described.add((metadata["fingerprint"], tuple(metadata["layers"])))
        index = read_table(path, "hidden_index").to_pylist()
        at = 0
        for table in iter_tables(shard, "shard", ["sample_id", "prompt_ids", "output_ids", "dataset", "split"]):
            for row in table.to_pylist():
                listed = index[at] if at < len(index) else {"sample_id": None, "tokens": 0}
                length = len(row["prompt_ids"]) + len(row["output_ids"])
                if (listed["sample_id"], listed["tokens"]) != (row["sample_id"], length):
                    raise RecordError(
                        f"{path}: row {at} is {listed['sample_id']} with {listed['tokens']} tokens, in {shard} it is "
                        f"{row['sample_id']} with {length}; run hidden_states again"
                    )
                at += 1
                if chosen is not None and row["split"] == "train" and row["sample_id"] not in chosen:
                    outside_share += 1
                    continue
                samples[row["split"]].append(Sample(listed["key"], len(row["prompt_ids"]), length))
                group = row["split"], row["dataset"]
                if group not in counts:
                    counts[group] = np.zeros(vocab_size, dtype=np.int64)
                np.add.at(counts[group], row["output_ids"], 1)
        if at != len(index):
            raise RecordError(f"{path}: {len(index)} rows, {shard} has {at}; run hidden_states again")
    if len(described) != 1 or next(iter(described))[0] != turn_format.fingerprint:
        found = ", ".join(f"target {target[:12]} layers {list(layers)}" for target, layers in sorted(described))
        raise RecordError(
            f"the hidden indexes were made from {found}; expected one, of target {turn_format.fingerprint[:12]}; "
            "run hidden_states again"
        )
    return Data(samples, counts, next(iter(described))[1], turn_format.fingerprint, outside_share)


def choose_vocab(data: Data, size: int) -> DraftVocab:
    """From the training rows alone."""
    return draft_vocab.choose(sum(counts for (split, _), counts in data.counts.items() if split == "train"), size)


def checkpoint_key(options, settings: Settings, config: Eagle3Config, data: Data, dtype: torch.dtype) -> str:
    """Names a training by everything that decides its weights: a checkpoint of another is never taken up."""
    modules = Path(draft_vocab.__file__).parent
    return content_key(
        {
            "settings": asdict(settings),
            "config": asdict(config),
            "dtype": str(dtype),
            "target": data.fingerprint,
            "shards": [file_sha256(path) for path in options.shards],
            "indexes": [file_sha256(path) for path in options.indexes],
            "code": [file_sha256(modules / f"{name}.py") for name in CODE] + [file_sha256(__file__)],
        }
    )


def vocab_report(vocab: DraftVocab, data: Data) -> dict:
    """Sizes, and the share of output tokens that the draft vocabulary holds, for each dataset and split."""
    datasets = sorted({dataset for _, dataset in data.counts})

    def covered(split: str, chosen: Iterable[str]) -> float | None:
        found = [data.counts[split, name] for name in chosen if (split, name) in data.counts]
        share = vocab.coverage(sum(found)) if found else None
        return None if share is None else round(share, 6)

    coverage = {name: {split: covered(split, [name]) for split in ("train", "heldout")} for name in datasets}
    coverage["all"] = {split: covered(split, datasets) for split in ("train", "heldout")}
    warnings = [
        f"{name}: the draft vocabulary holds {found['heldout']:.1%} of the held-out output tokens; the drafter can never "
        "write the others. Raise drafter.draft_vocab_size or capture more rows of this kind"
        for name, found in coverage.items()
        if found["heldout"] is not None and found["heldout"] < LOW_COVERAGE
    ]
    if vocab.filled:
        warnings.append(
            f"the training outputs hold {vocab.distinct} different tokens; {vocab.filled} of {len(vocab.ids)} places of the "
            "draft vocabulary are filled with the lowest other ids"
        )
    return {
        "size": len(vocab.ids),
        "distinct_output_tokens": vocab.distinct,
        "filled": vocab.filled,
        "coverage": coverage,
        "warnings": warnings,
    }


def write_outputs(
    folder: Path, drafter: Eagle3Drafter, dtype: torch.dtype, checkpoints: Checkpoints, report: dict
) -> None:
    """drafter/: the checkpoint in the target's dtype, the log, the report."""
    save_drafter(folder, drafter, dtype=dtype)
    write_bytes(folder / LOG, checkpoints.log.read_bytes())
    write_json(folder / REPORT, report)


def tell(report: dict) -> None:
    """A few lines for people, warnings to stderr."""
    for warning in report["draft_vocab"]["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{report['optimizer_steps']} optimizer steps over {report['rows']['train']} rows, in {report['dtype']}")
    if report["heldout"]:
        for name, values in report["heldout"].items():
            print(f"held-out {name} by step: {' '.join(f'{v:.3f}' for v in values)}")


if __name__ == "__main__":
    program.run(main)
