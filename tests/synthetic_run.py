"""A complete small run, written in a second by eaglet's own programs and writers: every file and provenance, and no model.

The tokens are made up but well formed; the files, digests, keys and counts are what the real stages write.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import audit
import merge
import prompts
import serve_script
from eaglet import journal
from eaglet.config import checked_config
from eaglet.digests import hidden_key
from eaglet.files import write_json, write_text
from eaglet.hidden_store import HiddenStore
from eaglet.inference import infer
from eaglet.provenance import recorded
from eaglet.records import RecordWriter, iter_jsonl, iter_rows, row_digest
from eaglet.rendering import Renderer
from eaglet.row_request import Requests
from eaglet.targets import Target
from eaglet.turn_format import TurnFormat
from tiny import build_tiny_target

RUN, STORE = Path("results/demo"), Path("results/store")
AUDIT = RUN / "provenance/audit/audit.json"
SAMPLING = {"temperature": 0.7, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "max_new_tokens": 64, "seed": 0}
LAYERS = [2, 4, 5]
WORDS = ["write", "a", "short", "list", "of", "three", "things", "for", "a", "walk", "in", "the", "rain"]
HOSTILE = "<script>document.title='owned'</script></script><img src=x onerror=\"document.title='owned'\">"


def build_synthetic_run(
    datasets: dict[str, int] | None = None,
    *,
    shards: int = 2,
    question_words: int = 6,
    output_tokens: int | None = None,
) -> Path:
    """Write a run below the working directory; returns results/demo.

    With `output_tokens` the outputs are random ids of a large vocabulary, so many on average, and cannot be decoded.

    `datasets` maps a name to a number of prompts; each dataset loses one record as a duplicate, its third row to the
    quarantine, and one row is held out.
    """
    datasets = datasets or {"notes": 12, "code": 9}
    random.seed(0)
    for name, count in datasets.items():
        _write_source(name, count, question_words)
    _target()
    write_json("config.json", make_config(datasets, shards))
    for name in datasets:
        _prompts(name)
        _generate(name, output_tokens)
        _validate(name)
    _merge(list(datasets), shards)
    for k in range(shards):
        _hidden_states(k)
    _train(shards)
    _serve_script()
    _evaluate(list(datasets), shards)
    return RUN


def audit_run() -> None:
    """`audit.py build` on the run that `build_synthetic_run` wrote."""
    config = Path("config.json").read_text()
    audit.main(
        [
            "build",
            "--run-dir",
            str(RUN),
            "--config-json",
            config,
            "--output",
            str(RUN / "audit"),
            "--provenance",
            str(AUDIT),
        ]
    )


def make_config(datasets: dict[str, int], shards: int) -> dict:
    return checked_config(
        {
            "run": RUN.name,
            "target": {"model": "model"},
            "datasets": {name: {"source": {"path": f"{name}.jsonl"}, "format": "messages"} for name in datasets},
            "shards": {"count": shards},
        }
    )


def _recorded(stage: str, name: str, inputs: dict, outputs: dict):
    path = RUN / "provenance" / stage / f"{name}.json"
    return recorded(path, stage=stage, name=name, params={"of": name}, inputs=inputs, outputs=outputs)


def _write_source(name: str, count: int, words: int) -> None:
    questions = [f"{name} {i}: {' '.join(random.choices(WORDS, k=words))}" for i in range(count)]
    questions[0] = f"{name} {HOSTILE} & <b>bold</b>"
    questions.append(questions[-1])
    lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in questions]
    write_text(f"{name}.jsonl", "\n".join(lines) + "\n")


def _target() -> None:
    build_tiny_target("model")
    path = RUN / "target" / "turn_format.json"
    with _recorded("target", "turn_format", {"model": "model"}, {"turn_format": path}):
        infer(Target("model")).save(path)


def _turn_format() -> TurnFormat:
    return TurnFormat.load(RUN / "target" / "turn_format.json")


def _prompts(dataset: str) -> None:
    made = {"source": {"path": f"{dataset}.jsonl"}, "format": "messages", "template_arguments": {}}
    files = {"output": f"prompts/{dataset}.jsonl", "report": f"prompts/{dataset}.report.json"}
    _run(
        prompts.main,
        f"prompts/{dataset}",
        files,
        "--dataset",
        dataset,
        "--params",
        json.dumps(made),
        "--store",
        str(STORE),
    )


def _run(main: Callable, job: str, files: dict[str, str], *arguments: str) -> None:
    """Run a stage's own program on files below the run's folder."""
    named = [text for option, name in files.items() for text in (f"--{option}", str(RUN / name))]
    main([*arguments, *named, "--provenance", str(RUN / f"provenance/{job}.json")])


def _generate(dataset: str, output_tokens: int | None) -> None:
    turn_format = _turn_format()
    renderer, requests = Renderer(turn_format.target), Requests(turn_format, SAMPLING, None)
    inputs = {"prompts": RUN / f"prompts/{dataset}.jsonl", "turn_format": RUN / "target/turn_format.json"}
    outputs = {"raw": RUN / f"raw/{dataset}.parquet", "report": RUN / f"raw/{dataset}.report.json"}
    facts = {"engine": "synthetic", "version": "1", "model_path": "model"}
    metadata = {"dataset": dataset, "sampling": SAMPLING, "context_length": requests.context_length, "servers": [facts]}
    folder, rows = STORE / "generations" / turn_format.fingerprint, []
    with _recorded("generate", dataset, inputs, outputs) as job:
        with journal.Generations(folder, dataset) as generations:
            server = generations.journal.append_server(facts)
            for number, (_, record) in enumerate(iter_jsonl(inputs["prompts"])):
                row = _answer(renderer, requests, turn_format, record, cut=number == 2)
                if output_tokens:
                    length = random.randrange(output_tokens // 2, output_tokens * 3 // 2)
                    row["output_ids"][:-1] = (np.random.default_rng(number).zipf(1.2, length) % 150_000).tolist()
                rows.append(row)
                answered = (
                    row[name] for name in ("request_key", "sample_id", "output_ids", "finish_reason", "matched_stop")
                )
                generations.journal.append(journal.Generation(*answered, server))
        with RecordWriter(outputs["raw"], "raw", metadata) as writer:
            writer.write_rows(rows)
        write_json(outputs["report"], {"rows_in": len(rows), "rows_out": len(rows), "dropped": {}})
        job.count(len(rows), len(rows))


def _answer(renderer: Renderer, requests: Requests, turn_format: TurnFormat, record: dict, *, cut: bool) -> dict:
    def encode(text: str) -> list[int]:
        return renderer.tokenizer.encode(text, add_special_tokens=False)

    prompt_ids = renderer.prompt_ids(record["messages"])
    thought, answer = (" ".join(random.choices(WORDS, k=random.randint(3, 9))) for _ in range(2))
    end = turn_format.end_of_turn_ids[0]
    output_ids = encode(thought) if cut else [*encode(thought), *turn_format.closing.ids, *encode(answer), end]
    return {
        "sample_id": record["sample_id"],
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "finish_reason": "length" if cut else "stop",
        "matched_stop": None if cut else end,
        "request_key": requests.make(record["sample_id"], prompt_ids).key,
        "server": 0,
    }


def _validate(dataset: str) -> None:
    turn_format = _turn_format()
    inputs = {"raw": RUN / f"raw/{dataset}.parquet", "prompts": RUN / f"prompts/{dataset}.jsonl"}
    names = {"checked": f"checked/{dataset}.parquet", "quarantine": f"quarantine/{dataset}.parquet"}
    outputs = {role: RUN / name for role, name in names.items()} | {"report": RUN / f"checked/{dataset}.report.json"}
    with _recorded("validate", dataset, inputs, outputs) as job:
        good, bad = [], []
        for row in iter_rows(inputs["raw"], "raw"):
            if row["finish_reason"] == "stop":
                good.append(
                    row | {"think_end": turn_format.think_end(row["output_ids"]), "row_digest": row_digest(row)}
                )
            else:
                bad.append(row | {"reasons": ["truncated"], "excerpt": "…"})
        for role, rows in (("checked", good), ("quarantine", bad)):
            with RecordWriter(outputs[role], role, {"dataset": dataset}) as writer:
                writer.write_rows(rows)
        write_json(outputs["report"], {"rows_in": len(good) + len(bad), "rows_out": len(good), "reasons": {}})
        job.count(len(good) + len(bad), len(good), {"truncated": len(bad)})


def _merge(datasets: list[str], shards: int) -> None:
    params = {"shards": {"count": shards, "seed": 0}, "heldout": {"rows_per_dataset": 1}}
    checked = [str(RUN / f"checked/{dataset}.parquet") for dataset in datasets]
    _run(merge.main, "merge/merge", {"output": "shards"}, "--params", json.dumps(params), "--checked", *checked)


def _hidden_states(k: int) -> None:
    turn_format, store = _turn_format(), HiddenStore(STORE / "hidden")
    inputs = {"shard": RUN / f"shards/shard-{k}.parquet", "turn_format": RUN / "target/turn_format.json"}
    outputs = {"index": RUN / f"hidden/shard-{k}.index.parquet", "report": RUN / f"hidden/shard-{k}.report.json"}
    about = {"fingerprint": turn_format.fingerprint, "layers": LAYERS, "dtype": "float16"}
    with _recorded("hidden_states", f"shard-{k}", inputs, outputs) as job:
        entries = []
        for row in iter_rows(inputs["shard"], "shard"):
            ids = row["prompt_ids"] + row["output_ids"]
            key = hidden_key(turn_format.fingerprint, LAYERS, "float16", ids)
            states = torch.full((len(ids), 3), 0.5), torch.full((len(ids), 1), 0.5)
            digest = store.write(key, ids, *states, about)
            entries.append({"sample_id": row["sample_id"], "key": key, "tokens": len(ids), "sha256": digest})
        with RecordWriter(outputs["index"], "hidden_index", about) as writer:
            writer.write_rows(entries)
        write_json(outputs["report"], {"rows": len(entries), "tokens": sum(e["tokens"] for e in entries)})
        job.count(len(entries), len(entries))


def _train(shards: int) -> None:
    inputs = {
        "manifest": RUN / "shards/manifest.json",
        "shards": [RUN / f"shards/shard-{k}.parquet" for k in range(shards)],
        "indexes": [RUN / f"hidden/shard-{k}.index.parquet" for k in range(shards)],
    }
    outputs = {
        name: RUN / "drafter" / name for name in ("config.json", "model.safetensors", "log.jsonl", "report.json")
    }
    with _recorded("train", "train", inputs, outputs) as job:
        splits = [row["split"] for path in inputs["shards"] for row in iter_rows(path, "shard", ["split"])]
        log = []
        for step in range(1, 41):
            measured = {name: [round(float(v + k / 4), 3) for k in range(4)] for name, v in _curve(step).items()}
            log.append({"step": step, "epoch": step // 10, "lr": 1e-3, "tokens": 900, **measured})
            if step % 10 == 0:
                log.append({"step": step, "epoch": step // 10, "heldout": measured})
        write_text(outputs["log.jsonl"], "".join(json.dumps(line) + "\n" for line in log))
        write_json(outputs["config.json"], {"architectures": ["LlamaForCausalLMEagle3"]})
        write_text(outputs["model.safetensors"], "weights")
        write_json(outputs["report.json"], {"steps": 40, "loss": 1.1})
        job.count(len(splits), len(splits))


def _curve(step: int) -> dict[str, float]:
    return {"loss": 4 * np.exp(-step / 12) + 1, "accuracy": 0.2 * (1 - np.exp(-step / 12))}


def _serve_script() -> None:
    files = {"turn-format": "target/turn_format.json", "output": "drafter/serve.sh"}
    _run(serve_script.main, "train/serve_script", files, "--params", '{"draft_tokens": 4}')


def _evaluate(datasets: list[str], shards: int) -> None:
    inputs = {
        "drafter": [RUN / "drafter" / name for name in ("config.json", "model.safetensors", "log.jsonl")],
        "manifest": RUN / "shards/manifest.json",
        "shards": [RUN / f"shards/shard-{k}.parquet" for k in range(shards)],
    }
    names = ("acceptance.json", "acceptance.csv", "speed.json")
    outputs = {name: RUN / "evaluation" / name for name in names}
    with _recorded("evaluate", "evaluate", inputs, outputs) as job:
        measured = {
            "acceptance_length": 1.9,
            "accepted_share": [0.6, 0.45, 0.3, 0.2],
            "verifications": 50,
            "tokens": 95,
        }
        baselines = {"untrained": measured | {"acceptance_length": 1.02}}
        each = {dataset: {"rows": 1, **measured, "baselines": baselines, "regions": {}} for dataset in datasets}
        proof = {"rows_decoded_without_drafter": 2, "rows_checked_by_one_pass": 2, "tokens_checked_by_one_pass": 190}
        report = {"draft_tokens": 4, "rows": 2, **measured, "baselines": baselines, "regions": {"reasoning": measured}}
        report |= {"datasets": each, "identical": {**proof, "near_ties": [], "failures": []}}
        pace = {"rows": 2, "speedup": 1.4}
        pace |= {
            name: {"tokens_per_second": rate} for name, rate in (("with_drafter", 21.0), ("without_drafter", 15.0))
        }
        machine = {"where": "cpu, float32, 1 threads", "batch_size": 1}
        write_json(outputs["acceptance.json"], report)
        write_text(outputs["acceptance.csv"], "dataset,acceptance_length\n")
        write_json(outputs["speed.json"], {**machine, **pace, "datasets": dict.fromkeys(datasets, pace)})
        job.count(len(datasets), len(datasets))
