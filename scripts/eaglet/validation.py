"""From checks to decisions: which rows are kept, which are set aside, when the run stops, and what the report says.

A dataset is read row group by row group, so memory does not grow with it; the checks themselves are eaglet.checks.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from eaglet.checks import BITS, REASONS, Findings, Vocabulary, check
from eaglet.errors import ConfigError, RecordError, ValidationFailed
from eaglet.excerpts import excerpt
from eaglet.lengths import Lengths
from eaglet.ragged import Ragged
from eaglet.records import iter_jsonl, iter_tables, row_digests
from eaglet.rendering import Renderer
from eaglet.turn_format import TurnFormat

EXCERPTS = 3  # of each reason, in the report
UNCOUNTED = ("truncated", "repetition_loop")  # what a model does, no fault of capture: no part of max_bad_fraction
# Threads: the work is mostly Arrow's and numpy's, without the GIL, and a process would load the tokenizer again.
WORKERS = 2


@dataclass(frozen=True)
class Rules:
    """The config's `validation` section."""

    max_bad_fraction: float
    render_check: int
    severities: Mapping[str, str]

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "Rules":
        """Raises ConfigError for a reason code that does not exist."""
        severities = {code: reason.severity for code, reason in REASONS.items()}
        severities["truncated"] = params.get("truncated", "keep")
        for code, severity in (params.get("severity") or {}).items():
            if code not in REASONS:
                raise ConfigError(f"validation.severity.{code}: no such reason; reasons: {', '.join(REASONS)}")
            severities[code] = severity
        return cls(params.get("max_bad_fraction", 0.05), params.get("render_check", 256), severities)

    def mask(self, severities: Iterable[str], but: Iterable[str] = ()) -> int:
        """The bits of the reasons that have one of the severities."""
        return sum(
            BITS[code] for code, severity in self.severities.items() if severity in severities and code not in but
        )


class Prompts:
    """The prompts beside a raw file: in the same order, of which the raw file may lack some."""

    def __init__(self, path: Path):
        self.path = path
        self._lines = iter_jsonl(path)
        self._ahead = next(self._lines, None)
        self.template_arguments = dict(self._ahead[1].get("template_arguments") or {}) if self._ahead else {}

    def take(self, sample_ids: Sequence[str]) -> list[dict]:
        """The records of the raw file's next rows.  Raises RecordError when a row answers no prompt still to come."""
        return [self._next(name) for name in sample_ids]

    def _next(self, name: str) -> dict:
        while self._ahead is not None:
            (number, record), self._ahead = self._ahead, next(self._lines, None)
            if (record.get("template_arguments") or {}) != self.template_arguments:
                raise RecordError(
                    f"{self.path}:{number}: template_arguments {record['template_arguments']} differ from the first line's "
                    f"{self.template_arguments}; a dataset has one turn format, so make two datasets of it"
                )
            if record["sample_id"] == name:
                return record
        raise RecordError(
            f"{self.path}: no line for the raw row {name} where the raw file's order has it; raw and prompts do not belong "
            "together, run generate again"
        )


class PromptFacts(NamedTuple):
    """What the conversations of one row group say, beside their ids."""

    offered: list[frozenset[str]]  # names of the tools of each row
    rendered: int  # rows that were rendered again
    changed: list[int]  # rows whose prompt is another now
    literal: list[int]  # rows with a message that spells out a marker
    literal_markers: Counter  # marker -> times
    past_reasoning: int  # rows with reasoning in an earlier turn


class Group(NamedTuple):
    """One row group with what was found in it."""

    table: pa.Table
    prompts: Ragged
    outputs: Ragged
    about: PromptFacts
    findings: Findings
    bad: np.ndarray  # bool [R]: to be set aside
    kept: pa.Table  # the other rows, with the columns of a checked file


@dataclass
class Tally:
    """What the report says, grown row group by row group."""

    rows: int = 0
    kept: int = 0
    counted: int = 0  # rows that count against max_bad_fraction
    counted_boundary: int = 0  # those of them whose reasoning is not where the turn format has it
    reasons: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)  # main reason -> rows set aside
    excerpts: dict[str, list[dict]] = field(default_factory=lambda: {code: [] for code in REASONS})
    tokens: Counter = field(default_factory=Counter)
    lengths: dict[str, Lengths] = field(
        default_factory=lambda: {n: Lengths() for n in ("prompt", "reasoning", "answer", "turn")}
    )
    rendered: int = 0
    literal_markers: Counter = field(default_factory=Counter)
    past_reasoning: int = 0


class Validator:
    """Decides about one dataset's rows under one turn format."""

    def __init__(self, turn_format: TurnFormat, renderer: Renderer, rules: Rules):
        self.turn_format, self.renderer, self.rules = turn_format, renderer, rules
        self.vocabulary = Vocabulary(turn_format.vocab_size, renderer)
        self.set_aside = rules.mask(("quarantine", "stop"))
        self.counted = rules.mask(("quarantine", "stop"), but=UNCOUNTED)
        self.boundary = sum(BITS[code] for code, reason in REASONS.items() if reason.boundary)
        self.tally = Tally()

    def split(self, raw: Path, prompts: Prompts, rows: int) -> Iterator[tuple[pa.Table, list[dict]]]:
        """(checked rows, quarantined rows) of each row group in order; `rows` is how many the raw file has.

        Raises ValidationFailed for a reason whose severity is `stop`, and at the end when too many rows are bad.
        """
        share = min(1.0, self.rules.render_check / max(rows, 1))
        waiting: deque = deque()
        with ThreadPoolExecutor(WORKERS) as pool:
            for table in iter_tables(raw, "raw"):
                about = self.look_at_prompts(table, prompts.take(table["sample_id"].to_pylist()), share)
                waiting.append(pool.submit(self.check, table, about))
                if len(waiting) > WORKERS:
                    yield self.decide(waiting.popleft().result())
            while waiting:
                yield self.decide(waiting.popleft().result())
        self.refuse_too_many()

    def look_at_prompts(self, table: pa.Table, records: Sequence[Mapping], share: float) -> PromptFacts:
        """Render a share of the prompts again (which, is decided by sample_id), and look for markers in messages."""
        rendered, changed, literal, markers, past = 0, [], [], Counter(), 0
        for row, record in enumerate(records):
            if spelled := self.renderer.literal_markers(record["messages"], record.get("tools")):
                markers.update(spelled)
                literal.append(row)
            past += any(m["role"] == "assistant" and m.get("reasoning_content") for m in record["messages"])
            if int(record["sample_id"][:8], 16) < share * 2**32:
                rendered += 1
                fresh = self.renderer.prompt_ids(
                    record["messages"], record.get("tools"), record.get("template_arguments")
                )
                if fresh != table["prompt_ids"][row].as_py():
                    changed.append(row)
        offered = [frozenset(tool["function"]["name"] for tool in record.get("tools") or []) for record in records]
        return PromptFacts(offered, rendered, changed, literal, markers, past)

    def check(self, table: pa.Table, about: PromptFacts) -> Group:
        """Everything that is found out about a row group."""
        prompts, outputs = (Ragged.from_arrow(table[name]) for name in ("prompt_ids", "output_ids"))
        finish_reasons = np.array(table["finish_reason"].to_pylist(), object)
        findings = check(prompts, outputs, finish_reasons, self.turn_format, self.vocabulary, about.offered.__getitem__)
        findings.add("prompt_changed", np.array(about.changed, int))
        if self.renderer.target.literal_markers == "count":
            findings.add("literal_marker", np.array(about.literal, int))
        bad = findings.reasons & self.set_aside != 0
        kept = table.filter(pa.array(~bad))
        digests = row_digests(kept)
        kept = kept.append_column("think_end", pa.array(findings.think_end[~bad]))
        kept = kept.append_column("row_digest", pa.array(digests, pa.string()))
        return Group(table, prompts, outputs, about, findings, bad, kept)

    def decide(self, group: Group) -> tuple[pa.Table, list[dict]]:
        """Count a row group and part it into checked and quarantined rows."""
        self._count(group)
        for code, severity in self.rules.severities.items():
            if severity == "stop" and self.tally.reasons[code]:
                raise ValidationFailed(self._stopped(code))
        rejected = group.table.filter(pa.array(group.bad)).to_pylist()
        for row, record in zip(np.flatnonzero(group.bad).tolist(), rejected, strict=True):
            codes = group.findings.codes(row)
            main = next(code for code in codes if self.rules.severities[code] != "keep")
            self.tally.dropped[main] += 1
            record.update(reasons=codes, excerpt=self._excerpt(group, row, main))
        return group.kept, rejected

    def _count(self, group: Group) -> None:
        tally, found, outputs, kept = self.tally, group.findings, group.outputs, ~group.bad
        counted = found.reasons & self.counted != 0
        tally.rows += len(kept)
        tally.kept += int(kept.sum())
        tally.counted += int(counted.sum())
        tally.counted_boundary += int((counted & (found.reasons & self.boundary != 0)).sum())
        tally.tokens.update(
            prompt=int(group.prompts.lengths.sum()),
            output=int(outputs.lengths.sum()),
            checked_prompt=int(group.prompts.lengths[kept].sum()),
            checked_output=int(outputs.lengths[kept].sum()),
        )
        tally.rendered += group.about.rendered
        tally.literal_markers.update(group.about.literal_markers)
        tally.past_reasoning += group.about.past_reasoning
        thought = found.think_end >= 0
        reasons = self.turn_format.owner in ("prompt", "model")
        tally.lengths["prompt"].add(group.prompts.lengths[kept])
        tally.lengths["turn"].add(outputs.lengths[kept])
        tally.lengths["reasoning"].add(found.think_end[kept & thought])
        tally.lengths["answer"].add(
            (outputs.lengths - np.maximum(found.think_end, 0))[kept & thought if reasons else kept]
        )
        for code, bit in BITS.items():
            rows = np.flatnonzero(found.reasons & bit)
            tally.reasons[code] += len(rows)
            for row in rows[: EXCERPTS - len(tally.excerpts[code])].tolist():
                name = group.table["sample_id"][row].as_py()
                tally.excerpts[code].append({"sample_id": name, "excerpt": self._excerpt(group, row, code)})

    def _excerpt(self, group: Group, row: int, code: str) -> str:
        place = group.findings.places.get(code, {}).get(row, int(group.findings.think_end[row]))
        return excerpt(self.renderer.decode, group.prompts.row(row), group.outputs.row(row), place)

    def _stopped(self, code: str) -> str:
        (example, *_) = self.tally.excerpts[code]
        remedy = REMEDIES.get(code, f"to set such rows aside instead, set validation.severity.{code} to quarantine")
        return f"row {example['sample_id']} has {code}: {REASONS[code].what}\n    {example['excerpt']!r}\n{remedy}"

    def refuse_too_many(self) -> None:
        """Raises ValidationFailed when a larger share of the rows is bad than `max_bad_fraction`."""
        tally, limit = self.tally, self.rules.max_bad_fraction
        if not tally.rows or tally.counted / tally.rows <= limit:
            return
        told = [
            f"{tally.counted} of {tally.rows} rows ({tally.counted / tally.rows:.1%}) are bad, more than "
            f"validation.max_bad_fraction ({limit:.1%}) allows; nothing was written:"
        ]
        for code, rows in tally.reasons.most_common():
            if rows and BITS[code] & self.counted:
                (example, *_) = tally.excerpts[code]
                told.append(
                    f"  {code}: {rows} rows ({REASONS[code].what}), e.g. {example['sample_id']}: {example['excerpt']!r}"
                )
        if tally.counted_boundary * 2 >= tally.counted:
            told.append(PARSER)
        else:
            told.append(
                "Look at the rows; if they are what the model writes, set validation.severity for their reasons"
            )
        raise ValidationFailed("\n".join(told))

    def report(self) -> dict:
        """What the stage's report says; all shares are of the rows read."""
        tally, rows = self.tally, max(self.tally.rows, 1)
        return {
            "rows_in": tally.rows,
            "rows_out": tally.kept,
            "quarantined": tally.rows - tally.kept,
            "dropped": dict(sorted(tally.dropped.items())),
            "bad": {
                "rows": tally.counted,
                "share": round(tally.counted / rows, 6),
                "limit": self.rules.max_bad_fraction,
            },
            "truncated": {"rows": tally.reasons["truncated"], "share": round(tally.reasons["truncated"] / rows, 6)},
            "reasons": {
                code: {
                    "rows": tally.reasons[code],
                    "share": round(tally.reasons[code] / rows, 6),
                    "severity": self.rules.severities[code],
                    "what": reason.what,
                    "excerpts": tally.excerpts[code],
                }
                for code, reason in REASONS.items()
            },
            "tokens": {name: tally.tokens[name] for name in ("prompt", "output", "checked_prompt", "checked_output")},
            "lengths": {name: lengths.summary() for name, lengths in tally.lengths.items()},
            "render_check": {"rows": tally.rendered, "changed": tally.reasons["prompt_changed"]},
            "literal_markers": {
                "treatment": self.renderer.target.literal_markers,
                "found": dict(sorted(tally.literal_markers.items())),
            },
            "past_reasoning": {"rows": tally.past_reasoning, "treatment": self.turn_format.past_reasoning},
            "owner": self.turn_format.owner,
        }


PARSER = (
    "In most of them the reasoning is not where the turn format has it: separated, stripped, emptied or moved. A reasoning parser between "
    "the model and the capture does that. Run the server without --reasoning-parser (and without a proxy that rewrites "
    "answers), remove what was captured through it (the dataset's journal below results/store/generations/), and run again. "
    "If `snakemake check` shows a turn format that is not the model's, set target.turn_format instead; if the excerpts are what a "
    "weak model writes of itself, raise validation.max_bad_fraction"
)
REMEDIES = {
    "id_out_of_range": "the server runs another model or tokenizer than target.model names, or the file is damaged; check the server",
    "prompt_changed": (
        "the tokenizer, the chat template or its arguments are others than at capture, or the template renders differently "
        "from one time to the next; run the stages target and generate again"
    ),
}
