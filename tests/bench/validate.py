"""Validated tokens a second and peak memory of `validate.py`, over files of two sizes.

python tests/bench/validate.py                     16,000 and 64,000 rows of about 1,000 tokens
python tests/bench/validate.py --rows 2000

DeepSeek-V4's vocabulary; conversations and outputs are cut from Python's own sources; a tenth of the rows call a tool,
a fiftieth is cut at the limit.  All checks are on, the rendering check at its default of 256 rows.
"""

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from transformers import AutoTokenizer  # noqa: E402, F401 - which validate imports late, and imports are not measured

import validate  # noqa: E402
from eaglet.digests import sample_id  # noqa: E402
from eaglet.inference import infer  # noqa: E402
from eaglet.records import ROW_GROUP, RecordWriter  # noqa: E402
from eaglet.rendering import Renderer  # noqa: E402
from families import family, saved_target  # noqa: E402
from turns import tool  # noqa: E402

FAMILY = "DeepSeek-V3.1/V4, thinking=True"
CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for rows in (arguments.rows, 4 * arguments.rows):
            folder = Path(scratch) / str(rows)
            in_a_child(lambda folder=folder, rows=rows: build(folder, rows))
            seconds, peak = in_a_child(lambda folder=folder: run(folder))
            tokens = json.loads((folder / "report.json").read_text())["tokens"]
            total = tokens["prompt"] + tokens["output"]
            print(
                f"{rows:>7,} rows  {total / 1e6:7.1f}M tokens  {seconds:6.2f} s  {total / seconds / 1e6:5.2f}M tokens/s  {peak:6.0f} MB"
            )


def in_a_child(work) -> tuple[float, float]:
    """(seconds that `work` says it took, peak MB) of a process of its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        seconds = work()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        os.write(writing, json.dumps([seconds, peak]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return tuple(json.loads(os.read(reading, 1000)))


def build(folder: Path, rows: int) -> float:
    target = saved_target(folder / "model", family(FAMILY))
    found, renderer = infer(target), Renderer(target)
    found.save(folder / "turn_format.json")
    sources = "\n".join(path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    stream = renderer.tokenizer.encode(sources, add_special_tokens=False)
    call, close, end = (
        renderer.tokenizer.encode(t, add_special_tokens=False) for t in (CALL, "</think>", "<｜end▁of▁sentence｜>")
    )
    chance, captured = random.Random(0), []

    def cut(length: int) -> list[int]:
        start = chance.randrange(len(stream) - length)
        return stream[start : start + length]

    with (
        RecordWriter(folder / "raw.parquet", "raw", {"servers": []}) as raw,
        open(folder / "prompts.jsonl", "w", encoding="utf-8") as prompts,
    ):
        for number in range(rows):
            start = chance.randrange(len(sources) - 1200)
            messages = [{"role": "user", "content": f"{number}: {sources[start : start + 1000]}"}]
            tools = [tool("get_weather")] if number % 10 == 0 else None
            name = sample_id(messages, tools, {"thinking": True})
            record = {"sample_id": name, "messages": messages, "tools": tools, "template_arguments": {"thinking": True}}
            prompts.write(json.dumps(record, ensure_ascii=False) + "\n")
            finished = number % 50 != 1
            output = cut(chance.randrange(200, 700)) + close + cut(chance.randrange(50, 450))
            output += (call if tools else []) + (end if finished else [])
            ended = {"finish_reason": "stop" if finished else "length", "matched_stop": end[0] if finished else None}
            ids = {"prompt_ids": renderer.prompt_ids(messages, tools), "output_ids": output}
            captured.append({"sample_id": name, **ids, **ended, "request_key": f"{number:064x}", "server": 0})
            if len(captured) == ROW_GROUP or number == rows - 1:
                raw.write_rows(captured)
                captured.clear()
    return 0.0


def run(folder: Path) -> float:
    """Seconds from start to end of the program, its imports aside."""
    files = {"raw": "raw.parquet", "prompts": "prompts.jsonl", "turn-format": "turn_format.json"}
    files |= {"checked": "checked.parquet", "quarantine": "quarantine.parquet", "report": "report.json"}
    began = time.perf_counter()
    validate.main(
        [
            "--dataset",
            "bench",
            "--params",
            "{}",
            *(part for name, file in files.items() for part in (f"--{name}", str(folder / file))),
        ]
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
