"""The record files: their columns, one reader and one writer for each kind.

Field names are the same in every file.  Parquet files carry provenance in the schema metadata under the key
`eaglet`.  The same rows and settings give the same bytes: compression, row-group size and encodings are fixed and no
time is written.  Writing streams, so memory does not grow with the file.
"""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eaglet.digests import canonical_json, content_key, sha256
from eaglet.errors import RecordError
from eaglet.files import atomic_path

ROW_GROUP = 2048  # rows; 2048 rows of 1,000 tokens are 8 MB in memory

_raw = [
    ("sample_id", pa.string()),
    ("prompt_ids", pa.list_(pa.int32())),
    ("output_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),  # stop | length
    ("matched_stop", pa.int32()),  # the end-of-turn id that ended the output; null where it was cut
    ("request_key", pa.string()),
    ("server", pa.int32()),  # index into the servers of the file's metadata
]
_checked = [*_raw, ("think_end", pa.int32()), ("row_digest", pa.string())]
RAW = pa.schema(_raw)
CHECKED = pa.schema(_checked)
QUARANTINE = pa.schema([*_raw, ("reasons", pa.list_(pa.string())), ("excerpt", pa.string())])
SHARD = pa.schema([*_checked, ("dataset", pa.string()), ("split", pa.string())])  # split: train | heldout
HIDDEN_INDEX = pa.schema(
    [("sample_id", pa.string()), ("key", pa.string()), ("tokens", pa.int32()), ("sha256", pa.string())]
)
KINDS = {"raw": RAW, "checked": CHECKED, "quarantine": QUARANTINE, "shard": SHARD, "hidden_index": HIDDEN_INDEX}


def row_digest(row: Mapping) -> str:
    """SHA-256 over what a raw row says: its columns of `RAW`, in canonical JSON."""
    return content_key({name: row[name] for name in RAW.names})


def row_digests(table: pa.Table) -> list[str]:
    """`row_digest` of each row of a table with the columns of `RAW`: the same digests, made several times as fast.

    The JSON of the ids, nearly all of a row, is made for whole columns by looking each id's digits up.
    """
    columns = {}
    for name in sorted(RAW.names):
        if pa.types.is_list(RAW.field(name).type):
            columns[name] = _json_lists(table[name].combine_chunks())
        else:
            columns[name] = [canonical_json(value) for value in table[name].to_pylist()]
    keys = [b'"%s":' % name.encode() for name in columns]
    rows = zip(*columns.values(), strict=True)
    return [sha256(b"{" + b",".join(k + v for k, v in zip(keys, row, strict=True)) + b"}") for row in rows]


def _json_lists(lists: pa.ListArray) -> list[bytes]:
    """Each list<int32> as JSON without white space."""
    offsets = lists.offsets.to_numpy()
    ids = lists.values[offsets[0] : offsets[-1]]
    if not len(ids):
        return [b"[]"] * len(lists)
    least, most = pc.min_max(ids).as_py().values()
    if least < 0 or most >= 10**7:  # no ids of a vocabulary; rare, so slow is good enough
        return [canonical_json(row) for row in lists.to_pylist()]
    _, ends, text = _with_comma(1 << (most + 1).bit_length()).take(ids).buffers()
    ends, text = np.frombuffer(ends, np.int64)[offsets - offsets[0]].tolist(), memoryview(text)
    return [b"[%b]" % text[start : max(start, stop - 1)] for start, stop in itertools.pairwise(ends)]


@functools.cache
def _with_comma(size: int) -> pa.LargeStringArray:
    """The digits of each number below `size` and a comma."""
    return pa.array([f"{number}," for number in range(size)], pa.large_string())


class RecordWriter:
    """Writes one record file.  Use as a context manager: the file appears whole at the end, or not at all.

    `kind` is a key of `KINDS`; `metadata` is JSON-able and lands under the schema metadata key `eaglet`.
    """

    def __init__(self, path: str | Path, kind: str, metadata: Mapping):
        self.schema = KINDS[kind].with_metadata({b"eaglet": canonical_json({"kind": kind, **metadata})})
        self.rows = 0
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._atomic = atomic_path(path)

    def __enter__(self) -> "RecordWriter":
        self._writer = pq.ParquetWriter(
            self._atomic.__enter__(),
            self.schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=[n for n in ("finish_reason", "dataset", "split") if n in self.schema.names],
            write_statistics=False,
        )
        return self

    def write_rows(self, rows: Iterable[Mapping]) -> None:
        rows = list(rows)
        self.write_table(pa.table({n: [r[n] for r in rows] for n in self.schema.names}, schema=self.schema))

    def write_table(self, table: pa.Table) -> None:
        """Append a table with this kind's columns; row groups come out `ROW_GROUP` long however it is cut."""
        table = table.select(self.schema.names).cast(self.schema)
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.rows += table.num_rows
        if self._pending_rows >= ROW_GROUP:
            whole = pa.concat_tables(self._pending)
            cut = whole.num_rows - whole.num_rows % ROW_GROUP
            self._write(whole.slice(0, cut))
            self._pending, self._pending_rows = [whole.slice(cut)], whole.num_rows - cut

    def _write(self, table: pa.Table) -> None:
        self._writer.write_table(table.combine_chunks(), row_group_size=ROW_GROUP)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._pending_rows:
            self._write(pa.concat_tables(self._pending))
        self._writer.close()
        self._atomic.__exit__(*error)


def open_records(path: str | Path, kind: str) -> pq.ParquetFile:
    """Open a record file after checking its columns; raises RecordError with what was found."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(
            f"{path}: not a readable Parquet file ({error}); remove it and run its stage again"
        ) from error
    found, wanted = file.schema_arrow, KINDS[kind]
    if found.names != wanted.names or [f.type for f in found] != [f.type for f in wanted]:
        raise RecordError(
            f"{path}: columns are {', '.join(f'{f.name} {f.type}' for f in found)}; a {kind} file has "
            f"{', '.join(f'{f.name} {f.type}' for f in wanted)}; run the stage that writes it again"
        )
    if b"eaglet" not in (found.metadata or {}):
        raise RecordError(
            f"{path}: the schema metadata has no key `eaglet`, so the rows cannot be traced; run its stage again"
        )
    return file


def read_metadata(path: str | Path, kind: str) -> dict:
    with open_records(path, kind) as file:
        return json.loads(file.schema_arrow.metadata[b"eaglet"])


def read_table(path: str | Path, kind: str, columns: list[str] | None = None) -> pa.Table:
    with open_records(path, kind) as file:
        return file.read(columns=columns)


def iter_tables(path: str | Path, kind: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The file's row groups one after another, as tables of at most `ROW_GROUP` rows."""
    with open_records(path, kind) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


def iter_rows(path: str | Path, kind: str, columns: list[str] | None = None) -> Iterator[dict]:
    """Rows as dicts of Python values."""
    for table in iter_tables(path, kind, columns):
        yield from table.to_pylist()


def iter_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """(line number from 1, object) of a JSON Lines file; blank lines are skipped; raises RecordError with the line."""
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise RecordError(f"{path}:{number}: not JSON ({error}); found {line[:80]!r}") from error
            if not isinstance(value, dict):
                raise RecordError(f"{path}:{number}: expected a JSON object, found {type(value).__name__}")
            yield number, value
