"""Stage evaluate: what is counted, what proves that the output holds, and what fails the run."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

import evaluate
from eaglet.acceptance import Acceptance, regions_of
from eaglet.drafter_files import drafter_config, save_drafter
from eaglet.eagle3 import Batch, Row, initial_drafter
from eaglet.errors import EvaluationFailed
from eaglet.proposers import EagleChain
from eaglet.speculative import Decoded, NoDraft, Round, TargetDecoder, decode, replay
from eaglet.turn_format import Marker, ToolMarkers, TurnFormat
from tiny_shard import build_tiny_shard, tiny_turn_format

PARAMS = {"draft_tokens": 3, "max_new_tokens": 20, "min_acceptance": None, "speed_rows": 1, "seed": 0}
DETERMINISTIC = ("acceptance.json", "acceptance.csv", "acceptance.png", "positions.png", "training.png")


@pytest.fixture(scope="module")
def shard(tmp_path_factory, tiny_target):
    return build_tiny_shard(tmp_path_factory.mktemp("shard"), tiny_target, rows=8)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, tiny_target):
    """The folder of an untrained drafter of the tiny target, with a short training log."""
    folder = tmp_path_factory.mktemp("drafter")
    target = tiny_turn_format(tiny_target).target
    model = target.load()
    config = drafter_config(target.text_config(), draft_vocab_size=256, layer_ids=(2, 4, 5), vocab_size=512)
    embedding = model.get_input_embeddings().weight
    save_drafter(folder, initial_drafter(config, embedding, embedding, torch.arange(256) * 2, 7), dtype=torch.float32)
    log = [{"step": 1, "loss": [3.0], "accuracy": [0.1]}, {"step": 1, "heldout": {"loss": [3.1], "accuracy": [0.2]}}]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return folder


def run(folder: Path, shard, drafter, **params) -> Path:
    evaluate.main(
        [
            *("--drafter", str(drafter), "--manifest", str(shard[1]), "--shards", str(shard[0])),
            *("--turn-format", str(shard[1]), "--params", json.dumps(PARAMS | params), "--output", str(folder)),
            *("--provenance", str(folder / "provenance.json")),
        ]
    )
    return folder


def test_the_figures_of_a_run(tmp_path, shard, drafter):
    folder = run(tmp_path, shard, drafter)
    report = json.loads((folder / "acceptance.json").read_text())
    assert report["rows"] == 4 and set(report["datasets"]) == {"lists", "chats"}
    assert report["tokens"] == report["output_tokens"] - 4  # each row's first token comes from reading the prompt
    assert report["acceptance_length"] >= 1 and len(report["accepted_share"]) == 3
    assert sum(d["verifications"] for d in report["datasets"].values()) == report["verifications"]
    proof = report["identical"]
    assert proof["rows_decoded_without_drafter"] == 2 and proof["rows_checked_by_one_pass"] == 4
    assert proof["failures"] == proof["near_ties"] == []
    assert report["baselines"].keys() == {"untrained", "prompt_lookup"}
    speed = json.loads((folder / "speed.json").read_text())
    assert speed["rows"] == 2 and speed["with_drafter"]["tokens"] == speed["without_drafter"]["tokens"]
    lines = list(csv.DictReader((folder / "acceptance.csv").open()))
    assert {(line["drafter"], line["region"]) for line in lines} >= {("trained", "all"), ("untrained", "all")}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in evaluate.evaluation_plots.NAMES)
    assert json.loads((folder / "provenance.json").read_text())["facts"]["speed"] == speed


def test_what_lies_beside_the_weights_is_no_input(tmp_path, shard, drafter):
    shutil.copytree(drafter, tmp_path / "drafter")
    (tmp_path / "drafter" / "serve.sh").write_text("exec true\n")
    job = json.loads((run(tmp_path, shard, tmp_path / "drafter") / "provenance.json").read_text())
    read = [Path(entry["path"]).name for entry in job["inputs"] if entry["role"] == "drafter"]
    assert read == ["config.json", "model.safetensors", "log.jsonl"]


def test_two_runs_differ_in_speed_alone(tmp_path, shard, drafter):
    first, second = (run(tmp_path / name, shard, drafter) for name in "ab")
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in DETERMINISTIC)


def test_a_tree_and_sampling_are_measured_when_asked_for(tmp_path, shard, drafter):
    folder = run(tmp_path, shard, drafter, tree={"branches": 2, "tokens": 6}, temperature=0.8, top_p=0.9)
    report = json.loads((folder / "acceptance.json").read_text())
    assert report["baselines"].keys() == {"untrained", "prompt_lookup", "chain"}
    assert report["acceptance_length"] >= report["baselines"]["chain"]["acceptance_length"]
    assert report["sampled"]["temperature"] == 0.8 and report["sampled"]["acceptance_length"] >= 1


def test_a_drafter_below_the_gate_fails_the_run(tmp_path, shard, drafter):
    with pytest.raises(EvaluationFailed, match=r"acceptance length 1\S* is below evaluation.min_acceptance 3"):
        run(tmp_path, shard, drafter, min_acceptance=3)
    assert not (tmp_path / "provenance.json").exists()


def test_a_run_without_held_out_rows_says_which_key_to_set(tmp_path, tiny_target, drafter):
    shard = build_tiny_shard(tmp_path, tiny_target, rows=1)
    with pytest.raises(EvaluationFailed, match=r"heldout.rows_per_dataset"):
        run(tmp_path, shard, drafter)


def test_an_output_that_the_drafter_changed_fails_the_run(tmp_path, shard, drafter, monkeypatch):
    class Careless(evaluate.TargetDecoder):
        def keep(self, path):  # leaves rejected tokens in the cache
            self.cache.crop(0)

    monkeypatch.setattr(evaluate, "TargetDecoder", Careless)
    with pytest.raises(EvaluationFailed, match=r"changed the greedy output at \d+ places.*output position .*logits"):
        run(tmp_path, shard, drafter)


LOGITS = torch.tensor([[9.0, 5.0, 0.0], [8.0, 7.9999, 0.0], [0.0, 1.0, 4.0]])


def test_the_targets_own_output_has_no_differences():
    assert evaluate.differences(LOGITS, [0, 0, 2], [0, 0, 2]) == []


def test_a_token_within_rounding_of_the_best_is_a_near_tie():
    (found,) = evaluate.differences(LOGITS, [0, 1, 2], None)
    assert found["kind"] == "near_tie" and found["position"] == 1 and found["tokens"] == [1, 0]
    (found,) = evaluate.differences(LOGITS, [0, 1, 2], [0, 0, 1])  # after it, the outputs are of different texts
    assert found["kind"] == "near_tie"
    (found,) = evaluate.differences(LOGITS, [0, 0, 2], [0, 1, 2])
    assert found["kind"] == "near_tie" and found["tokens"] == [0, 1]


def test_any_other_difference_is_a_failure():
    (found,) = evaluate.differences(LOGITS, [1, 0, 2], None)
    assert found == {"kind": "failure", "position": 0, "tokens": [1, 0], "logits": [5.0, 9.0]}
    (found,) = evaluate.differences(LOGITS, [0, 0, 2], [0, 0, 1])
    assert found["kind"] == "failure" and found["position"] == 2
    (found,) = evaluate.differences(LOGITS, [0, 0, 2], [0, 0])
    assert found == {"kind": "failure", "position": 2, "lengths": [3, 2]}


def test_acceptance_counts_positions_that_were_drafted():
    counted = Acceptance().add([Round(1, 4, 2, 3), Round(4, 4, 0, 1), Round(5, 1, 1, 1)])
    assert counted.length == 5 / 3
    assert counted.proposed == [3, 2, 2, 2] and counted.accepted == [2, 1, 0, 0]
    assert Acceptance().length is None


def test_regions_follow_the_markers(tiny_target):
    turn_format = tiny_turn_format(tiny_target)
    assert regions_of([9, 4, 9, 2], turn_format) == ["reasoning", "reasoning", "answer", "answer"]
    assert regions_of([9, 9], turn_format) == ["reasoning"] * 2  # cut before it closed
    calls = ToolMarkers(call_begin=Marker((5,), "<tool_call>"), call_end=Marker((6,), "</tool_call>"))
    with_calls = TurnFormat(**{**vars(turn_format), "tool_calls": calls})
    assert regions_of([5, 4, 9, 5, 8, 6, 9, 5, 8], with_calls) == [
        *["reasoning"] * 2,
        "answer",
        *["tool_call"] * 3,
        "answer",
        *["tool_call"] * 2,  # not closed
    ]


def test_a_replay_takes_the_rounds_that_decoding_takes(tiny_target):
    turn_format = tiny_turn_format(tiny_target)
    model = turn_format.target.load()
    target = TargetDecoder(model, [2, 4, 5])
    config = drafter_config(turn_format.target.text_config(), draft_vocab_size=64, layer_ids=(2, 4, 5), vocab_size=512)
    embedding = model.get_input_embeddings().weight
    prompt, options = [1, 50, 51, 52, 3], {"max_new_tokens": 40, "draft_tokens": 4}
    output = decode(target, NoDraft(), prompt, stop_ids=(), **options).output_ids
    drafter = initial_drafter(config, embedding, embedding, torch.tensor(sorted({*output, *range(100, 164)})[:64]), 1)
    for stop_ids in ((), {output[20]}):
        decoded: Decoded = decode(target, EagleChain(drafter), prompt, stop_ids=stop_ids, **options)
        with torch.inference_mode():
            target.read_all([*prompt, *decoded.output_ids])
        replayed = replay(EagleChain(drafter), prompt, decoded.output_ids, target.aux(), **options)
        assert replayed == decoded.rounds


def test_a_drafter_that_has_learnt_an_output_drafts_it(tiny_target):
    """Training and decoding agree on alignment, positions and feedback: a learnt output is accepted many tokens at a time."""
    turn_format = tiny_turn_format(tiny_target)
    model = turn_format.target.load()
    target = TargetDecoder(model, [2, 4, 5])
    embedding = model.get_input_embeddings().weight.detach()
    options = {"max_new_tokens": 32, "draft_tokens": 4, "stop_ids": ()}
    prompts = [[1, 50, 51, 52, 3], [1, 70, 71, 72, 73, 3], [1, 90, 91, 3]]
    rows = []
    for prompt in prompts:
        sequence = [*prompt, *decode(target, NoDraft(), prompt, **options).output_ids]
        with torch.no_grad():
            last = target.read_all(sequence)
        rows.append(Row(torch.tensor(sequence), target.aux().clone(), last.clone(), len(prompt)))
    config = drafter_config(turn_format.target.text_config(), draft_vocab_size=512, layer_ids=(2, 4, 5), vocab_size=512)
    drafter = initial_drafter(config, embedding, embedding, torch.arange(512), 0)
    batch, optimizer = Batch.of(rows, 4), torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(200):
        drafter(batch, embedding, batch.counted / batch.counted.sum()).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    learnt = Acceptance()
    for prompt in prompts:
        decoded = decode(target, EagleChain(drafter.eval()), prompt, **options)
        learnt.add(decoded.rounds)
        with torch.inference_mode():
            target.read_all([*prompt, *decoded.output_ids])
        known = {"max_new_tokens": 32, "draft_tokens": 4}
        assert replay(EagleChain(drafter), prompt, decoded.output_ids, target.aux(), **known) == decoded.rounds
    assert learnt.length > 3.3 and learnt.shares[3] > 0.4  # untrained: 1.0 and 0.0
