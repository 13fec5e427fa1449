"""Exports: what the peers' readers find, with the norm and the layer names that each expects."""

import json

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

import export
from eaglet.errors import RecordError, StoreError, TargetError
from eaglet.records import iter_rows
from tiny_shard import build_tiny_run, build_tiny_shard, tiny_turn_format


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_target):
    """Flags that name a captured shard and a drafter; and the shard's rows."""
    made = build_tiny_run(tmp_path_factory.mktemp("run"), tiny_target)
    return made.flags, list(iter_rows(made.shard, "shard"))


def exported(run, tmp_path, name):
    output = tmp_path / "out"
    export.main(["--format", name, "--output", str(output), *run[0]])
    return output, json.loads((output / "export.json").read_text())


def of_split(run, split):
    return [row for row in run[1] if row["split"] == split]


def own_states(tiny_target, row):
    """transformers' hidden states for a row, the last before the final norm as well."""
    model = tiny_turn_format(tiny_target).target.load()
    before = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    with torch.inference_mode():
        own = model(torch.tensor([row["prompt_ids"] + row["output_ids"]]), output_hidden_states=True)
    return own.hidden_states, before[0][0], model


def test_specforge_offline_files_hold_the_state_after_the_norm(run, tmp_path, tiny_target):
    output, described = exported(run, tmp_path, "specforge-offline")
    assert described["rows"] == {"train": 3, "heldout": 3} and described["layers_named_by_output"] == [1, 3, 4]
    for split in ("train", "heldout"):
        for number, row in enumerate(of_split(run, split)):
            data = torch.load(output / split / "rows_0-2000" / f"data_{number}.ckpt", weights_only=True)
            hidden, _, _ = own_states(tiny_target, row)
            assert data["input_ids"].tolist() == row["prompt_ids"] + row["output_ids"]
            assert data["loss_mask"].tolist() == [0] * len(row["prompt_ids"]) + [1] * len(row["output_ids"])
            torch.testing.assert_close(data["hidden_state"], hidden[-1])
            torch.testing.assert_close(data["aux_hidden_state"], torch.cat([hidden[k] for k in (2, 4, 5)], -1))
    mapping = torch.load(output / "vocab_mapping/vocab_mapping.pt", weights_only=True)
    assert (mapping["d2t"] + torch.arange(32)).tolist() == [3 * i for i in range(32)]
    assert mapping["t2d"].nonzero().squeeze(-1).tolist() == [3 * i for i in range(32)]


def test_specforge_online_lines_hold_ids_and_masks(run, tmp_path):
    output, _ = exported(run, tmp_path, "specforge-online")
    lines = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    assert [line["input_ids"] for line in lines] == [r["prompt_ids"] + r["output_ids"] for r in of_split(run, "train")]
    assert all(
        sum(line["loss_mask"]) == len(r["output_ids"]) for line, r in zip(lines, of_split(run, "train"), strict=True)
    )


def test_speculators_files_hold_a_state_before_the_norm_that_gives_the_same_logits(run, tmp_path, tiny_target):
    output, _ = exported(run, tmp_path, "speculators")
    data = load_from_disk(output / "train")
    for number, row in enumerate(of_split(run, "train")):
        found = load_file(output / "train/hidden_states" / f"hs_{number}.safetensors")
        hidden, before, model = own_states(tiny_target, row)
        assert torch.equal(found["token_ids"], data[number]["input_ids"])  # as speculators compares them
        assert data[number]["seq_len"] == len(found["token_ids"])
        assert found["hidden_states"].shape == (len(found["token_ids"]), 4, 64)
        torch.testing.assert_close(found["hidden_states"][:, 1], hidden[4][0])
        last = found["hidden_states"][:, 3]
        torch.testing.assert_close(model.model.norm(last), hidden[-1][0], rtol=1e-4, atol=1e-4)
        cosine = torch.nn.functional.cosine_similarity(last, before)
        assert (cosine > 0.9999).all()
    assert np.load(output / "train/d2t.npy").shape == (32,) and np.load(output / "train/t2d-32.npy").dtype == bool


def test_a_norm_that_cannot_be_undone_is_refused(tmp_path, tiny_target):
    norm = export.final_norm(tiny_turn_format(tiny_target).target)
    last = norm(torch.randn(4, 64))
    export.before_norm(last, norm, tmp_path)
    with torch.no_grad():
        norm.weight[:32] = 0
    with pytest.raises(TargetError, match="cannot be computed"):
        export.before_norm(last, norm, tmp_path)
    with pytest.raises(TargetError, match="LayerNorm"):
        export.before_norm(last, torch.nn.LayerNorm(64), tmp_path)


def test_an_index_of_another_shard_and_an_existing_folder_are_refused(run, tmp_path, tiny_target):
    flags = list(run[0])
    shard, _ = build_tiny_shard(tmp_path, tiny_target, rows=2)
    flags[flags.index("--shards") + 1] = str(shard)
    with pytest.raises(RecordError, match="lists other rows"):
        export.main(["--format", "specforge-online", "--output", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()
    with pytest.raises(StoreError, match="exists already"):
        export.main(["--format", "specforge-online", "--output", str(tmp_path), *flags])
