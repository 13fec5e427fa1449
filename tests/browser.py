"""A real browser for tests: Debian's chromium, headless, on a page of its own and without the network."""

import shutil
import subprocess
from pathlib import Path

import pytest

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=3000",
]


def chromium(page: Path, profile: Path, *options: str) -> str:
    """What the browser prints for a local page.  Skips the test where there is no chromium."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    command = [browser, *OPTIONS, f"--user-data-dir={profile}", *options, page.absolute().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
