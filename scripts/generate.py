"""generate: ask a server for every prompt of a dataset and keep each token as the model wrote it.

Prompts are rendered here, sent as ids to SGLang's `/generate`, and the ids that come back go into a journal,
{store}/generations/{target fingerprint}/{dataset}.jsonl, before anything else happens to them.  A row that is in a journal
is never asked for again, so the program may be stopped at any moment and run again.  The raw file is a view of the
journal: the rows of the prompts file, in its order, up to the token cap.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from eaglet.capture import Capture, Captured, Tuning
from eaglet.client import Client, Expected
from eaglet.endpoint import connect
from eaglet.errors import ConfigError
from eaglet.files import write_json
from eaglet.inference import for_arguments
from eaglet.journal import Generations
from eaglet.program import json_object, parser, run
from eaglet.provenance import recorded
from eaglet.records import iter_jsonl
from eaglet.row_request import Requests
from eaglet.turn_format import TurnFormat


def main(arguments: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(arguments)
    _, first_prompt = next(iter_jsonl(args.prompts), (0, {}))
    turn_format = for_arguments(TurnFormat.load(args.turn_format), first_prompt.get("template_arguments") or {})
    requests = Requests(turn_format, args.params.get("sampling", {}), args.params.get("context_length"))
    tuning = tuning_of(args.tuning)
    if args.url and "@" in urlsplit(args.url).netloc:
        raise ConfigError("server.url: holds a name or password, which would be written down; use server.token_env")
    with (
        recorded(
            args.provenance,
            stage="generate",
            name=args.dataset,
            params=args.params,
            inputs={"prompts": args.prompts, "turn_format": args.turn_format},
            outputs={"raw": args.output, "report": args.report},
        ) as job,
        Generations(args.store / "generations" / turn_format.fingerprint, args.dataset) as generations,
        ExitStack() as stack,
    ):
        capture = Capture(
            prompts=args.prompts,
            turn_format=turn_format,
            requests=requests,
            max_tokens=args.params.get("max_tokens"),
            generations=generations,
            open_client=lambda: open_client(args, stack, turn_format, tuning),
            tuning=tuning,
            retry_refused=args.retry_refused,
        )
        made = capture.run(args.output, f"generate {args.dataset}", metadata(args, turn_format, requests))
        write_json(args.report, report(args, made))
        job.count(made.rows_in, made.rows_out, +made.dropped)
        job.facts.update(facts(args, capture))


def build_parser() -> argparse.ArgumentParser:
    made = parser(__doc__, params="sampling; max_tokens (null: no cap); context_length (null: the model's own)")
    made.add_argument("--dataset", required=True, metavar="NAME", help="names the journal")
    made.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="prompts/{dataset}.jsonl")
    made.add_argument("--turn-format", required=True, type=Path, metavar="FILE", help="target/turn_format.json")
    server = made.add_mutually_exclusive_group(required=True)
    server.add_argument("--endpoint", type=Path, metavar="FILE", help="the endpoint file of serve.py")
    server.add_argument("--url", metavar="URL", help="a server that already runs")
    made.add_argument("--token-env", metavar="NAME", help="environment variable with the bearer token for --url")
    made.add_argument("--store", required=True, type=Path, metavar="FOLDER", help="results/store")
    made.add_argument("--output", required=True, type=Path, metavar="FILE", help="raw/{dataset}.parquet")
    made.add_argument("--report", required=True, type=Path, metavar="FILE", help="raw/{dataset}.report.json")
    made.add_argument(
        "--tuning",
        type=json_object,
        default={},
        metavar="JSON",
        help=f"any of {', '.join(Tuning.__dataclass_fields__)}; decides no token",
    )
    made.add_argument("--retry-refused", action="store_true", help="ask rows again that a server has refused before")
    return made


def tuning_of(given: dict) -> Tuning:
    """Raises ConfigError on an unknown name."""
    if unknown := sorted(set(given) - set(Tuning.__dataclass_fields__)):
        raise ConfigError(f"--tuning: unknown {', '.join(unknown)}; known: {', '.join(Tuning.__dataclass_fields__)}")
    return Tuning(**given)


def open_client(args: argparse.Namespace, stack: ExitStack, turn_format: TurnFormat, tuning: Tuning) -> Client:
    connection = stack.enter_context(connect(args.endpoint, args.url, args.token_env))
    return Client(
        connection,
        Expected(turn_format.vocab_size, frozenset(turn_format.end_of_turn_ids)),
        max_in_flight=tuning.max_in_flight,
        request_timeout=tuning.request_timeout,
        give_up_after=tuning.give_up_after,
    )


def metadata(args: argparse.Namespace, turn_format: TurnFormat, requests: Requests) -> dict:
    """What the raw file says of all its rows; the servers are added to it."""
    return {
        "dataset": args.dataset,
        "target": {"model": turn_format.target.model, "revision": turn_format.target.revision},
        "fingerprint": turn_format.fingerprint,
        "sampling": requests.settings,
        "stop_token_ids": sorted(turn_format.end_of_turn_ids),
        "context_length": requests.context_length,
        "max_tokens": args.params.get("max_tokens"),
    }


def report(args: argparse.Namespace, made: Captured) -> dict:
    """What the raw file holds and what it does not; the same for the same prompts and journal."""
    return {
        "dataset": args.dataset,
        "rows": {"in": made.rows_in, "out": made.rows_out, "dropped": dict(sorted((+made.dropped).items()))},
        "tokens": {"prompt": made.prompt_tokens, "output": made.output_tokens, "cap": args.params.get("max_tokens")},
        "finish_reasons": dict(sorted(made.finish_reasons.items())),
        "set_aside": made.set_aside,
        "servers": made.servers,
    }


def facts(args: argparse.Namespace, capture: Capture) -> dict:
    """What happened on the way, for the provenance: it differs from run to run."""
    made, client = capture.result, capture.client
    told = {
        "rows_reused": made.reused,
        "rows_borrowed": made.borrowed,
        "rows_answered": made.answered,
        "tokens_answered": made.answered_tokens,
        "seconds": round(made.seconds, 3),
    }
    if client:
        told |= {
            "server": client.connection.url,
            "requests_sent": client.asked,
            "failures": dict(sorted(client.failures.items())),
            "renderings_compared": made.rendering_compared,
        }
    return told


if __name__ == "__main__":
    run(main)
