"""Stage hidden_states: what is captured is what the model computes, once, whatever happens in between."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import hidden_states
from eaglet import forward
from eaglet.errors import ConfigError, StoreError, TargetError
from eaglet.forward import HiddenForward, auxiliary_layers, plan_batches
from eaglet.hidden_store import HiddenStore
from eaglet.records import iter_rows
from eaglet.targets import Target
from tiny_shard import build_tiny_shard

LAYERS = [2, 4, 5]


@pytest.fixture(scope="module")
def shard(tmp_path_factory, tiny_target):
    return build_tiny_shard(tmp_path_factory.mktemp("shard"), tiny_target)


def capture(folder: Path, shard, *, name="a", tuning=None, **params) -> tuple[Path, Path]:
    """Run the stage into folder/{name}.*; returns (index, report)."""
    index, report = folder / f"{name}.index.parquet", folder / f"{name}.report.json"
    hidden_states.main(
        [
            *("--shard", str(shard[0]), "--turn-format", str(shard[1]), "--store", str(folder / "store")),
            *("--params", json.dumps({"backend": "transformers", "dtype": "float32", "layers": "auto", **params})),
            *("--tuning", json.dumps(tuning or {}), "--index", str(index), "--report", str(report)),
            *("--provenance", str(folder / f"{name}.provenance.json")),
        ]
    )
    return index, report


def facts(folder: Path, name="a") -> dict:
    return json.loads((folder / f"{name}.provenance.json").read_text())["facts"]


def test_the_stored_states_are_those_that_transformers_reports(tmp_path, shard):
    index, report = capture(tmp_path, shard)
    store, model = HiddenStore(tmp_path / "store/hidden"), Target(model=_model(shard)).load()
    for row, entry in zip(iter_rows(shard[0], "shard"), iter_rows(index, "hidden_index"), strict=True):
        ids = row["prompt_ids"] + row["output_ids"]
        stored = store.read(entry["key"])
        with torch.inference_mode():
            own = model(torch.tensor([ids]), output_hidden_states=True)
        wanted = torch.cat([own.hidden_states[k][0] for k in LAYERS], dim=-1)
        assert entry["sample_id"] == row["sample_id"] and entry["tokens"] == len(ids)
        assert stored.token_ids.tolist() == ids
        torch.testing.assert_close(stored.aux, wanted)
        torch.testing.assert_close(stored.last, own.hidden_states[-1][0])
        torch.testing.assert_close(model.lm_head(stored.last), own.logits[0])
    said = json.loads(report.read_text())
    assert said["argmax"] == {"checked": 48, "agreed": 48, "share": 1.0}  # the answers are greedy


def _model(shard) -> str:
    return json.loads(Path(shard[1]).read_text())["target"]["model"]


def test_a_second_run_loads_no_model_and_writes_the_same_bytes(tmp_path, shard, monkeypatch):
    first = capture(tmp_path, shard)
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("the model was loaded"))
    second = capture(tmp_path, shard, name="b")
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert facts(tmp_path)["captured"] == 6 and facts(tmp_path, "b")["captured"] == 0


def test_an_interrupted_capture_goes_on_and_ends_byte_identical(tmp_path, shard):
    whole = capture(tmp_path / "whole", shard)
    capture(tmp_path / "cut", shard, name="before")
    store = HiddenStore(tmp_path / "cut/store/hidden")
    for key in list(store.keys())[::2]:
        store.path(key).unlink()
    again = capture(tmp_path / "cut", shard)
    assert facts(tmp_path / "cut")["captured"] == 3
    assert [p.read_bytes() for p in whole] == [p.read_bytes() for p in again]


def test_a_damaged_file_is_captured_again(tmp_path, shard):
    index, _ = capture(tmp_path, shard)
    store = HiddenStore(tmp_path / "store/hidden")
    path = store.path(next(iter_rows(index, "hidden_index"))["key"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    capture(tmp_path, shard, name="b")
    assert facts(tmp_path, "b")["damaged"] == facts(tmp_path, "b")["captured"] == 1
    assert path.read_bytes() == whole


def test_padded_batches_give_the_states_of_single_rows(shard):
    rows = [row["prompt_ids"] + row["output_ids"] for row in iter_rows(shard[0], "shard")]
    rows = [row[: 10 + 7 * i] for i, row in enumerate(rows)]
    target = Target(model=_model(shard), dtype="float32")
    alone, together = HiddenForward(target, LAYERS), HiddenForward(target, LAYERS, batch_tokens=10_000)
    single = {i: (aux, last) for batch in alone.batches(rows) for i, aux, last in batch}
    (batch,) = together.batches(rows)
    for i, aux, last in batch:
        assert aux.shape == (len(rows[i]), 3 * 64) and last.shape == (len(rows[i]), 64)
        torch.testing.assert_close(aux, single[i][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(last, single[i][1], rtol=1e-3, atol=1e-3)


def test_batches_hold_the_token_budget_with_padding():
    lengths = [5, 100, 7, 90, 30, 8, 300]
    batches = plan_batches(lengths, 200)
    assert sorted(row for batch in batches for row in batch) == list(range(7))
    assert batches[0] == [6]  # longer than the budget: alone
    assert all(len(b) * max(lengths[i] for i in b) <= 200 for b in batches[1:])


def test_a_full_disk_is_refused_before_the_model_is_loaded(tmp_path, shard, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2 << 30, 1 << 30, 1 << 30))
    with pytest.raises(StoreError, match=r"need .* kB.*1.07 GB are free.*float8_e4m3fn takes.*max_new_tokens"):
        capture(tmp_path, shard)
    assert not (tmp_path / "store").exists()


def test_tokens_of_another_model_are_refused_where_sampling_was_greedy(tmp_path, shard, monkeypatch):
    monkeypatch.setattr(hidden_states, "argmax_agreement", lambda *_: {"checked": 32, "agreed": 3})
    with pytest.raises(TargetError, match=r"only 9%.*another model"):
        capture(tmp_path, shard, tuning={"temperature": 0})
    capture(tmp_path, shard, tuning={"temperature": 0.7})  # reported, not refused


def test_a_changed_model_is_refused(tmp_path, shard, tiny_target):
    folder = tmp_path / "model"
    shutil.copytree(tiny_target, folder)
    shard = build_tiny_shard(tmp_path, folder, rows=1)
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(TargetError, match="the model's files have changed"):
        capture(tmp_path, shard)


def test_hooks_that_disagree_with_the_model_are_refused(shard, monkeypatch):
    target = Target(model=_model(shard), dtype="float32")
    made = HiddenForward(target, LAYERS)
    made.check([5, 6, 7])
    monkeypatch.setattr(forward.LayerTap, "aux", lambda tap: torch.zeros(1, 3, 192))
    with pytest.raises(TargetError, match="aux differs"):
        made.check([5, 6, 7])


def test_layers_are_inputs_and_must_exist():
    assert auxiliary_layers(30) == [2, 15, 27]
    assert auxiliary_layers(8, [0, 3, 7]) == [0, 3, 7]
    for wrong in ([2, 4, 8], [4, 2, 5], [2, 2, 4]):
        with pytest.raises(ConfigError, match="three ascending numbers from 0 to 7"):
            auxiliary_layers(8, wrong)


def test_float8_is_half_as_large_and_close(tmp_path, shard):
    exact, _ = capture(tmp_path, shard, name="exact")
    small, report = capture(tmp_path, shard, name="small", dtype="float8_e4m3fn")
    store = HiddenStore(tmp_path / "store/hidden")
    for a, b in zip(iter_rows(exact, "hidden_index"), iter_rows(small, "hidden_index"), strict=True):
        wanted, found = store.read(a["key"]).aux, store.read(b["key"]).aux.float()
        assert (wanted - found).norm() / wanted.norm() < 0.03
    assert json.loads(report.read_text())["dtype"] == "float8_e4m3fn"
