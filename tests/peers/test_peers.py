"""The peers themselves: the stored figures are theirs, our drafters draft the same in their classes, our exports are read.

`make test-peers` installs them; EAGLET_UPDATE_FIXTURES=1 stores the figures again.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import export
from eaglet.config import ROOT
from eaglet.drafter_files import load_drafter
from eaglet.hidden_store import HiddenStore
from eaglet.proposers import DrafterCache
from eaglet.records import iter_rows
from eaglet.target_weights import embedding_and_head
from eaglet.turn_format import TurnFormat
from tiny_shard import TinyRun, build_tiny_run

HERE = Path(__file__).parent
PYTHON = os.environ.get("EAGLET_PEERS_PYTHON")
PEERS = ["specforge", "speculators"]

pytestmark = [pytest.mark.peers, pytest.mark.skipif(not PYTHON, reason="needs the peers: make test-peers")]


def told_by(program: str, *arguments: str | Path):
    """What a program prints, run in the peers' environment."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([PYTHON, HERE / program, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("peer", PEERS)
def test_the_stored_figures_are_the_peers(peer):
    found = told_by("run_peer.py", peer)
    path = HERE / f"{peer}.json"
    if os.environ.get("EAGLET_UPDATE_FIXTURES"):
        path.write_text(json.dumps(found) + "\n")
    stored = json.loads(path.read_text())
    assert found["version"] == stored["version"]
    assert found["loss"] == pytest.approx(stored["loss"], abs=1e-6)
    for step, wanted in zip(found["logits"], stored["logits"], strict=True):
        for row, wanted_row in zip(step, wanted, strict=True):
            for position, wanted_position in zip(row, wanted_row, strict=True):
                assert position == pytest.approx(wanted_position, abs=1e-5)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory, tiny_target):
    return build_tiny_run(tmp_path_factory.mktemp("run"), tiny_target)


@pytest.fixture(scope="module")
def default_run():
    """The default run of this checkout, if it has one."""
    run = ROOT / "results" / "demo"
    if not (run / "drafter" / "model.safetensors").is_file():
        pytest.skip("no default run in this checkout (make run)")
    return TinyRun(
        run / "shards" / "shard-0.parquet",
        run / "hidden" / "shard-0.index.parquet",
        run / "target" / "turn_format.json",
        ROOT / "results" / "store",
        run / "drafter",
    )


@pytest.mark.parametrize("run", ["tiny_run", "default_run"])
@pytest.mark.parametrize("peer", PEERS)
def test_a_drafter_drafts_the_same_first_tokens_in_a_peers_class(peer, run, request, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the default run names its target by a relative path
    run = request.getfixturevalue(run)
    target = TurnFormat.load(run.turn_format).target
    embedding, head = (weight.float() for weight in embedding_and_head(target))
    drafter, store = load_drafter(run.drafter, embedding, dtype=torch.float32), HiddenStore(run.store / "hidden")
    inputs, prompts, expected = {"embedding": embedding, "head": head}, [], []
    prompt_lengths = [len(row["prompt_ids"]) for row in iter_rows(run.shard, "shard")][:4]
    for number, entry in enumerate(list(iter_rows(run.index, "hidden_index"))[:4]):
        states = store.read(entry["key"])
        aux, last = states.aux.float(), states.last.float()
        inputs |= {f"token_ids_{number}": states.token_ids, f"aux_{number}": aux, f"last_{number}": last}
        prompts.append(prompt_lengths[number])
        positions = torch.arange(len(aux) - 1)[None]
        with torch.inference_mode():
            logits, _ = drafter.step(
                states.token_ids[None, 1:], drafter.fuse(aux[None, :-1]), positions, DrafterCache()
            )
        expected.append(drafter.to_target_ids(logits[0].argmax(-1)).tolist())
    inputs["prompts"] = torch.tensor(prompts)
    save_file({name: tensor.clone() for name, tensor in inputs.items()}, tmp_path / "inputs.safetensors")
    drafts = told_by("run_peer.py", peer, run.drafter, tmp_path / "inputs.safetensors")["drafts"]
    for ours, theirs, prompt in zip(expected, drafts, prompts, strict=True):
        assert ours[prompt - 1 :] == theirs[prompt - 1 :]  # where drafting begins: at the prompt's last token


@pytest.mark.parametrize("format_name", export.FORMATS)
def test_an_export_is_read_by_the_peers_own_reader(format_name, tiny_run, tmp_path):
    export.main(["--format", format_name, "--output", str(tmp_path / "export"), *tiny_run.flags])
    found = told_by("read_exports.py", format_name, tmp_path / "export" / "train")
    rows = [row for row in iter_rows(tiny_run.shard, "shard") if row["split"] == "train"]
    keys = {entry["sample_id"]: entry["key"] for entry in iter_rows(tiny_run.index, "hidden_index")}
    store = HiddenStore(tiny_run.store / "hidden")
    assert len(found) == len(rows) == 3
    for read, row in zip(found, rows, strict=True):
        assert read["input_ids"] == row["prompt_ids"] + row["output_ids"]
        # SpecForge's offline reader leaves the last token out of the loss: no state predicts beyond it
        assert read["masked"] == len(row["output_ids"]) - (format_name == "specforge-offline")
        if "aux" in read:
            stored = store.read(keys[row["sample_id"]])
            assert read["aux"] == pytest.approx(stored.aux.mean().item(), abs=1e-5)
            # the tiny target's norm has a gain of 1, so the state before it is the one after it up to a factor
            assert read["last"] == pytest.approx(stored.last.mean().item(), abs=1e-5)
