"""The draft vocabulary: the target's most frequent output tokens, as a pure function of counts, so it is reproducible.

It is made from the training rows of the run that trains, never taken from another: a stale mapping would go unnoticed
and cost acceptance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eaglet.errors import ConfigError


@dataclass(frozen=True)
class DraftVocab:
    ids: np.ndarray  # int64 [Vd], target ids, ascending
    distinct: int  # tokens that occur in the training outputs
    filled: int  # ids that do not occur and fill the vocabulary up

    def coverage(self, counts: np.ndarray) -> float | None:
        """Share of output tokens that the draft vocabulary holds; None where there are none."""
        total = int(counts.sum())
        return int(counts[self.ids].sum()) / total if total else None


def count_tokens(outputs: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each id occurs in lists or arrays of ids, all below vocab_size."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids in outputs:
        counts += np.bincount(np.asarray(ids, dtype=np.int64), minlength=vocab_size)
    return counts


def choose(counts: np.ndarray, size: int) -> DraftVocab:
    """The `size` most frequent ids; of equally frequent ones the lowest, so ids that never occur come last, in order.

    Raises ConfigError where the target has fewer ids.
    """
    if size > len(counts):
        raise ConfigError(
            f"drafter.draft_vocab_size: {size} is more than the target's vocabulary of {len(counts)}; set it to at most that"
        )
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    occurring = int((counts[ids] > 0).sum())
    return DraftVocab(ids, distinct=int((counts > 0).sum()), filled=size - occurring)
