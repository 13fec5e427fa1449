"""A share of the training rows: the same always, each inside the next, and every dataset in its proportion."""

import pytest

from eaglet.errors import ConfigError
from eaglet.subset import subset

ROWS = {name: [f"{name}{n:012x}" for n in range(count)] for name, count in (("long", 1000), ("some", 90), ("few", 3))}


def of(dataset, chosen):
    return chosen & set(ROWS[dataset])


def test_a_smaller_share_lies_within_a_larger_one():
    shares = [subset(ROWS, share, 0) for share in (0.25, 0.5, 1)]
    assert shares[0] < shares[1] < shares[2] == {i for ids in ROWS.values() for i in ids}


def test_every_dataset_gives_its_share_and_none_vanishes():
    assert [len(of(name, subset(ROWS, 0.25, 0))) for name in ROWS] == [250, 23, 1]


def test_the_order_of_the_rows_does_not_matter_and_the_seed_does():
    backwards = {name: ids[::-1] for name, ids in ROWS.items()}
    assert subset(backwards, 0.5, 0) == subset(ROWS, 0.5, 0) != subset(ROWS, 0.5, 1)


def test_an_added_row_moves_one_other_at_most():
    before = subset(ROWS, 0.5, 0)
    for number in range(20):
        after = subset({**ROWS, "long": [*ROWS["long"], f"new{number}"]}, 0.5, 0)
        assert len(before - after) <= 1 and len(after - before) <= 1


@pytest.mark.parametrize("share", [0, -0.5, 1.01])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match=r"row_share: found .* at most 1"):
        subset(ROWS, share, 0)
