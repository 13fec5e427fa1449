"""Which shard a row belongs to, where it stands in it, and whether it is held out: all from its id and the seed alone.

    place(row)  = first 64 bits of SHA-256 of ["shard", seed, sample_id]
    shard(row)  = place mod count; within a shard rows stand in ascending order of place
    held out    = the `rows_per_dataset` rows of a dataset with the smallest 64 bits of ["heldout", seed, dataset, sample_id]

So an added, removed or edited row moves no other, and changes the split of one other at most (the one that it displaces
from the held-out rows, or makes room for).  A conversation that two datasets share is kept once, in the dataset that
comes first by name; otherwise a drafter could be measured on a row that it was trained on.

The alternative, a seeded shuffle of all rows, would move every row when one comes or goes, and with it every
shard's hidden states.  This module knows ids, not tokens or files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eaglet.digests import content_key


@dataclass(frozen=True)
class Assignment:
    """Of the rows of one dataset, in the order of its file."""

    shard: np.ndarray  # int32 [rows]; −1 where the row is dropped
    place: np.ndarray  # uint64 [rows]
    heldout: np.ndarray  # bool [rows]
    duplicates: Mapping[str, str]  # sample_id of a dropped row -> the dataset that has it

    def dropped(self) -> dict[str, int]:
        """Rows by reason, `duplicate_of:{dataset}`."""
        return {f"duplicate_of:{name}": rows for name, rows in sorted(Counter(self.duplicates.values()).items())}


def place_of(sample_id: str, seed: int) -> int:
    return _first_64_bits(["shard", seed, sample_id])


def _first_64_bits(value: list) -> int:
    return int(content_key(value)[:16], 16)


def assign(sample_ids: Mapping[str, Sequence[str]], *, seed: int, count: int, heldout: int) -> dict[str, Assignment]:
    """The assignment of each dataset's rows to `count` shards, with `heldout` rows of each dataset held out.

    `sample_ids` maps a dataset to its rows' ids, unique within it.
    """
    owner: dict[str, str] = {}
    for dataset in sorted(sample_ids):
        for sample_id in sample_ids[dataset]:
            owner.setdefault(sample_id, dataset)
    return {
        dataset: _assign_one(dataset, sample_ids[dataset], owner, seed, count, heldout)
        for dataset in sorted(sample_ids)
    }


def _assign_one(
    dataset: str, sample_ids: Sequence[str], owner: Mapping[str, str], seed: int, count: int, heldout: int
) -> Assignment:
    kept = np.array([owner[sample_id] == dataset for sample_id in sample_ids], dtype=bool)
    place = np.array([place_of(sample_id, seed) for sample_id in sample_ids], dtype=np.uint64)
    shard = np.where(kept, (place % np.uint64(count)).astype(np.int32), np.int32(-1))
    ranked = sorted(
        (_first_64_bits(["heldout", seed, dataset, sample_id]), row)
        for row, sample_id in enumerate(sample_ids)
        if kept[row]
    )
    is_heldout = np.zeros(len(sample_ids), dtype=bool)
    is_heldout[[row for _, row in ranked[:heldout]]] = True
    duplicates = {s: owner[s] for s in sample_ids if owner[s] != dataset}
    return Assignment(shard, place, is_heldout, duplicates)
