"""Exact percentiles of lengths in memory that depends on the longest length, not on how many there are."""

import numpy as np

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


class Lengths:
    """A histogram of non-negative whole numbers."""

    def __init__(self) -> None:
        self.counts = np.zeros(1, np.int64)

    def add(self, lengths: np.ndarray) -> None:
        if not len(lengths):
            return
        more = np.bincount(lengths)
        longer, shorter = (self.counts, more) if len(self.counts) >= len(more) else (more, self.counts)
        self.counts = longer.astype(np.int64)
        self.counts[: len(shorter)] += shorter

    def summary(self) -> dict[str, float] | None:
        """rows, mean, min, p1 … p99 (nearest rank) and max; None without any."""
        rows = int(self.counts.sum())
        if not rows:
            return None
        upto, values = np.cumsum(self.counts), np.arange(len(self.counts))
        ranks = {f"p{p}": int(np.searchsorted(upto, np.ceil(rows * p / 100))) for p in PERCENTILES}
        mean = float((self.counts * values).sum() / rows)
        least, most = int(np.flatnonzero(self.counts)[0]), len(self.counts) - 1
        return {"rows": rows, "mean": round(mean, 1), "min": least, **ranks, "max": most}
