"""What each row must say for the chain to hold, from the source line to the hidden states.

A prompts line names itself by its content; a raw row answers a line of its prompts file and stands in the journal; a
checked row is its raw row, unchanged; a shard's rows are the checked rows, and their digests give the Merkle root in
the manifest; an index lists its shard's rows, each with the digest of a file that holds the same tokens.  Whether a file
is the one that its job wrote is checked in `lineage`; here a damaged file is read as far as it goes, to name the row.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from eaglet import journal
from eaglet.digests import file_sha256, hidden_key, merkle_root, sample_id
from eaglet.errors import EagletError
from eaglet.files import read_json
from eaglet.hidden_store import HiddenStore
from eaglet.lineage import Chain
from eaglet.progress import progress
from eaglet.records import RAW, iter_jsonl, iter_rows, iter_tables, read_metadata, row_digests
from eaglet.row_request import Requests
from eaglet.turn_format import TurnFormat

ANSWERED = ("output_ids", "finish_reason", "matched_stop")  # what a journal line and a raw row share
DAMAGED = (EagletError, OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException)


def check_rows(chain: Chain, *, store: Path, sample: int | None = None) -> dict[str, int]:
    """Check every row of the run; of the hidden states `sample` files, or all.  Returns rows checked for each file kind.

    `store` is the folder that all runs share (results/store).
    """
    counted = {"prompts": 0, "raw": 0, "checked": 0, "shards": 0, "hidden": 0}
    digests: dict[str, dict[str, str]] = {}  # dataset -> sample_id -> digest of its checked row
    turn_format = chain.path("target", "turn_format.json")
    journals = None
    with _reading(chain, "target", turn_format):
        journals = Journals(chain, store / "generations")
    for dataset in progress(chain.datasets, what="audit datasets", unit="dataset"):
        prompts = check_prompts(chain, dataset)
        raw = check_raw(chain, dataset, prompts, journals)
        digests[dataset] = check_checked(chain, dataset, raw)
        counted["prompts"] += len(prompts)
        counted["raw"] += len(raw)
        counted["checked"] += len(digests[dataset])
    counted["shards"] = check_shards(chain, digests)
    counted["hidden"] = check_hidden(chain, HiddenStore(store / "hidden"), sample)
    return counted


@contextmanager
def _reading(chain: Chain, stage: str, path: str) -> Iterator[None]:
    """A file that cannot be read to its end is a break, not the end of the audit."""
    try:
        yield
    except DAMAGED as error:
        if Path(path).is_file():  # `lineage` names a missing one, if a job says that it wrote it
            chain.at_fault(stage, path, f"damaged ({str(error).removeprefix(f'{path}: ')})")


def check_prompts(chain: Chain, dataset: str) -> dict[str, int]:
    """sample_id -> line number; each id must be the digest of its line's conversation, and each source one that was read."""
    path, lines = chain.path("prompts", f"{dataset}.jsonl"), {}
    job = chain.job("prompts", dataset)
    sources = {source["sha256"] for source in job["inputs"]} if job else set()
    with _reading(chain, "prompts", path):
        for number, record in iter_jsonl(path):
            named = record["sample_id"]
            content = sample_id(record["messages"], record["tools"], record["template_arguments"])
            if named != content:
                problem = "the conversation is not the one that its sample_id names"
                chain.at_fault("prompts", path, problem, row=f"line {number}", expected=named, found=content)
            elif named in lines:
                chain.at_fault(
                    "prompts", path, f"the row of line {lines[named]} again", row=f"line {number}", found=named
                )
            source = record["source"].get("sha256")
            if source and sources and source not in sources:
                problem = "names a source that the job did not read"
                chain.at_fault(
                    "prompts", path, problem, row=f"line {number}", expected=" or ".join(sources), found=source
                )
            lines[named] = number
    return lines


class Journals:
    """The journals of the run's target, read and checked once each, in which every raw row must stand."""

    def __init__(self, chain: Chain, folder: Path):
        self.chain, self.indexes = chain, {}
        self.turn_format = TurnFormat.load(chain.path("target", "turn_format.json"))
        self.folder = folder / self.turn_format.fingerprint

    def requests(self, metadata: dict) -> Requests:
        """What made the requests of a raw file with this metadata."""
        return Requests(self.turn_format, metadata["sampling"], metadata["context_length"])

    def path(self, dataset: str) -> Path:
        return self.folder / f"{dataset}.jsonl"

    def open(self, path: Path) -> journal.Index | None:
        if path not in self.indexes:
            self.indexes[path] = journal.Index(path) if path.is_file() else None
            for damage in journal.verify(path) if path.is_file() else []:
                self.chain.at_fault("generate", path, f"damaged ({damage.what})", row=f"line {damage.line}")
        return self.indexes[path]

    def find(self, dataset: str, request_key: str) -> journal.Generation | None:
        """From the dataset's own journal, or from another's where the same request had been answered before."""
        own = self.open(self.path(dataset))
        if own and (found := own.get(request_key)):
            return found
        others = (self.open(path) for path in sorted(self.folder.glob("*.jsonl")))
        return next((found for other in others if other and (found := other.get(request_key))), None)


def check_raw(chain: Chain, dataset: str, prompts: dict[str, int], journals: Journals | None) -> dict[str, str]:
    """sample_id -> row digest; rows answer the prompts in their order, and are what the journal has under their keys.

    A journal line holds no prompt: it is bound to its row's prompt ids by the request key, which is made again here.
    """
    path, rows, last = chain.path("raw", f"{dataset}.parquet"), {}, 0
    with _reading(chain, "generate", path):
        requests = journals and journals.requests(read_metadata(path, "raw"))
        for row, digest in _digested(path, "raw", RAW.names):
            name = row["sample_id"]
            line = prompts.get(name)
            if prompts and line is None:
                chain.at_fault("generate", path, f"answers no prompt of prompts/{dataset}.jsonl", row=name)
            elif prompts and line < last:
                chain.at_fault("generate", path, "stands out of the order of its prompts", row=name)
            last = line or last
            if journals:
                _check_answer(chain, path, row, requests, journals, dataset)
            rows[name] = digest
    return rows


def _check_answer(chain: Chain, path: str, row: dict, requests: Requests, journals: "Journals", dataset: str) -> None:
    answered, own = journals.find(dataset, row["request_key"]), journals.path(dataset)
    name, request = row["sample_id"], requests.make(row["sample_id"], row["prompt_ids"])
    key = request.key if request else None
    if key != row["request_key"]:
        problem = "its prompt, sampling and seed are not those of its request key"
        chain.at_fault("generate", path, problem, row=name, expected=row["request_key"], found=key)
    if answered is None:
        chain.at_fault("generate", own, f"has no line for a row of {path}", row=name, expected=row["request_key"])
    elif any(getattr(answered, column) != row[column] for column in ANSWERED):
        chain.at_fault("generate", path, "is not what the journal says that the server answered", row=name)


def check_checked(chain: Chain, dataset: str, raw: dict[str, str]) -> dict[str, str]:
    """sample_id -> row digest; each row must have its own digest, and be a raw row, and no raw row may be lost."""
    path, digests = chain.path("checked", f"{dataset}.parquet"), {}
    before = len(chain.breaks)
    files_are_there = all(
        Path(chain.path(folder, f"{dataset}.parquet")).is_file() for folder in ("checked", "quarantine")
    )
    with _reading(chain, "validate", path):
        for row, digest in _digested(path, "checked", ["sample_id", "row_digest"]):
            name = row["sample_id"]
            digests[name] = _check_digest(chain, "validate", path, row, digest)
            if raw and name not in raw:
                chain.at_fault("validate", path, f"is no row of raw/{dataset}.parquet", row=name)
            elif raw and raw[name] != row["row_digest"]:
                problem = f"is not the row of raw/{dataset}.parquet"
                chain.at_fault("validate", path, problem, row=name, expected=raw[name], found=row["row_digest"])
    path, quarantined = chain.path("quarantine", f"{dataset}.parquet"), set()
    with _reading(chain, "validate", path):
        for row, digest in _digested(path, "quarantine", ["sample_id", "reasons"]):
            name = row["sample_id"]
            if name in digests:
                chain.at_fault("validate", path, "is in the checked file too", row=name)
            elif raw and (name not in raw or raw[name] != digest):
                chain.at_fault("validate", path, f"is no row of raw/{dataset}.parquet", row=name)
            elif not row["reasons"]:
                chain.at_fault("validate", path, "is quarantined without a reason", row=name)
            quarantined.add(name)
    if files_are_there and len(chain.breaks) == before:
        for name in (n for n in raw if n not in digests and n not in quarantined):
            chain.at_fault(
                "validate", chain.path("raw", f"{dataset}.parquet"), "is neither checked nor quarantined", row=name
            )
    return digests


def _digested(path: str, kind: str, columns: list[str]) -> Iterator[tuple[dict, str]]:
    """Rows with some of their columns, and the digest of what they hold."""
    for table in iter_tables(path, kind):
        yield from zip(table.select(columns).to_pylist(), row_digests(table), strict=True)


def _check_digest(chain: Chain, stage: str, path: str, row: dict, found: str) -> str:
    if found != row["row_digest"]:
        problem = "the content is not the one that its row_digest names"
        chain.at_fault(stage, path, problem, row=row["sample_id"], expected=row["row_digest"], found=found)
    return row["row_digest"]


def check_shards(chain: Chain, checked: dict[str, dict[str, str]]) -> int:
    """Every checked row is in one shard as it was checked, or a duplicate that the manifest names.  Rows checked.

    The digests and Merkle roots that the manifest names are those of the shards and their rows.
    """
    manifest_path = chain.path("shards", "manifest.json")
    with _reading(chain, "merge", manifest_path):
        manifest = read_json(manifest_path)
        _check_manifest(chain, manifest_path, manifest)
        roots = {entry["path"]: entry["merkle_root"] for entry in manifest["shards"]}
        expected = {
            name: (dataset, digest)
            for dataset, digests in checked.items()
            for name, digest in digests.items()
            if name not in manifest["duplicates"].get(dataset, {})
        }
        return _check_shard_rows(chain, roots, expected)
    return 0


def _check_shard_rows(chain: Chain, roots: dict[str, str], expected: dict[str, tuple[str, str]]) -> int:
    """`roots` maps a shard's path to its Merkle root, `expected` a sample_id to (dataset, row digest).  Rows checked."""
    unseen, count = set(expected), 0
    for path in progress(roots, what="audit shards", unit="shard"):
        leaves = []
        with _reading(chain, "merge", path):
            for row, found in _digested(path, "shard", ["sample_id", "dataset", "row_digest"]):
                name = row["sample_id"]
                leaves.append(_check_digest(chain, "merge", path, row, found))
                dataset, digest = expected.get(name, (row["dataset"], None))
                if name not in unseen or dataset != row["dataset"]:
                    chain.at_fault("merge", path, "is no checked row, or is in the shards twice", row=name)
                elif digest != leaves[-1]:
                    problem = f"is not the row of checked/{dataset}.parquet"
                    chain.at_fault("merge", path, problem, row=name, expected=digest, found=leaves[-1])
                unseen.discard(name)
            if (root := merkle_root(leaves)) != roots[path]:
                problem = "the rows do not give the Merkle root that the manifest names"
                chain.at_fault("merge", path, problem, expected=roots[path], found=root)
        count += len(leaves)
    for name in sorted(unseen):
        chain.at_fault("merge", chain.path("checked", f"{expected[name][0]}.parquet"), "is in no shard", row=name)
    return count


def _check_manifest(chain: Chain, path: str, manifest: dict) -> None:
    named = [(entry["path"], entry["sha256"]) for entry in manifest["shards"]]
    named += [(entry["checked"], entry["sha256"]) for entry in manifest["datasets"].values()]
    for file, expected in named:
        if (found := chain.digest(file)) != expected:
            chain.at_fault("merge", file, "is not what the manifest names", expected=expected, found=found)
    evaluated, heldout = chain.job("evaluate", "evaluate"), sum(d["heldout"] for d in manifest["datasets"].values())
    if evaluated and evaluated["rows"]["in"] != heldout:
        problem = "evaluate did not take in the rows that the manifest says are held out"
        chain.at_fault("evaluate", path, problem, expected=heldout, found=evaluated["rows"]["in"])
    root = merkle_root(entry["merkle_root"] for entry in manifest["shards"])
    if root != manifest["merkle_root"]:
        problem = "the shards' Merkle roots do not give the manifest's own"
        chain.at_fault("merge", path, problem, expected=manifest["merkle_root"], found=root)


def check_hidden(chain: Chain, store: HiddenStore, sample: int | None) -> int:
    """Each index lists the rows of its shard; of `sample` of them, drawn anew each time (None: all), the file is read.

    Returns the number of files read.
    """
    indexes = {name: _check_index(chain, name, store) for name in chain.of_stage("hidden_states")}
    chosen = [(name, sample_id) for name, index in indexes.items() for sample_id in index]
    if sample is not None and sample < len(chosen):
        chosen = random.sample(chosen, sample)
    chosen_of = {name: {row for shard, row in chosen if shard == name} for name in indexes}
    with progress(total=len(chosen), what="audit hidden states", unit="file") as bar, ThreadPoolExecutor() as pool:
        for name, rows in chosen_of.items():
            shard = chain.path("shards", f"{name}.parquet")
            with _reading(chain, "merge", shard):
                for table in iter_tables(shard, "shard", ["sample_id", "prompt_ids", "output_ids"]):
                    wanted = table.filter(pc.is_in(table["sample_id"], pa.array(rows, pa.string()))).to_pylist()
                    check = partial(_check_hidden_file, chain, store, indexes[name])
                    for _ in pool.map(check, wanted):
                        bar.update()
    return len(chosen)


def _check_index(chain: Chain, name: str, store: HiddenStore) -> dict[str, dict]:
    """sample_id -> entry of one shard's index, after checking that it lists the shard's rows and that their files exist."""
    path, shard = chain.path("hidden", f"{name}.index.parquet"), chain.path("shards", f"{name}.parquet")
    index: dict[str, dict] = {}
    with _reading(chain, "hidden_states", path):
        index = {entry["sample_id"]: entry for entry in iter_rows(path, "hidden_index")}
    with _reading(chain, "merge", shard):
        rows = dict.fromkeys(row["sample_id"] for row in iter_rows(shard, "shard", ["sample_id"]))
        for lost in (n for n in rows if n not in index):
            chain.at_fault("hidden_states", path, f"a row of {shard} has no hidden states", row=lost)
        for extra in [n for n in index if n not in rows]:
            chain.at_fault("hidden_states", path, f"is no row of {shard}", row=extra)
            del index[extra]
    for entry in index.values():
        if not store.has(entry["key"]):
            file = store.path(entry["key"])
            chain.at_fault("hidden_states", file, "missing", row=entry["sample_id"], expected=entry["sha256"])
    return {name: entry for name, entry in index.items() if store.has(entry["key"])}


def _check_hidden_file(chain: Chain, store: HiddenStore, index: dict[str, dict], row: dict) -> None:
    """The file is the one that the index names, its key is that of its content, and it holds the row's tokens."""
    entry = index[row["sample_id"]]
    path, name = store.path(entry["key"]), row["sample_id"]
    found = file_sha256(path)
    if found != entry["sha256"]:
        chain.at_fault(
            "hidden_states", path, "is not what the index names", row=name, expected=entry["sha256"], found=found
        )
        return
    with _reading(chain, "hidden_states", path.as_posix()):
        token_ids, about = row["prompt_ids"] + row["output_ids"], store.read(entry["key"]).metadata
        key = hidden_key(about["fingerprint"], about["layers"], about["dtype"], token_ids)
        if key != entry["key"]:
            chain.at_fault(
                "hidden_states", path, "holds the states of other tokens", row=name, expected=key, found=entry["key"]
            )
