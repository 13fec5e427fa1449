"""Stage target: build the embedded target model, and learn where the parts of a target's turns begin and end."""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from eaglet import program
from eaglet.config import EMBEDDED_TARGET
from eaglet.errors import ConfigError
from eaglet.provenance import recorded
from eaglet.targets import Target


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    options.do(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    help_model = "build the embedded target model (once; kept in the store) and put its folder at --output"
    model = commands.add_parser(
        "model",
        help=help_model,
        description=help_model,
        parents=[program.parser(None, params='{"model": NAME}')],
        add_help=False,
    )
    model.add_argument("--store", type=Path, default=Path("results/store"), help="folder that all runs share")
    model.add_argument("--output", type=Path, required=True, help="the model folder to make")
    model.add_argument("--threads", type=int, default=2, help="CPU threads of the training (default 2)")
    model.set_defaults(do=make_model)

    help_format = "infer the turn format from the target's tokenizer and chat template"
    turn_format = commands.add_parser(
        "turn-format",
        help=help_format,
        description=help_format,
        parents=[program.parser(None, params="the config's target section, with `model` a folder or a hub id")],
        add_help=False,
    )
    turn_format.add_argument("--output", type=Path, required=True, help="the turn_format.json to write")
    turn_format.set_defaults(do=make_turn_format)
    return parser


def make_model(options: argparse.Namespace) -> None:
    from eaglet import embedded_target, lessons

    name = options.params.get("model")
    if name != EMBEDDED_TARGET:
        raise ConfigError(
            f"target.model: only {EMBEDDED_TARGET} is built, found {name!r}; any other model is used as it is"
        )
    with recorded(
        options.provenance,
        stage="target",
        name="model",
        params=options.params,
        inputs={"chat_template": embedded_target.TEMPLATE, "lessons": [lessons.FUNCTIONS, lessons.TOOLS, lessons.TALK]},
        outputs={"model": options.output},
    ) as job:
        built = embedded_target.build(options.store, threads=options.threads)
        shutil.rmtree(options.output, ignore_errors=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(built, options.output, copy_function=_link_or_copy)
        job.facts["key"] = built.name


def _link_or_copy(source: str, destination: str) -> None:
    """Hard-link a file, or copy it where the file system cannot."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def make_turn_format(options: argparse.Namespace) -> None:
    from eaglet.inference import infer

    target = Target.from_params(options.params)
    with recorded(
        options.provenance,
        stage="target",
        name="turn_format",
        params=options.params,
        inputs={"model": target.folder} if Path(target.model).is_dir() else {},
        outputs={"turn_format": options.output},
    ):
        infer(target, options.params.get("turn_format") or {}).save(options.output)


if __name__ == "__main__":
    program.run(main)
