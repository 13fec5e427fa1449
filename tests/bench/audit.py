"""Time and peak memory of `audit.py verify` over a synthetic run.

python tests/bench/audit.py                        88,000 rows of about 1,137 tokens (100M tokens), 16 shards
python tests/bench/audit.py --rows 2000 --shards 4
"""

import argparse
import contextlib
import io
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import audit  # noqa: E402
from eaglet.files import read_json  # noqa: E402
from synthetic_run import RUN, STORE, build_synthetic_run  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=88_000)
    parser.add_argument("--tokens", type=int, default=1_137, help="of a row, on average")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--sample", type=int, help="read only so many files of hidden states")
    arguments = parser.parse_args()
    words = arguments.tokens // 4
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        datasets = dict.fromkeys(("first", "second", "third", "fourth"), arguments.rows // 4)
        child = os.fork()  # so that the peak below is the audit's own
        if child == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                build_synthetic_run(
                    datasets, shards=arguments.shards, question_words=words, output_tokens=arguments.tokens * 3 // 4
                )
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit("the run could not be made")
        rows, tokens = (read_json(RUN / "shards/manifest.json")[name] for name in ("rows", "tokens"))
        started = time.perf_counter()
        chain, checked = audit.examine(RUN, read_json(Path("config.json")), STORE, arguments.sample)
        seconds = time.perf_counter() - started
    if chain.breaks:
        sys.exit("\n".join(map(str, chain.breaks[:10])))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"verify: {rows:,} rows, {tokens / 1e6:.1f}M tokens, {checked['hidden']:,} files of hidden states in {seconds:.1f} s: "
        f"{rows / seconds:,.0f} rows/s, {tokens / seconds / 1e6:.1f}M tokens/s; peak memory {peak:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
