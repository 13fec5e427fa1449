"""Learning a turn format from the outside: render, compare, and see what the template does with known text.

Nothing here knows a model by name.  Conversations with known texts (eaglet.probing) are rendered with and without each
part: generation prompt, reasoning, tools, tool calls, history, arguments, another date.  Every fact says how it was
found, and the config may override it.
"""

import datetime
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eaglet.digests import sha256
from eaglet.errors import TurnFormatError
from eaglet.files import read_json
from eaglet.probing import (
    ANSWER,
    QUESTION,
    REASONING,
    USER,
    Probe,
    contains,
    dated,
    every_rendering,
    renders,
    template_variables,
)
from eaglet.rendering import PROBE_TOOL, Renderer, renders_by_code
from eaglet.targets import Target, context_length
from eaglet.tool_inference import infer_tool_markers
from eaglet.turn_format import OWNERS, Marker, ToolMarkers, TurnFormat, plain

OVERRIDABLE = ("owner", "opening", "closing", "end_of_turn_ids", "interleaved", "tool_calls", "context_length")
DATES = (datetime.datetime(2001, 2, 3, 4, 5, 6), datetime.datetime(2033, 11, 30, 21, 47, 58))


def infer(target: Target, overrides: Mapping[str, Any] | None = None) -> TurnFormat:
    """The turn format of a target under its template arguments.

    `overrides` maps a name of `OVERRIDABLE` to its value; a marker is given as its text, as {ids, text}, or as null.
    Raises TurnFormatError when a boundary cannot be found or contradicts another, or the template cannot be relied on.
    """
    probe = Probe(Renderer(target))
    found = Findings(_read_overrides(overrides or {}, probe))
    _refuse_two_renderings(probe)
    _note_model(found, target)
    _note_template(found, probe)
    _note_reasoning(found, probe)
    _note_end_of_turn(found, probe)
    _note_tools(found, probe)
    _note_history(found, probe)
    turn_format = TurnFormat(target=target, **found.values, how=found.how, overridden=found.overridden)
    _refuse_contradictions(turn_format)
    return turn_format


def for_arguments(turn_format: TurnFormat, template_arguments: Mapping[str, Any]) -> TurnFormat:
    """The format of turns rendered with a dataset's own template arguments, which may change who opens the reasoning."""
    merged = {**turn_format.target.template_arguments, **template_arguments}
    if merged == turn_format.target.template_arguments:
        return turn_format
    overrides = {name: plain(getattr(turn_format, name)) for name in turn_format.overridden}
    return infer(replace(turn_format.target, template_arguments=merged), overrides)


class Findings:
    """What has been found so far, with the config's overrides in place of what they override."""

    def __init__(self, overrides: Mapping[str, Any]):
        self.overrides = overrides
        self.values: dict[str, Any] = {}
        self.how: dict[str, str] = {}
        self.overridden: dict[str, Any] = {}

    def note(self, name: str, value: Any, how: str) -> None:
        if name in self.overrides:
            self.overridden[name] = plain(value)
            value, how = self.overrides[name], f"set by target.turn_format.{name}; inferred was {plain(value)!r}: {how}"
        self.values[name], self.how[name] = value, how

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def _read_overrides(given: Mapping[str, Any], probe: Probe) -> dict[str, Any]:
    read = {}
    for name, value in given.items():
        if name not in OVERRIDABLE:
            near = difflib.get_close_matches(name, OVERRIDABLE, n=1)
            hint = f"did you mean {near[0]}?" if near else f"those that can be set: {', '.join(OVERRIDABLE)}"
            raise TurnFormatError(f"target.turn_format.{name}: no fact that can be set; {hint}")
        if name == "owner" and value not in OWNERS:
            raise TurnFormatError(f"target.turn_format.owner: found {value!r}; expected one of {', '.join(OWNERS)}")
        if name in ("opening", "closing"):
            value = _read_marker(value, f"target.turn_format.{name}", probe)
        elif name == "end_of_turn_ids":
            if not isinstance(value, Sequence) or not value or not all(isinstance(i, int) for i in value):
                raise TurnFormatError(
                    f"target.turn_format.end_of_turn_ids: found {value!r}; expected a list of token ids"
                )
            value = tuple(value)
        elif name == "tool_calls" and value is not None:
            value = _read_tool_markers(value, probe)
        read[name] = value
    return read


def _read_marker(value: Any, key: str, probe: Probe) -> Marker | None:
    if value is None:
        return None
    if isinstance(value, str):
        return probe.marker(value)
    if isinstance(value, Mapping) and isinstance(value.get("ids"), Sequence):
        ids = tuple(int(i) for i in value["ids"])
        return Marker(ids, value.get("text") or probe.renderer.decode(ids))
    raise TurnFormatError(f"{key}: found {value!r}; expected the marker's text, {{ids: […]}}, or null")


def _read_tool_markers(value: Any, probe: Probe) -> ToolMarkers:
    names = list(ToolMarkers.__dataclass_fields__)
    if not isinstance(value, Mapping) or set(value) - set(names):
        raise TurnFormatError(
            f"target.turn_format.tool_calls: found {value!r}; expected null or some of {', '.join(names)}"
        )
    return ToolMarkers(
        **{
            name: part
            if name in ("arguments", "name_pattern")
            else _read_marker(part, f"target.turn_format.tool_calls.{name}", probe)
            for name, part in value.items()
        }
    )


def _note_model(found: Findings, target: Target) -> None:
    config, text = target.config(), target.text_config()
    found.note("fingerprint", target.fingerprint(), "digest of config, tokenizer, template, code, weights and revision")
    found.note("architecture", (config.architectures or ["?"])[0], "config.json")
    found.note("model_type", config.model_type, "config.json")
    found.note("vocab_size", int(text.vocab_size), "config.json: rows of the embedding")
    found.note("hidden_size", int(text.hidden_size), "config.json")
    found.note("num_layers", int(text.num_hidden_layers), "config.json")
    found.note("context_length", context_length(text), "config.json")


def _note_template(found: Findings, probe: Probe) -> None:
    renderer = probe.renderer
    source = renderer.template
    found.note("template_sha256", sha256(source.encode()), "the template that renders, as text")
    tokens = sorted((number, token) for token, number in probe.tokenizer.get_vocab().items())
    listed = "\n".join(f"{number} {token}" for number, token in tokens)
    found.note("vocabulary_sha256", sha256(listed.encode()), "lines `id token` of the whole tokenizer, by id")
    found.note(
        "template_arguments",
        _template_arguments(probe),
        "the template's free variables, each rendered with other values",
    )
    renderings = []
    for day in DATES:
        with dated(day):
            renderings.append(every_rendering(renderer, {}))
    dependent = renderings[0] != renderings[1]
    found.note("date_dependent", dependent, f"rendered on {DATES[0]:%Y-%m-%d} and on {DATES[1]:%Y-%m-%d}")
    if dependent:
        raise TurnFormatError(_undated(found["template_arguments"]))


def _undated(arguments: Mapping[str, str]) -> str:
    dates = [name for name in arguments if "date" in name.lower()]
    pin = (
        f"target.template_arguments: {{{dates[0]}: 1 January 2026}} (the template takes it)"
        if dates
        else ("target.chat_template: a copy of the template with the date written in, and serve with the same file")
    )
    return (
        "the chat template writes today's date into the prompt, so the same prompt has other ids tomorrow and nothing that "
        f"was generated could be found again. Pin the date with {pin}"
    )


def _template_arguments(probe: Probe) -> dict[str, str]:
    """Argument -> what it changes.  Raises TurnFormatError for a configured argument that changes nothing."""
    renderer = probe.renderer
    given = renderer.target.template_arguments
    special = set(probe.tokenizer.special_tokens_map) | {f"{name}_token" for name in ("bos", "eos", "pad", "unk")}
    variables = {n: v for n, v in template_variables(renderer.template).items() if n not in special}
    effects = {name: _effect(renderer, name, [True, False, *compared]) for name, compared in variables.items()}
    effects = {name: effect for name, effect in effects.items() if effect != NO_EFFECT or name in given}
    for name, value in given.items():
        effect = effects.get(name) or _effect(renderer, name, [value, True, False])
        if effect == NO_EFFECT:
            exist = ", ".join(known for known, changes in effects.items() if changes != NO_EFFECT) or "none"
            raise TurnFormatError(
                f"target.template_arguments.{name}: {value!r} changes nothing in any rendering, so the model would not do what "
                f"was asked for; arguments that this template has: {exist}"
            )
        effects.setdefault(name, effect)
    return effects


NO_EFFECT = "changes nothing"


def _effect(renderer: Renderer, name: str, values: Sequence) -> str:
    """What values of one argument change, compared with the rendering without it."""
    others = {n: v for n, v in renderer.target.template_arguments.items() if n != name}
    bare = Renderer(replace(renderer.target, template_arguments=others), renderer.tokenizer)
    without = every_rendering(bare, {})
    told = []
    for value in dict.fromkeys((type(v).__name__, v) for v in values if isinstance(v, str | int | float | bool)):
        value = value[1]
        changed = every_rendering(bare, {name: value})
        differing = [case for case in without if changed[case] != without[case]]
        if differing:
            told.append(
                f"{value!r} changes {_difference(without[differing[0]], changed[differing[0]])} ({differing[0]})"
            )
    return "; ".join(told) or NO_EFFECT


def _difference(a: str, b: str) -> str:
    start = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"…{a[max(0, start - 12) : start + 24]!r} to …{b[max(0, start - 12) : start + 24]!r}"


def _refuse_two_renderings(probe: Probe) -> None:
    """Refuse a configured template file beside a tokenizer whose own code renders differently from it."""
    renderer = probe.renderer
    if not renderer.target.chat_template or not renders_by_code(renderer.tokenizer):
        return
    by_file = every_rendering(renderer.by_template_alone(), {})
    by_code = every_rendering(renderer, {})
    differing = [case for case in by_code if by_code[case] != by_file.get(case)]
    if differing:
        raise TurnFormatError(
            f"target.chat_template: the tokenizer's own code renders {differing[0]} differently from {renderer.target.chat_template} "
            f"({_difference(by_file.get(differing[0], ''), by_code[differing[0]])}), and a server may use either; remove "
            "target.chat_template, or use a tokenizer without code of its own"
        )


def _note_reasoning(found: Findings, probe: Probe) -> None:
    """generation_prompt, owner, opening, closing, interleaved, reasoning_field."""
    prompt = probe.generation_prompt
    found.note("generation_prompt", prompt, "what add_generation_prompt adds to a question")
    reading = probe.renderer.reasoning_field
    found.note("reasoning_field", reading, "each name in use was rendered with a known text")
    before, behind, closing_how = _around_reasoning(probe)
    closing = probe.marker(behind) if behind else None
    found.note("closing", closing, closing_how)
    closing = found["closing"]
    header = _header(probe, prompt.text, before, closing.text if closing else None)
    rest = prompt.text[len(header) :]  # what the generation prompt says beyond the header
    if closing is None:
        owner, opening, how = "none", None, "no rendering contains a marker between reasoning and answer"
    elif closing.text in rest:
        text = rest[: rest.index(closing.text)].strip()
        owner, opening = "off", probe.marker(text) if text else None
        how = f"the generation prompt {prompt.text!r} closes the reasoning at once"
    elif rest.strip():
        ids = probe.encode(rest)
        owner, opening = "prompt", Marker(tuple(prompt.ids[len(prompt.ids) - len(ids) :]), rest)
        how = f"the generation prompt {prompt.text!r} ends with it"
    elif before is not None and before[len(header) :].strip():
        owner, opening = "model", probe.marker(before[len(header) :].strip())
        how = f"a turn with reasoning starts with {before!r}, the generation prompt is {prompt.text!r}"
    else:
        owner, opening = "model", _mirrored(probe, closing)
        how = "the generation prompt does not open the reasoning, and the template removes what stands before the closing marker"
    found.note("opening", opening, how)
    found.note("owner", owner, how)
    several = bool(prompt.ids and closing and tuple(closing.ids[-len(prompt.ids) :]) == prompt.ids)
    found.note(
        "interleaved",
        several,
        "the closing marker begins a new message of the same turn"
        if several
        else "the closing marker begins no new message",
    )


def _around_reasoning(probe: Probe) -> tuple[str | None, str | None, str]:
    """(text from the turn's start to the reasoning, closing marker's text, how they were found); None where not found."""
    field = probe.renderer.reasoning_field
    if field is None:
        return None, *_closing_by_removal(probe)
    turn = probe.turn({"content": ANSWER, field: REASONING})
    start, stop = turn.index(REASONING), turn.index(REASONING) + len(REASONING)
    if ANSWER not in turn[stop:]:
        raise TurnFormatError(
            f"the template writes the answer before the reasoning ({turn!r}); no closing marker can stand between them"
        )
    between = turn[stop : turn.index(ANSWER, stop)]
    how = f"between reasoning and answer of a turn with {field}: {between!r}"
    calling = {"content": "", field: REASONING, "tool_calls": _call(probe)}
    if renders(probe.renderer, [USER, {"role": "assistant", **calling}], probe.tools):
        turn_that_calls = probe.turn(calling, probe.tools)
        if REASONING in turn_that_calls:
            behind = turn_that_calls[turn_that_calls.index(REASONING) + len(REASONING) :]
            between = _without_next_part(probe, probe.common_start(between, behind), turn[:start])
            how += f", and what a turn that calls a tool has in common with it: {between!r}"
    return turn[:start], between.strip() or None, how


def _without_next_part(probe: Probe, between: str, before: str) -> str:
    """`between` without a last token that begins parts of a turn, as it begins the turn itself."""
    pieces = probe.token_texts(probe.encode(between))
    begins = probe.token_texts(probe.encode(before))[:1]
    return between[: -len(pieces[-1])] if pieces[-1:] == begins and len(pieces) > 1 else between


def _call(probe: Probe) -> list[dict]:
    name = PROBE_TOOL["function"]["name"]
    return [{"id": f"functions.{name}:0", "type": "function", "function": {"name": name, "arguments": {}}}]


def _closing_by_removal(probe: Probe) -> tuple[str | None, str]:
    """For templates that never write reasoning: the added token in front of which they remove text from an answer."""
    for number in sorted(probe.added):
        text = probe.renderer.decode([number])
        if text not in probe.renderer.template or not _mirror(text) or not text.strip():
            continue
        for messages in ([USER, _said(text)], [USER, _said(text), USER]):
            if not renders(probe.renderer, messages, None):
                continue
            written = probe.text(messages)
            if ANSWER in written and REASONING not in written:
                return text, f"the template removes what an answer has before {text!r}, and never writes reasoning"
    return None, "no field of a message is rendered as reasoning, and no text is removed from an answer"


def _said(closing: str) -> dict:
    return {"role": "assistant", "content": f"{REASONING}{closing}{ANSWER}"}


def _mirror(text: str) -> str | None:
    """The opening text of a closing one: the same without its slash."""
    return text.replace("/", "", 1) if "/" in text else None


def _mirrored(probe: Probe, closing: Marker) -> Marker:
    text = _mirror(closing.text)
    if not text:
        raise TurnFormatError(
            f"the model writes an opening marker before its reasoning, which {closing.text!r} ends, but no rendering shows it; "
            "set target.turn_format.opening to its text"
        )
    return probe.marker(text)


def _header(probe: Probe, prompt: str, before: str | None, closing: str | None) -> str:
    """The part of the generation prompt that begins every assistant turn; the opening marker, if it is there, follows.

    All of it where a turn with reasoning starts with it and goes on.  Else the first of these that leaves something:
    up to the token that ends a user's header too; up to the closing marker's mirror; what it has in common with turns
    without reasoning; up to the closing marker; all but its last token.
    """
    if closing is None or (before is not None and before.startswith(prompt) and before[len(prompt) :].strip()):
        return prompt
    pieces = probe.token_texts(probe.encode(prompt))
    candidates = ["".join(pieces[: n + 1]) for n, piece in enumerate(pieces) if piece == _last_of_user_header(probe)][
        :1
    ]
    mirror = _mirror(closing)
    if mirror and mirror in prompt:
        candidates.append(prompt[: prompt.rindex(mirror)])
    said = {"role": "assistant", "content": ANSWER}
    for messages in ([USER, said, USER], [USER, said]):
        turn = probe.text(messages)[len(probe.text([USER])) :]
        candidates.append(probe.common_start(prompt, turn[: turn.index(ANSWER)]))
    if closing in prompt:
        candidates.append(prompt[: prompt.index(closing)])
    if before is not None and before.rstrip() == prompt.rstrip():
        candidates.append("".join(probe.token_texts(probe.encode(prompt.rstrip()))[:-1]))
    return next((header for header in candidates if prompt[len(header) :].strip()), prompt)


def _last_of_user_header(probe: Probe) -> str:
    """The text of the token in front of a user's words."""
    written = probe.text([USER])
    return probe.token_texts(probe.encode(written[: written.rindex(QUESTION)]))[-1]


def _note_end_of_turn(found: Findings, probe: Probe) -> None:
    target, tokenizer = probe.renderer.target, probe.tokenizer
    sources: dict[int, list[str]] = {}

    def add(ids: Any, source: str) -> None:
        for i in ids if isinstance(ids, Sequence) else [ids]:
            if i is not None:
                sources.setdefault(int(i), []).append(source)

    generation = target.folder / "generation_config.json"
    add(read_json(generation).get("eos_token_id") if generation.is_file() else None, "generation_config.json")
    add(getattr(target.text_config(), "eos_token_id", None), "config.json")
    add(tokenizer.eos_token_id, "the tokenizer's eos")
    field = probe.renderer.reasoning_field
    turn = probe.turn({"content": ANSWER, **({field: REASONING} if field else {})})
    behind = probe.encode(turn[turn.rindex(ANSWER) + len(ANSWER) :])
    if behind and behind[0] in probe.added:
        add(behind[0], "the template")
    closing = found["closing"]
    inside = [i for i in sources if closing and i in closing.ids]
    found.note(
        "end_of_turn_ids",
        tuple(sorted(set(sources) - set(inside))),
        "; ".join(f"{i} {probe.renderer.decode([i])!r} from {', '.join(named)}" for i, named in sorted(sources.items()))
        + (f"; not {inside}, which stands inside the closing marker" if inside else ""),
    )


def _note_tools(found: Findings, probe: Probe) -> None:
    renderer = probe.renderer
    found.note("tools_rendered", renderer.tools_rendered, "a prompt with a tool was searched for the tool's name")
    found.note(
        "tool_arguments", renderer.tool_arguments, "an earlier call was rendered with its arguments in both forms"
    )
    markers, how = infer_tool_markers(probe, found["closing"], found["end_of_turn_ids"])
    found.note("tool_calls", markers, how)


def _note_history(found: Findings, probe: Probe) -> None:
    """past_reasoning: what the template does with the reasoning of earlier turns."""
    field, closing = probe.renderer.reasoning_field, found["closing"]
    if closing is None:
        found.note("past_reasoning", "none", "turns have no reasoning")
        return
    said = {"role": "assistant", "content": ANSWER, field: REASONING} if field else _said(closing.text)
    if REASONING in probe.text([USER, said, USER], generation_prompt=True):
        found.note("past_reasoning", "kept", "an earlier turn was rendered with its reasoning")
        return
    calling = {**said, "content": "" if field else said["content"], "tool_calls": _call(probe)}
    result = {
        "role": "tool",
        "tool_call_id": _call(probe)[0]["id"],
        "name": PROBE_TOOL["function"]["name"],
        "content": "eaglet result",
    }
    answered = [USER, calling, result]
    if renders(probe.renderer, answered, probe.tools) and REASONING in probe.text(
        answered, probe.tools, generation_prompt=True
    ):
        found.note(
            "past_reasoning",
            "since_last_user",
            "reasoning before a tool's result is rendered, that of an earlier turn is not",
        )
    else:
        found.note("past_reasoning", "stripped", "an earlier turn was rendered without its reasoning")


def _refuse_contradictions(turn_format: TurnFormat) -> None:
    """Raises TurnFormatError when facts, inferred or overridden, cannot all be true."""
    f = turn_format
    if not f.end_of_turn_ids:
        raise TurnFormatError(
            "no end of turn is known: neither generation config, config, tokenizer nor template names one; set "
            "target.turn_format.end_of_turn_ids"
        )
    if f.owner in ("prompt", "model") and (f.opening is None or f.closing is None):
        raise TurnFormatError(
            f"owner is {f.owner}, but there is no {'opening' if f.opening is None else 'closing'} marker; set target.turn_format."
            f"{'opening' if f.opening is None else 'closing'}, or owner to none"
        )
    if f.owner == "prompt" and not f.opens(f.generation_prompt.ids):
        raise TurnFormatError(
            f"owner is prompt, but the generation prompt {f.generation_prompt.text!r} does not end with the opening marker "
            f"{f.opening.text!r}; mend target.turn_format"
        )
    if f.opening and f.closing and f.opening.text.strip() == f.closing.text.strip():
        raise TurnFormatError(
            f"opening and closing marker are the same ({f.closing.text!r}); set target.turn_format.closing"
        )
    markers = {"opening": f.opening, "closing": f.closing, "generation_prompt": f.generation_prompt}
    used = {i: name for name, marker in markers.items() if marker for i in marker.ids}
    used |= dict.fromkeys(f.end_of_turn_ids, "end_of_turn_ids")
    outside = {i: name for i, name in used.items() if not 0 <= i < f.vocab_size}
    if outside:
        number, name = next(iter(outside.items()))
        raise TurnFormatError(
            f"{name} has the id {number}, but the model's embedding has {f.vocab_size} rows; tokenizer and model do not belong "
            "together"
        )
    if f.closing and contains(f.generation_prompt.ids, f.closing.ids) and f.owner == "prompt":
        raise TurnFormatError(
            "owner is prompt, but the generation prompt already contains the closing marker; set owner to off"
        )
