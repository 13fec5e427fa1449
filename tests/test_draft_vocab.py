"""The draft vocabulary is a function of the counts alone."""

import numpy as np
import pytest

from eaglet.draft_vocab import choose, count_tokens
from eaglet.errors import ConfigError


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_the_lowest_id():
    counts = count_tokens([[7, 7, 7, 2], [5, 5, 3], [9, 3, 9, 5]], vocab_size=10)
    assert counts.tolist() == [0, 0, 1, 2, 0, 3, 0, 3, 0, 2]
    assert choose(counts, 3).ids.tolist() == [3, 5, 7], "3 and 9 occur twice: the lower id wins"
    assert choose(counts, 4).ids.tolist() == [3, 5, 7, 9]


def test_unused_places_are_filled_with_the_lowest_other_ids():
    vocab = choose(count_tokens([[7, 5]], vocab_size=10), 5)
    assert vocab.ids.tolist() == [0, 1, 2, 5, 7]
    assert (vocab.distinct, vocab.filled) == (2, 3)


def test_the_order_of_the_rows_does_not_matter():
    rows = np.random.default_rng(0).integers(0, 50, (20, 30))
    one, other = (choose(count_tokens(r, 50), 20).ids for r in (rows, rows[::-1]))
    assert one.tolist() == other.tolist()


def test_coverage_is_a_share_of_tokens_not_of_ids():
    vocab = choose(count_tokens([[1, 1, 2]], vocab_size=10), 1)
    assert vocab.coverage(count_tokens([[1, 1, 1, 8]], vocab_size=10)) == 0.75
    assert vocab.coverage(count_tokens([], vocab_size=10)) is None


def test_a_size_above_the_targets_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"drafter\.draft_vocab_size: 11 .* 10"):
        choose(count_tokens([[1]], vocab_size=10), 11)
