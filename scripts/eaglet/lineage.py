"""The chain of one run: which job wrote which file from which others, and each place where that does not hold.

A job is a provenance file.  The chain holds if every file still has the digest that its job wrote down, if every job
read its inputs as their own jobs wrote them, if every file below the run's folder has a job, and if rows add up: within
each stage, from one stage to the next, and with what the files hold.  What a row says is `row_checks`; how it is shown is
`report_page` and `ro_crate`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eaglet.config import EMBEDDED_TARGET
from eaglet.digests import content_key, file_sha256
from eaglet.errors import AuditFailed, RecordError
from eaglet.files import read_json
from eaglet.provenance import read_provenance
from eaglet.records import open_records

STAGES = ("target", "prompts", "generate", "validate", "merge", "hidden_states", "train", "evaluate")
TRACED = ("target", "prompts", "raw", "checked", "quarantine", "shards", "hidden", "drafter", "evaluation")
ROW_FILES = {  # stage -> folder and suffix of the files that hold its rows
    "prompts": ("prompts", ".jsonl"),
    "generate": ("raw", ".parquet"),
    "validate": ("checked", ".parquet"),
    "merge": ("shards", ".parquet"),
    "hidden_states": ("hidden", ".parquet"),
}
STATEMENT = ("stage", "name", "params", "inputs", "outputs", "rows")  # what of a job does not vary from run to run


@dataclass(frozen=True)
class Break:
    """One place where the chain does not hold.  `row` is a sample_id, or `line N` of a text file."""

    stage: str
    file: str
    problem: str
    row: str | None = None
    expected: str | int | None = None
    found: str | int | None = None

    def as_json(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        row = f", row {self.row}" if self.row else ""
        values = [f"{name} {value}" for name in ("expected", "found") if (value := getattr(self, name)) is not None]
        return f"{self.file}{row} [{self.stage}]: {self.problem}{': ' if values else ''}{', '.join(values)}"


@dataclass
class Chain:
    """The jobs of a run, in the order of the stages, with the breaks found so far."""

    run: Path  # results/{run}
    config: dict | None
    jobs: dict[tuple[str, str], dict] = field(default_factory=dict)  # (stage, name) -> provenance
    breaks: list[Break] = field(default_factory=list)
    digests: dict[str, str | None] = field(default_factory=dict)  # path -> SHA-256 now, None where there is no file
    complete: bool = True  # whether the provenance of every job could be read

    def job(self, stage: str, name: str) -> dict | None:
        return self.jobs.get((stage, name))

    def of_stage(self, stage: str) -> dict[str, dict]:
        """Name -> provenance of the stage's jobs."""
        return {name: job for (of, name), job in self.jobs.items() if of == stage}

    def digest(self, path: str) -> str | None:
        if path not in self.digests:
            self.digests[path] = file_sha256(path) if Path(path).is_file() else None
        return self.digests[path]

    def writers(self) -> dict[str, tuple[str, str]]:
        """Path -> (stage, name) of the job that wrote it."""
        return {output["path"]: key for key, job in self.jobs.items() for output in job["outputs"]}

    @property
    def datasets(self) -> list[str]:
        return sorted(self.config["datasets"]) if self.config else sorted(self.of_stage("prompts"))

    def path(self, *parts: str) -> str:
        return self.run.joinpath(*parts).as_posix()

    def at_fault(self, stage: str, file: str | Path, problem: str, **more) -> None:
        self.breaks.append(Break(stage, str(file), problem, **more))


def read_chain(run: str | Path, config: Mapping | None) -> Chain:
    """The jobs whose provenance lies below `run`: those that `config` asks for, or all where there is no config."""
    chain = Chain(Path(run), dict(config) if config else None)
    for path in provenance_files(run, config):
        stage, name = path.parent.name, path.stem
        if not path.is_file():
            chain.at_fault(stage, path, "no provenance: the job has not run, or its file was removed")
            chain.complete = False
            continue
        try:
            job = read_provenance(path)
        except AuditFailed as error:
            chain.at_fault(stage, path, str(error).removeprefix(f"{path}: "))
            chain.complete = False
            continue
        if (job["stage"], job["name"]) != (stage, name):
            said = f"{job['stage']}/{job['name']}"
            chain.at_fault(stage, path, "says that it belongs to another job", expected=f"{stage}/{name}", found=said)
        chain.jobs[stage, name] = job
    return chain


def provenance_files(run: str | Path, config: Mapping | None) -> list[Path]:
    """Where the provenance of the run's jobs is, or should be, in the order of the stages."""
    folder = Path(run) / "provenance"
    if config is not None:
        return [folder / stage / f"{name}.json" for stage, name in expected_jobs(config)]
    found = [path for stage in STAGES for path in (folder / stage).glob("*.json")]
    return sorted(found, key=lambda path: _order(path.parent.name, path.stem))


def expected_jobs(config: Mapping) -> Iterator[tuple[str, str]]:
    """(stage, name) of every job that a complete run of this config has, in the order of the stages."""
    if config["target"]["model"] == EMBEDDED_TARGET:
        yield "target", "model"
    yield "target", "turn_format"
    for stage in ("prompts", "generate", "validate"):
        yield from ((stage, dataset) for dataset in sorted(config["datasets"]))
    yield "merge", "merge"
    yield from (("hidden_states", f"shard-{k}") for k in range(config["shards"]["count"]))
    yield "train", "serve_script"
    yield "train", "train"
    yield "evaluate", "evaluate"


def _order(stage: str, name: str) -> tuple:
    number = name.rpartition("-")[2]
    return STAGES.index(stage), int(number) if number.isdigit() else -1, name


def check_files(chain: Chain) -> None:
    """Every output has its recorded digest, every input is what its own job wrote, and no file lacks a job.

    The last is asked only where all provenance could be read.
    """
    writers = chain.writers()
    for (stage, name), job in chain.jobs.items():
        for output in job["outputs"]:
            _check_file(chain, stage, output, f"is not what {stage} {name} wrote")
        for source in job["inputs"]:
            writer = writers.get(source["path"])
            if writer is None:
                _check_file(chain, stage, source, f"is not what {stage} {name} read")
            else:
                _check_same_version(chain, writer, (stage, name), source)
    for folder in TRACED if chain.complete else ():
        for path in sorted(p for p in (chain.run / folder).rglob("*") if p.is_file() and not p.name.startswith(".")):
            if path.as_posix() not in writers and not _left_over(chain, path):
                chain.at_fault(folder, path, "no job says that it wrote this file: remove it, or run its stage again")


def _check_file(chain: Chain, stage: str, entry: Mapping, problem: str) -> None:
    found = chain.digest(entry["path"])
    if found is None:
        chain.at_fault(stage, entry["path"], "missing", expected=entry["sha256"])
    elif found != entry["sha256"]:
        chain.at_fault(stage, entry["path"], problem, expected=entry["sha256"], found=found)


def _check_same_version(chain: Chain, writer: tuple[str, str], reader: tuple[str, str], source: Mapping) -> None:
    written = next(o["sha256"] for o in chain.jobs[writer]["outputs"] if o["path"] == source["path"])
    if written != source["sha256"]:
        problem = f"{' '.join(reader)} read another version than {' '.join(writer)} wrote"
        chain.at_fault(reader[0], source["path"], problem, expected=written, found=source["sha256"])


def _left_over(chain: Chain, path: Path) -> bool:
    """Whether the file belongs to a dataset or shard that the config has dropped; such files do no harm."""
    if chain.config is None:
        return False
    name = path.relative_to(chain.run).parts[1].split(".")[0]
    folder = path.relative_to(chain.run).parts[0]
    if folder in ("prompts", "raw", "checked", "quarantine"):
        return name not in chain.config["datasets"]
    number = name.removeprefix("shard-")
    return folder in ("shards", "hidden") and number.isdigit() and int(number) >= chain.config["shards"]["count"]


def check_counts(chain: Chain) -> None:
    """Rows in = rows out + drops in every job, from stage to stage, and against the rows that the files hold."""
    for (stage, name), job in chain.jobs.items():
        rows = job["rows"]
        accounted = rows["out"] + sum(rows["dropped"].values())
        if rows["in"] != accounted:
            file = chain.path("provenance", stage, f"{name}.json")
            chain.at_fault(stage, file, "rows in are not rows out + rows dropped", expected=rows["in"], found=accounted)
    for dataset in chain.datasets:
        _check_handover(chain, "prompts", "generate", [dataset], [dataset])
        _check_handover(chain, "generate", "validate", [dataset], [dataset])
    _check_handover(chain, "validate", "merge", chain.datasets, ["merge"])
    _check_handover(chain, "merge", "hidden_states", ["merge"], chain.of_stage("hidden_states"))
    _check_handover(chain, "merge", "train", ["merge"], ["train"])
    for (stage, name), job in chain.jobs.items():
        if stage in ROW_FILES:
            _check_rows(chain, stage, name, job)


def _check_handover(chain: Chain, giver: str, taker: str, given: Iterable[str], taken: Iterable[str]) -> None:
    """What one stage put out, the next took in."""
    givers, takers = [chain.job(giver, n) for n in given], [chain.job(taker, n) for n in taken]
    if not givers or not takers or None in givers or None in takers:
        return  # a missing job is a break already, or the run is not that far
    out, into = sum(j["rows"]["out"] for j in givers), sum(j["rows"]["in"] for j in takers)
    if out != into:
        names = ", ".join(j["name"] for j in takers)
        file = chain.path("provenance", taker)
        chain.at_fault(taker, file, f"{names}: {taker} did not take in what {giver} put out", expected=out, found=into)


def _check_rows(chain: Chain, stage: str, name: str, job: Mapping) -> None:
    """The files that hold a job's rows hold as many as it says."""
    folder, suffix = ROW_FILES[stage]
    paths = [path for o in job["outputs"] if (path := Path(o["path"])).parent.name == folder and path.suffix == suffix]
    if not all(path.is_file() for path in paths):
        return
    counts = [count_rows(path) for path in paths]
    if None not in counts and sum(counts) != job["rows"]["out"]:
        expected, files = job["rows"]["out"], " + ".join(path.as_posix() for path in paths)
        chain.at_fault(stage, files, f"rows that {stage} {name} wrote", expected=expected, found=sum(counts))


def count_rows(path: str | Path) -> int | None:
    """Rows of a record file or lines of a JSON Lines file; None where it cannot be read (its digest is then wrong)."""
    path = Path(path)
    if path.suffix == ".jsonl":
        with open(path, "rb") as stream:
            return sum(1 for line in stream if not line.isspace())
    try:
        with open_records(path, kind_of(path)) as file:
            return file.metadata.num_rows
    except RecordError:
        return None


def kind_of(path: Path) -> str:
    """The kind of a record file, from the folder that it lies in."""
    kinds = {"shards": "shard", "hidden": "hidden_index"}
    return kinds.get(path.parent.name, path.parent.name)


def document(chain: Chain) -> dict:
    """lineage.json: the same for the same files, whenever and wherever the jobs ran.  Every file must be there."""
    writers = chain.writers()
    files = {entry["path"] for job in chain.jobs.values() for entry in [*job["inputs"], *job["outputs"]]}
    return {
        "run": chain.run.name,
        "config": chain.config,
        "jobs": [statement(job) for job in chain.jobs.values()],
        "files": {
            path: {
                "sha256": chain.digest(path),
                "bytes": Path(path).stat().st_size,
                "written_by": "/".join(writers[path]) if path in writers else None,
            }
            for path in sorted(files)
        },
    }


@dataclass
class Audit:
    """What an earlier audit wrote down about a run, with the breaks in its own files."""

    config: dict | None = None
    lineage: dict | None = None
    breaks: list[Break] = field(default_factory=list)


def read_audit(run: str | Path) -> Audit:
    """The audit of a run: its own provenance names lineage.json, the report, the crate, and each provenance file."""
    chain = Chain(Path(run), None)
    path = chain.run / "provenance" / "audit" / "audit.json"
    if not path.is_file():
        chain.at_fault(
            "audit", path, "missing: the run has not been audited (snakemake audit), or the file was removed"
        )
        return Audit(breaks=chain.breaks)
    try:
        job = read_provenance(path)
    except AuditFailed as error:
        chain.at_fault("audit", path, str(error).removeprefix(f"{path}: "))
        job = {"inputs": [], "outputs": []}
    for entry in [*job["inputs"], *job["outputs"]]:
        _check_file(chain, "audit", entry, "is not what it was when the run was audited")
    if chain.breaks:
        return Audit(breaks=chain.breaks)  # what lineage.json says cannot be relied on
    lineage = read_json(chain.run / "audit" / "lineage.json")
    return Audit(lineage["config"], lineage)


def compare(audit: Audit, chain: Chain) -> list[Break]:
    """What an unbroken chain says that lineage.json does not: the run went on after its audit."""
    now, then = document(chain), audit.lineage
    differing = Chain(chain.run, None)
    for path in sorted({*now["files"], *then["files"]}):
        before, after = then["files"].get(path), now["files"].get(path)
        if before != after:
            expected, found = (entry and entry["sha256"] for entry in (before, after))
            differing.at_fault("audit", path, "changed since the run was audited", expected=expected, found=found)
    if not differing.breaks and now != then:
        differing.at_fault(
            "audit", chain.run / "audit" / "lineage.json", "jobs have run again since the run was audited"
        )
    return differing.breaks


def statement(job: Mapping) -> dict:
    """What of a job's provenance is the same whenever it runs on the same files, with its own digest."""
    said = {key: job[key] for key in STATEMENT}
    return {**said, "sha256": content_key(said)}
