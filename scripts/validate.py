"""Stage validate: check each captured row's token boundaries, set bad rows aside with their reasons, stop when there are many.

A row with a reason of severity `quarantine` goes to the quarantine file with all its reasons and an excerpt; the others
go to the checked file as they were captured, with `think_end` and `row_digest`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from eaglet import program
from eaglet.files import write_json
from eaglet.inference import for_arguments
from eaglet.progress import progress
from eaglet.provenance import recorded
from eaglet.records import RecordWriter, open_records, read_metadata
from eaglet.rendering import Renderer
from eaglet.turn_format import TurnFormat
from eaglet.validation import Prompts, Rules, Validator


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    inputs = {"raw": options.raw, "prompts": options.prompts, "turn_format": options.turn_format}
    outputs = {"checked": options.checked, "quarantine": options.quarantine, "report": options.report}
    rules = Rules.from_params(options.params)
    with recorded(
        options.provenance,
        stage="validate",
        name=options.dataset,
        params=options.params,
        inputs=inputs,
        outputs=outputs,
    ) as job:
        report = validate(options, rules)
        write_json(options.report, report)
        job.count(report["rows_in"], report["rows_out"], report["dropped"])
    print(
        f"{options.dataset}: {report['rows_in']} rows checked, {report['rows_out']} kept, {report['quarantined']} set aside "
        f"({', '.join(f'{n} {code}' for code, n in report['dropped'].items()) or 'no reason'})"
    )


def validate(options: argparse.Namespace, rules: Rules) -> dict:
    """Write the checked and the quarantine file; return the report.  Raises ValidationFailed and writes nothing."""
    prompts = Prompts(options.prompts)
    turn_format = for_arguments(TurnFormat.load(options.turn_format), prompts.template_arguments)
    validator = Validator(turn_format, Renderer(turn_format.target), rules)
    with open_records(options.raw, "raw") as file:
        rows = file.metadata.num_rows
    captured = {key: value for key, value in read_metadata(options.raw, "raw").items() if key != "kind"}
    metadata = {**captured, "validation": options.params}
    with (
        RecordWriter(options.checked, "checked", metadata) as checked,
        RecordWriter(options.quarantine, "quarantine", metadata) as quarantine,
        progress(total=rows, what=f"validate {options.dataset}") as bar,
    ):
        for kept, rejected in validator.split(options.raw, prompts, rows):
            checked.write_table(kept)
            quarantine.write_rows(rejected)
            bar.update(kept.num_rows + len(rejected))
    return {"dataset": options.dataset, **validator.report()}


def _parser() -> argparse.ArgumentParser:
    parser = program.parser(__doc__, params="the config's validation section")
    parser.add_argument("--dataset", required=True, help="the dataset's name")
    parser.add_argument("--raw", type=Path, required=True, help="raw/{dataset}.parquet")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts/{dataset}.jsonl")
    parser.add_argument("--turn-format", type=Path, required=True, help="turn_format.json of the target")
    parser.add_argument("--checked", type=Path, required=True, help="where the rows that are kept go")
    parser.add_argument("--quarantine", type=Path, required=True, help="where the others go")
    parser.add_argument("--report", type=Path, required=True, help="counts, shares, lengths and excerpts")
    return parser


if __name__ == "__main__":
    program.run(main)
