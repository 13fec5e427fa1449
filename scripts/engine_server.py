"""The embedded inference server: a transformers model on the CPU behind SGLang's native API, on loopback.

Flags have SGLang's names.  The workflow starts it through scripts/serve.py; by hand:

    python scripts/engine_server.py --model-path results/demo/target/model --port 30000
    curl -s localhost:30000/generate -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}'

With EAGLET_API_KEY in the environment, requests must carry it as a bearer token (/health excepted).
"""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from eaglet import __version__, program
from eaglet.server_command import engine_code
from eaglet.targets import Target, context_length


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="a Hugging Face model folder, or a hub id")
    parser.add_argument("--revision", help="a commit, required with a hub id")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--chat-template", metavar="FILE", help="replaces the tokenizer's own")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument(
        "--context-length", type=int, help="longest prompt + output in tokens; the model's own if absent"
    )
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--max-running-requests", type=int, default=32, help="rows of the batch")
    parser.add_argument("--max-queued-requests", type=int, default=4096, help="more are answered with 503")
    parser.add_argument("--cache-mib", type=int, default=1536, help="memory for keys and values")
    parser.add_argument("--random-seed", type=int, default=0, help="for requests that bring no sampling_seed")
    parser.add_argument("--threads", type=int, help="CPU threads; all cores if absent")
    return parser


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a generation, from where SGLang takes them: the model's configs and the tokenizer's eos."""
    found: set[int] = set()
    for ids in (
        model.config.get_text_config().eos_token_id,
        model.generation_config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update(ids if isinstance(ids, list) else [ids])
    return found - {None}


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    import torch

    from eaglet.engine import Engine
    from eaglet.engine_http import EngineServer

    if args.threads:
        torch.set_num_threads(args.threads)
    target = Target(
        model=args.model_path,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        chat_template=args.chat_template,
        dtype=args.dtype,
    )
    tokenizer, model = target.tokenizer(), target.load()
    engine = Engine(
        model,
        end_ids=end_ids(model, tokenizer),
        context_length=args.context_length or context_length(model.config.get_text_config()),
        max_running=args.max_running_requests,
        max_queued=args.max_queued_requests,
        cache_bytes=args.cache_mib << 20,
        seed=args.random_seed,
    )
    facts = {
        "engine": "eaglet-transformers",
        "version": f"{__version__}+{engine_code()[:8]}",
        "model_path": args.model_path,
        "tokenizer_path": args.model_path,
        "revision": args.revision,
        "trust_remote_code": args.trust_remote_code,
        "chat_template": args.chat_template,
        "dtype": str(model.dtype).removeprefix("torch."),
        "random_seed": args.random_seed,
        "launch_command": sys.argv,
    }
    server = EngineServer(args.port, engine, tokenizer, facts, api_key=os.environ.get("EAGLET_API_KEY"))
    engine.start()

    def end(*_: object) -> None:
        server.closing.set()
        threading.Thread(target=server.shutdown, daemon=True).start()  # shutdown waits for serve_forever to return

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    logging.info("serving %s on http://127.0.0.1:%d, %d threads", args.model_path, args.port, torch.get_num_threads())
    server.serve_forever(poll_interval=0.1)
    engine.stop()
    logging.info("stopped")
    return 0


if __name__ == "__main__":
    program.run(main)
