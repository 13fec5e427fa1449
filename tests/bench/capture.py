"""How fast the client of the capture is, and how much memory it takes: 88,000 prompts, a server that answers at once.

Every answer has 256 output tokens.  Server and client share two cores, as they do in the embedded default; the figures
are of the whole of scripts/generate.py: rendering, asking, checking, journal, raw file.

    python tests/bench/capture.py [--rows 88000] [--json FILE]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
CORES = 2
TOKENS = 256
LEAST_RATE, MOST_GIB = 400, 1.0


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rows", type=int, default=88_000)
    made.add_argument("--max-in-flight", type=int, default=64)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    args = made.parse_args()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:CORES]))  # the children inherit it
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), args.rows, args.max_in_flight)
    print(json.dumps(figures, indent=2))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.rows >= 88_000 and (figures["requests_per_second"] < LEAST_RATE or figures["client_gib"] > MOST_GIB):
        sys.exit(f"expected at least {LEAST_RATE} requests/s and at most {MOST_GIB} GiB")


def measure(folder: Path, rows: int, max_in_flight: int) -> dict:
    from capturing import SETTINGS, write_prompts
    from eaglet.inference import infer
    from eaglet.targets import Target
    from tiny import build_tiny_target

    turn_format = infer(Target(str(build_tiny_target(folder / "model")), dtype="float32"))
    turn_format.save(folder / "turn_format.json")
    write_prompts(folder / "prompts.jsonl", rows)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "OMP_NUM_THREADS": "1"}
    server = [sys.executable, ROOT / "tests" / "scripted_server.py", "--turn-format", folder / "turn_format.json"]
    server += ["--port-file", folder / "port", "--tokens", str(TOKENS)]
    running = subprocess.Popen(server, env=environment)
    try:
        while not (folder / "port").exists():
            time.sleep(0.1)
        url = f"http://127.0.0.1:{(folder / 'port').read_text()}"
        params = {"sampling": {**SETTINGS, "max_new_tokens": 512}, "max_tokens": None, "context_length": None}
        tuning = {"max_in_flight": max_in_flight, "render_samples": 0}
        client = [sys.executable, ROOT / "scripts" / "generate.py", "--dataset", "bench", "--url", url]
        client += ["--prompts", folder / "prompts.jsonl", "--turn-format", folder / "turn_format.json"]
        client += ["--params", json.dumps(params), "--tuning", json.dumps(tuning), "--store", folder / "store"]
        client += ["--output", folder / "bench.parquet", "--report", folder / "report.json"]
        client += ["--provenance", folder / "provenance.json"]
        began = time.monotonic()
        subprocess.run(client, env=environment, check=True)
        seconds = time.monotonic() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the client alone: the server has not been waited for
    finally:
        running.terminate()
        running.wait()
    report = json.loads((folder / "report.json").read_text())
    return {
        "rows": report["rows"]["out"],
        "output_tokens": report["tokens"]["output"],
        "prompt_tokens": report["tokens"]["prompt"],
        "max_in_flight": max_in_flight,
        "cores": CORES,
        "seconds": round(seconds, 1),
        "requests_per_second": round(report["rows"]["out"] / seconds),
        "client_cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "client_gib": round(used.ru_maxrss / 2**20, 3),
        "journal_mib": round((next((folder / "store").rglob("*.jsonl"))).stat().st_size / 2**20, 1),
    }


if __name__ == "__main__":
    main()
