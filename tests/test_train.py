"""Training: the order of the data, resuming, and the stage on the tiny target's own answers."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import hidden_states
import train as stage
from eaglet.drafter_files import load_drafter
from eaglet.errors import RecordError, StoreError, TrainingFailed
from eaglet.files import read_json
from eaglet.hidden_store import HiddenStore
from eaglet.records import RecordWriter, iter_rows, read_metadata, read_table
from eaglet.subset import subset
from eaglet.training import Sample, Trainer, Window, epoch_steps, learning_rate, packed, share, windows
from tiny_shard import build_tiny_shard

PARAMS = {"draft_vocab_size": 48, "ttt_steps": 3, "epochs": 3, "learning_rate": 0.003, "batch_tokens": 120, "seed": 1}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_target):
    """A shard of the tiny target's answers with its hidden states, as the stages before `train` leave them."""
    folder = tmp_path_factory.mktemp("train")
    shard, facts = build_tiny_shard(folder, tiny_target, rows=12)
    index = folder / "hidden" / "shard-0.index.parquet"
    hidden_states.main(
        [
            *("--shard", str(shard), "--turn-format", str(facts), "--store", str(folder / "store")),
            *(
                "--index",
                str(index),
                "--report",
                str(folder / "hidden" / "report.json"),
                "--params",
                '{"dtype": "float32"}',
            ),
        ]
    )
    (folder / "shards" / "manifest.json").write_text("{}")
    return folder


def arguments(inputs, output, *, tuning=None, index=None, **params):
    shards = inputs / "shards"
    return [
        *("--manifest", str(shards / "manifest.json"), "--shards", str(shards / "shard-0.parquet")),
        *("--indexes", str(index or inputs / "hidden" / "shard-0.index.parquet")),
        *("--turn-format", str(inputs / "turn_format.json"), "--store", str(inputs / "store")),
        *("--params", json.dumps({**PARAMS, "dtype": "float32", **params}), "--tuning", json.dumps(tuning or {})),
        *("--output", str(output), "--provenance", str(output / "provenance.json")),
    ]


def run(inputs, output, **more):
    stage.main(arguments(inputs, output, **more))
    return output


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def loss_of(line):
    """The losses by step of a line of the log, a training step's or the held-out ones."""
    return line.get("heldout", line)["loss"]


def forget(inputs):
    for path in (inputs / "store").glob("checkpoints/*/*"):
        path.unlink()


OUTPUTS = ["config.json", "model.safetensors", "log.jsonl", "report.json"]


def contents(folder):
    return {name: (folder / name).read_bytes() for name in OUTPUTS}


@pytest.fixture(scope="module")
def trained(inputs):
    return run(inputs, inputs / "drafter")


def test_the_drafter_learns_and_loads(inputs, trained, tiny_target):
    lines = log_of(trained)
    steps, heldout = [x for x in lines if "loss" in x], [x["heldout"] for x in lines if "heldout" in x]
    assert steps[-1]["loss"][0] < steps[0]["loss"][0]
    assert len(heldout) == PARAMS["epochs"] and len(heldout[0]["loss"]) == PARAMS["ttt_steps"]
    report = read_json(trained / "report.json")
    assert report["heldout"] == heldout[-1], "what was measured last is what is reported"
    drafter = load_drafter(trained, torch.zeros(512, 64))
    rows = [r for r in iter_rows(inputs / "shards" / "shard-0.parquet", "shard") if r["split"] == "train"]
    count = Counter(token for row in rows for token in row["output_ids"])
    wanted = sorted(sorted(range(512), key=lambda i: (-count[i], i))[: PARAMS["draft_vocab_size"]])
    assert drafter.to_target_ids(torch.arange(PARAMS["draft_vocab_size"])).tolist() == wanted
    assert (
        list(drafter.config.layer_ids)
        == read_metadata(inputs / "hidden" / "shard-0.index.parquet", "hidden_index")["layers"]
    )


def test_the_report_adds_up(inputs, trained):
    report, provenance = read_json(trained / "report.json"), read_json(trained / "provenance.json")
    rows = list(iter_rows(inputs / "shards" / "shard-0.parquet", "shard"))
    assert report["rows"] == dict(Counter(row["split"] for row in rows))
    assert provenance["rows"] == {"in": len(rows), "out": len(rows), "dropped": {"no_target": 0}}
    assert sum(x["tokens"] for x in log_of(trained) if "loss" in x) == PARAMS["epochs"] * report["tokens"]["train"]
    coverage = report["draft_vocab"]["coverage"]
    assert set(coverage) == {"lists", "chats", "all"}
    vocab = set(load_drafter(trained, torch.zeros(512, 64)).t2d.nonzero().squeeze(-1).tolist())
    held = [token for row in rows if row["split"] == "heldout" for token in row["output_ids"]]
    assert coverage["all"]["heldout"] == pytest.approx(sum(token in vocab for token in held) / len(held), abs=1e-6)


def test_training_again_gives_the_same_bytes(inputs, trained, tmp_path):
    forget(inputs)
    assert contents(run(inputs, tmp_path)) == contents(trained)


def test_a_finished_training_is_taken_from_its_checkpoint(inputs, trained, tmp_path, monkeypatch):
    run(inputs, trained)
    monkeypatch.setattr(Trainer, "update", None)
    assert contents(run(inputs, tmp_path)) == contents(trained)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_stopped_training_ends_with_the_bytes_of_an_undisturbed_one(inputs, trained, tmp_path, monkeypatch, stop):
    forget(inputs)
    update, calls = Trainer.update, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return update(self, *arguments)

    monkeypatch.setattr(Trainer, "update", failing)
    with pytest.raises(KeyboardInterrupt):
        run(inputs, tmp_path, tuning={"checkpoint_every": 2})
    monkeypatch.setattr(Trainer, "update", update)
    assert contents(run(inputs, tmp_path, tuning={"checkpoint_every": 5})) == contents(trained)
    resumed = read_json(tmp_path / "provenance.json")["facts"]["resumed_from_step"]
    assert resumed == (stop - 1) // 2 * 2


def test_a_killed_training_ends_with_the_bytes_of_an_undisturbed_one(inputs, tmp_path):
    more = {"epochs": 60, "seed": 7}
    whole = contents(run(inputs, tmp_path / "whole", **more))
    forget(inputs)
    command = [
        sys.executable,
        stage.__file__,
        *arguments(inputs, tmp_path / "out", tuning={"checkpoint_every": 3}, **more),
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        wait_until(lambda: any((inputs / "store").glob("checkpoints/*/step-*.pt")) or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    assert contents(run(inputs, tmp_path / "out", **more)) == whole
    assert read_json(tmp_path / "out" / "provenance.json")["facts"]["resumed_from_step"] > 0


def wait_until(happened, seconds=120):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_two_processes_train_as_one(inputs, trained, tmp_path):
    forget(inputs)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, stage.__file__, *arguments(inputs, tmp_path, micro_batch_tokens=60)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_json(tmp_path / "provenance.json")["facts"]["processes"] == 2
    for a, b in zip(log_of(trained), log_of(tmp_path), strict=True):
        assert a.get("targets") == b.get("targets")
        assert loss_of(a) == pytest.approx(loss_of(b), rel=1e-3)


def test_a_damaged_checkpoint_is_passed_over(inputs, trained, tmp_path, capsys):
    forget(inputs)
    run(inputs, tmp_path, tuning={"checkpoint_every": 2})
    last = max((inputs / "store").glob("checkpoints/*/step-*.pt"))
    last.write_bytes(last.read_bytes()[:1000])
    assert contents(run(inputs, tmp_path)) == contents(trained)
    assert "damaged" in capsys.readouterr().err


def test_micro_batches_change_nothing_but_rounding(inputs, trained, tmp_path):
    run(inputs, tmp_path, micro_batch_tokens=40)
    for a, b in zip(log_of(trained), log_of(tmp_path), strict=True):
        assert a.get("tokens") == b.get("tokens")
        assert loss_of(a) == pytest.approx(loss_of(b), rel=1e-3)


def test_long_rows_are_cut_into_windows_and_counted(inputs, tmp_path):
    report = read_json(run(inputs, tmp_path, max_length=32, epochs=1) / "report.json")
    assert report["rows_cut_into_windows"]["train"] > 0
    assert report["windows"]["train"] > report["rows"]["train"]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_share_of_the_rows_trains_on_that_share_with_a_vocabulary_and_checkpoints_of_its_own(
    inputs, trained, tmp_path, share
):
    report = read_json(run(inputs, tmp_path, row_share=share) / "report.json")
    whole = read_json(trained / "report.json")
    rows = [r for r in iter_rows(inputs / "shards" / "shard-0.parquet", "shard") if r["split"] == "train"]
    ids = {name: [r["sample_id"] for r in rows if r["dataset"] == name] for name in ("lists", "chats")}
    kept = [r for r in rows if r["sample_id"] in subset(ids, share, PARAMS["seed"])]
    assert report["rows"] == {"train": len(kept), "heldout": whole["rows"]["heldout"]}
    assert report["draft_vocab"]["distinct_output_tokens"] == len({t for r in kept for t in r["output_ids"]})
    assert report["tokens"]["heldout"] == whole["tokens"]["heldout"]
    provenance = read_json(tmp_path / "provenance.json")
    left_out = {"no_target": 0, "outside_share": len(rows) - len(kept)}
    assert provenance["rows"]["dropped"] == left_out and provenance["rows"]["in"] == 12
    assert provenance["facts"]["resumed_from_step"] == 0, "a checkpoint of all rows is another training's"


@pytest.mark.parametrize("convention", [{"outside_vocabulary": "drop"}, {"skip_first_target": True}])
def test_the_peers_conventions_leave_targets_out(inputs, trained, tmp_path, convention):
    lines = log_of(run(inputs, tmp_path, **{"draft_vocab_size": 8, **convention}))
    assert lines[0]["loss"] != log_of(trained)[0]["loss"]


def test_a_drafter_begins_as_the_targets_last_layer_where_it_has_its_sizes(inputs, tmp_path, tiny_target):
    target = load_file(tiny_target / "model.safetensors")
    one_step = {"epochs": 1, "batch_tokens": 10**6, "learning_rate": 1e-9}
    for start, sizes, expected in [
        ("target", {}, True),
        ("random", {}, False),
        ("target", {"intermediate_size": 96}, False),
    ]:
        out = run(inputs, tmp_path / f"{start}{len(sizes)}", start=start, **sizes, **one_step)
        made = load_file(out / "model.safetensors")
        q = made["midlayer.self_attn.q_proj.weight"][:, 64:]
        assert torch.allclose(q, target["model.layers.7.self_attn.q_proj.weight"], atol=1e-6) == expected
        assert read_json(out / "report.json")["began_with"] == (
            "the target's last layer" if expected else "random weights"
        )


def test_an_index_of_another_shard_is_refused(inputs, tmp_path):
    path = inputs / "hidden" / "shard-0.index.parquet"
    table = read_table(path, "hidden_index").slice(1)
    other = tmp_path / "index.parquet"
    with RecordWriter(other, "hidden_index", read_metadata(path, "hidden_index")) as writer:
        writer.write_table(table)
    with pytest.raises(RecordError, match=r"row 0 is .* run hidden_states again"):
        run(inputs, tmp_path / "out", index=other)


def test_a_missing_hidden_state_is_named(inputs, tmp_path):
    store = HiddenStore(inputs / "store" / "hidden")
    path = store.path(next(store.keys()))
    away = path.rename(path.with_suffix(".away"))
    try:
        with pytest.raises(StoreError, match=r"missing; run hidden_states again"):
            run(inputs, tmp_path, seed=99)
    finally:
        away.rename(path)


def test_a_gradient_that_is_no_number_stops_the_training(inputs, tmp_path):
    with pytest.raises(TrainingFailed, match=r"the gradient is (nan|inf) at learning rate .* drafter\.learning_rate"):
        run(inputs, tmp_path, learning_rate=1e38)
    assert not (tmp_path / "model.safetensors").exists()


def sample(prompt, output, name="k"):
    return Sample(name, prompt, prompt + output)


@pytest.mark.parametrize(("prompt", "output"), [(5, 5), (5, 6), (3, 100), (40, 3), (100, 100), (1, 21), (10, 1)])
def test_windows_hold_every_target_once_with_context(prompt, output):
    cut = windows(sample(prompt, output), max_length=10)
    targets = [j for w in cut for j in range(w.first_target, w.end)]
    assert targets == list(range(prompt, prompt + output))
    for w in cut:
        assert 0 <= w.start < w.first_target < w.end <= prompt + output and w.tokens <= 10
        assert w.first_target - w.start >= min(5, w.first_target), "half a window of context where the row has it"


def test_a_row_without_output_has_no_window():
    assert windows(sample(5, 0), 100) == []
    assert windows(sample(5, 1), 100, skip_first_target=True) == []


def test_an_epoch_takes_every_window_once_in_its_own_order():
    items = [Window(sample(5, n % 7 + 1, str(n)), 0, 6 + n % 7, 5) for n in range(40)]
    first, second = (epoch_steps(items, 50, seed=0, epoch=e) for e in (0, 1))
    for steps in (first, second):
        assert Counter(w.sample.key for step in steps for w in step) == Counter(str(n) for n in range(40))
        assert all(sum(w.tokens for w in step) <= 50 for step in steps)
    assert first != second and first == epoch_steps(items, 50, seed=0, epoch=0)


def test_a_window_longer_than_the_batch_is_a_step_of_its_own():
    items = [Window(sample(5, n), 0, 5 + n, 5) for n in (3, 90, 4, 5)]
    assert [[w.tokens for w in group] for group in packed(items, 20)] == [[8], [95], [9, 10]]


def test_processes_share_a_step_without_loss_or_overlap():
    step = [Window(sample(5, n, str(n)), 0, 5 + n, 5) for n in (1, 30, 12, 7, 9)]
    parts = [share(step, 3, p) for p in range(3)]
    assert sorted(w.sample.key for part in parts for w in part) == sorted(w.sample.key for w in step)
    assert max(sum(w.tokens for w in part) for part in parts) == 35
    assert share(step, 1, 0) == step


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:])) and 0 < rates[-1] < 0.01
    assert learning_rate(0, 1, 1.0, 0.03) == 1.0
