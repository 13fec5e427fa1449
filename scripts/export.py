"""Export shards and hidden states in the formats that other trainers read.

    python scripts/export.py --format specforge-offline …   data_{i}.ckpt files, for `train_hidden_states_path`
    python scripts/export.py --format specforge-online …    one JSON Lines file of ids and masks
    python scripts/export.py --format speculators …         a `datasets` folder with hidden_states/hs_{i}.safetensors

Training and held-out rows come apart, in train/ and heldout/.  The mask marks the output tokens.  The formats differ in two
things that no reader checks: SpecForge takes the last hidden state *after* the target's final norm and names layers by
their outputs, speculators takes it *before* that norm and names layers by their inputs.  export.json says what was written,
with the layer ids to put into the trainer's config.  --drafter adds its draft vocabulary.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eaglet import program
from eaglet.drafter_files import WEIGHTS
from eaglet.errors import RecordError, StoreError, TargetError
from eaglet.files import atomic_path, free_bytes, readable_size, write_json
from eaglet.forward import decoder_of
from eaglet.hidden_store import HiddenRow, HiddenStore
from eaglet.progress import progress
from eaglet.provenance import recorded
from eaglet.records import iter_rows, read_metadata
from eaglet.target_weights import tensor_files
from eaglet.targets import Target
from eaglet.turn_format import TurnFormat

ROWS_IN_A_FOLDER = 2000  # of SpecForge's offline format
SPLITS = ("train", "heldout")
NORM_ERROR = 0.02  # how far norm(state before the norm) may be from the stored state, relative; bfloat16 rounds twice


@dataclass(frozen=True)
class Row:
    """A row of a shard with its place in the store."""

    sample_id: str
    split: str
    token_ids: list[int]
    prompt_tokens: int
    key: str

    def mask(self) -> list[int]:
        """1 where the token is of the output."""
        return [0] * self.prompt_tokens + [1] * (len(self.token_ids) - self.prompt_tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    output = Path(options.output)
    if output.exists():
        raise StoreError(f"{output}: exists already; remove it or name another folder with --output")
    turn_format, store = TurnFormat.load(options.turn_format), HiddenStore(Path(options.store) / "hidden")
    inputs = {"shards": options.shards, "indexes": options.indexes, "turn_format": options.turn_format}
    inputs |= {"drafter": Path(options.drafter) / WEIGHTS} if options.drafter else {}
    with (
        recorded(
            options.provenance,
            stage="export",
            name=options.format,
            params={"format": options.format},
            inputs=inputs,
            outputs={"export": output},
        ) as job,
        _whole(output) as folder,
    ):
        rows = list(read_rows(options.shards, options.indexes))
        write = FORMATS[options.format]
        facts = write(folder, rows, store, turn_format, progress(total=len(rows), what=f"export {options.format}"))
        layers = read_metadata(options.indexes[0], "hidden_index")["layers"]
        counted = {split: sum(row.split == split for row in rows) for split in SPLITS}
        vocabulary = write_vocabulary(folder, options.format, Path(options.drafter)) if options.drafter else None
        described = {
            "format": options.format,
            "rows": counted,
            "layers_named_by_input": layers,
            "layers_named_by_output": [layer - 1 for layer in layers],
            "target": turn_format.target.as_params(),
            "draft_vocab_size": vocabulary,
        }
        write_json(folder / "export.json", described | facts)
        job.count(len(rows), len(rows))


def _parser():
    parser = program.parser(__doc__)
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument("--shards", required=True, nargs="+", help="shards/shard-K.parquet")
    parser.add_argument("--indexes", required=True, nargs="+", help="hidden/shard-K.index.parquet, in the same order")
    parser.add_argument("--turn-format", required=True, help="target/turn_format.json")
    parser.add_argument("--drafter", help="drafter/, whose draft vocabulary is exported as well")
    parser.add_argument("--store", default="results/store", help="folder that all runs share")
    parser.add_argument("--output", required=True, help="the folder to make")
    return parser


class _whole:
    """A folder that appears under its name when the body has succeeded, and not before."""

    def __init__(self, output: Path):
        self.output = output

    def __enter__(self) -> Path:
        self._path = atomic_path(self.output)
        self._temporary = self._path.__enter__()
        self._temporary.mkdir()
        return self._temporary

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            shutil.rmtree(self._temporary)
        self._path.__exit__(kind, error, trace)


def read_rows(shards: Sequence[str], indexes: Sequence[str]) -> Iterator[Row]:
    """The rows of all shards with their hidden keys.  Raises RecordError where an index is not of its shard."""
    if len(shards) != len(indexes):
        raise RecordError(
            f"{len(shards)} shards and {len(indexes)} indexes; name one index for each shard, in the same order"
        )
    columns = ["sample_id", "prompt_ids", "output_ids", "split"]
    for shard, index in zip(shards, indexes, strict=True):
        listed = list(iter_rows(index, "hidden_index"))
        rows = list(iter_rows(shard, "shard", columns))
        if [row["sample_id"] for row in rows] != [entry["sample_id"] for entry in listed]:
            raise RecordError(f"{index}: lists other rows than {shard} holds; run hidden_states again")
        for row, entry in zip(rows, listed, strict=True):
            token_ids = row["prompt_ids"] + row["output_ids"]
            yield Row(row["sample_id"], row["split"], token_ids, len(row["prompt_ids"]), entry["key"])


def write_specforge_offline(
    folder: Path, rows: Sequence[Row], store: HiddenStore, turn_format: TurnFormat, bar
) -> dict:
    """{split}/rows_{g}-{g+2000}/data_{i}.ckpt: input_ids, loss_mask int64 [T]; hidden_state [1, T, H], aux_hidden_state [1, T, 3H]."""
    refuse_without_room(folder, rows, store)
    for number, row in numbered(rows, bar):
        states = stored(store, row)
        group = number // ROWS_IN_A_FOLDER * ROWS_IN_A_FOLDER
        path = folder / row.split / f"rows_{group}-{group + ROWS_IN_A_FOLDER}" / f"data_{number}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "input_ids": torch.tensor(row.token_ids),
            "loss_mask": torch.tensor(row.mask()),
            "hidden_state": states.last[None].clone(),
            "aux_hidden_state": states.aux[None].clone(),
        }
        torch.save(record, path)
    return {"last_hidden_state": "after the final norm", "layer_ids": "layers_named_by_output"}


def write_specforge_online(folder: Path, rows: Sequence[Row], store: HiddenStore, turn_format: TurnFormat, bar) -> dict:
    """{split}.jsonl: input_ids and loss_mask of each row."""
    for split in SPLITS:
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as lines:
            for row in rows:
                if row.split == split:
                    lines.write(json.dumps({"input_ids": row.token_ids, "loss_mask": row.mask()}) + "\n")
                    bar.update()
    return {"last_hidden_state": None, "layer_ids": "layers_named_by_output"}


def write_speculators(folder: Path, rows: Sequence[Row], store: HiddenStore, turn_format: TurnFormat, bar) -> dict:
    """{split}/: a `datasets` folder, and hidden_states/hs_{i}.safetensors with token_ids [T], hidden_states [T, 4, H]."""
    from datasets import Dataset

    refuse_without_room(folder, rows, store)
    norm = final_norm(turn_format.target)
    for split in SPLITS:
        chosen = [row for row in rows if row.split == split]
        columns = {
            "input_ids": [row.token_ids for row in chosen],
            "loss_mask": [row.mask() for row in chosen],
            "seq_len": [len(row.token_ids) for row in chosen],
        }
        if chosen:
            Dataset.from_dict(columns).with_format("torch").save_to_disk(folder / split)
    for number, row in numbered(rows, bar):
        states = stored(store, row)
        layers = states.aux.unflatten(-1, (3, -1))  # [T, 3, H]
        last = before_norm(states.last, norm, store.path(row.key))
        path = folder / row.split / "hidden_states" / f"hs_{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden_states = torch.cat([layers, last[:, None].to(layers.dtype)], dim=1).contiguous()  # [T, 4, H]
        save_file({"token_ids": torch.tensor(row.token_ids), "hidden_states": hidden_states}, path)
    return {
        "last_hidden_state": "before the final norm, up to a factor for each token, which the norm removes",
        "layer_ids": "layers_named_by_input",
    }


FORMATS: dict[str, Callable] = {
    "specforge-offline": write_specforge_offline,
    "specforge-online": write_specforge_online,
    "speculators": write_speculators,
}


def numbered(rows: Sequence[Row], bar) -> Iterator[tuple[int, Row]]:
    """Rows with their number within their split, from 0."""
    counts = dict.fromkeys(SPLITS, 0)
    for row in rows:
        yield counts[row.split], row
        counts[row.split] += 1
        bar.update()


def stored(store: HiddenStore, row: Row) -> HiddenRow:
    """The row's states; raises StoreError where they are of other tokens."""
    states = store.read(row.key)
    if states.token_ids.tolist() != row.token_ids:
        raise StoreError(f"{store.path(row.key)}: holds other tokens than row {row.sample_id}; run hidden_states again")
    return states


def refuse_without_room(folder: Path, rows: Sequence[Row], store: HiddenStore) -> None:
    needed, free = sum(store.path(row.key).stat().st_size for row in rows), free_bytes(folder)
    if needed > free:
        raise StoreError(
            f"{folder.parent}: the export needs {readable_size(needed)}, and {readable_size(free)} are free; "
            "name a folder on a larger disk with --output"
        )


def final_norm(target: Target) -> torch.nn.Module:
    """The norm between the target's last layer and its head, with its weights, in float32.  Raises TargetError."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target.config(), trust_remote_code=target.trust_remote_code)
    norm = getattr(decoder_of(model), "norm", None)
    tensor = next((f"{name}.weight" for name, module in model.named_modules() if module is norm), None)
    files = tensor_files(target.weights_folder)
    if tensor not in files:
        raise TargetError(f"target.model: {target.model}: no tensor {tensor or 'of a final norm'} in its files")
    with safe_open(files[tensor], framework="pt") as file:
        weight = file.get_tensor(tensor).float()
    norm = norm.to_empty(device="cpu").float()
    norm.load_state_dict({"weight": weight})
    return norm


def before_norm(last: torch.Tensor, norm: torch.nn.Module, path: Path) -> torch.Tensor:
    """A state [T, H] (float32) whose final norm is `last`: last / gain, for an RMS norm does not see a token's scale.

    Raises TargetError where it does not come out: another kind of norm, or a gain of zero that swallows a component.
    """
    gain = norm(torch.ones(1, last.shape[-1]))[0]  # the RMS of ones is 1
    state = torch.where(gain == 0, 0, last.float() / gain)
    error = (norm(state) - last.float()).norm() / last.float().norm()
    if not error <= NORM_ERROR:
        raise TargetError(
            f"{path}: the state before the target's final norm ({type(norm).__name__}) cannot be computed from the stored one "
            f"(relative error {error:.3g}); export for SpecForge, which takes the state after it"
        )
    return state


def write_vocabulary(folder: Path, format_name: str, drafter: Path) -> int:
    """The drafter's d2t (offsets int64 [Vd]) and t2d (bool [V]) where the format's reader looks; returns Vd."""
    tensors = load_file(drafter / WEIGHTS)
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if format_name == "speculators":
        for split in (folder / split for split in SPLITS if (folder / split).is_dir()):
            for suffix in ("", f"-{len(d2t)}"):  # releases differ in whether the name carries the size
                np.save(split / f"d2t{suffix}.npy", d2t.numpy())
                np.save(split / f"t2d{suffix}.npy", t2d.numpy())
    else:
        (folder / "vocab_mapping").mkdir()
        torch.save({"d2t": d2t, "t2d": t2d}, folder / "vocab_mapping" / "vocab_mapping.pt")
    return len(d2t)


if __name__ == "__main__":
    program.run(main)
