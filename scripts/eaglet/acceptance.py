"""What speculative decoding is judged by: acceptance length and accepted share per draft position, counted from rounds.

Acceptance length is tokens emitted per verification, that is accepted drafted tokens + the target's own: 1 without a
drafter, draft_tokens + 1 at most.  The accepted share of position i is over all rounds that drafted so far, so it falls
with i.  A round belongs to the region (reasoning, answer, tool call) of the first token that it emits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eaglet.speculative import Round
from eaglet.turn_format import Marker, TurnFormat

REGIONS = ("reasoning", "answer", "tool_call")


@dataclass
class Acceptance:
    """Sums over rounds."""

    rounds: int = 0
    tokens: int = 0  # emitted
    proposed: list[int] = field(default_factory=list)  # by draft position: rounds that drafted so far
    accepted: list[int] = field(default_factory=list)  # by draft position: rounds that kept so much

    def add(self, rounds: Iterable[Round]) -> "Acceptance":
        for one in rounds:
            self.rounds += 1
            self.tokens += one.emitted
            while len(self.proposed) < one.proposed:
                self.proposed.append(0)
                self.accepted.append(0)
            for place in range(one.proposed):
                self.proposed[place] += 1
                self.accepted[place] += place < one.accepted
        return self

    @property
    def length(self) -> float | None:
        """Tokens per verification; None without rounds."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def shares(self) -> list[float]:
        """Accepted share of each draft position, from the first."""
        return [a / p for a, p in zip(self.accepted, self.proposed, strict=True)]

    def as_json(self) -> dict:
        return {
            "acceptance_length": None if self.length is None else round(self.length, 4),
            "accepted_share": [round(share, 4) for share in self.shares],
            "verifications": self.rounds,
            "tokens": self.tokens,
        }


def by_region(rounds: Sequence[Round], regions: Sequence[str]) -> dict[str, list[Round]]:
    """The rounds of one output, by the region of the first token that each emitted."""
    found: dict[str, list[Round]] = {}
    for one in rounds:
        found.setdefault(regions[one.start], []).append(one)
    return found


def regions_of(output_ids: Sequence[int], turn_format: TurnFormat) -> list[str]:
    """The region of each output token.  Markers belong to the region that they enclose."""
    regions = ["answer"] * len(output_ids)
    answer = 0
    if turn_format.owner in ("prompt", "model") and turn_format.closing is not None:
        closed = turn_format.think_end(output_ids)
        answer = closed if closed >= 0 else len(output_ids)
        regions[:answer] = ["reasoning"] * answer
    for start, end in _tool_calls(output_ids, answer, turn_format):
        regions[start:end] = ["tool_call"] * (end - start)
    return regions


def _tool_calls(output_ids: Sequence[int], start: int, turn_format: TurnFormat) -> Iterable[tuple[int, int]]:
    """Spans of tool calls from `start` on; one that is not closed reaches to the end."""
    markers = turn_format.tool_calls
    if markers is None:
        return
    opening, closing = markers.call_begin, markers.call_end
    if markers.section_begin is not None:
        opening, closing = markers.section_begin, markers.section_end
    while (begin := _find(output_ids, opening, start)) >= 0:
        end = -1 if closing is None else _find(output_ids, closing, begin)
        start = len(output_ids) if end < 0 else end + len(closing.ids)
        yield begin, start


def _find(ids: Sequence[int], marker: Marker, start: int) -> int:
    """Index of the marker at or after `start`; −1 where there is none."""
    size = len(marker.ids)
    return next((i for i in range(start, len(ids) - size + 1) if tuple(ids[i : i + size]) == tuple(marker.ids)), -1)
