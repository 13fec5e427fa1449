"""The embedded engine against plain batched `model.generate` on the same prompts: output tokens per second.

python tests/bench/engine.py --target results/demo/target/model --prompts results/demo/prompts/*.jsonl
python tests/bench/engine.py … --rows 32 --only engine      short, one side

Both sides get the prompts in the given order, the same sampling, and as many rows at once.  `generate` is used as anybody
would: batches padded on the left, each run until its last row has ended.  Tokens are counted up to a row's end token on
both sides, so what a batch computes past it is waste and not throughput.  With --temperature 0 the tokens of both must agree
and are compared.
"""

import argparse
import itertools
import json
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import torch  # noqa: E402

from eaglet.engine import Engine, Request  # noqa: E402
from eaglet.records import iter_jsonl  # noqa: E402
from eaglet.rendering import Renderer  # noqa: E402
from eaglet.targets import Target  # noqa: E402
from eaglet.token_sampling import SamplingParams  # noqa: E402
from engine_server import end_ids  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a model folder")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True, help="prompts/*.jsonl of a run")
    parser.add_argument("--rows", type=int, help="so many prompts, taken evenly from all")
    parser.add_argument("--batch", type=int, default=32, help="rows at once")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["engine", "generate"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = Target(args.target, dtype="float32")
    prompts = rendered(target, args.prompts)
    if args.rows:
        prompts = prompts[:: max(1, len(prompts) // args.rows)][: args.rows]
    found, outputs = {}, {}
    for name, run in (("generate", by_generate), ("engine", by_engine)):
        if args.only in (None, name):
            began = time.perf_counter()
            model = target.load()
            loaded, cpu = time.perf_counter(), time.process_time()
            outputs[name] = run(model, target.tokenizer(), prompts, args)
            seconds, cpu = time.perf_counter() - loaded, time.process_time() - cpu
            tokens = sum(map(len, outputs[name]))
            found[name] = tokens / seconds
            print(
                f"{name}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s "
                f"({cpu:.1f} s of CPU time; loaded in {loaded - began:.1f} s)",
                flush=True,
            )
    if args.temperature == 0 and len(outputs) == 2:
        same = sum(a == b for a, b in zip(*outputs.values(), strict=True))
        print(f"{same} of {len(prompts)} outputs are equal")
    ratio = found["engine"] / found["generate"] if len(found) == 2 else None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        json.dumps(
            {
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)),
                **found,
                "ratio": ratio,
                "peak_mib": peak,
            }
        )
    )


def rendered(target: Target, paths: list[Path]) -> list[list[int]]:
    """The prompts of all files as ids, in the files' order."""
    renderer = Renderer(target)
    records = itertools.chain.from_iterable(iter_jsonl(path) for path in paths)
    return [renderer.prompt_ids(r["messages"], r["tools"], r["template_arguments"]) for _, r in records]


def by_engine(model, tokenizer, prompts: list[list[int]], args: argparse.Namespace) -> list[list[int]]:
    longest = max(map(len, prompts)) + args.max_new_tokens
    engine = Engine(model, end_ids=end_ids(model, tokenizer), context_length=longest, max_running=args.batch)
    engine.start()
    asked = [
        Request(
            ids,
            SamplingParams(
                max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, sampling_seed=seed
            ),
        )
        for seed, ids in enumerate(prompts)
    ]
    for request in asked:
        engine.submit(request)
    for request in asked:
        request.done.wait()
        if request.error:
            raise request.error
    engine.stop()
    return [request.output_ids for request in asked]


def by_generate(model, tokenizer, prompts: list[list[int]], args: argparse.Namespace) -> list[list[int]]:
    ends = end_ids(model, tokenizer)
    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    torch.manual_seed(0)
    outputs = []
    for start in range(0, len(prompts), args.batch):
        batch = prompts[start : start + args.batch]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=args.max_new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=min(ends),
            **sampling,
        )
        for row in made[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
            outputs.append(row[: end + 1])
    return outputs


if __name__ == "__main__":
    main()
