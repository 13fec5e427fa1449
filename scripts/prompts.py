"""Turn a dataset's source into prompts: one JSON line for each conversation, and a report of what was dropped and why.

    python scripts/prompts.py --dataset notes --store results/store \\
        --params '{"source": {"path": "config/prompts/notes.jsonl"}, "format": "messages"}' \\
        --output results/demo/prompts/notes.jsonl --report results/demo/prompts/notes.report.json

The source is streamed, so memory does not grow with it (8 bytes a prompt are kept to find duplicates).  With
`max_prompts` the first so many accepted prompts are taken and the rest of the source is not read.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglet import program
from eaglet.conversations import Conversation, Reading, Refused
from eaglet.digests import sample_id
from eaglet.errors import SourceError
from eaglet.files import atomic_path, write_json
from eaglet.progress import progress
from eaglet.provenance import recorded
from eaglet.sources import Record, open_source

EXAMPLES = 5  # dropped records of each reason that the report shows
HOPELESS = 1000  # records after which a source without one usable record is given up
UNREADABLE = ("unreadable_record", "missing_field")  # the dataset's block does not fit the file


@dataclass
class Tally:
    """What was read, kept and dropped, in a form that depends on the source alone."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: Counter = field(default_factory=Counter)
    examples: dict[str, list[dict]] = field(default_factory=dict)
    roles: Counter = field(default_factory=Counter)
    user_turns: Counter = field(default_factory=Counter)  # number of user turns -> prompts
    with_tools: int = 0
    tools: int = 0
    characters: int = 0
    longest: int = 0

    def drop(self, line: int, refused: Refused) -> None:
        self.dropped[refused.reason] += 1
        shown = self.examples.setdefault(refused.reason, [])
        if len(shown) < EXAMPLES:
            shown.append({"line": line, "detail": refused.detail})

    def keep(self, conversation: Conversation) -> None:
        self.rows_out += 1
        roles = Counter(message["role"] for message in conversation.messages)
        self.roles += roles
        self.user_turns[roles["user"]] += 1
        self.with_tools += conversation.tools is not None
        self.tools += len(conversation.tools or ())
        characters = sum(len(message["content"]) for message in conversation.messages)
        self.characters += characters
        self.longest = max(self.longest, characters)

    def report(self) -> dict:
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": dict(sorted(self.dropped.items())),
            "examples": dict(sorted(self.examples.items())),
            "messages": dict(sorted(self.roles.items())),
            "user_turns": {str(turns): prompts for turns, prompts in sorted(self.user_turns.items())},
            "tools": {"prompts": self.with_tools, "total": self.tools},
            "characters": {"total": self.characters, "longest": self.longest},
        }


def make_prompts(
    records: Iterable[Record],
    reading: Reading,
    origin: Mapping[str, str],
    *,
    template_arguments: Mapping[str, Any],
    max_prompts: int | None,
    tally: Tally,
) -> Iterator[dict]:
    """Prompt records in the order of the source; counts everything in `tally`.  Stops after `max_prompts`."""
    seen: set[int] = set()
    for record in records:
        tally.rows_in += 1
        try:
            conversation = _conversation(record, reading)
            name = _sample_id(conversation, template_arguments)
            if int(name, 16) in seen:
                raise Refused("duplicate", f"sample_id {name}")
        except Refused as refused:
            tally.drop(record.line, refused)
            if tally.rows_in >= HOPELESS and not tally.rows_out:
                return
            continue
        seen.add(int(name, 16))
        tally.keep(conversation)
        yield {
            "sample_id": name,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "template_arguments": dict(template_arguments),
            "source": {**origin, "line": record.line},
        }
        if tally.rows_out == max_prompts:
            return


def _conversation(record: Record, reading: Reading) -> Conversation:
    if record.value is None:
        raise Refused("unreadable_record", record.problem or "no value")
    return reading.conversation(record.value)


def _sample_id(conversation: Conversation, template_arguments: Mapping[str, Any]) -> str:
    try:
        return sample_id(conversation.messages, conversation.tools, template_arguments)
    except UnicodeEncodeError as error:
        raise Refused("lone_surrogate", f"{error.object[error.start]!r} in the text") from error
    except (TypeError, ValueError) as error:
        raise Refused("unreadable_record", f"holds a value that JSON cannot write ({error})") from error


def check_usable(tally: Tally, source: str, reading: Reading) -> None:
    """Raise SourceError when nothing was usable, or when most records do not fit the format at all."""
    unfit = sum(tally.dropped[reason] for reason in UNREADABLE)
    if tally.rows_out and unfit * 2 <= tally.rows_in:
        return
    if not tally.rows_in:
        raise SourceError(f"{source}: holds no records; name a file with one JSON object a line, an array, or Parquet")
    told = [
        f"  {count} × {reason}, first in record {tally.examples[reason][0]['line']}: {tally.examples[reason][0]['detail']}"
        for reason, count in tally.dropped.most_common()
    ]
    usable = f"only {tally.rows_out}" if tally.rows_out else "none"
    raise SourceError(
        f"{source}: {usable} of the {tally.rows_in} records read can be used as format {reading.format}:\n"
        + "\n".join(told)
        + "\nSet `format`, `fields` and `prompt` of the dataset's block to what the records hold"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = program.parser(__doc__, params="the dataset's block of the config, with all template_arguments")
    parser.add_argument("--dataset", required=True, metavar="NAME")
    parser.add_argument("--store", required=True, type=Path, metavar="FOLDER", help="where fetched wheels are kept")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="prompts, one JSON object a line")
    parser.add_argument("--report", required=True, type=Path, metavar="FILE", help="what was read, kept and dropped")
    arguments = parser.parse_args(argv)
    params = arguments.params

    reading = Reading.from_params(params)
    source = open_source(params["source"], arguments.store / "wheels")
    with recorded(
        arguments.provenance,
        stage="prompts",
        name=arguments.dataset,
        params=params,
        inputs={"source": source.file} if source.file else {},
        outputs={"prompts": arguments.output, "report": arguments.report},
    ) as job:
        tally = Tally()
        prompts = make_prompts(
            source.records(),
            reading,
            source.origin,
            template_arguments=params.get("template_arguments") or {},
            max_prompts=params.get("max_prompts"),
            tally=tally,
        )
        with atomic_path(arguments.output) as temporary:
            with temporary.open("w", encoding="utf-8") as stream:
                for prompt in progress(prompts, what=f"prompts {arguments.dataset}", unit="prompt"):
                    stream.write(json.dumps(prompt, ensure_ascii=False, separators=(",", ":")) + "\n")
            check_usable(tally, source.name, reading)
        write_json(
            arguments.report,
            {"dataset": arguments.dataset, "format": reading.format, "source": dict(source.origin), **tally.report()},
        )
        job.count(tally.rows_in, tally.rows_out, tally.dropped)
        job.facts["source"] = dict(source.origin)
    print(
        f"{arguments.dataset}: {tally.rows_out} prompts of {tally.rows_in} records {dict(tally.dropped) or ''}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    program.run(main)
