"""Evaluation through the server that users run: SGLang with the drafter and without it, at several batch sizes.

Acceptance comes from SGLang's own counts in each answer's meta_info, so it is that of the deployed kernels.  Outputs of
the two servers are compared; they are not judged, since a batch on a GPU rounds differently with every batch size.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglet.client import Client
from eaglet.errors import EvaluationFailed
from eaglet.progress import progress
from eaglet.serve_script import eagle_arguments
from eaglet.sglang_server import in_flight, served

BATCH_SIZES = (1, 4, 16)


def measure_served(
    rows: Sequence[dict],
    drafter: Path,
    turn_format: Path,
    params: Mapping[str, Any],
    server: Mapping[str, Any],
    log: Path,
) -> tuple[dict, dict]:
    """(the contents of acceptance.json, those of speed.json)."""
    answers, speeds = {}, {}
    for name, arguments in (("with_drafter", eagle_arguments(drafter, params)), ("without_drafter", {})):
        with served(turn_format, server, arguments, log) as client:
            _generate(client, rows[:1], params, 1)  # warm-up
            for size in BATCH_SIZES:
                begun = time.perf_counter()
                answers[name, size] = _generate(client, rows, params, size)
                speeds[name, size] = time.perf_counter() - begun
    return _acceptance(rows, answers, params), _speed(rows, answers, speeds)


def _generate(client: Client, rows: Sequence[dict], params: Mapping, batch_size: int) -> list[dict]:
    sampling = {"temperature": 0, "max_new_tokens": params["max_new_tokens"]}

    def ask(row: dict) -> dict:
        return client.ask({"input_ids": row["prompt_ids"], "sampling_params": sampling})

    done = in_flight(ask, rows, batch_size)
    return [answer for _, answer in progress(done, total=len(rows), what=f"held-out prompts, {batch_size} at once")]


def _counts(answers: Sequence[dict]) -> dict:
    """Acceptance from the servers' own counts, in the keys of acceptance.json."""
    verifications = correct = 0
    histogram: list[int] = []  # by number of accepted drafted tokens: verifications
    for answer in answers:
        meta = answer["meta_info"]
        if "spec_verify_ct" not in meta:
            raise EvaluationFailed(
                "SGLang's answers carry no spec_verify_ct: it runs without the drafter; its log says why (--speculative-algorithm "
                "must be EAGLE3)"
            )
        verifications += meta["spec_verify_ct"]
        correct += meta["spec_num_correct_drafts"]
        for number, count in enumerate(meta["spec_correct_drafts_histogram"]):
            histogram += [0] * (number + 1 - len(histogram))
            histogram[number] += count
    total = sum(histogram)
    return {
        "acceptance_length": round(1 + correct / verifications, 4) if verifications else None,
        "accepted_share": [round(sum(histogram[i:]) / total, 4) for i in range(1, len(histogram))],
        "verifications": verifications,
        "tokens": verifications + correct,
    }


def _acceptance(rows: Sequence[dict], answers: Mapping[tuple[str, int], list[dict]], params: Mapping) -> dict:
    drafted, plain = answers["with_drafter", 1], answers["without_drafter", 1]
    differing = [
        {"sample_id": row["sample_id"], "dataset": row["dataset"], "position": _first_difference(a, b)}
        for row, a, b in zip(rows, drafted, plain, strict=True)
        if a["output_ids"] != b["output_ids"]
    ]
    datasets = sorted({row["dataset"] for row in rows})
    groups = {name: [a for row, a in zip(rows, drafted, strict=True) if row["dataset"] == name] for name in datasets}
    return {
        "engine": "sglang",
        "draft_tokens": params["draft_tokens"],
        "tree": params.get("tree"),
        "max_new_tokens": params["max_new_tokens"],
        "temperature": 0,
        "rows": len(rows),
        "output_tokens": sum(len(answer["output_ids"]) for answer in drafted),
        **_counts(drafted),
        "baselines": {},
        "sampled": None,
        "regions": {},
        "datasets": {
            name: {"rows": len(group), **_counts(group), "baselines": {}, "regions": {}}
            for name, group in groups.items()
        },
        "identical": {"rows_decoded_without_drafter": len(rows), "rows_that_differ": differing},
        "min_acceptance": params.get("min_acceptance"),
    }


def _first_difference(a: dict, b: dict) -> int:
    pairs = zip(a["output_ids"], b["output_ids"], strict=False)
    shortest = min(len(a["output_ids"]), len(b["output_ids"]))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), shortest)


def _speed(rows: Sequence[dict], answers: Mapping, seconds: Mapping[tuple[str, int], float]) -> dict:
    def compare(size: int) -> dict:
        found = {}
        for name in ("with_drafter", "without_drafter"):
            tokens = sum(len(answer["output_ids"]) for answer in answers[name, size])
            rate = round(tokens / seconds[name, size], 2)
            found[name] = {"tokens": tokens, "seconds": round(seconds[name, size], 3), "tokens_per_second": rate}
        rates = [found[name]["tokens_per_second"] for name in ("with_drafter", "without_drafter")]
        return {"rows": len(rows), "speedup": round(rates[0] / rates[1], 3), **found}

    batches = {f"{size} at once": compare(size) for size in BATCH_SIZES}
    return {"where": "SGLang", "batch_size": 1, **compare(1), "datasets": {}, "batches": batches}
