"""Where one row, or one shard, came from: the answers to a reviewer's questions, as data.

A trail is put together from the run's own files, stage by stage, so it shows what they say; whether they say the truth is
for `lineage` and `row_checks`.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from eaglet.errors import RecordError
from eaglet.hidden_store import HiddenStore
from eaglet.lineage import Chain
from eaglet.records import iter_jsonl, iter_rows, open_records, read_metadata
from eaglet.rendering import Renderer
from eaglet.turn_format import TurnFormat

Segment = dict  # {kind: text | marker, name, text, ids}


def markers(turn_format: TurnFormat) -> list[tuple[str, tuple[int, ...]]]:
    """(name, ids) of everything that structures a turn, longer sequences first."""
    named = {"opening": turn_format.opening, "closing": turn_format.closing}
    if turn_format.tool_calls:
        calls = turn_format.tool_calls
        for name in ("section_begin", "section_end", "call_begin", "argument_begin", "call_end"):
            named[name] = getattr(calls, name)
    found = [(name, tuple(marker.ids)) for name, marker in named.items() if marker]
    found += [("end_of_turn", (token,)) for token in turn_format.end_of_turn_ids]
    return sorted(found, key=lambda marker: -len(marker[1]))


def segments(ids: Sequence[int], named: Sequence[tuple[str, tuple[int, ...]]], decode: Callable) -> list[Segment]:
    """The text of `ids` cut at its markers, which stay visible: [{kind, name, text, ids}] where `ids` is a count."""
    cut: list[Segment] = []
    start = place = 0

    def text_up_to(end: int) -> None:
        if end > start:
            cut.append({"kind": "text", "name": None, "text": decode(ids[start:end]), "ids": end - start})

    while place < len(ids):
        name, length = next(((n, len(m)) for n, m in named if tuple(ids[place : place + len(m)]) == m), (None, 0))
        if name is None:
            place += 1
            continue
        text_up_to(place)
        cut.append({"kind": "marker", "name": name, "text": decode(ids[place : place + length]), "ids": length})
        start = place = place + length
    text_up_to(len(ids))
    return cut


class Reader:
    """The run's files, opened for looking up single rows."""

    def __init__(self, chain: Chain, store: Path):
        self.chain, self.store = chain, store
        self.turn_format = TurnFormat.load(chain.path("target", "turn_format.json"))
        self.renderer = Renderer(self.turn_format.target)
        self.markers = markers(self.turn_format)

    def show(self, ids: Sequence[int]) -> list[Segment]:
        return segments(ids, self.markers, self._text)

    def _text(self, ids: Sequence[int]) -> str:
        """The text of ids; those that the tokenizer does not know, as a quarantined row may have them, as ⟨id⟩."""
        known = len(self.renderer.tokenizer)
        runs = itertools.groupby(ids, key=lambda token: 0 <= token < known)
        return "".join(
            self.renderer.decode(list(run)) if is_known else "".join(f"⟨{i}⟩" for i in run) for is_known, run in runs
        )

    def row(self, sample_id: str) -> dict:
        """The whole trail of one row.  Raises RecordError when no dataset of the run has it."""
        datasets = [d for d in self.chain.datasets if self._prompt(d, sample_id)]
        if not datasets:
            raise RecordError(
                f"sample_id {sample_id}: in no prompts file of {self.chain.run}; sample_ids are 16 hex digits, and stand "
                "in every record of prompts, raw, checked and shards"
            )
        return {"sample_id": sample_id, "datasets": [self._trail(d, sample_id) for d in datasets]}

    def _trail(self, dataset: str, sample_id: str) -> dict:
        prompt = self._prompt(dataset, sample_id)
        raw_path = self.chain.path("raw", f"{dataset}.parquet")
        raw = find_row(raw_path, "raw", sample_id)
        trail: dict[str, Any] = {
            "dataset": dataset,
            "source": prompt["source"],
            "prompts": {"file": self.chain.path("prompts", f"{dataset}.jsonl"), "line": prompt["line"]},
            "messages": prompt["messages"],
            "tools": prompt["tools"],
            "template_arguments": prompt["template_arguments"],
            "jobs": [self._job(stage, dataset) for stage in ("prompts", "generate", "validate")],
        }
        if raw is None:
            return trail | {"outcome": f"not generated: {self.chain.path('raw', f'{dataset}.report.json')} says why"}
        rendered = self.renderer.prompt_ids(prompt["messages"], prompt["tools"], prompt["template_arguments"])
        trail["prompt"] = {
            "tokens": len(raw["prompt_ids"]),
            "segments": self.show(raw["prompt_ids"]),
            "renders_the_same_now": rendered == raw["prompt_ids"],
        }
        trail["request"] = {
            "key": raw["request_key"],
            "server": read_metadata(raw_path, "raw")["servers"][raw["server"]],
            "journal": (self.store / "generations" / self.turn_format.fingerprint / f"{dataset}.jsonl").as_posix(),
        }
        trail["output"] = {
            "tokens": len(raw["output_ids"]),
            "segments": self.show(raw["output_ids"]),
            "finish_reason": raw["finish_reason"],
            "matched_stop": raw["matched_stop"],
        }
        return trail | self._after_generation(dataset, sample_id)

    def _after_generation(self, dataset: str, sample_id: str) -> dict:
        quarantined = find_row(self.chain.path("quarantine", f"{dataset}.parquet"), "quarantine", sample_id)
        if quarantined:
            return {"outcome": "quarantined", "checks": {"reasons": quarantined["reasons"]}}
        for name in self.chain.of_stage("hidden_states"):
            path = self.chain.path("shards", f"{name}.parquet")
            if row := find_row(path, "shard", sample_id, dataset):
                return {
                    "outcome": row["split"],
                    "checks": {"think_end": row["think_end"], "row_digest": row["row_digest"], "reasons": []},
                    "shard": {"file": path, "place": row["place"], "split": row["split"]},
                    "hidden": self._hidden(name, sample_id),
                    "later_jobs": [self._job("merge", "merge"), self._job("hidden_states", name)],
                }
        return {"outcome": "in no shard"}

    def _hidden(self, shard: str, sample_id: str) -> dict | None:
        entry = find_row(self.chain.path("hidden", f"{shard}.index.parquet"), "hidden_index", sample_id)
        if entry is None:
            return None
        store = HiddenStore(self.store / "hidden")
        return {"file": store.path(entry["key"]).as_posix(), "key": entry["key"], "sha256": entry["sha256"]}

    def _prompt(self, dataset: str, sample_id: str) -> dict | None:
        path = self.chain.path("prompts", f"{dataset}.jsonl")
        if not Path(path).is_file():
            return None
        found = ((number, record) for number, record in iter_jsonl(path) if record["sample_id"] == sample_id)
        return next(({**record, "line": number} for number, record in found), None)

    def _job(self, stage: str, name: str) -> dict | None:
        return job_summary(self.chain.job(stage, name))


def code_name(code: Mapping) -> str:
    """The version of the programs, short: a commit, or their digest outside a checkout, and whether it was all of it."""
    name = (code["commit"] or code["sha256"])[:10]
    return f"{name} + uncommitted changes" if code["clean"] is False else name


def job_summary(job: Mapping | None) -> dict | None:
    """Which program at which version ran when, where."""
    if job is None:
        return None
    return {
        "job": f"{job['stage']}/{job['name']}",
        "command": job["command"],
        "code": job["code"],
        "host": job["host"]["name"],
        "started": job["started"],
        "ended": job["ended"],
    }


def find_row(path: str, kind: str, sample_id: str, dataset: str | None = None) -> dict | None:
    """The row with this id (and dataset), with `place`, its number from 0; reads the other columns of its row group only."""
    if not Path(path).is_file():
        return None
    place = 0
    with open_records(path, kind) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["sample_id", *(["dataset"] if dataset else [])])
            matches = pc.equal(table["sample_id"], sample_id)
            if dataset:
                matches = pc.and_(matches, pc.equal(table["dataset"], dataset))
            if (at := pc.index(matches, True).as_py()) >= 0:
                return {**file.read_row_group(group).slice(at, 1).to_pylist()[0], "place": place + at}
            place += table.num_rows
    return None


def shard_summary(chain: Chain, k: int) -> dict:
    """Datasets, splits, tokens, servers and code versions behind the rows of one shard, and what was dropped on the way."""
    path = chain.path("shards", f"shard-{k}.parquet")
    if not Path(path).is_file():
        raise RecordError(f"{path}: no such shard; shards are numbered from 0 (shards.count in the config)")
    rows: Counter = Counter()
    tokens: Counter = Counter()
    servers: dict[str, Counter] = {}
    for row in iter_rows(path, "shard", ["dataset", "split", "prompt_ids", "output_ids", "server"]):
        dataset = row["dataset"]
        rows[dataset, row["split"]] += 1
        tokens[dataset, "prompt"] += len(row["prompt_ids"])
        tokens[dataset, "output"] += len(row["output_ids"])
        servers.setdefault(dataset, Counter())[row["server"]] += 1
    datasets = sorted({dataset for dataset, _ in rows})
    return {
        "shard": path,
        "sha256": chain.digest(path),
        "rows": sum(rows.values()),
        "datasets": {
            d: {
                "train": rows[d, "train"],
                "heldout": rows[d, "heldout"],
                "prompt_tokens": tokens[d, "prompt"],
                "output_tokens": tokens[d, "output"],
                "servers": [{"rows": count, "server": server} for server, count in _servers(chain, d, servers[d])],
                "dropped": {
                    stage: chain.jobs[stage, d]["rows"]["dropped"]
                    for stage in ("prompts", "generate", "validate")
                    if (stage, d) in chain.jobs
                },
            }
            for d in datasets
        },
        "jobs": [
            job_summary(job)
            for (stage, name), job in chain.jobs.items()
            if name in (*datasets, "merge", f"shard-{k}", "turn_format", "model")
        ],
    }


def _servers(chain: Chain, dataset: str, counts: Counter) -> Iterator[tuple[Any, int]]:
    listed = read_metadata(chain.path("raw", f"{dataset}.parquet"), "raw")["servers"]
    for index, count in sorted(counts.items()):
        yield listed[index], count
