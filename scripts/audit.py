"""Stage audit: recompute the chain of digests from every row back to its source, and say where it does not hold.

    python scripts/audit.py build --run-dir results/demo --config-json '{…}' --output results/demo/audit
    python scripts/audit.py verify --run-dir results/demo          # at any time later, or on a copy of results/
    python scripts/audit.py shard 0 --run-dir results/demo         # where the rows of a shard came from
    python scripts/audit.py row 1a2b3c4d5e6f7a8b --run-dir results/demo

`build` fails, and writes nothing, when the chain does not hold.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from eaglet import lineage, program
from eaglet.errors import AuditFailed
from eaglet.files import write_json, write_text
from eaglet.lineage import Break, Chain
from eaglet.provenance import recorded
from eaglet.report_page import report_page
from eaglet.ro_crate import crate
from eaglet.row_checks import check_rows
from eaglet.trail import Reader, code_name, shard_summary

OUTPUTS = {"lineage": "lineage.json", "report": "report.html", "crate": "ro-crate-metadata.json"}
BUILD_SAMPLE = 1000  # files of hidden states that `build` reads: a large run has terabytes, and has just written them
SHOWN = 20  # breaks that a message lists; --json has all


def main(arguments: Sequence[str] | None = None) -> int | None:
    options = _parser().parse_args(arguments)
    options.store = options.store or options.run_dir.parent / "store"
    return options.do(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--run-dir", type=Path, required=True, metavar="FOLDER", help="results/{run}")
    common.add_argument(
        "--store", type=Path, metavar="FOLDER", help="what all runs share; default: store beside the run"
    )
    common.add_argument("--json", action="store_true", help="print JSON instead of text")
    build = _command(commands, "build", build_audit, [common], "check the whole run, then write what --output is for")
    build.add_argument(
        "--config-json", type=program.json_object, required=True, metavar="JSON", help="the run's config"
    )
    build.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help=f"for {', '.join(OUTPUTS.values())}"
    )
    build.add_argument("--provenance", type=Path, metavar="FILE", help="where to say what was done, from what")
    again = _command(commands, "verify", verify, [common], "check the whole run against what the audit wrote")
    for command, most, default in ((build, BUILD_SAMPLE, f"{BUILD_SAMPLE:,}"), (again, None, "all")):
        what = f"read only N files of hidden states, drawn anew each time (default: {default})"
        command.add_argument("--sample", type=_count, metavar="N", default=most, help=what)
    shard = _command(commands, "shard", show_shard, [common], "say where the rows of a shard came from")
    shard.add_argument("number", type=_count, metavar="K")
    row = _command(commands, "row", show_row, [common], "follow one row from its source to its hidden states")
    row.add_argument("sample_id", metavar="SAMPLE_ID", help="16 hex digits")
    return parser


def _command(commands, name: str, do, parents: list, description: str) -> argparse.ArgumentParser:
    made = commands.add_parser(name, parents=parents, help=description, description=description)
    made.set_defaults(do=do)
    return made


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text!r}")
    return int(text)


def build_audit(options: argparse.Namespace) -> None:
    """Raises AuditFailed when the chain does not hold."""
    outputs = {role: options.output / name for role, name in OUTPUTS.items()}
    provenance = [p for p in lineage.provenance_files(options.run_dir, options.config_json) if p.is_file()]
    with recorded(
        options.provenance,
        stage="audit",
        name="audit",
        params={"run": options.run_dir.name, "sample": options.sample},
        inputs={"provenance": provenance},
        outputs=outputs,
    ) as job:
        chain, checked = examine(options.run_dir, options.config_json, options.store, options.sample)
        if chain.breaks:
            raise AuditFailed(_told(chain.breaks))
        write_json(outputs["lineage"], lineage.document(chain))
        write_json(outputs["crate"], crate(chain, options.output))
        write_text(outputs["report"], report_page(chain, options.store))
        job.count(checked["shards"], checked["shards"])
        job.facts["checked"] = checked
    print(json.dumps(checked) if options.json else _summary(chain, checked))


def examine(run: Path, config: dict | None, store: Path, sample: int | None) -> tuple[Chain, dict[str, int]]:
    """The chain of the run with every break found, and how many rows of each kind were checked."""
    chain = lineage.read_chain(run, config)
    lineage.check_files(chain)
    lineage.check_counts(chain)
    checked = check_rows(chain, store=store, sample=sample)
    return chain, {"jobs": len(chain.jobs), "files": len(chain.digests), **checked}


def verify(options: argparse.Namespace) -> int:
    """0 when everything still is as the audit found it, else 1."""
    audited = lineage.read_audit(options.run_dir)
    chain, checked = examine(options.run_dir, audited.config, options.store, options.sample)
    breaks = [*audited.breaks, *chain.breaks]
    if not breaks:
        breaks += lineage.compare(audited, chain)
    if options.json:
        print(json.dumps({"holds": not breaks, "checked": checked, "breaks": [b.as_json() for b in breaks]}, indent=2))
    elif not breaks:
        print(_summary(chain, checked))
    else:
        raise AuditFailed(_told(breaks))
    return 1 if breaks else 0


def _told(breaks: Sequence[Break]) -> str:
    lines = [f"  - {found}" for found in breaks[:SHOWN]]
    if len(breaks) > SHOWN:
        lines.append(f"  … and {len(breaks) - SHOWN} more: `audit.py verify --json` lists all")
    return f"the chain does not hold in {len(breaks)} place{'s' * (len(breaks) > 1)}:\n" + "\n".join(lines)


def _summary(chain: Chain, checked: dict[str, int]) -> str:
    return (
        f"{chain.run.name}: the chain holds: {checked['jobs']} jobs, {checked['files']} files, {checked['prompts']} prompts, "
        f"{checked['raw']} raw rows, {checked['checked']} checked, {checked['shards']} in shards, {checked['hidden']} hidden states"
    )


def show_shard(options: argparse.Namespace) -> None:
    audited = lineage.read_audit(options.run_dir)
    found = shard_summary(lineage.read_chain(options.run_dir, audited.config), options.number)
    print(json.dumps(found, indent=2, ensure_ascii=False) if options.json else told(found))


def show_row(options: argparse.Namespace) -> None:
    audited = lineage.read_audit(options.run_dir)
    found = Reader(lineage.read_chain(options.run_dir, audited.config), options.store).row(options.sample_id)
    print(json.dumps(found, indent=2, ensure_ascii=False) if options.json else told(found))


def told(value: object, indent: int = 0) -> str:
    """Nested data as indented lines for people; a job is one line, decoded tokens are set off."""
    margin = "  " * indent
    if isinstance(value, list):
        return "\n".join(f"{margin}- {told(held, indent + 1).lstrip()}" for held in value)
    if not isinstance(value, dict):
        return f"{margin}{value}"
    if "command" in value:
        code = code_name(value["code"])
        return f"{margin}{value['job']}: code {code}, on {value['host']}, {value['started']} to {value['ended']}"
    lines = []
    for name, held in value.items():
        if name == "segments":
            lines.append(f"{margin}text:\n{_set_off(held, indent + 1)}")
        elif isinstance(held, dict | list) and held:
            lines.append(f"{margin}{name}:\n{told(held, indent + 1)}")
        else:
            lines.append(f"{margin}{name}: {'–' if held is None or held in ({}, []) else held}")
    return "\n".join(lines)


def _set_off(segments: list[dict], indent: int) -> str:
    """Decoded tokens, with each marker as ⟦marker⟧ so that it cannot be taken for text."""
    text = "".join(f"⟦{s['text']}⟧" if s["kind"] == "marker" else s["text"] for s in segments)
    return "\n".join("  " * indent + "│ " + line for line in text.split("\n"))


if __name__ == "__main__":
    program.run(main)
