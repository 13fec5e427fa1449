"""report.html: one page that shows a whole run, with its style, figures and rows inside it; it loads nothing.

What is shown is gathered here from the run's own files; report.html.jinja says how.  All text from data goes through
jinja's autoescape, or as JSON through its `tojson`, which writes `<`, `>` and `&` as escapes; the page's script puts it in as text.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.compute as pc

from eaglet import charts
from eaglet.files import read_json
from eaglet.lineage import STAGES, Chain
from eaglet.records import iter_jsonl, iter_rows, iter_tables
from eaglet.trail import Reader, code_name, job_summary

TEMPLATE = Path(__file__).with_name("report.html.jinja")
ROWS_PER_DATASET, ROWS = 200, 1000  # that the row browser holds, at most
LONGEST = 20_000  # characters of one segment that are shown
SHOWN_ALONE = 8  # jobs of one stage that the graph draws one by one


def report_page(chain: Chain, store: Path) -> str:
    """The page as text.  `chain` must hold: every file is there and can be read."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"short": charts.short, "duration": charts.duration, "figure": _figure}
    fates = _fates(chain)
    datasets = {
        name: _dataset(chain, name, Counter(f["fate"] for f in fates[name].values())) for name in chain.datasets
    }
    return environment.get_template(TEMPLATE.name).render(
        run=chain.run.name,
        target=read_json(chain.path("target", "turn_format.json"))["target"]["model"],
        code=sorted({code_name(job["code"]) for job in chain.jobs.values()}),
        ended=max(job["ended"] for job in chain.jobs.values()),
        datasets=datasets,
        totals={
            key: sum(d[key] for d in datasets.values())
            for key in ("read", "prompts", "raw", "train", "heldout", "tokens")
        },
        drops=_drops(chain),
        graph=_graph(chain),
        timeline=_timeline(chain),
        throughput=_throughput(chain, datasets),
        training=_training(chain),
        acceptance=_evaluation(chain, "acceptance.json"),
        speed=_evaluation(chain, "speed.json"),
        rows=list(_rows(chain, store, fates)),
        jobs=[_job(chain, key) for key in chain.jobs],
        files=_files(chain),
    )


def _dataset(chain: Chain, name: str, fates: Counter) -> dict:
    """What became of one dataset's records, and how long its prompts and outputs are."""
    rows = {stage: chain.jobs[stage, name]["rows"] for stage in ("prompts", "generate", "validate")}
    prompt_tokens, output_tokens, finished = [], [], Counter()
    for table in iter_tables(
        chain.path("raw", f"{name}.parquet"), "raw", ["prompt_ids", "output_ids", "finish_reason"]
    ):
        prompt_tokens += pc.list_value_length(table["prompt_ids"]).to_pylist()
        output_tokens += pc.list_value_length(table["output_ids"]).to_pylist()
        finished.update(table["finish_reason"].to_pylist())
    return {
        "read": rows["prompts"]["in"],
        "prompts": rows["prompts"]["out"],
        "raw": rows["generate"]["out"],
        "checked": rows["validate"]["out"],
        "train": fates["train"],
        "heldout": fates["heldout"],
        "finished": finished["stop"],
        "prompt_tokens": sum(prompt_tokens),
        "output_tokens": sum(output_tokens),
        "tokens": sum(prompt_tokens) + sum(output_tokens),
        "prompt_lengths": charts.histogram(prompt_tokens, label="prompt tokens"),
        "output_lengths": charts.histogram(output_tokens, label="output tokens"),
    }


def _drops(chain: Chain) -> list[dict]:
    return [
        {"stage": stage, "name": name, "reason": reason, "rows": count, "share": count / (job["rows"]["in"] or 1)}
        for (stage, name), job in chain.jobs.items()
        for reason, count in job["rows"]["dropped"].items()
        if count
    ]


COLUMNS = {  # of the graph: heading -> stages whose jobs stand there
    "sources, target": ["source"],
    "prompts, turn format": ["target", "prompts"],
    **{stage.replace("_", " "): [stage] for stage in STAGES[2:]},
}


def _graph(chain: Chain) -> charts.Markup:
    """Jobs in the columns of their stages, the sources before them; a stage with many jobs is one box."""
    nodes: dict[str, charts.Node] = {}
    box_of: dict[str, str] = {}  # path -> key of the box that wrote it, or is it
    edges: dict[tuple[str, str], None] = {}
    for (stage, name), job in chain.jobs.items():
        key = _box(chain, stage, name)
        nodes[key] = _node(chain, stage, name)
        for source in job["inputs"]:
            if stage == "prompts" and source["path"] not in box_of:
                box_of[source["path"]] = box = _box(chain, "source", source["path"], "prompts")
                alone = box != "source"
                title = Path(source["path"]).name if alone else f"{len(chain.of_stage('prompts'))} sources"
                nodes[box] = charts.Node(0, title, f"sha256 {source['sha256'][:8]}" if alone else "")
            if source["path"] in box_of:
                edges[box_of[source["path"]], key] = None
        for output in job["outputs"]:
            box_of[output["path"]] = key
    return charts.graph(list(COLUMNS), nodes, list(edges))


def _box(chain: Chain, kind: str, name: str, stage: str | None = None) -> str:
    """A box of its own, or the stage's where there are many."""
    return f"{kind}/{name}" if len(chain.of_stage(stage or kind)) <= SHOWN_ALONE else kind


def _node(chain: Chain, stage: str, name: str) -> charts.Node:
    jobs = list(chain.of_stage(stage).values())
    title = f"{len(jobs)} jobs"
    if len(jobs) <= SHOWN_ALONE:
        jobs = [chain.jobs[stage, name]]
        title = name.replace("_", " ") if stage != "target" else f"target {name}".replace("target turn_", "turn ")
    rows_in, rows_out = (sum(job["rows"][way] for job in jobs) for way in ("in", "out"))
    note = f"{rows_in:,} → {rows_out:,} rows" if rows_in else Path(jobs[0]["outputs"][0]["path"]).name
    column = 0 if (stage, name) == ("target", "model") else [stage in held for held in COLUMNS.values()].index(True)
    return charts.Node(column, title, note)


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _timeline(chain: Chain) -> charts.Markup:
    bars = []
    for (stage, name), job in chain.jobs.items():
        rows = f", {job['rows']['out']:,} rows" if job["rows"]["out"] else ""
        start, end = _seconds(job["started"]), _seconds(job["ended"])
        bars.append(charts.Bar(f"{stage} {name}", stage.replace("_", " "), start, end, rows))
    return charts.timeline(bars)


def _throughput(chain: Chain, datasets: Mapping[str, Mapping]) -> list[dict]:
    """Rows and, where the work is tokens, tokens per second of each stage, over the sum of its jobs' times."""
    tokens = {
        "generate": sum(d["output_tokens"] for d in datasets.values()),
        "hidden_states": sum(d["tokens"] for d in datasets.values()),
    }
    found = []
    for stage in STAGES:
        jobs = chain.of_stage(stage).values()
        seconds = sum(_seconds(j["ended"]) - _seconds(j["started"]) for j in jobs)
        rows = sum(j["rows"]["in"] for j in jobs)
        if jobs:
            found.append(
                {
                    "stage": stage,
                    "jobs": len(jobs),
                    "seconds": seconds,
                    "rows": rows,
                    "rows_per_second": rows / seconds if seconds else 0,
                    "tokens_per_second": tokens[stage] / seconds if stage in tokens and seconds else None,
                }
            )
    return found


def _training(chain: Chain) -> dict | None:
    """Loss and accuracy by optimizer step, of the first and the last step of the training-time test."""
    path = chain.path("drafter", "log.jsonl")
    if not Path(path).is_file():
        return None
    log = [line for _, line in iter_jsonl(path)]
    steps, heldout = [line for line in log if "loss" in line], [line for line in log if "heldout" in line]
    if not steps:
        return None

    def drawn(measure: str) -> charts.Markup:
        named = [
            charts.Line("training, first drafted token", [(x["step"], x[measure][0]) for x in _thinned(steps)]),
            charts.Line(
                f"training, token {len(steps[0][measure])}", [(x["step"], x[measure][-1]) for x in _thinned(steps)]
            ),
            charts.Line("held out, first drafted token", [(x["step"], x["heldout"][measure][0]) for x in heldout]),
        ]
        return charts.lines(named, label="optimizer step", low=0)

    return {
        "loss": drawn("loss"),
        "accuracy": drawn("accuracy"),
        "steps": steps[-1]["step"],
        "ttt_steps": len(steps[0]["loss"]),
    }


def _thinned(points: Sequence, most: int = 400) -> Sequence:
    return points[:: max(1, len(points) // most)]


def _evaluation(chain: Chain, name: str) -> dict | None:
    path = Path(chain.path("evaluation", name))
    return read_json(path) if path.is_file() else None


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _rows(chain: Chain, store: Path, fates: Mapping[str, Mapping[str, dict]]) -> Iterator[dict]:
    """Rows for the browser, spread evenly over each dataset: the decoded tokens, cut at the markers, and the row's trail."""
    reader = Reader(chain, store)
    most = min(ROWS_PER_DATASET, max(1, ROWS // len(chain.datasets)))
    for dataset in chain.datasets:
        rows = {row["sample_id"]: row for row in _spread(chain, dataset, most)}
        sources = {
            record["sample_id"]: record["source"]
            for _, record in iter_jsonl(chain.path("prompts", f"{dataset}.jsonl"))
            if record["sample_id"] in rows
        }
        for name, row in rows.items():
            yield {
                "id": name,
                "dataset": dataset,
                "source": sources[name],
                "prompt": [_cut(s) for s in reader.show(row["prompt_ids"])],
                "output": [_cut(s) for s in reader.show(row["output_ids"])],
                "prompt_tokens": len(row["prompt_ids"]),
                "output_tokens": len(row["output_ids"]),
                "finish_reason": row["finish_reason"],
                "request_key": row["request_key"],
                **fates[dataset].get(name, {"fate": "dropped", "place": "a duplicate in another dataset"}),
            }


def _spread(chain: Chain, dataset: str, most: int) -> Iterator[dict]:
    """At most so many rows of a raw file, at even distances."""
    total, start = chain.jobs["generate", dataset]["rows"]["out"], 0
    chosen = [i * total // min(most, total) for i in range(min(most, total))]
    for table in iter_tables(chain.path("raw", f"{dataset}.parquet"), "raw"):
        here = [place - start for place in chosen if start <= place < start + table.num_rows]
        yield from table.take(pa.array(here, pa.int64())).to_pylist()
        start += table.num_rows


def _cut(segment: dict) -> dict:
    text = segment["text"]
    return (
        segment
        if len(text) <= LONGEST
        else segment | {"text": f"{text[:LONGEST]} … ({len(text) - LONGEST:,} more characters)"}
    )


def _fates(chain: Chain) -> dict[str, dict[str, dict]]:
    """dataset -> sample_id -> where the row went: a shard and place, or the quarantine with its reasons."""
    fates: dict[str, dict[str, dict]] = {dataset: {} for dataset in chain.datasets}
    for dataset in chain.datasets:
        path = chain.path("quarantine", f"{dataset}.parquet")
        for row in iter_rows(path, "quarantine", ["sample_id", "reasons"]):
            fates[dataset][row["sample_id"]] = {"fate": "quarantined", "place": ", ".join(row["reasons"])}
    for shard in chain.of_stage("hidden_states"):
        path = chain.path("shards", f"{shard}.parquet")
        for place, row in enumerate(iter_rows(path, "shard", ["sample_id", "dataset", "split"])):
            fates[row["dataset"]][row["sample_id"]] = {"fate": row["split"], "place": f"{shard}, row {place}"}
    return fates


def _job(chain: Chain, key: tuple[str, str]) -> dict:
    job = chain.jobs[key]
    return {
        **(job_summary(job) or {}),
        "version": code_name(job["code"]),
        "seconds": _seconds(job["ended"]) - _seconds(job["started"]),
        "rows": job["rows"],
    }


def _files(chain: Chain) -> list[dict[str, Any]]:
    writers = chain.writers()
    paths = sorted(path for path, digest in chain.digests.items() if digest)
    return [
        {"path": p, "sha256": chain.digests[p], "by": "/".join(writers[p]) if p in writers else "source"} for p in paths
    ]
