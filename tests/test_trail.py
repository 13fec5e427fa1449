"""Decoded tokens are cut at their markers, and every row can be shown, also one that no tokenizer would write."""

from eaglet.lineage import read_chain
from eaglet.records import iter_rows
from eaglet.trail import Reader, find_row, segments
from synthetic_run import STORE

MARKERS = [("closing", (7, 8)), ("opening", (7,)), ("end_of_turn", (9,))]


def cut(*ids: int) -> list[tuple]:
    found = segments(ids, MARKERS, lambda ids: " ".join(map(str, ids)))
    return [(s["name"] or s["kind"], s["text"], s["ids"]) for s in found]


def test_text_is_cut_at_markers():
    assert cut(7, 1, 2, 9) == [("opening", "7", 1), ("text", "1 2", 2), ("end_of_turn", "9", 1)]


def test_a_longer_marker_goes_before_its_own_beginning():
    assert cut(1, 7, 8, 2) == [("text", "1", 1), ("closing", "7 8", 2), ("text", "2", 1)]


def test_nothing_gives_nothing():
    assert cut() == []


def test_ids_that_no_tokenizer_knows_are_shown_as_numbers(demo_run):
    reader = Reader(read_chain(demo_run, None), STORE)
    word = reader.renderer.tokenizer.encode("rain")
    (shown,) = reader.show([-1, *word, 100_000])
    assert shown["text"] == "⟨-1⟩rain⟨100000⟩"


def test_a_row_is_found_with_its_place(demo_run):
    path = str(demo_run / "shards/shard-0.parquet")
    rows = list(iter_rows(path, "shard"))
    for place, row in enumerate(rows):
        assert find_row(path, "shard", row["sample_id"], row["dataset"]) == row | {"place": place}
    assert find_row(path, "shard", rows[0]["sample_id"], "another") is None
    assert find_row(path, "shard", "0" * 16) is None
