"""Rows per second and peak memory of merge over synthetic checked files.

python tests/bench/merge.py                        88,000 rows of about 1,137 tokens (100M tokens) in two datasets
python tests/bench/merge.py --rows 5000 --shards 4
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from eaglet.digests import content_key  # noqa: E402
from eaglet.records import RecordWriter, row_digest  # noqa: E402

VOCABULARY = 150_000


def write_checked(path: Path, rows: int, tokens: int, seed: int) -> int:
    """A checked file of random ids; lengths vary by half around `tokens`.  Returns the number of tokens."""
    random, total = np.random.default_rng(seed), 0
    with RecordWriter(path, "checked", {"servers": []}) as writer:
        for start in range(0, rows, 512):
            block = []
            for number in range(start, min(start + 512, rows)):
                length = int(random.integers(tokens // 2, tokens * 3 // 2))
                ids = random.zipf(1.2, length) % VOCABULARY
                key = content_key([seed, number])
                row = {
                    "sample_id": key[:16],
                    "prompt_ids": ids[: length // 4].tolist(),
                    "output_ids": ids[length // 4 :].tolist(),
                    "finish_reason": "stop",
                    "matched_stop": 2,
                    "request_key": key,
                    "server": 0,
                }
                total += length
                block.append({**row, "think_end": length // 8, "row_digest": row_digest(row)})
            writer.write_rows(block)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=88_000)
    parser.add_argument("--tokens", type=int, default=1_137, help="of a row, on average")
    parser.add_argument("--shards", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / "checked" / f"{name}.parquet" for name in ("first", "second")]
        tokens = sum(write_checked(f, arguments.rows // 2, arguments.tokens, n) for n, f in enumerate(files))
        params = f'{{"shards": {{"count": {arguments.shards}, "seed": 0}}, "heldout": {{"rows_per_dataset": 64}}}}'
        command = [sys.executable, ROOT / "scripts" / "merge.py", "--checked", *files, "--params", params]
        started = time.perf_counter()
        subprocess.run([*command, "--output", Path(scratch) / "shards"], check=True, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    print(
        f"merge: {arguments.rows} rows, {tokens / 1e6:.1f}M tokens, {arguments.shards} shards: {seconds:.1f} s, ",
        end="",
    )
    print(f"{arguments.rows / seconds:.0f} rows/s, {tokens / seconds / 1e6:.2f}M tokens/s, peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
