"""Whatever the order in which rows are answered, they leave the window in file order, up to the cap."""

import itertools
import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglet.journal import Generation
from eaglet.window import Row, Window


def generation(tokens):
    return Generation("0" * 64, "s", np.zeros(tokens, dtype=np.int32), "stop", 2, "f")


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.none(), st.integers(1, 30)), min_size=1, max_size=60),
    max_tokens=st.integers(0, 400),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_whatever_the_order_of_answers_the_window_yields_the_prefix_within_the_cap(lengths, max_tokens, chunk, seed):
    """`lengths`: output tokens of each row; None for a row that is set aside."""
    order, window, left = random.Random(seed), Window(max_tokens), []
    rows = [Row(i, str(i), np.zeros(1, dtype=np.int32)) for i in range(len(lengths))]
    waiting, position = [], 0
    while not window.cut and (position < len(rows) or window.rows):
        left += window.leave()
        if window.cut:
            break
        if not waiting and position < len(rows):
            window.add(rows[position : position + chunk])
            waiting, position = rows[position : position + chunk], position + chunk
            order.shuffle(waiting)
        if waiting:
            row = waiting.pop()
            if row.index >= window.limit:
                continue
            if lengths[row.index] is None:
                row.set_aside = ("refused", "")
            else:
                row.generation = generation(lengths[row.index])
            window.finish(row)
    totals = itertools.accumulate(length or 0 for length in lengths)
    wanted = next((i for i, total in enumerate(totals) if total > max_tokens), len(lengths))
    assert [row.index for row in left] == list(range(wanted))
    assert window.limit == (math.inf if wanted == len(lengths) else wanted)


def test_an_open_row_may_still_be_set_aside_so_nothing_behind_it_is_given_up():
    window = Window(5)
    rows = [Row(i, str(i), np.zeros(1, dtype=np.int32)) for i in range(3)]
    window.add(rows)
    rows[0].generation = generation(5)
    window.finish(rows[0])
    assert window.limit == math.inf
    rows[2].generation = generation(1)
    window.finish(rows[2])
    assert window.limit == 2


def test_as_many_rows_are_wanted_as_the_cap_is_likely_to_take():
    window = Window(1000)
    assert window.rows_wanted(64, 4, guess=100) == 10
    assert Window(None).rows_wanted(64, 4, guess=100) == 64
    rows = [Row(i, str(i), np.zeros(1, dtype=np.int32)) for i in range(10)]
    window.add(rows)
    assert window.rows_wanted(64, 4, guess=100) == 0
    for row in rows[:5]:
        row.generation = generation(20)
        window.finish(row)
    assert [row.index for row in window.leave()] == [0, 1, 2, 3, 4]
    assert window.rows_wanted(64, 4, guess=100) == 40  # of 20 tokens, beside five that are open
