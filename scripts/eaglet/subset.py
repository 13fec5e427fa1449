"""Which training rows a share of them holds: from each row's id and the seed alone, for the learning curve.

Of each dataset the ⌈share · rows⌉ with the smallest SHA-256 of ["subset", seed, sample_id].  So every dataset keeps its part, a
smaller share lies within a larger one, and an added row moves one other of its dataset at most.  This module knows ids, not
tokens or files.
"""

import math
from collections.abc import Iterable, Mapping

from eaglet.digests import content_key
from eaglet.errors import ConfigError


def subset(sample_ids: Mapping[str, Iterable[str]], share: float, seed: int) -> set[str]:
    """The ids that belong to the share; `sample_ids` maps a dataset to those of its training rows.

    Raises ConfigError unless 0 < share ≤ 1.
    """
    if not 0 < share <= 1:
        raise ConfigError(
            f"row_share: found {share}; expected more than 0 and at most 1, the share of the training rows"
        )
    chosen: set[str] = set()
    for ids in sample_ids.values():
        ranked = sorted(ids, key=lambda sample_id: content_key(["subset", seed, sample_id]))
        chosen.update(ranked[: math.ceil(share * len(ranked))])
    return chosen
