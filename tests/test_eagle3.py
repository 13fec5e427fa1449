"""The drafter against the formulas: a plain computation over all positions gives the same losses and gradients."""

import pytest
import torch

from eaglet import eagle3
from eaglet.eagle3 import Batch, Eagle3Drafter, Row, counted_targets
from plain_eagle3 import plain_losses
from small_drafter import SMALL

STEPS = 4


def make_drafter(config=SMALL, seed=0):
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config, torch.randn(config.vocab_size, config.hidden_size))
    for p in drafter.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3)
    drafter.set_draft_vocab(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return drafter


def make_row(prompt, output, config=SMALL, seed=0, start=0):
    random = torch.Generator().manual_seed(seed)
    h, length = config.hidden_size, prompt + output
    return Row(
        torch.randint(0, config.vocab_size, (length,), generator=random),
        torch.randn(length, 3 * h, generator=random),
        torch.randn(length, h, generator=random),
        first_target=prompt,
        start=start,
    )


def make_head(config=SMALL, seed=5):
    return torch.randn(config.draft_vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def weights_of(batch, decay=0.8):
    """Step k: decay^k divided among the targets that count."""
    steps = batch.counted.shape[0]
    return batch.counted * (decay ** torch.arange(steps) / batch.counted.sum(1))[:, None]


def gradients(drafter, loss):
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters()}


ROWS = [make_row(9, 6, seed=1), make_row(2, 5, seed=2), make_row(1, 1, seed=3), make_row(7, 8, seed=4, start=30)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Attention and loss in the smallest blocks, so that a row takes several."""
    monkeypatch.setattr(eagle3, "LEAST_QUERIES", 3)
    monkeypatch.setattr(eagle3, "SCORES_AT_ONCE", {"cpu": 1})
    monkeypatch.setattr(eagle3, "LOGITS_AT_ONCE", {"cpu": 4 * STEPS * SMALL.draft_vocab_size})


@pytest.mark.parametrize("blocks", ["one", "many"])
def test_losses_and_gradients_equal_the_plain_computation_over_all_positions(blocks, request):
    if blocks == "many":
        request.getfixturevalue("small_blocks")
    drafter, head = make_drafter(), make_head()
    batch = Batch.of(ROWS, STEPS)
    losses = drafter(batch, head, weights_of(batch))
    found = gradients(drafter, losses.total)

    plain = [plain_losses(drafter, row, STEPS, head) for row in ROWS]
    by_step = [torch.stack([x for row in plain for x in row[k]]) for k in range(STEPS)]
    total = sum(0.8**k * x.mean() for k, x in enumerate(by_step))
    expected = gradients(drafter, total)

    assert batch.counted.sum(1).tolist() == [len(x) for x in by_step]
    torch.testing.assert_close(losses.by_step, torch.stack([x.sum() for x in by_step]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.total, total, rtol=1e-5, atol=1e-6)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_batch_says_which_position_predicts_which_target():
    """Row of 5 prompt and 3 output tokens, two steps: targets 5, 6, 7; at step k, position t = j-1-k predicts target j."""
    batch = Batch.of([make_row(5, 3)], steps=2)
    queries = batch.positions[batch.query]
    assert queries.tolist() == [3, 4, 5, 6], (
        "one position before the answer is needed for step 1; the last has a next token"
    )
    assert queries[batch.predicts].tolist() == [[4, 5, 6], [3, 4, 5]]
    assert batch.counted.all()
    own = batch.query[batch.ahead]  # whose next token step k reads
    assert batch.positions[own].tolist() == [[3, 4, 5, 6], [4, 5, 6, 6]]


def test_targets_that_no_position_predicts_do_not_count():
    batch = Batch.of([make_row(1, 4)], steps=3)
    assert batch.counted.tolist() == [[True] * 4, [False, True, True, True], [False, False, True, True]]
    assert counted_targets(1, 5, 3) == [4, 3, 2]
    assert batch.counted.sum(1).tolist() == counted_targets(1, 5, 3)


@pytest.mark.parametrize("changed", ["first drafted token", "end"])
def test_the_mask_holds_the_first_drafted_token_and_ends_with_the_last_output_token(changed):
    """SpecForge, EAGLE and AngelSlim mask by x[t]: they miss the target of the first output token."""
    drafter, head, row = make_drafter(), make_head(), make_row(6, 4)
    batch = Batch.of([row], 1)
    assert torch.equal(batch.targets, row.last[6:10])
    before = drafter(batch, head, weights_of(batch)).by_step
    last = row.last.clone()
    last[6 if changed == "first drafted token" else 9] += 1
    moved = Batch.of([Row(row.token_ids, row.aux, last, 6)], 1)
    assert drafter(moved, head, weights_of(moved)).by_step != before
    last = row.last.clone()
    last[:6] += 1
    same = Batch.of([Row(row.token_ids, row.aux, last, 6)], 1)
    assert torch.equal(drafter(same, head, weights_of(same)).by_step, before)


def test_what_lies_behind_a_position_changes_nothing_before_it():
    """Causality: the loss of the first targets does not depend on later tokens, nor on other rows of the batch."""
    drafter, head, row = make_drafter(), make_head(), make_row(6, 6)
    short = Row(row.token_ids[:9], row.aux[:9], row.last[:9], 6)
    alone, together = Batch.of([short], STEPS), Batch.of([make_row(3, 3, seed=9), row], STEPS)
    weight = torch.zeros(STEPS, together.counted.shape[1])
    weight[:, 3:6] = 1  # the first three targets of the second row
    a = drafter(alone, head, torch.ones(STEPS, 3)).by_step
    b = drafter(together, head, weight).by_step
    torch.testing.assert_close(a, b)


def test_weight_leaves_targets_out():
    drafter, head, row = make_drafter(), make_head(), make_row(6, 5)
    batch = Batch.of([row], STEPS)
    kept = torch.tensor([True, False, True, True, False])
    losses = drafter(batch, head, kept.float().expand(STEPS, -1))
    plain = plain_losses(drafter, row, STEPS, head)
    expected = torch.stack([torch.stack(step)[kept].sum() for step in plain])
    torch.testing.assert_close(losses.by_step, expected, rtol=1e-5, atol=1e-5)


def test_agreements_count_where_the_best_tokens_are_equal():
    drafter, row = make_drafter(), make_row(6, 8)
    batch = Batch.of([row], STEPS)
    with torch.no_grad():
        losses = drafter(batch, make_head(), weights_of(batch))
        assert (losses.agreements <= 8).all() and (losses.agreements >= 0).all()
        drafter.lm_head.weight.zero_()  # all logits equal: the first is the best
        head = torch.zeros(SMALL.draft_vocab_size, SMALL.hidden_size)
        assert drafter(batch, head, weights_of(batch)).agreements.tolist() == [8] * STEPS


class GrowingCache:
    """The least that `step` asks of a cache."""

    def __init__(self):
        self.keys = self.values = None

    def append(self, keys, values):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=2)
        return self.keys, self.values


def test_decoding_step_by_step_gives_the_training_time_test():
    """A chain that drafts the true tokens sees in `step` what training computed: the same cross-entropy at each step."""
    drafter, head, row = make_drafter(), make_head(), make_row(6, 6)
    plain = plain_losses(drafter, row, STEPS, head)
    t = 6  # the context is x[0…t], with aux[0…t]; x[t+1] is known
    cache = GrowingCache()
    with torch.no_grad():
        logits, hidden = drafter.step(
            row.token_ids[None, 1 : t + 2], drafter.fuse(row.aux[None, : t + 1]), torch.arange(t + 1)[None], cache
        )
        for k in range(STEPS):
            j = t + 1 + k
            p = (row.last[j] @ head.T).softmax(0)
            cross = -(p * logits[0, -1].log_softmax(0)).sum()
            torch.testing.assert_close(
                cross, plain[k][j - row.first_target - (0 if row.first_target > k else 1)].detach()
            )
            position = torch.tensor([[t + k + 1]])
            if k + 1 < STEPS:
                logits, hidden = drafter.step(row.token_ids[None, j + 1 : j + 2], hidden[:, -1:], position, cache)


def test_bfloat16_autocast_stays_near_full_precision():
    drafter, head = make_drafter(), make_head()
    batch = Batch.of(ROWS, STEPS)
    exact = drafter(batch, head, weights_of(batch))
    full = gradients(drafter, exact.total)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = drafter(batch, head, weights_of(batch))
    half = gradients(drafter, rounded.total)
    torch.testing.assert_close(rounded.total, exact.total, rtol=2e-2, atol=2e-2)
    for name in full:
        cosine = torch.nn.functional.cosine_similarity(full[name].flatten(), half[name].flatten(), dim=0)
        assert cosine > 0.995, name
