"""Choosing the next token from logits, with the parameters, defaults and order of filters of SGLang's /generate.

Knows logits and numbers; it knows no model, no batch order and no request.  A row's choice depends on its logits, its
parameters and its own random number alone.  The random number is turned into a token by the inverse of the cumulative
distribution over the kept tokens *in order of their ids*, so a rounding error in a probability moves a choice only when
the number falls within that error of a boundary (sorting by probability first would let ties swap whole tokens).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GREEDY_BELOW = 1e-6  # a lower temperature means greedy, as in SGLang
# What SGLang offers and this engine does not: only the value that changes nothing is accepted.
NEUTRAL = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "beam_width": (None, 1),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "logit_bias": (None, {}),
    "watermark": (None,),
}
TEXT_ONLY = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "custom_params"}


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling.  Raises ValueError, with the field's name, for a value that SGLang would refuse."""

    max_new_tokens: int | None = 128  # None: as many as fit into the context
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: no limit
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        _check(_is_number(self.temperature) and self.temperature >= 0, "temperature", "a number ≥ 0", self.temperature)
        _check(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(_is_int(self.top_k) and (self.top_k == -1 or self.top_k >= 1), "top_k", "-1 or at least 1", self.top_k)
        _check(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        limit = self.max_new_tokens
        _check(limit is None or (_is_int(limit) and limit >= 0), "max_new_tokens", "an integer ≥ 0", limit)
        least = self.min_new_tokens
        fits = _is_int(least) and least >= 0 and (limit is None or least <= limit)
        _check(fits, "min_new_tokens", f"in [0, max_new_tokens({limit})]", least)
        seed = self.sampling_seed
        _check(seed is None or (_is_int(seed) and -(2**63) <= seed < 2**63), "sampling_seed", "a 64-bit integer", seed)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "SamplingParams":
        """The `sampling_params` of a request.  null means the default.  Raises ValueError."""
        known = {}
        for name, value in given.items():
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise ValueError(f"sampling_params.{name}: the embedded engine does not offer it; found {value!r}")
            elif name in TEXT_ONLY:
                continue
            elif name not in cls.__dataclass_fields__:
                raise ValueError(f"sampling_params.{name}: unknown field; known: {', '.join(cls.__dataclass_fields__)}")
            elif value is not None or name == "max_new_tokens":
                known[name] = value
        stops = known.get("stop_token_ids", [])
        _check(isinstance(stops, list) and all(map(_is_int, stops)), "stop_token_ids", "a list of integers", stops)
        return cls(**{**known, "stop_token_ids": frozenset(stops), "ignore_eos": bool(known.get("ignore_eos", False))})

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


def next_tokens(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """The next token of each row.

    `logits` [rows, vocabulary] float; `draws`: one number in [0, 1) per row, not looked at in a greedy row.
    """
    chosen = logits.argmax(dim=-1).tolist()
    sampled = [row for row, p in enumerate(params) if not p.greedy]
    if sampled:
        temperatures = torch.tensor([params[row].temperature for row in sampled], dtype=torch.float32)
        # Indexing copies, so the caller's logits stay as they are.
        probabilities = torch.softmax(logits[sampled].float().div_(temperatures[:, None]), dim=-1)
        for row, distribution in zip(sampled, probabilities, strict=True):
            chosen[row] = _draw(*kept_tokens(distribution, params[row]), draws[row])
    return chosen


def kept_tokens(probabilities: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """The tokens that the filters leave, as (ids in ascending order, weights); ids None means all of them.

    In SGLang's order, each filter on the unfiltered probabilities sorted downwards: the first top_k; those with at most
    top_p in front of them; those with at least min_p times the largest.  `probabilities` [vocabulary] sums to 1.
    """
    if params.top_p >= 1 and params.top_k == -1 and params.min_p == 0:
        return None, probabilities
    # The tokens below this floor hold less than 1 − top_p together, so none of them is in the nucleus: no full sort.
    floor = (1 - params.top_p) / len(probabilities) if params.top_p < 1 else -1.0
    candidates = (probabilities > floor).nonzero().squeeze(1)
    weights, order = probabilities[candidates].sort(descending=True, stable=True)
    keep = weights.cumsum(0) - weights <= params.top_p
    if params.top_k != -1:
        keep[params.top_k :] = False
    if params.min_p > 0:
        keep &= weights >= weights[0] * params.min_p
    ids, ascending = candidates[order[keep]].sort()
    return ids, weights[keep][ascending]


def _draw(ids: Tensor | None, weights: Tensor, draw: float) -> int:
    """The token at which the cumulative weight passes `draw` times the total."""
    cumulative = weights.double().cumsum(0)
    place = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
    place = min(place, len(weights) - 1)
    return place if ids is None else int(ids[place])


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _check(holds: bool, name: str, wanted: str, found: Any) -> None:
    if not holds:
        raise ValueError(f"sampling_params.{name}: must be {wanted}, got {found!r}")
