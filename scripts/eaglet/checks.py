"""What is checked of each row, and where a row's parts lie: pure functions over arrays of ids and a turn format.

A check gives each row a yes or no under a stable code of `REASONS`.  Structure is checked in whole row groups; text is
decoded only where it is needed (tool calls, and ids that are parts of characters).  What becomes of a row with
a reason is for the config to say and for validate to do.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from eaglet.ragged import Ragged
from eaglet.rendering import Renderer
from eaglet.turn_format import Marker, ToolMarkers, TurnFormat


class Reason(NamedTuple):
    """What a code means and what happens by default; `boundary`: a parser between model and capture does such things."""

    severity: str  # keep | quarantine | stop
    what: str
    boundary: bool = False


# In the order in which one of several is called the main one: the first usually causes the others.
REASONS = {
    "id_out_of_range": Reason("stop", "an id that the model's embedding does not have"),
    "prompt_changed": Reason("stop", "the prompt is not what its conversation renders to now"),
    "output_empty": Reason("quarantine", "no output ids at all", boundary=True),
    "finish_unknown": Reason("quarantine", "the generation ended neither by itself nor at the length limit"),
    "opening_missing": Reason("quarantine", "the opening marker is not where the turn format has it", boundary=True),
    "closing_missing": Reason("quarantine", "the turn ended, but its reasoning was not closed", boundary=True),
    "closing_repeated": Reason("quarantine", "the closing marker again", boundary=True),
    "opening_repeated": Reason("quarantine", "the opening marker again", boundary=True),
    "reasoning_empty": Reason("quarantine", "nothing between opening and closing marker", boundary=True),
    "answer_empty": Reason("quarantine", "nothing between closing marker and end of turn", boundary=True),
    "end_wrong": Reason("quarantine", "the turn ended by itself, but not with an end-of-turn id"),
    "ids_after_end": Reason("quarantine", "ids after an end-of-turn id"),
    "tool_calls_unbalanced": Reason("quarantine", "a tool marker without its partner"),
    "tool_calls_nested": Reason("quarantine", "a tool call inside a tool call"),
    "tool_arguments_invalid": Reason("quarantine", "a tool call whose arguments are not a JSON object"),
    "tool_unknown": Reason("quarantine", "a call of a tool that was not offered"),
    "replacement_characters": Reason("quarantine", "the output decodes to replacement characters (U+FFFD)"),
    "repetition_loop": Reason("quarantine", "the same few ids again and again"),
    "truncated": Reason("keep", "cut at the length limit"),
    "literal_marker": Reason("keep", "a message of the prompt spells out a marker, which became the marker's id"),
}
BITS = {code: 1 << n for n, code in enumerate(REASONS)}
LOOP_PERIOD, LOOP_IDS, LOOP_TIMES = 64, 96, 6  # a loop: up to 64 ids, 6 times or more, 96 ids or more in all
STRIDE = 16


class Vocabulary:
    """What single ids look like as text, found out when an id is first seen.

    `blank`: white space only.  `fragment`: part of a character; only these are decoded together with their neighbours.
    """

    def __init__(self, size: int, renderer: Renderer):
        self.size, self.decode, self.decode_each = size, renderer.decode, renderer.decode_each
        self.known, self.blank, self.fragment = (np.zeros(size, bool) for _ in range(3))

    def learn(self, ids: np.ndarray) -> None:
        """Look at those ids (all within range) that are new."""
        seen = np.zeros(self.size, bool)
        seen[ids] = True
        new = np.flatnonzero(seen & ~self.known)
        texts = self.decode_each(new[:, None].tolist())
        self.blank[new] = [not text.strip() for text in texts]
        self.fragment[new] = ["\ufffd" in text for text in texts]
        self.known[new] = True


@dataclass
class Findings:
    """What the checks of one row group found."""

    reasons: np.ndarray  # int64 [R], bits of BITS
    think_end: np.ndarray  # int32 [R], index within output_ids just past the closing marker; −1 none
    places: dict[str, dict[int, int]] = field(default_factory=dict)  # code -> row -> index within output_ids

    def add(self, code: str, rows: np.ndarray, places: np.ndarray | None = None) -> None:
        """Note a reason for rows (bool [R] or row numbers); `places`: where in each row's output it is to be seen."""
        numbers = np.flatnonzero(rows) if rows.dtype == bool else rows
        self.reasons[numbers] |= BITS[code]
        if places is not None:
            self.places.setdefault(code, {}).update(zip(numbers.tolist(), places.tolist(), strict=True))

    def codes(self, row: int) -> list[str]:
        return [code for code, bit in BITS.items() if self.reasons[row] & bit]


def check(
    prompts: Ragged,
    outputs: Ragged,
    finish_reasons: np.ndarray,
    turn_format: TurnFormat,
    vocabulary: Vocabulary,
    offered: Callable[[int], Collection[str]],
) -> Findings:
    """All checks that a row's ids allow.

    `finish_reasons`: object [R]; `offered`: row → names of the tools that its prompt offers (asked only of rows with calls).
    """
    found = Findings(np.zeros(len(outputs), np.int64), np.full(len(outputs), -1, np.int32))
    outside = _out_of_range(prompts, outputs, turn_format.vocab_size)
    found.add("id_out_of_range", outside)
    if outside.any():  # nothing else can be said of such ids: leave them to the report
        prompts, outputs = _clipped(prompts, turn_format.vocab_size), _clipped(outputs, turn_format.vocab_size)
    vocabulary.learn(outputs.ids)
    finished = finish_reasons == "stop"
    ends = np.zeros(turn_format.vocab_size, bool)
    ends[list(turn_format.end_of_turn_ids)] = True
    _check_end(found, outputs, finish_reasons, ends)
    _check_reasoning(found, prompts, outputs, finished, turn_format, vocabulary, ends)
    _check_tool_calls(found, outputs, finished, turn_format, vocabulary, offered)
    found.add("repetition_loop", repetition_loops(outputs))
    found.add("replacement_characters", _replacement_characters(outputs, finished, vocabulary))
    return found


def _out_of_range(prompts: Ragged, outputs: Ragged, size: int) -> np.ndarray:
    outside = np.zeros(len(outputs), bool)
    for part in (prompts, outputs):
        if len(part.ids) and (part.ids.min() < 0 or part.ids.max() >= size):
            outside[part.rows_of(np.flatnonzero((part.ids < 0) | (part.ids >= size)))] = True
    return outside


def _clipped(part: Ragged, size: int) -> Ragged:
    return Ragged(np.clip(part.ids, 0, size - 1), part.offsets)


def _check_end(found: Findings, outputs: Ragged, finish_reasons: np.ndarray, ends: np.ndarray) -> None:
    """`ends`: bool [vocabulary], the end-of-turn ids."""
    finished, cut = finish_reasons == "stop", finish_reasons == "length"
    found.add("output_empty", outputs.lengths == 0)
    found.add("finish_unknown", ~(finished | cut))
    found.add("truncated", cut)
    found.add("end_wrong", finished & (outputs.lengths > 0) & ~_ends_with_one_of(outputs, ends))
    places = np.flatnonzero(ends[outputs.ids])
    early = places[places < outputs.offsets[outputs.rows_of(places) + 1] - 1]
    _add_at_first(found, "ids_after_end", outputs, early)


def _ends_with_one_of(outputs: Ragged, ends: np.ndarray) -> np.ndarray:
    well = np.zeros(len(outputs), bool)
    some = outputs.lengths > 0
    well[some] = ends[outputs.ids[outputs.offsets[1:][some] - 1]]
    return well


def _check_reasoning(
    found: Findings,
    prompts: Ragged,
    outputs: Ragged,
    finished: np.ndarray,
    turn_format: TurnFormat,
    vocabulary: Vocabulary,
    ends: np.ndarray,
) -> None:
    f, starts, some = turn_format, outputs.offsets[:-1], outputs.lengths > 0
    nonblank = np.concatenate([[0], np.cumsum(~vocabulary.blank[outputs.ids])])  # how many before each position
    opening = core(f.opening, vocabulary) if f.opening and f.owner != "none" else ()
    openings = outputs.occurrences(opening) if opening else np.zeros(0, np.int64)
    first_opening = outputs.first(openings)
    if f.owner in ("prompt", "off"):
        ending = f.opening.ids if f.owner == "prompt" else f.generation_prompt.ids
        found.add("opening_missing", ~prompts.ends_with(ending))
    elif f.owner == "model":
        leading = nonblank[np.maximum(first_opening, 0)] - nonblank[starts]
        found.add("opening_missing", some & ((first_opening < 0) | (leading > 0)))
    if not f.interleaved:
        _add_at_first(found, "opening_repeated", outputs, _beyond(outputs, openings, allowed=int(f.owner == "model")))

    reasons = f.owner in ("prompt", "model")
    answer_start = starts
    if f.closing and f.owner != "none":
        closings = outputs.occurrences(f.closing.ids)
        if not f.interleaved:
            _add_at_first(found, "closing_repeated", outputs, _beyond(outputs, closings, allowed=int(reasons)))
    if reasons:
        first_closing = outputs.first(closings)
        closed = first_closing >= 0
        found.add("closing_missing", finished & some & ~closed)
        at = outputs.last(closings) if f.interleaved else first_closing
        found.think_end[:] = np.where(closed, at + len(f.closing.ids) - starts, -1)
        opened = (f.owner == "model") & (first_opening >= 0)
        reasoning_start = np.where(opened, first_opening + len(opening), starts)
        reasoning_stop = np.maximum(first_closing, reasoning_start)
        found.add("reasoning_empty", closed & (nonblank[reasoning_stop] == nonblank[reasoning_start]))
        answer_start = np.where(closed, starts + found.think_end, -1)
    answer_stop = outputs.offsets[1:] - _ends_with_one_of(outputs, ends)
    answered = finished & some & (answer_start >= 0)
    answer_start = np.minimum(answer_start, answer_stop)
    found.add("answer_empty", answered & (nonblank[answer_stop] == nonblank[answer_start]))


def core(marker: Marker, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The marker's ids without the white space behind it."""
    ids = list(marker.ids)
    while len(ids) > 1 and not vocabulary.decode([ids[-1]]).strip():
        ids.pop()
    return tuple(ids)


def _beyond(outputs: Ragged, positions: np.ndarray, allowed: int) -> np.ndarray:
    """The positions that are not the first `allowed` (0 or 1) of their row."""
    rows = outputs.rows_of(positions)
    return positions if not allowed else positions[1:][rows[1:] == rows[:-1]]


def _add_at_first(found: Findings, code: str, outputs: Ragged, positions: np.ndarray) -> None:
    """Note the rows that have one of the (ascending) positions, at the first."""
    first = outputs.first(positions)
    rows = np.flatnonzero(first >= 0)
    found.add(code, rows, first[rows] - outputs.offsets[rows])


class Call(NamedTuple):
    """A tool call in a row's output: ids[start:stop] between its markers, or up to the end of the turn."""

    start: int
    stop: int


def _check_tool_calls(
    found: Findings,
    outputs: Ragged,
    finished: np.ndarray,
    turn_format: TurnFormat,
    vocabulary: Vocabulary,
    offered: Callable[[int], Collection[str]],
) -> None:
    if turn_format.tool_calls is None:
        return
    reader = CallReader(turn_format.tool_calls, vocabulary.decode)
    for row, events in _tool_events(outputs, turn_format.tool_calls):
        ids = outputs.row(row)
        if turn_format.tool_calls.call_begin is None:
            calls = reader.call_at_end(ids, max(0, int(found.think_end[row])))
            faults = {}
        else:
            calls, faults = match_calls(events, finished=bool(finished[row]))
        names = offered(row) if calls else ()
        for call in calls:
            name, valid = reader.read(ids[call.start : call.stop])
            if not valid:
                faults.setdefault("tool_arguments_invalid", call.start)
            if name not in names:
                faults.setdefault("tool_unknown", call.start)
        for code, place in faults.items():
            found.add(code, np.array([row]), np.array([place]))


def _tool_events(outputs: Ragged, markers: ToolMarkers) -> Iterator[tuple[int, list[tuple[int, str, int]]]]:
    """For each row with tool markers: (row, [(index within the row, marker's name, its length)] in order)."""
    kinds = ("section_begin", "section_end", "call_begin", "call_end")
    found: dict[int, list[tuple[int, str, int]]] = {}
    for kind in kinds:
        marker = getattr(markers, kind)
        if marker is None:
            continue
        positions = outputs.occurrences(marker.ids)
        rows = outputs.rows_of(positions)
        for row, place in zip(rows.tolist(), (positions - outputs.offsets[rows]).tolist(), strict=True):
            found.setdefault(row, []).append((place, kind, len(marker.ids)))
    for row in sorted(found):
        yield row, sorted(found[row])


def match_calls(events: Sequence[tuple[int, str, int]], *, finished: bool) -> tuple[list[Call], dict[str, int]]:
    """(complete calls, fault -> index) of one row's tool markers in order; a row that was cut may leave them open."""
    calls: list[Call] = []
    faults: dict[str, int] = {}
    open_calls: list[int] = []
    open_section: int | None = None
    sections = any(kind.startswith("section") for _, kind, _ in events)
    for place, kind, length in events:
        if kind == "call_begin":
            if open_calls:
                faults.setdefault("tool_calls_nested", place)
            elif sections and open_section is None:
                faults.setdefault("tool_calls_unbalanced", place)
            open_calls.append(place + length)
        elif kind == "call_end":
            if not open_calls:
                faults.setdefault("tool_calls_unbalanced", place)
            else:
                start = open_calls.pop()
                if not open_calls and "tool_calls_nested" not in faults:
                    calls.append(Call(start, place))
        elif kind == "section_begin":
            if open_section is not None:
                faults.setdefault("tool_calls_nested", place)
            open_section = place
        elif open_section is None or open_calls:
            faults.setdefault("tool_calls_unbalanced", place)
            open_section = None
        else:
            open_section = None
    if finished and (open_calls or open_section is not None):
        faults.setdefault("tool_calls_unbalanced", open_calls[-1] if open_calls else open_section)
    return calls, faults


class CallReader:
    """Reads name and arguments of a call as the target's format writes them."""

    def __init__(self, markers: ToolMarkers, decode: Callable[[Sequence[int]], str]):
        self.markers, self.decode = markers, decode
        self.pattern = re.compile(markers.name_pattern) if markers.name_pattern else None

    def call_at_end(self, ids: np.ndarray, start: int) -> list[Call]:
        """The call that ends the turn, where calls have no marker of their own to begin with."""
        end = self.markers.call_end.ids
        if tuple(ids[-len(end) :].tolist()) != end:
            return []
        return [Call(start, len(ids) - len(end))]

    def read(self, ids: np.ndarray) -> tuple[str | None, bool]:
        """(name, whether the arguments are a JSON object); arguments in another form than JSON are not looked at."""
        if self.markers.arguments == "call":
            return self._read_object(self.decode(ids.tolist()))
        if self.markers.arguments == "other":
            return self._name(self.decode(ids.tolist())), True
        begin = self.markers.argument_begin
        if begin is None:
            head, brace, rest = self.decode(ids.tolist()).partition("{")
            return self._name(head), _json_object((brace + rest)[: rest.rfind("}") + 2]) is not None
        places = Ragged.from_lists([ids]).occurrences(begin.ids)
        if not len(places):
            return self._name(self.decode(ids.tolist())), False
        at = int(places[-1] if self.markers.call_begin is None else places[0])
        arguments = _json_object(self.decode(ids[at + len(begin.ids) :].tolist()))
        return self._name(self.decode(ids[:at].tolist())), arguments is not None

    def _name(self, head: str) -> str | None:
        found = self.pattern.search(head) if self.pattern else None
        return found.group(1) if found else head.strip() or None

    def _read_object(self, text: str) -> tuple[str | None, bool]:
        call = _json_object(text)
        if call is None:
            named = re.search(r'"name"\s*:\s*"([^"]*)"', text)
            return (named.group(1) if named else None), False
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = _json_object(arguments)
        return call.get("name"), isinstance(arguments, dict)


def _json_object(text: str) -> dict | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def repetition_loops(outputs: Ragged) -> np.ndarray:
    """Rows in which up to LOOP_PERIOD ids come LOOP_TIMES in a row, over LOOP_IDS ids or more, bool [R].

    A run in which each id equals the one `period` before it shows at every STRIDE-th position too, so those alone are
    looked at first, and only rows that pass are compared in full.
    """
    ids, looping = outputs.ids, np.zeros(len(outputs), bool)
    for period in range(1, LOOP_PERIOD + 1):
        run = max(LOOP_IDS, LOOP_TIMES * period) - period
        sampled = ids[period::STRIDE] == ids[: max(0, len(ids) - period) : STRIDE]
        candidates = _runs(sampled, run // STRIDE)
        if not len(candidates):
            continue
        for row in np.unique(outputs.rows_of(candidates * STRIDE + period)).tolist():
            for near in (row, row + 1):  # a sampled run may begin in the row before
                if near < len(outputs) and not looping[near]:
                    looping[near] = _longest_run(outputs.row(near), period) >= run
    return looping


def _runs(true: np.ndarray, length: int) -> np.ndarray:
    """Where `length` or more consecutive values are true."""
    for _ in range(length - 1):
        true = true[:-1] & true[1:]
    return np.flatnonzero(true)


def _longest_run(ids: np.ndarray, period: int) -> int:
    if len(ids) <= period:
        return 0
    breaks = np.flatnonzero(ids[period:] != ids[:-period])
    return int(np.diff(np.concatenate([[-1], breaks, [len(ids) - period]])).max()) - 1


def _replacement_characters(outputs: Ragged, finished: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Rows whose text has U+FFFD; a row that was cut may end within a character.

    An id that is no fragment is whole characters, so what the runs of fragments between such ids say is enough.
    """
    places = np.flatnonzero(vocabulary.fragment[outputs.ids])
    rows = outputs.rows_of(places)
    starts = np.flatnonzero((np.diff(places, prepend=-2) > 1) | (np.diff(rows, prepend=-1) > 0))
    stops = np.append(starts, len(places))[1:]
    may_be_cut = ~finished[rows[starts]] & (places[stops - 1] + 1 == outputs.offsets[rows[starts] + 1])
    ids = outputs.ids[places].tolist()
    texts = vocabulary.decode_each([ids[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])
    told = ["\ufffd" in (text.rstrip("\ufffd") if cut else text) for text, cut in zip(texts, may_be_cut, strict=True)]
    found = np.zeros(len(outputs), bool)
    found[rows[starts][np.array(told, bool)]] = True
    return found
