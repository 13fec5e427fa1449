"""SpecForge's and speculators' own numbers, stored in tests/peers/, against what eaglet computes from the same files."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eaglet import eagle3
from eaglet.drafter_files import load_drafter
from eaglet.eagle3 import Batch, Row

PEERS = Path(__file__).parent / "peers"
spec = importlib.util.spec_from_file_location("peers_case", PEERS / "case.py")
case = importlib.util.module_from_spec(spec)
spec.loader.exec_module(case)

LENGTHS = [prompt + output for prompt, output in zip(case.PROMPTS, case.OUTPUTS, strict=True)]


def stored(peer):
    return json.loads((PEERS / f"{peer}.json").read_text())


def computed(monkeypatch, *, skip_first_target=False, drop=False):
    """(losses, batch, logits [K, J, Vd], target logits over the draft vocabulary [J, Vd]) of the case."""
    inputs = load_file(case.FOLDER / "inputs.safetensors")
    drafter = load_drafter(case.FOLDER, inputs["embedding"])
    batch = Batch.of(
        [Row(r["token_ids"], r["aux"], r["last"], r["prompt"] + skip_first_target) for r in case.rows()], case.STEPS
    )
    outputs = []
    loss = eagle3.draft_loss
    monkeypatch.setattr(eagle3, "draft_loss", lambda x, *rest: (outputs.append(x), loss(x, *rest))[1])
    kept = batch.counted
    if drop:
        kept = kept & drafter.t2d[(batch.targets @ inputs["head"].T).argmax(-1)]
    head = inputs["head"][drafter.t2d]
    with torch.no_grad():
        losses = drafter(batch, head, kept.float())
    return losses, batch, outputs[0] @ drafter.lm_head.weight.T, batch.targets @ head.T


@pytest.mark.parametrize("peer", ["specforge", "speculators"])
def test_logits_equal_the_peers_at_every_counted_position_and_step(peer, monkeypatch):
    _, _, logits, _ = computed(monkeypatch)
    expected = stored(peer)["logits"]
    at = 0
    for row, (prompt, length) in enumerate(zip(case.PROMPTS, LENGTHS, strict=True)):
        for j in range(prompt, length):
            for k in range(case.STEPS):
                peers = torch.tensor(expected[k][row][j - 1 - k])
                torch.testing.assert_close(logits[k, at], peers, rtol=1e-4, atol=1e-4)
            at += 1


def test_loss_equals_specforges_under_its_mask_and_normalisation(monkeypatch):
    """It leaves out the first target of each answer, drops targets outside the draft vocabulary, and divides by all positions."""
    losses, *_ = computed(monkeypatch, skip_first_target=True, drop=True)
    positions = len(LENGTHS) * max(LENGTHS)
    assert (losses.by_step / positions).tolist() == pytest.approx(stored("specforge")["loss"], abs=1e-4)


def test_loss_equals_speculators_less_the_targets_entropy(monkeypatch):
    """It counts as eaglet does and reports the KL divergence: cross-entropy less the entropy of the target."""
    losses, batch, _, target_logits = computed(monkeypatch)
    p = target_logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()
    means = losses.by_step / batch.counted.sum(1)
    assert (means - entropy).tolist() == pytest.approx(stored("speculators")["loss"], abs=1e-4)


def test_the_case_has_targets_on_both_sides_of_every_convention():
    inputs = load_file(case.FOLDER / "inputs.safetensors")
    drafter = load_drafter(case.FOLDER, inputs["embedding"])
    inside = torch.cat([drafter.t2d[(r["last"][r["prompt"] :] @ inputs["head"].T).argmax(-1)] for r in case.rows()])
    assert inside.any() and not inside.all()
