"""Write the key tables of config/README.md from config/schema.yaml, so that the two never disagree.

python scripts/config_docs.py --write      rewrites the tables
python scripts/config_docs.py              exits with 1 if they are not those of the schema
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

import yaml

from eaglet import program
from eaglet.config import SCHEMA

README = SCHEMA.parent / "README.md"
BEGIN, END = "<!-- keys: begin (make docs) -->", "<!-- keys: end -->"


def main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the tables in config/README.md")
    args = parser.parse_args(arguments)
    found = README.read_text(encoding="utf-8")
    wanted = with_tables(found, yaml.safe_load(SCHEMA.read_text(encoding="utf-8")))
    if args.write:
        README.write_text(wanted, encoding="utf-8")
    elif found != wanted:
        print(f"{README}: the tables are not those of {SCHEMA}; run `make docs`", file=sys.stderr)
        return 1
    return 0


def with_tables(readme: str, schema: Mapping) -> str:
    """`readme` with the text between the two comment lines replaced by the schema's tables."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables(schema)}\n{END}{after}"


def tables(schema: Mapping) -> str:
    """One Markdown table for the top level and one for each part under $defs."""
    parts = {"": schema, **schema["$defs"]}
    return "\n".join(
        f"{f'### {name}{chr(10)}{chr(10)}' if name else ''}| key | takes | default | meaning |\n|---|---|---|---|\n"
        + "".join(f"| {' | '.join(_cell(text) for text in row)} |\n" for row in _rows(part))
        for name, part in parts.items()
    )


def _rows(part: Mapping, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    for key, value in part["properties"].items():
        if "$ref" in value:
            yield f"`{prefix}{key}`", "section", "", f"see {value['$ref'].rsplit('/', 1)[1]}"
            continue
        if "x-refused" in value:
            yield f"`{prefix}{key}`", "nothing", "", f"refused: {value['x-refused']}"
            continue
        default = (
            "required"
            if key in part.get("required", [])
            else f"`{yaml_inline(value['default'])}`"
            if "default" in value
            else ""
        )
        yield f"`{prefix}{key}`", _takes(value), default, value.get("description", "")
        if "properties" in value:
            yield from _rows(value, f"{prefix}{key}.")


def _takes(value: Mapping) -> str:
    if "enum" in value:
        return ", ".join(f"`{yaml_inline(choice)}`" for choice in value["enum"])
    kinds = value.get("type", "")
    text = " or ".join(kinds if isinstance(kinds, list) else [kinds])
    limits = [
        sign + str(value[key])
        for key, sign in (("minimum", "≥ "), ("exclusiveMinimum", "> "), ("maximum", "≤ "), ("exclusiveMaximum", "< "))
        if key in value
    ]
    return " ".join([text, ", ".join(limits)]).strip()


def yaml_inline(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).replace("\n...", "").strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    program.run(main)
