"""The request of one row: explicit sampling, a seed of its own, a length that fits the context, and the key that names it.

Capture, checks and audit make requests here, so a key can be recomputed from a raw row and its file's metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eaglet import digests
from eaglet.errors import ConfigError
from eaglet.turn_format import TurnFormat

RESERVED_TOKENS = 6  # of the context: SGLang takes prompts of context − 7 ids at most, and gives context − 2 in all
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed")


@dataclass(frozen=True, slots=True)
class Request:
    """One row as it is asked.  `key` covers the target, the prompt, and everything of `sampling` below."""

    key: str
    max_new_tokens: int
    seed: int


class Requests:
    """Makes the request of a row: explicit sampling, a seed of its own, and a length that fits the context."""

    def __init__(self, turn_format: TurnFormat, settings: Mapping[str, Any], context_length: int | None):
        """`settings` are the config's `sampling`; `context_length` in tokens, None for the model's own.

        Raises ConfigError when a setting is missing: the server must not choose one.
        """
        if missing := [name for name in SETTINGS if name not in settings]:
            raise ConfigError(f"sampling: {', '.join(missing)} missing; each of {', '.join(SETTINGS)} is needed")
        self.fingerprint = turn_format.fingerprint
        self.settings = {name: settings[name] for name in SETTINGS}
        self.context_length = context_length or turn_format.context_length
        self._fixed = {
            "temperature": float(settings["temperature"]),
            "top_p": float(settings["top_p"]),
            "top_k": int(settings["top_k"]),
            "min_p": float(settings["min_p"]),
            "stop_token_ids": sorted(turn_format.end_of_turn_ids),
            "skip_special_tokens": False,
        }

    def make(self, sample_id: str, prompt_ids: Sequence[int]) -> Request | None:
        """None when the prompt leaves no room for an answer in the context."""
        room = self.context_length - RESERVED_TOKENS - len(prompt_ids)
        max_new_tokens = min(self.settings["max_new_tokens"], room)
        if max_new_tokens < 1:
            return None
        seed = digests.row_seed(self.settings["seed"], sample_id)
        sampling = {**self._fixed, "max_new_tokens": max_new_tokens}
        return Request(digests.request_key(self.fingerprint, prompt_ids, sampling, seed), max_new_tokens, seed)

    def sampling(self, request: Request) -> dict:
        """The `sampling_params` that are sent."""
        return {**self._fixed, "max_new_tokens": request.max_new_tokens, "sampling_seed": request.seed}
