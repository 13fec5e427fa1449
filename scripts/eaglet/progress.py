"""One look for every progress bar: live on a terminal, a line every ten seconds in a log."""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm


class _Lines:
    """A stream for tqdm where nobody watches: each refresh becomes a line of its own."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        if text := text.strip("\r\n"):
            self._stream.write(f"{text}\n")

    def flush(self) -> None:
        self._stream.flush()


def progress(
    iterable: Iterable | None = None, *, total: float | None = None, what: str, unit: str = "row", **more: Any
):
    """A tqdm bar on stderr.  `what` says the work ("capture humaneval"), `unit` what is counted."""
    live = sys.stderr.isatty()
    return tqdm(
        iterable,
        total=total,
        desc=what,
        unit=unit,
        file=sys.stderr if live else _Lines(sys.stderr),
        mininterval=0.2 if live else 10,
        maxinterval=10,
        dynamic_ncols=live,
        ncols=None if live else 100,
        ascii=None if live else True,
        smoothing=0.1,
        **more,
    )
