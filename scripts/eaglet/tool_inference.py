"""How a turn writes tool calls, inferred: one turn with two calls is rendered, and what repeats belongs to a call.

With names N1, N2 and no arguments the rendering is  before N1 between N2 behind.  What `between` and `behind` start
with ends a call; what `before` and `between` end with begins one; what is left of `before` and `behind` encloses all
calls.  Only added tokens count as markers: other text has no ids of its own.
"""

import re
from collections.abc import Sequence

from eaglet.probing import REASONING, USER, Probe, common_prefix, common_suffix, renders
from eaglet.turn_format import Marker, ToolMarkers

NAMES = ("eaglet_probe", "eaglet_second")
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Looks up.", "parameters": {"type": "object", "properties": {}}},
    }
    for name in NAMES
]
EMPTY = re.compile(r"\{\s*\}\s*\}?")  # the arguments {}, and the brace that closes a call written as one object


def infer_tool_markers(
    probe: Probe, closing: Marker | None, end_of_turn_ids: Sequence[int]
) -> tuple[ToolMarkers | None, str]:
    """(markers, how they were found); no markers where calls are not rendered, or are written without added tokens."""
    several = len(NAMES) if _renders(probe, 2) else 1 if _renders(probe, 1) else 0
    if not several:
        return None, "the template refuses a turn that calls a tool"
    turn = _turn(probe, several)
    if any(name not in turn for name in NAMES[:several]):
        return None, "the template does not write tool calls"
    if REASONING in turn:
        turn = turn[turn.index(REASONING) + len(REASONING) :].lstrip()
    else:
        turn = turn[len(probe.common_start(turn, probe.generation_prompt.text)) :]
    if closing is not None and closing.text in turn:
        turn = turn[turn.index(closing.text) + len(closing.text) :]
    how = f"a turn with {several} call{'s' if several > 1 else ''} was rendered: {turn!r}"
    before, rest = turn.split(NAMES[0], 1)
    behind = turn.rsplit(NAMES[several - 1], 1)[1]
    ends = [probe.renderer.decode([i]) for i in end_of_turn_ids]
    call_end_by_turn = next((text for text in ends if behind.rstrip().endswith(text)), None)
    if several == 1:
        return _single(probe, before, behind, call_end_by_turn, how)
    between = rest.split(NAMES[1], 1)[0]
    if call_end_by_turn:
        behind = behind[: behind.rindex(call_end_by_turn)]
    head, between = _split_arguments(between)
    _, behind = _split_arguments(behind)
    call_end = probe.within_added(_common(probe, between, behind, common_prefix))
    opens = between[between.index(call_end) + len(call_end) :] if call_end else between
    call_begin = probe.within_added(_common(probe, before, opens, common_suffix))
    around_begin = before[: before.rindex(call_begin)] if call_begin else before
    around_end = behind[behind.index(call_end) + len(call_end) :] if call_end else behind
    section_begin, section_end = probe.within_added(around_begin), probe.within_added(around_end)
    if (
        not call_begin and section_begin and section_end
    ):  # calls have no markers of their own: the section stands for them
        call_begin, call_end, section_begin, section_end = section_begin, section_end, "", ""
    if not call_begin or not call_end:
        return None, f"calls are not marked by added tokens; {how}"
    call_begin = _unambiguous(probe, turn, call_begin, before, several)
    argument_begin = probe.within_added(head)
    markers = ToolMarkers(
        call_begin=_marker(probe, call_begin),
        call_end=_marker(probe, call_end),
        argument_begin=_marker(probe, argument_begin),
        section_begin=_marker(probe, section_begin),
        section_end=_marker(probe, section_end),
        **_shape(
            probe, before[before.rindex(call_begin) + len(call_begin) :] if call_begin in before else "", head, call_end
        ),
    )
    return markers, how


def _turn(probe: Probe, calls: int) -> str:
    field = probe.renderer.reasoning_field
    message = {"content": "", "tool_calls": _calls(probe, calls), **({field: REASONING} if field else {})}
    return probe.turn(message, TOOLS if probe.tools else None)


def _renders(probe: Probe, calls: int) -> bool:
    message = {"role": "assistant", "content": "", "tool_calls": _calls(probe, calls)}
    return renders(probe.renderer, [USER, message], TOOLS if probe.tools else None)


def _calls(probe: Probe, calls: int) -> list[dict]:
    return [
        {"id": f"functions.{name}:{n}", "type": "function", "function": {"name": name, "arguments": {}}}
        for n, name in enumerate(NAMES[:calls])
    ]


def _split_arguments(text: str) -> tuple[str, str]:
    """(up to the empty arguments, behind them); where they are not written as JSON, all is behind."""
    found = EMPTY.search(text)
    return (text[: found.start()], text[found.end() :]) if found else ("", text)


def _common(probe: Probe, a: str, b: str, common) -> str:
    """What two texts start or end with in common, in whole tokens."""
    return probe.renderer.decode(common(probe.encode(a), probe.encode(b)))


def _unambiguous(probe: Probe, turn: str, begin: str, before: str, calls: int) -> str:
    """`begin`, longer by the word behind it where the same tokens stand in other places of the turn too."""
    if turn.count(begin) == calls:
        return begin
    behind = before[before.rindex(begin) + len(begin) :]
    word = re.match(r"\w+", behind)
    return begin + word.group() if word else begin


def _shape(probe: Probe, prefix: str, head: str, call_end: str) -> dict:
    """How name and arguments stand in a call: `prefix` NAME `head`, with `head` ending where the arguments begin."""
    if "{" in prefix:
        return {"arguments": "call", "name_pattern": None}
    arguments = "json" if _writes_json(probe) else "other"
    suffix = head[: head.index(probe.within_added(head))] if probe.within_added(head) else head
    suffix = re.split(r"\s", suffix, maxsplit=1)[0]
    ending = re.sub(r"\d+", r"\\d+", re.escape(suffix)) if suffix else r"(?=[\s<>\"]|$)"
    return {"arguments": arguments, "name_pattern": re.escape(prefix.lstrip()) + r"([^\s<>\"]+?)" + ending}


def _writes_json(probe: Probe) -> bool:
    return EMPTY.search(_turn(probe, 1)) is not None


def _single(probe: Probe, before: str, behind: str, call_end: str | None, how: str) -> tuple[ToolMarkers | None, str]:
    """For templates that write one call a turn."""
    head, rest = _split_arguments(behind)
    begin, end = probe.within_added(before), probe.within_added(rest[: rest.rindex(call_end)] if call_end else rest)
    argument_begin = probe.within_added(head)
    if begin and end:
        shape = _shape(probe, before[before.rindex(begin) + len(begin) :], head, end)
        return ToolMarkers(_marker(probe, begin), _marker(probe, end), _marker(probe, argument_begin), **shape), how
    if call_end and argument_begin:  # the call ends the turn, and nothing but its arguments has a marker
        last = probe.token_texts(probe.encode(argument_begin))[-1]
        shape = _shape(probe, before, head, call_end)
        return ToolMarkers(
            None, _marker(probe, call_end), _marker(probe, last), **shape
        ), f"a call ends the turn; {how}"
    return None, f"calls are not marked by added tokens; {how}"


def _marker(probe: Probe, text: str) -> Marker | None:
    return Marker(tuple(probe.encode(text)), text) if text else None
