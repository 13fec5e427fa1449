"""Prompts per second and peak memory of the prompts stage over a synthetic source.

python tests/bench/prompts.py                 88,000 conversations of three turns, one in ten with tools
python tests/bench/prompts.py --rows 5000
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the model reads a prompt and writes an answer while each token is kept as it came from the server"
TOOL = {
    "name": "find",
    "description": "Find.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}


def write_source(path: Path, rows: int) -> None:
    chance, words = random.Random(0), TEXT.split()
    with path.open("w", encoding="utf-8") as stream:
        for number in range(rows):
            turns = [
                {"role": role, "content": f"{number} " + " ".join(chance.choices(words, k=200))}
                for role in ("user", "assistant", "user", "assistant")
            ]
            stream.write(json.dumps({"messages": turns, "tools": [TOOL] if number % 10 == 0 else []}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=88_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source, output, report = (Path(scratch) / name for name in ("source.jsonl", "prompts.jsonl", "report.json"))
        write_source(source, arguments.rows)
        params = json.dumps({"source": {"path": str(source)}, "format": "messages"})
        command = [sys.executable, ROOT / "scripts" / "prompts.py", "--dataset", "bench", "--store", scratch]
        command += ["--params", params, "--output", output, "--report", report]
        started = time.perf_counter()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    print(
        f"prompts: {arguments.rows} records in {seconds:.1f} s, {arguments.rows / seconds:.0f} records/s, peak memory {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
