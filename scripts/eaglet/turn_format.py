"""The turn format: where the parts of a turn begin and end, as token ids, and how each fact was found.

A turn is prompt + [reasoning + closing marker] + answer + end of turn.  Which side writes the opening marker differs
between models, template versions and template arguments, so it is a fact (`owner`) and not a rule.  This module knows
the facts and their file, turn_format.json; how they are inferred is eaglet.inference, what a row must satisfy is
eaglet.checks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eaglet.errors import TurnFormatError
from eaglet.files import read_json, write_json
from eaglet.targets import Target

OWNERS = {
    "prompt": "the generation prompt ends with the opening marker; the model writes reasoning, closing marker, answer",
    "model": "the model writes opening marker, reasoning, closing marker, answer",
    "off": "the generation prompt opens and closes the reasoning; the model writes the answer",
    "none": "turns have no reasoning",
}


@dataclass(frozen=True)
class Marker:
    """A sequence of ids that stands in every turn, and its text.  Often one id; not always a special token."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class ToolMarkers:
    """How a turn writes tool calls.  A part that the format does not have is None.

    One call is `call_begin … call_end`; all calls of a turn may stand between `section_begin` and `section_end`.  Without
    `call_begin`, a call is what stands in front of a turn's end (`call_end` is an end-of-turn id then).
    """

    call_begin: Marker | None
    call_end: Marker
    argument_begin: Marker | None = None  # between the call's name and its arguments
    section_begin: Marker | None = None
    section_end: Marker | None = None
    arguments: str = (
        "json"  # json: an object behind the name; call: the whole call is an object with name; other: no JSON
    )
    name_pattern: str | None = None  # finds the called name (group 1) in the text in front of the arguments


@dataclass(frozen=True)
class TurnFormat:
    """Everything that the stages need to know about a target and its turns.  All ids are below `vocab_size`."""

    target: Target
    fingerprint: str  # of the target, 64 hex digits
    architecture: str
    model_type: str
    vocab_size: int  # rows of the embedding: ids 0 … vocab_size − 1 exist in the model
    hidden_size: int
    num_layers: int
    context_length: int
    owner: str  # a key of OWNERS
    generation_prompt: Marker  # what add_generation_prompt adds
    opening: Marker | None  # with the white space that follows it in the prompt where the owner is `prompt`
    closing: Marker | None  # without white space around it
    end_of_turn_ids: tuple[int, ...]  # any of these ends a turn
    interleaved: bool = False  # one turn may close its reasoning more than once
    tool_calls: ToolMarkers | None = None
    tools_rendered: bool = False
    tool_arguments: str | None = None  # `object` or `string`: how the template takes an earlier call's arguments
    reasoning_field: str | None = None  # the message field that the template reads reasoning from
    past_reasoning: str = "none"  # kept | stripped | since_last_user | none
    template_arguments: dict[str, str] = field(default_factory=dict)  # those that exist, and what each changes
    date_dependent: bool = False
    template_sha256: str = ""
    vocabulary_sha256: str = ""
    how: dict[str, str] = field(default_factory=dict)  # field -> how its value was found
    overridden: dict[str, Any] = field(default_factory=dict)  # field -> what was inferred before the config overrode it

    def opens(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends as this format's prompts must: with the opening marker where the prompt owns it."""
        if self.owner not in ("prompt", "off") or self.opening is None:
            return True
        ending = self.opening.ids if self.owner == "prompt" else self.generation_prompt.ids
        return tuple(prompt_ids[-len(ending) :]) == ending

    def think_end(self, output_ids: Sequence[int]) -> int:
        """Index into `output_ids` just past the (last, if interleaved) closing marker; −1 where there is none."""
        if self.closing is None or self.owner not in ("prompt", "model"):
            return -1
        ids, output = self.closing.ids, tuple(output_ids)
        starts = range(len(output) - len(ids) + 1)
        for start in reversed(starts) if self.interleaved else starts:
            if output[start : start + len(ids)] == ids:
                return start + len(ids)
        return -1

    def facts(self) -> list[tuple[str, Any, str]]:
        """(fact, value, how it was found) for people, in the order of the file."""
        told = self._as_json()
        return [
            (name, told[name], self.how.get(name, "")) for name in told if name not in ("how", "overridden", "target")
        ]

    def _as_json(self) -> dict:
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def save(self, path: str | Path) -> None:
        write_json(path, self._as_json())

    @classmethod
    def load(cls, path: str | Path) -> "TurnFormat":
        """Raises TurnFormatError when the file is not a turn format."""
        try:
            found = read_json(path)
        except OSError as error:
            raise TurnFormatError(f"{path}: cannot be read ({error.strerror}); run the target stage") from error
        except ValueError as error:
            raise TurnFormatError(f"{path}: not JSON ({error}); run the target stage again") from error
        return cls.from_json(found, str(path))

    @classmethod
    def from_json(cls, found: Mapping[str, Any], name: str = "turn format") -> "TurnFormat":
        names = {f.name for f in fields(cls)}
        if not isinstance(found, Mapping) or set(found) != names:
            differing = ", ".join(sorted(set(found) ^ names)) if isinstance(found, Mapping) else type(found).__name__
            raise TurnFormatError(
                f"{name}: not a turn format of this version ({differing}); run the target stage again"
            )
        markers = {key: _marker(found[key]) for key in ("generation_prompt", "opening", "closing")}
        return cls(
            **{
                **found,
                **markers,
                "target": Target.from_params(found["target"]),
                "end_of_turn_ids": tuple(found["end_of_turn_ids"]),
                "tool_calls": _tool_markers(found["tool_calls"]),
            }
        )


def plain(value: Any) -> Any:
    """A fact as JSON says it: dataclasses as objects, tuples as lists."""
    if isinstance(value, Target):
        return value.as_params()
    if isinstance(value, Marker | ToolMarkers):
        return {name: plain(part) for name, part in vars(value).items()}
    return list(value) if isinstance(value, tuple) else value


def _marker(found: Mapping | None) -> Marker | None:
    return None if found is None else Marker(tuple(found["ids"]), found["text"])


def _tool_markers(found: Mapping | None) -> ToolMarkers | None:
    if found is None:
        return None
    return ToolMarkers(**{k: v if k in ("arguments", "name_pattern") else _marker(v) for k, v in found.items()})
