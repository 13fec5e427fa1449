"""The window: the rows that are under way, in file order, and the row that the token cap cuts the file at.

Rows are answered in any order and leave in file order.  Knows rows and tokens; it does not know where answers come from.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from eaglet.journal import Generation
from eaglet.row_request import Request


@dataclass(slots=True)
class Row:
    """A prompt on its way through the window."""

    index: int  # in the prompts file, from 0
    sample_id: str
    prompt_ids: np.ndarray  # int32
    request: Request | None = None
    generation: Generation | None = None  # output_ids as int32
    set_aside: tuple[str, str] | None = None  # (reason code, message)

    @property
    def finished(self) -> bool:
        return self.generation is not None or self.set_aside is not None

    @property
    def tokens(self) -> int:
        """Output tokens; 0 of a row that is still open: it may yet be set aside."""
        return 0 if self.generation is None else len(self.generation.output_ids)

    def answer(self, generation: Generation) -> None:
        compact = np.asarray(generation.output_ids, dtype=np.int32)  # 4 bytes an id; a list of ints takes 36
        self.generation = replace(generation, output_ids=compact)


class Window:
    """The rows under way, in file order, and where the token cap cuts the file.

    `limit`: index of the first row that is certainly beyond the cap, whatever the open rows turn out to hold.
    """

    def __init__(self, max_tokens: int | None):
        self.max_tokens = math.inf if max_tokens is None else max_tokens
        self.rows: deque[Row] = deque()
        self.limit: float = math.inf
        self.cut = False  # the row that the file ends before is known
        self.spent = 0  # output tokens of the rows that have left
        self.open = 0  # rows that are not finished
        self._known = 0  # output tokens of all finished rows that ever entered
        self._left_answered = 0

    def add(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)
        self._known += sum(row.tokens for row in rows)
        self.open += sum(not row.finished for row in rows)
        self._find_limit()

    def finish(self, row: Row) -> None:
        """To be called when a row that entered open has been finished."""
        self._known += row.tokens
        self.open -= 1
        self._find_limit()

    def _find_limit(self) -> None:
        if self._known <= self.max_tokens:
            return
        total = self.spent
        for row in self.rows:
            total += row.tokens
            if total > self.max_tokens:
                self.limit = min(self.limit, row.index)
                return

    def leave(self) -> Iterator[Row]:
        """Take the finished rows from the front, as far as they are finished and within the cap."""
        while self.rows and not self.cut:
            row = self.rows[0]
            if row.index >= self.limit or self.spent + row.tokens > self.max_tokens:
                self.cut, self.limit = True, row.index
            elif row.finished:
                self.rows.popleft()
                self.spent += row.tokens
                self._left_answered += row.generation is not None
                yield row
            else:
                return

    def rows_wanted(self, most: int, least: int, guess: float) -> int:
        """How many more rows the cap is likely to take: between `least` and `most`; 0 when those here may suffice.

        `guess`: tokens of a row as long as none has left the window.
        """
        if self.max_tokens == math.inf:
            return most
        mean = max(1.0, self.spent / self._left_answered if self._left_answered else guess)
        left = self.max_tokens - self._known - self.open * mean
        return 0 if left <= 0 or self.cut else min(most, max(least, math.ceil(left / mean)))
