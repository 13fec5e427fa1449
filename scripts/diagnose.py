"""Say whether responses that were captured elsewhere still have the boundary between reasoning and answer.

    python scripts/diagnose.py responses.jsonl
    python scripts/diagnose.py responses.jsonl.gz --open '<|begin_of_thought|>' --close '<|end_of_thought|>'
    python scripts/diagnose.py capture.parquet --turn-format results/demo/target/turn_format.json --json

Reads JSON Lines, a JSON array or Parquet (also gzipped) with what a chat API answers (choices, or messages, reasoning,
content, finish_reason, usage), what SGLang's /generate answers, or rows with prompt_ids and output_ids, which need
--turn-format.  Each response is

    whole        the boundary is where the model wrote it
    none         there was no reasoning
    unfinished   the output was cut inside the reasoning
    misplaced    the marker is there, on the wrong side or more than once
    lost         the marker, or more, is gone

The exit status is 1 when anything is lost or the file cannot be read, and 0 otherwise.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from eaglet import program
from eaglet.diagnosis import FINDINGS, VERDICTS, Diagnosis, Markers, Response, diagnose, responses
from eaglet.errors import SourceError
from eaglet.sources import read_records
from eaglet.turn_format import TurnFormat


def read_responses(path: Path) -> Iterator[tuple[int, int, Response]]:
    """(line, choice, response) of a file.  Raises SourceError at the first record that holds no response."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from error
    for record in read_records(stream, str(path)):
        if record.value is None:
            raise SourceError(f"{path}:{record.line}: {record.problem}; remove the line or mend it")
        found = list(responses(record.value))
        if not found:
            raise SourceError(
                f"{path}:{record.line}: no response found among the fields {', '.join(record.value)}; expected `choices`, "
                "`messages` that end with the assistant's, `content`, `text`, or `output_ids`"
            )
        for choice, response in enumerate(found):
            yield record.line, choice, response


def is_raw_capture(path: Path, markers: Markers) -> bool:
    """Whether the file's texts show that no parser was at work: markers in the contents, and no reasoning fields."""
    marked = False
    for _, _, response in read_responses(path):
        if response.reasoning:
            return False
        marked = marked or bool(markers.closing and markers.closing in response.content)
    return marked


def diagnose_file(path: Path, markers: Markers) -> Iterator[tuple[int, int, Diagnosis]]:
    """(line, choice, diagnosis) of each response."""
    raw_capture = is_raw_capture(path, markers)
    for line, choice, response in read_responses(path):
        if response.output_ids is not None and markers.turn_format is None and not response.content:
            raise SourceError(
                f"{path}:{line}: holds ids, and markers differ between models; name the model's --turn-format (written by "
                "scripts/target.py turn-format)"
            )
        yield line, choice, diagnose(response, markers, raw_capture=raw_capture)


def summary(diagnoses: Sequence[Diagnosis]) -> dict:
    verdicts = Counter(diagnosis.verdict for diagnosis in diagnoses)
    findings = Counter(code for diagnosis in diagnoses for code in diagnosis.findings)
    return {
        "responses": len(diagnoses),
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "findings": [
            {
                "code": code,
                "verdict": FINDINGS[code][0],
                "responses": n,
                "found": FINDINGS[code][1],
                "saved": FINDINGS[code][2],
            }
            for code, n in findings.most_common()
        ],
    }


def as_text(path: Path, found: Sequence[tuple[int, int, Diagnosis]], limit: int) -> str:
    total = summary([diagnosis for _, _, diagnosis in found])
    troubled = [entry for entry in found if entry[2].verdict in ("misplaced", "lost")]
    lines = []
    for line, choice, diagnosis in troubled[:limit]:
        place = f"{path}:{line}" + (f" choice {choice}" if choice else "")
        lines.append(f"{place}: {diagnosis.verdict}: {'; '.join(FINDINGS[code][1] for code in diagnosis.findings)}")
    if len(troubled) > limit:
        lines.append(f"… and {len(troubled) - limit} more (--limit shows more, --json all)")
    lines += [
        "",
        f"{total['responses']} responses: " + ", ".join(f"{n} {v}" for v, n in total["verdicts"].items() if n),
    ]
    for finding in total["findings"]:
        lines.append(f"{finding['responses']:>8} {finding['verdict']}: {finding['found']}")
        lines.append(f"         can be saved: {finding['saved']}")
    if total["verdicts"]["lost"]:
        lines.append(
            "What is lost cannot be computed; capture these prompts again as ids, from a server without parsers."
        )
    return "\n".join(lines).lstrip("\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--turn-format", type=Path, metavar="FILE", help="takes markers, in text and ids, from this")
    parser.add_argument("--open", default="<think>", metavar="TEXT", help="the opening marker (default: %(default)s)")
    parser.add_argument("--close", default="</think>", metavar="TEXT", help="the closing marker (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="responses listed one by one (default: 20)")
    parser.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    arguments = parser.parse_args(argv)
    if arguments.turn_format:
        markers = Markers.of(TurnFormat.load(arguments.turn_format))
    else:
        markers = Markers(arguments.open, arguments.close)
    found = list(diagnose_file(arguments.file, markers))
    if not found:
        raise SourceError(f"{arguments.file}: holds no responses")
    total = summary([diagnosis for _, _, diagnosis in found])
    if arguments.json:
        rows = [{"line": n, "choice": c, "verdict": d.verdict, "findings": d.findings} for n, c, d in found]
        print(json.dumps({"file": str(arguments.file), "summary": total, "rows": rows}, indent=2))
    else:
        print(as_text(arguments.file, found, arguments.limit))
    return 1 if total["verdicts"]["lost"] else 0


if __name__ == "__main__":
    program.run(main)
