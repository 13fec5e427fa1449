"""Write drafter/serve.sh, which serves the target with the drafter beside it: `serve.sh [MORE SGLANG FLAGS]`.

A job of its own, so that another number of draft tokens or another flag of the server trains nothing again.
"""

from collections.abc import Sequence

from eaglet import program
from eaglet.files import atomic_path
from eaglet.provenance import recorded
from eaglet.serve_script import serve_script
from eaglet.turn_format import TurnFormat


def main(arguments: Sequence[str] | None = None) -> None:
    parser = program.parser(__doc__, params="draft_tokens and tree of the config's evaluation section")
    parser.add_argument(
        "--turn-format", required=True, metavar="FILE", help="target/turn_format.json: names the target"
    )
    parser.add_argument(
        "--server",
        type=program.json_object,
        default={},
        metavar="JSON",
        help="python, arguments and environment of the config's server section (default: python, and no other flags)",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="drafter/serve.sh")
    options = parser.parse_args(arguments)
    with recorded(
        options.provenance,
        stage="train",
        name="serve_script",
        params={"evaluation": options.params, "server": options.server},
        inputs={"turn_format": options.turn_format},
        outputs={"serve": options.output},
    ):
        text = serve_script(TurnFormat.load(options.turn_format).target, options.params, options.server)
        with atomic_path(options.output) as temporary:
            temporary.write_text(text, encoding="utf-8")
            temporary.chmod(0o755)


if __name__ == "__main__":
    program.run(main)
