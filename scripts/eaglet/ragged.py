"""Rows of token ids as one flat array: what lets a row group be checked in a few passes of numpy, and no Python loop.

Positions are indices into the flat array unless they are said to be within a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Ragged:
    """R rows of ids: row r is ids[offsets[r] : offsets[r + 1]]."""

    ids: np.ndarray  # int32 [N]
    offsets: np.ndarray  # int64 [R + 1]

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> "Ragged":
        """A list<int32> column without nulls; the ids are not copied."""
        array = column.combine_chunks()
        offsets = array.offsets.to_numpy().astype(np.int64)
        return cls(array.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> "Ragged":
        lengths = [len(row) for row in rows]
        flat = np.fromiter((i for row in rows for i in row), dtype=np.int32, count=sum(lengths))
        return cls(flat, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> np.ndarray:
        return self.ids[self.offsets[number] : self.offsets[number + 1]]

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def rows_of(self, positions: np.ndarray) -> np.ndarray:
        """The row in which each position lies."""
        return np.searchsorted(self.offsets, positions, side="right") - 1

    def count(self, positions: np.ndarray) -> np.ndarray:
        """How many of the positions lie in each row, [R]."""
        return np.bincount(self.rows_of(positions), minlength=len(self))

    def first(self, positions: np.ndarray) -> np.ndarray:
        """The first of the (ascending) positions in each row, −1 where there is none, [R]."""
        found = np.full(len(self), -1, dtype=np.int64)
        found[self.rows_of(positions[::-1])] = positions[::-1]
        return found

    def last(self, positions: np.ndarray) -> np.ndarray:
        """The last of the (ascending) positions in each row, −1 where there is none, [R]."""
        found = np.full(len(self), -1, dtype=np.int64)
        found[self.rows_of(positions)] = positions
        return found

    def occurrences(self, sequence: Sequence[int]) -> np.ndarray:
        """Where the sequence starts and lies within one row, ascending."""
        length = len(sequence)
        starts = np.flatnonzero(self.ids[: len(self.ids) - length + 1] == sequence[0])
        for n in range(1, length):
            starts = starts[self.ids[starts + n] == sequence[n]]
        return starts[self.rows_of(starts) == self.rows_of(starts + length - 1)] if length > 1 else starts

    def ends_with(self, sequence: Sequence[int]) -> np.ndarray:
        """Whether each row ends with the sequence, bool [R]."""
        length = len(sequence)
        matching = self.lengths >= length
        ends = self.offsets[1:]
        for n, wanted in enumerate(sequence):
            places = np.where(matching, ends - length + n, 0)
            matching = matching & (self.ids[places] == wanted) if len(self.ids) else np.zeros(len(self), bool)
        return matching
