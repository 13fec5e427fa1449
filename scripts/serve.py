"""The inference server as a lease that the datasets of a workflow share.

    serve.py hold --endpoint F …      the Snakemake service: keep a lease until SIGTERM; the first one starts the
                                    server, with --when-wanted once a consumer connects
    serve.py command …                print the exact command that the server gets, and start nothing
    serve.py gpu -- COMMAND …         another job that needs the GPUs: wait for them, then become COMMAND
    serve.py status                   the servers of the workflow in this folder

A server is started without a reasoning parser, on loopback, with a key of its own.  It ends when no lease is left and the
linger is over, the workflow has gone, or the GPUs are wanted; it never outlives the workflow.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from eaglet import program
from eaglet.files import read_json
from eaglet.lease import become_gpu_job, current_state, hold
from eaglet.locks import Devices, LeaseFiles, workflow_folder
from eaglet.server_command import ServerCommand, Tuning, package_versions, server_command, visible_gpus
from eaglet.targets import Target


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for name in ("hold", "command"):
        mode = modes.add_parser(name)
        source = mode.add_mutually_exclusive_group(required=True)
        source.add_argument("--turn-format", type=Path, metavar="FILE", help="names the target")
        source.add_argument(
            "--target", type=program.json_object, metavar="JSON", help="the target section of the config"
        )
        mode.add_argument(
            "--params",
            type=program.json_object,
            required=True,
            metavar="JSON",
            help="what the answers depend on: engine, python, context_length, arguments, environment",
        )
        mode.add_argument(
            "--tuning",
            type=program.json_object,
            default={},
            metavar="JSON",
            help="what they do not depend on: " + ", ".join(Tuning.__dataclass_fields__),
        )
        if name == "hold":
            mode.add_argument(
                "--endpoint", type=Path, required=True, metavar="FILE", help="written at once; tells a consumer"
            )
            mode.add_argument("--log", type=Path, required=True, metavar="FILE", help="the server's log; appended to")
            mode.add_argument(
                "--when-wanted", action="store_true", help="start the server when a consumer connects, not before"
            )
    gpu = modes.add_parser("gpu")
    gpu.add_argument("--timeout", type=float, default=Tuning.gpu_timeout, metavar="SECONDS")
    gpu.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    modes.add_parser("status")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.mode == "status":
        return print_status()
    if args.mode == "gpu":
        words = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not words:
            raise SystemExit("serve.py gpu: name a command after --")
        become_gpu_job(words, Devices(visible_gpus()), args.timeout)
    tuning = Tuning.from_params(args.tuning)
    if args.mode == "command":
        print(the_command(args, tuning).told())
        return 0
    hold(partial(identified_command, args, tuning), tuning, args.endpoint, args.log, args.when_wanted)
    return 0


def the_command(args: argparse.Namespace, tuning: Tuning) -> ServerCommand:
    target = read_json(args.turn_format)["target"] if args.turn_format else args.target
    return server_command(args.params, Target.from_params(target), tuning)


def identified_command(args: argparse.Namespace, tuning: Tuning) -> ServerCommand:
    """The command together with all that decides whether another job may share its server."""
    command = the_command(args, tuning)
    engine = args.params.get("engine", "transformers")
    python = args.params.get("python", "python") if engine == "sglang" else sys.executable
    fingerprint = read_json(args.turn_format)["fingerprint"] if args.turn_format else None
    identity = {**command.identity, "target": fingerprint, "packages": package_versions(engine, python)}
    return replace(command, identity=identity, devices=visible_gpus() if command.on_gpus else ())


def print_status() -> int:
    folder = workflow_folder()
    found = 0
    for path in sorted(folder.glob("*.state.json")):
        state = current_state(LeaseFiles(folder, path.name.removesuffix(".state.json")))
        if state:
            found += 1
            print(
                f"server {path.name.split('.')[0]}: {state['phase']}, port {state['port']}, daemon {state['pid']}, log {state['log']}"
            )
    if not found:
        print("no server")
    return 0


if __name__ == "__main__":
    program.run(main)
