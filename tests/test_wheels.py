"""A wheel is fetched once, is the one that was pinned each time it is used, and gives its members unpacked."""

import gzip
import hashlib
import subprocess
import zipfile

import pytest

from eaglet import wheels
from eaglet.errors import SourceError


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one wheel in place of pip; returns the wheel's SHA-256 and the list of downloads."""
    wheel = tmp_path / "little-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("little/plain.txt", "plain")
        archive.writestr("little/rows.jsonl.gz", gzip.compress(b'{"a": 1}\n'))
    downloads = []

    def pip(command, **_):
        downloads.append(command[-1])
        if command[-1] != "little==1.0":
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        folder = command[command.index("--dest") + 1]
        subprocess.check_call(["cp", wheel, folder])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    return hashlib.sha256(wheel.read_bytes()).hexdigest(), downloads


def test_a_wheel_is_downloaded_once(index, tmp_path):
    digest, downloads = index
    first = wheels.fetch_wheel("little==1.0", digest, tmp_path / "cache")
    assert wheels.fetch_wheel("little==1.0", digest, tmp_path / "cache") == first
    assert first == tmp_path / "cache" / digest / "little-1.0-py3-none-any.whl"
    assert downloads == ["little==1.0"]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_wheel_that_was_damaged_in_the_cache_is_fetched_again(index, tmp_path):
    digest, downloads = index
    wheel = wheels.fetch_wheel("little==1.0", digest, tmp_path / "cache")
    wheel.write_bytes(wheel.read_bytes()[:-1])
    wheels.fetch_wheel("little==1.0", digest, tmp_path / "cache")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == digest
    assert len(downloads) == 2


def test_another_digest_than_the_pinned_one_is_refused_with_both(index, tmp_path):
    digest, _ = index
    with pytest.raises(SourceError, match=f"{digest}, expected {'0' * 64}"):
        wheels.fetch_wheel("little==1.0", "0" * 64, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.whl"))


def test_a_package_that_the_index_has_not_got_is_an_error_with_pips_reason(index, tmp_path):
    with pytest.raises(SourceError, match=r"little==9.*No matching distribution"):
        wheels.fetch_wheel("little==9", "0" * 64, tmp_path / "cache")


def test_members_are_read_and_gunzipped(index, tmp_path):
    wheel = wheels.fetch_wheel("little==1.0", index[0], tmp_path / "cache")
    assert wheels.read_member(wheel, "little/plain.txt") == b"plain"
    assert wheels.read_member(wheel, "little/rows.jsonl.gz") == b'{"a": 1}\n'


def test_a_member_that_is_not_there_is_an_error_that_names_it(index, tmp_path):
    wheel = wheels.fetch_wheel("little==1.0", index[0], tmp_path / "cache")
    with pytest.raises(SourceError, match=r"no member little/other\.txt"):
        wheels.read_member(wheel, "little/other.txt")
