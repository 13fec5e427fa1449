"""Show what is known about the target's turns, each fact with how it was found: the table of `snakemake check`."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglet import program
from eaglet.turn_format import OWNERS, TurnFormat

WIDEST = 140


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turn-format", type=Path, required=True, help="turn_format.json of the target")
    turn_format = TurnFormat.load(parser.parse_args(arguments).turn_format)
    print(table(turn_format, min(WIDEST, shutil.get_terminal_size((WIDEST, 40)).columns)))


def table(turn_format: TurnFormat, width: int) -> str:
    """One block a fact: its name and value, and below how it was found."""
    facts = turn_format.facts()
    names = max(len(name) for name, _, _ in facts) + 2
    lines = [f"{'model':{names}}{turn_format.target.model}"]
    for name, value, how in facts:
        told = shown(value)
        if name == "owner":
            told += f": {OWNERS[value]}"
        first, *more = [line for part in told.splitlines() for line in textwrap.wrap(part, max(20, width - names))] or [
            ""
        ]
        lines += [f"{name:{names}}{first}", *(f"{'':{names}}{line}" for line in more)]
        lines += [f"{'':{names}}  ↳ {line}" for line in textwrap.wrap(how, max(20, width - names - 4))]
    for name, inferred in turn_format.overridden.items():
        lines.append(f"{'overridden':{names}}{name}; inferred was {shown(inferred)}")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A fact's value for people: markers as their text with ids, an object's parts on lines of their own."""
    if value is None:
        return "none"
    if isinstance(value, Mapping) and set(value) == {"ids", "text"}:
        return f"{value['text']!r} = {' '.join(map(str, value['ids'])) or 'no ids'}"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {shown(part)}" for name, part in value.items() if part is not None) or "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    program.run(main)
