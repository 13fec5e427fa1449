"""What a peer's own reader finds in an export of eaglet's, as JSON; in the peers' environment.

    read_exports.py specforge-offline|specforge-online|speculators FOLDER      (of one split)

[{"input_ids", "masked": tokens with loss, "aux": mean of the auxiliary states, "last": of the last one}], in the reader's order.
The online format has no states.  SpecForge's readers may cut positions that carry no loss at the end; speculators'
`shift_batch` pairs each token with the state in front of it.
"""

import json
import sys
from pathlib import Path

import torch


def specforge_offline(folder: Path) -> list[dict]:
    from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    references = build_offline_reader(str(folder), run_id="eaglet", ttt_length=3, max_len=2048).read()
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=references,
        batch_size=1,
        drop_last=False,
        collate_fn=build_offline_collator(),
        num_workers=0,
        per_sample_transform=build_offline_normalizer(2048),
    )
    return [_specforge_row(batch.tensors) for batch in loader]


def _specforge_row(sample: dict) -> dict:
    return {
        "input_ids": sample["input_ids"].flatten().tolist(),
        "masked": int(sample["loss_mask"].sum()),
        "aux": sample["hidden_state"].float().mean().item(),
        "last": sample["target"].float().mean().item(),
    }


def specforge_online(folder: Path) -> list[dict]:
    from specforge.data.prompt_builder import prepare_prompt_tasks

    tasks = prepare_prompt_tasks(
        folder.with_suffix(".jsonl"),
        None,
        chat_template="qwen",
        max_length=2048,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
    )
    return [
        {"input_ids": _flat(task["payload"]["input_ids"]), "masked": sum(_flat(task["payload"]["loss_mask"]))}
        for task in tasks
    ]


def _flat(ids) -> list[int]:
    return torch.as_tensor(ids).flatten().tolist()


def speculators(folder: Path) -> list[dict]:
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset

    data = ArrowDataset(
        max_len=2048,
        datapath=str(folder),
        on_missing="raise",
        transfer=FileTransfer(folder / "hidden_states"),
        hidden_states_dtype=torch.float32,
    )
    return [
        {
            "input_ids": row["input_ids"].tolist(),
            "masked": int(row["loss_mask"].sum()),
            "aux": row["hidden_states"].mean().item(),
            "last": row["verifier_last_hidden_states"].mean().item(),
        }
        for row in (data[number] for number in range(len(data)))
    ]


if __name__ == "__main__":
    readers = {"specforge-offline": specforge_offline, "specforge-online": specforge_online, "speculators": speculators}
    print(json.dumps(readers[sys.argv[1]](Path(sys.argv[2]))))
