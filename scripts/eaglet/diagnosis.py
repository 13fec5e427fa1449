"""What became of the boundary between reasoning and answer in responses that something else captured.

A response is whole when the closing marker stands where the model wrote it.  Servers that parse reasoning delete the
marker and the white space around it, or leave it in the wrong field; nobody can tell afterwards which tokens there
were.  Each finding says what is wrong and what can still be saved.  This module reads responses as chat APIs, SGLang's
native API and eaglet's own files have them; it loads no tokenizer, since re-tokenized text proves nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eaglet.turn_format import Marker, TurnFormat

VERDICTS = ("whole", "none", "unfinished", "misplaced", "lost")  # from best to worst
STOPPED = ("stop", "tool_calls", "function_call", "eos", "end_turn")

# code -> (verdict, what was found, what can be saved)
FINDINGS = {
    "exact": (
        "whole",
        "ids with the closing marker once, where it belongs",
        "everything, token for token",
    ),
    "marker_in_text": (
        "whole",
        "the closing marker stands once, between reasoning and answer",
        "both texts, split without doubt; ids would be re-tokenized and are not exact",
    ),
    "no_reasoning": (
        "none",
        "no reasoning was written",
        "the answer; without ids it would be re-tokenized and is not exact",
    ),
    "cut_in_reasoning": (
        "unfinished",
        "the output was cut before the reasoning had ended, so there is no boundary",
        "the reasoning as far as it goes",
    ),
    "marker_in_reasoning_field": (
        "misplaced",
        "the closing marker is inside the reasoning field, and part of the answer with it",
        "both texts: what follows the marker in the field belongs in front of the content",
    ),
    "marker_in_content_field": (
        "misplaced",
        "reasoning came in a field of its own, and the closing marker is still in the content",
        "both texts: what precedes the marker in the content belongs behind the reasoning",
    ),
    "several_markers": (
        "misplaced",
        "the closing marker stands more than once",
        "the texts; where the answer begins has to be looked at",
    ),
    "opened_again": (
        "misplaced",
        "the opening marker stands inside the output",
        "the texts; where the reasoning begins has to be looked at",
    ),
    "opening_in_output": (
        "misplaced",
        "the output begins with the opening marker, which belongs to the prompt",
        "everything: the marker's ids can be moved to the end of the prompt",
    ),
    "split_by_parser": (
        "lost",
        "reasoning and content came in separate fields: the marker and the white space around it were deleted",
        "both texts; marker, white space and ids would be guesses",
    ),
    "answer_in_reasoning_field": (
        "lost",
        "the model ended by itself, all of its text is in the reasoning field, and there is no marker",
        "the text, without where the answer begins",
    ),
    "reasoning_dropped": (
        "lost",
        "reasoning tokens were counted and no reasoning was returned",
        "the answer alone",
    ),
    "no_marker": (
        "lost",
        "there is no closing marker: the reasoning was dropped, or it is not told from the answer",
        "the text, without knowing what it is part of",
    ),
    "tool_calls_parsed": (
        "lost",
        "tool calls were taken out of the text and rewritten",
        "names and arguments of the calls, not what the model wrote",
    ),
    "nothing_returned": (
        "lost",
        "the response holds no text and no ids",
        "nothing",
    ),
    "prompt_not_opened": (
        "lost",
        "the prompt's ids do not end with the opening marker: it is not the prompt that the model should have seen",
        "the output's ids, as an answer to another prompt",
    ),
    "end_missing": (
        "lost",
        "the model ended by itself, and its ids do not end with an end-of-turn id",
        "the rest; the last id can be put back where the record says which one it was",
    ),
}


@dataclass(frozen=True)
class Markers:
    """The texts of the markers, and the turn format where one is given; ids can only be read with it."""

    opening: str = "<think>"
    closing: str = "</think>"
    turn_format: TurnFormat | None = None

    @classmethod
    def of(cls, turn_format: TurnFormat) -> "Markers":
        opening, closing = turn_format.opening, turn_format.closing
        return cls(opening.text.strip() if opening else "", closing.text.strip() if closing else "", turn_format)


@dataclass(frozen=True)
class Response:
    """One answer of a model, from whatever shape it was captured in; None is what the capture does not say."""

    content: str = ""
    reasoning: str = ""
    tool_calls: bool = False
    finish_reason: str | None = None
    reasoning_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: Sequence[int] | None = None
    output_ids: Sequence[int] | None = None

    @property
    def stopped(self) -> bool:
        return self.finish_reason in STOPPED


@dataclass(frozen=True)
class Diagnosis:
    verdict: str  # one of VERDICTS
    findings: tuple[str, ...]  # codes of FINDINGS, the worst first

    @classmethod
    def of(cls, codes: Sequence[str]) -> "Diagnosis":
        ranked = sorted(dict.fromkeys(codes), key=lambda code: -VERDICTS.index(FINDINGS[code][0]))
        return cls(FINDINGS[ranked[0]][0], tuple(ranked))


# --- Reading ---


def responses(record: Mapping[str, Any]) -> Iterator[Response]:
    """The answers in a record: each choice of a chat API, or the record itself; nothing when it is none."""
    if isinstance(inner := record.get("response"), Mapping):
        record = {**record, **inner}
    if isinstance(choices := record.get("choices"), list):
        for choice in choices:
            if isinstance(choice, Mapping):
                yield _response({**record, **choice})
        return
    found = _response(record)
    if found != Response():
        yield found


def _response(record: Mapping[str, Any]) -> Response:
    said = _said(record)
    about = record.get("meta_info") if isinstance(record.get("meta_info"), Mapping) else {}
    usage = record.get("usage") if isinstance(record.get("usage"), Mapping) else about
    details = usage.get("completion_tokens_details")
    finish = record.get("finish_reason", said.get("finish_reason", about.get("finish_reason")))
    return Response(
        content=_text(said, "content", "text"),
        reasoning=_text(said, "reasoning_content", "reasoning", "thinking"),
        tool_calls=bool(said.get("tool_calls") or said.get("function_call")),
        finish_reason=finish.get("type") if isinstance(finish, Mapping) else finish,
        reasoning_tokens=_count({**usage, **(details if isinstance(details, Mapping) else {})}, "reasoning_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        prompt_ids=_ids(record, "prompt_ids", "input_ids", "prompt_token_ids"),
        output_ids=_ids(record, "output_ids", "token_ids"),
    )


def _said(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the answer's fields are: a `message`, the last of `messages` if it is the assistant's, or the record."""
    if isinstance(message := record.get("message"), Mapping):
        return message
    if any(isinstance(record.get(name), str) for name in ("content", "text", "reasoning", "reasoning_content")):
        return record
    messages = record.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return last if isinstance(last, Mapping) and last.get("role") == "assistant" else record


def _text(said: Mapping[str, Any], *names: str) -> str:
    for name in names:
        value = said.get(name)
        if isinstance(value, list):  # a list of parts, as some APIs return content
            value = "".join(part.get("text") or "" for part in value if isinstance(part, Mapping))
        if isinstance(value, str) and value:
            return value
    return ""


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) else None


def _ids(record: Mapping[str, Any], *names: str) -> list[int] | None:
    for name in names:
        value = record.get(name)
        if isinstance(value, list) and all(isinstance(i, int) for i in value):
            return value
    return None


# --- Judging ---


def diagnose(response: Response, markers: Markers, *, raw_capture: bool = False) -> Diagnosis:
    """`raw_capture`: the file's other responses show that no parser split them, so that a text that was cut without
    a marker is reasoning that had not ended yet."""
    if response.output_ids is not None and markers.turn_format is not None:
        return Diagnosis.of(_judged_by_ids(response, markers.turn_format))
    codes = [_judged_by_text(response, markers, raw_capture)]
    if response.tool_calls:
        codes.append("tool_calls_parsed")
    return Diagnosis.of(codes)


def _judged_by_ids(response: Response, turn_format: TurnFormat) -> list[str]:
    output, codes = list(response.output_ids or ()), []
    if not output:
        return ["nothing_returned"]
    opening = _without_white_space(turn_format.opening)
    begins_open = bool(opening) and tuple(output[: len(opening)]) == opening
    if turn_format.owner == "prompt" and begins_open:
        codes.append("opening_in_output")
    elif response.prompt_ids is not None and not turn_format.opens(response.prompt_ids):
        codes.append("prompt_not_opened")
    if response.stopped and output[-1] not in turn_format.end_of_turn_ids:
        codes.append("end_missing")
    if turn_format.closing is None or turn_format.owner not in ("prompt", "model"):
        return codes or ["no_reasoning"]
    closings = occurrences(output, turn_format.closing.ids)
    openings = occurrences(output[len(opening) if begins_open else 0 :], opening)
    if not closings and turn_format.owner == "model" and not begins_open and not openings:
        codes.append("no_reasoning")
    elif not closings:
        codes.append("no_marker" if response.stopped else "cut_in_reasoning")
    elif not turn_format.interleaved:
        codes += ["several_markers"] * (closings > 1) + ["opened_again"] * (openings > 0)
    return codes or ["exact"]


def _without_white_space(opening: Marker | None) -> tuple[int, ...]:
    """The opening marker's ids less the white space behind it, which is one id wherever it is more than none."""
    if opening is None:
        return ()
    return opening.ids[:-1] if len(opening.ids) > 1 and opening.text != opening.text.rstrip() else opening.ids


def occurrences(ids: Sequence[int], marker: Sequence[int]) -> int:
    """How often `marker` stands in `ids` as consecutive ids."""
    if not marker:
        return 0
    length, marker = len(marker), list(marker)
    return sum(list(ids[start : start + length]) == marker for start in range(len(ids) - length + 1))


def _judged_by_text(response: Response, markers: Markers, raw_capture: bool) -> str:
    content, reasoning = response.content, response.reasoning
    if not content and not reasoning:
        return "no_marker" if response.tool_calls else "nothing_returned"
    if not markers.closing:
        return "no_reasoning"
    opened = content.lstrip().removeprefix(markers.opening) if markers.opening else content
    closings = content.count(markers.closing) + reasoning.count(markers.closing)
    if closings > 1:
        return "several_markers"
    if markers.opening and (markers.opening in opened or (reasoning and markers.opening in content)):
        return "opened_again"
    if closings:
        if not reasoning:
            return "marker_in_text"
        return "marker_in_reasoning_field" if markers.closing in reasoning else "marker_in_content_field"
    return _without_a_marker(response, raw_capture)


def _without_a_marker(response: Response, raw_capture: bool) -> str:
    if response.reasoning:
        if response.content or response.tool_calls:
            return "split_by_parser"
        return "answer_in_reasoning_field" if response.stopped else "cut_in_reasoning"
    counted = response.reasoning_tokens
    if counted and counted == response.completion_tokens and not response.stopped:
        return "cut_in_reasoning"
    if counted:
        return "reasoning_dropped"
    if raw_capture and response.finish_reason == "length":
        return "cut_in_reasoning"
    if counted == 0 and response.stopped:
        return "no_reasoning"
    return "no_marker"
