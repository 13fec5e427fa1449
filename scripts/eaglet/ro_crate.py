"""The run as an RO-Crate: the jobs, programs and files of a chain in the terms of the Process Run Crate profile 0.5.

One CreateAction for each job, with its program as instrument, what it read as object, what it wrote as result, and its
times.  Paths in the crate are relative to its own folder, so they hold in a copied results/ folder.  Knows nothing about
what the files hold.  https://w3id.org/ro/wfrun/process/0.5
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from eaglet.lineage import Chain

CRATE = "https://w3id.org/ro/crate/1.1"
CONTEXT = f"{CRATE}/context"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
LICENSE = "https://spdx.org/licenses/Apache-2.0"
MEDIA_TYPES = {
    ".csv": "text/csv",
    ".jinja": "text/plain",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".parquet": "application/vnd.apache.parquet",
    ".png": "image/png",
    ".sh": "application/x-sh",
    ".whl": "application/zip",
}


def crate(chain: Chain, folder: Path) -> dict:
    """ro-crate-metadata.json for `folder`: JSON-LD with a flat @graph of the run's jobs and files.

    `chain` must hold: every file is there.
    """
    actions = [_action(stage, name, job, folder) for (stage, name), job in chain.jobs.items()]
    entries = {e["path"]: e for job in chain.jobs.values() for e in [*job["inputs"], *job["outputs"]]}
    files = [_file(path, entry["sha256"], folder) for path, entry in sorted(entries.items())]
    programs = {program["@id"]: program for program in map(_program, chain.jobs.values())}
    ended = max((job["ended"] for job in chain.jobs.values()), default="")
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"eaglet run {chain.run.name}",
        "description": "How prompts became a trained, measured EAGLE-3 drafter: each job with its files and times.",
        "datePublished": ended,
        "license": {"@id": LICENSE},
        "conformsTo": {"@id": PROFILE},
        "author": {"@id": "#agent"},
        "hasPart": [{"@id": file["@id"]} for file in files],
        "mentions": [{"@id": action["@id"]} for action in actions],
    }
    descriptor = {
        "@id": "ro-crate-metadata.json",
        "@type": "CreativeWork",
        "about": {"@id": "./"},
        "conformsTo": {"@id": CRATE},
    }
    context_entities = [
        {"@id": PROFILE, "@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"},
        {"@id": LICENSE, "@type": "CreativeWork", "name": "Apache License 2.0", "description": "Apache-2.0"},
        {"@id": "#agent", "@type": "Organization", "name": "whoever ran this eaglet workflow"},
    ]
    return {
        "@context": CONTEXT,
        "@graph": [descriptor, root, *context_entities, *programs.values(), *actions, *files],
    }


def _identifier(path: str, folder: Path) -> str:
    return quote(Path(os.path.relpath(path, folder)).as_posix())


def _action(stage: str, name: str, job: Mapping, folder: Path) -> dict:
    rows = job["rows"]
    dropped = "".join(f", {count} dropped as {reason}" for reason, count in rows["dropped"].items())
    return {
        "@id": f"#{stage}/{name}",
        "@type": "CreateAction",
        "name": f"{stage} {name}",
        "description": f"{job['command']} ({rows['in']} rows in, {rows['out']} out{dropped})",
        "instrument": {"@id": _program(job)["@id"]},
        "agent": {"@id": "#agent"},
        "object": _references(job["inputs"], folder),
        "result": _references(job["outputs"], folder),
        "startTime": job["started"],
        "endTime": job["ended"],
        "actionStatus": "http://schema.org/CompletedActionStatus",
    }


def _program(job: Mapping) -> dict:
    """The program that ran, at its version; two jobs of one stage may have run different ones."""
    script, code = shlex.split(job["command"])[1], job["code"]
    version = code["commit"] or code["version"]
    return {
        "@id": f"#{quote(script)}@{code['sha256'][:12]}",
        "@type": "SoftwareApplication",
        "name": script,
        "description": f"eaglet {code['version']}; SHA-256 of all programs {code['sha256']}",
        "softwareVersion": version if code["clean"] is not False else f"{version} with uncommitted changes",
    }


def _file(path: str, sha256: str, folder: Path) -> dict:
    suffix = Path(path).suffix
    return {
        "@id": _identifier(path, folder),
        "@type": "File",
        "name": path,
        "contentSize": str(Path(path).stat().st_size),
        "encodingFormat": MEDIA_TYPES.get(suffix, "application/octet-stream"),
        "sha256": sha256,
    }


def _references(entries: list[Mapping], folder: Path) -> dict | list[dict]:
    """To each file once; a single one stands alone, as RO-Crate recommends."""
    found = [{"@id": name} for name in dict.fromkeys(_identifier(entry["path"], folder) for entry in entries)]
    return found[0] if len(found) == 1 else found
