"""Training speed: tokens per second of whole optimizer steps at SmolLM2-135M's shapes, on rows made up in memory.

    python tests/bench/train.py                         # fp32 and bf16, 64 rows of 150 prompt and 100 output tokens
    python tests/bench/train.py --dtype bf16 --profile  # and the operators that take the time
    python tests/bench/train.py --prompt 1500 --output 1000 --rows 8

A step is forward, backward, clipping and optimizer; all tokens of the rows count, as in the peers' figures (docs/drafter.md).
`foreign` is the share of the CPUs that other processes used meanwhile: above 5 % the figures say little.
"""

import argparse
import itertools
import json
import resource
import statistics
import time

import psutil
import torch
from accelerate import Accelerator

from eaglet.eagle3 import Batch, Eagle3Config, Eagle3Drafter, Row
from eaglet.training import Reader, Sample, Settings, Trainer, Window, packed

SMOLLM2 = Eagle3Config(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    draft_vocab_size=4096,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    max_position_embeddings=8192,
    layer_ids=(2, 15, 27),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Memory(Reader):
    """Rows of random tokens and states instead of stored ones: reading is not what is timed."""

    def row(self, window: Window) -> Row:
        random = torch.Generator().manual_seed(int(window.sample.key))
        h, n = self.hidden_size, window.tokens
        return Row(
            torch.randint(0, SMOLLM2.vocab_size, (n,), generator=random),
            torch.randn(n, 3 * h, generator=random).to(self.dtype),
            torch.randn(n, h, generator=random).to(self.dtype),
            window.first_target,
        )


def measure(options: argparse.Namespace, dtype: str) -> dict:
    torch.manual_seed(0)
    settings = Settings(ttt_steps=options.steps, batch_tokens=options.batch_tokens)
    drafter = Eagle3Drafter(SMOLLM2, torch.randn(SMOLLM2.vocab_size, SMOLLM2.hidden_size) * 0.02)
    drafter.set_draft_vocab(torch.randperm(SMOLLM2.vocab_size)[: SMOLLM2.draft_vocab_size].sort().values)
    head = torch.randn(SMOLLM2.draft_vocab_size, SMOLLM2.hidden_size) * 0.02
    reader = Memory(None, SMOLLM2.hidden_size, options.steps, DTYPES[dtype])
    trainer = Trainer(drafter, head, reader, settings, Accelerator(cpu=not options.cuda))
    length = options.prompt + options.output
    rows = [Window(Sample(str(n), options.prompt, length), 0, length, options.prompt) for n in range(options.rows)]
    groups = [
        (group, [reader.batch(part) for part in trainer.micro_batches(group)])
        for group in packed(rows, options.batch_tokens)
    ]

    def step(group: list[Window], batches: list[Batch]) -> None:
        trainer.update(group, iter(batches), 1e-4)
        if options.cuda:
            torch.cuda.synchronize()

    endless = itertools.cycle(groups)
    for _ in range(options.warmup):
        step(*next(endless))
    rates, process = [], psutil.Process()
    others = psutil.cpu_times_percent()
    started, cpu = time.perf_counter(), sum(process.cpu_times()[:2])
    while len(rates) < options.timed_steps or time.perf_counter() - started < options.seconds:
        group, batches = next(endless)
        before = time.perf_counter()
        step(group, batches)
        rates.append(sum(w.tokens for w in group) / (time.perf_counter() - before))
    elapsed, own = time.perf_counter() - started, sum(process.cpu_times()[:2]) - cpu
    others = psutil.cpu_times_percent()
    busy = (100 - others.idle) / 100 - own / elapsed / psutil.cpu_count()
    result = {
        "dtype": dtype,
        "tokens_per_second": round(statistics.median(rates)),
        "output_tokens_per_second": round(statistics.median(rates) * options.output / length),
        "cpu_seconds_per_1000_tokens": round(1000 * own / (statistics.mean(rates) * elapsed), 3),
        "timed_steps": len(rates),
        "foreign": round(busy, 3),
        "threads": torch.get_num_threads(),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    if options.profile:
        profile(lambda: step(*groups[0]))
    return result


def profile(run) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=150)
    parser.add_argument("--output", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4, help="steps of the training-time test")
    parser.add_argument("--batch-tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timed-steps", type=int, default=5, help="at least so many")
    parser.add_argument("--seconds", type=float, default=6.0, help="at least so many of timed steps")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for dtype in options.dtype or DTYPES:
        print(json.dumps(measure(options, dtype)), flush=True)


if __name__ == "__main__":
    main()
