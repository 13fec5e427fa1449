"""Stage hidden_states: what the target computes for every token of one shard, captured once and kept in the store.

Each row's states lie in the store under a key of the target, the layers, the dtype and the row's tokens; the index lists
the keys in the shard's order.  Only rows that the store lacks are captured; if it lacks none, no model is loaded.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from eaglet import program
from eaglet.digests import file_sha256, hidden_key
from eaglet.errors import ConfigError, StoreError, TargetError
from eaglet.files import free_bytes, readable_size, write_json
from eaglet.forward import HiddenForward, auxiliary_layers
from eaglet.hidden_store import DTYPES, HiddenStore, bytes_per_token
from eaglet.progress import progress
from eaglet.provenance import recorded
from eaglet.records import RecordWriter, iter_rows
from eaglet.turn_format import TurnFormat

CHECKED_POSITIONS = 8  # of each row, where the written token is compared with the target's most likely one
GREEDY_SHARE = 0.9  # of them must agree where sampling was greedy; a server in bfloat16 turns some near ties around
SPARE_BYTES = 1 << 30  # of the disk that a capture leaves free
PENDING_WRITES = 8


@dataclass(frozen=True)
class Row:
    """One row of the shard, and its key."""

    sample_id: str
    key: str
    token_ids: list[int]  # prompt and output
    prompt_tokens: int


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    turn_format = TurnFormat.load(options.turn_format)
    dtype = options.params.get("dtype", "bfloat16")
    layers = auxiliary_layers(turn_format.num_layers, options.params.get("layers", "auto"))
    described = {"fingerprint": turn_format.fingerprint, "layers": layers, "dtype": dtype}
    with recorded(
        options.provenance,
        stage="hidden_states",
        name=Path(options.shard).stem,
        params=options.params,
        inputs={"shard": options.shard, "turn_format": options.turn_format},
        outputs={"index": options.index, "report": options.report},
    ) as job:
        store = HiddenStore(Path(options.store) / "hidden")
        rows = list(read_rows(options.shard, described))
        digests, damaged = stored_digests(store, rows)
        missing = list({row.key: row for row in rows if row.key not in digests}.values())
        if missing:
            refuse_without_room(store, missing, turn_format.hidden_size, dtype)
            refuse_changed_target(turn_format)
            if options.params.get("backend", "transformers") == "sglang":
                digests |= capture_with_sglang(options, turn_format, store, missing, described)
            else:
                forward = HiddenForward(turn_format.target, layers, batch_tokens=options.tuning.get("batch_tokens"))
                digests |= capture(forward, store, missing, described)
        write_index(options.index, rows, digests, {**described, "hidden_size": turn_format.hidden_size})
        report = summary(store, rows, described, turn_format.hidden_size)
        refuse_other_tokens(options.shard, report["argmax"], options.tuning.get("temperature"))
        write_json(options.report, report)
        job.count(len(rows), len(rows))
        job.facts.update(captured=len(missing), damaged=damaged, stored_before=len(rows) - len(missing))


def _parser():
    parser = program.parser(__doc__, params="the config's hidden_states section: backend, dtype, layers")
    parser.add_argument("--shard", required=True, help="shards/shard-K.parquet")
    parser.add_argument("--turn-format", required=True, help="target/turn_format.json")
    parser.add_argument(
        "--tuning",
        type=program.json_object,
        default={},
        metavar="JSON",
        help="what changes no key: batch_tokens (tokens of one pass), temperature (of the sampling; 0 makes the program "
        "insist that the written tokens are the target's most likely ones)",
    )
    program.add_server_options(parser)
    parser.add_argument("--store", default="results/store", help="folder that all runs share")
    parser.add_argument("--index", required=True, help="hidden/shard-K.index.parquet, to write")
    parser.add_argument("--report", required=True, help="hidden/shard-K.report.json, to write")
    return parser


def read_rows(shard: str | Path, described: dict) -> Iterator[Row]:
    """The rows of a shard with their hidden keys."""
    for row in iter_rows(shard, "shard", columns=["sample_id", "prompt_ids", "output_ids"]):
        token_ids = row["prompt_ids"] + row["output_ids"]
        key = hidden_key(described["fingerprint"], described["layers"], described["dtype"], token_ids)
        yield Row(row["sample_id"], key, token_ids, len(row["prompt_ids"]))


def stored_digests(store: HiddenStore, rows: Iterable[Row]) -> tuple[dict[str, str], int]:
    """Key -> SHA-256 of the files that the store already holds, and how many it held damaged (to be captured again)."""
    digests, damaged = {}, 0
    for row in rows:
        if row.key in digests or not store.has(row.key):
            continue
        try:
            store.verify(row.key)
        except StoreError as error:
            print(f"captured again: {error}", flush=True)
            damaged += 1
            continue
        digests[row.key] = file_sha256(store.path(row.key))
    return digests, damaged


def refuse_without_room(store: HiddenStore, missing: Sequence[Row], hidden_size: int, dtype: str) -> None:
    """Say what the capture will write; raises StoreError when the disk has not got the room."""
    tokens = sum(len(row.token_ids) for row in missing)
    needed = tokens * bytes_per_token(hidden_size, dtype) + len(missing) * 1024
    free = free_bytes(store.root)
    print(
        f"to capture: {len(missing)} rows, {tokens:,} tokens, {readable_size(needed)} of {readable_size(free)} free",
        flush=True,
    )
    if needed + SPARE_BYTES > free:
        smaller = (
            ""
            if dtype.startswith("float8")
            else (
                f"hidden_states.dtype: float8_e4m3fn takes {readable_size(tokens * bytes_per_token(hidden_size, 'float8_e4m3fn'))}; "
            )
        )
        raise StoreError(
            f"{store.root}: the hidden states of {len(missing)} rows ({tokens:,} tokens of {hidden_size} × 4 values, {dtype}) need "
            f"{readable_size(needed)}, and {readable_size(free)} are free, of which {readable_size(SPARE_BYTES)} stay free. {smaller}"
            "sampling.max_new_tokens, datasets.*.max_prompts and datasets.*.max_tokens make fewer tokens; "
            "scripts/store.py lists what no run refers to any more"
        )


def refuse_changed_target(turn_format: TurnFormat) -> None:
    """Raise TargetError unless the target is the one whose keys were made."""
    found = turn_format.target.fingerprint()
    if found != turn_format.fingerprint:
        raise TargetError(
            f"target.model: the fingerprint of {turn_format.target.model} is {found}, turn_format.json says "
            f"{turn_format.fingerprint}; the model's files have changed: run the target stage again"
        )


def capture(forward: HiddenForward, store: HiddenStore, missing: Sequence[Row], described: dict) -> dict[str, str]:
    """Capture the rows and store each as soon as its pass is done; returns key -> SHA-256.

    On a GPU files are written by a thread beside the passes, at most `PENDING_WRITES` behind; on a CPU the passes have all
    cores, and such a thread would only disturb them.
    """
    middle = sorted(missing, key=lambda row: (len(row.token_ids), row.key))[len(missing) // 2]
    pace = forward.check(middle.token_ids)
    tokens = sum(len(row.token_ids) for row in missing)
    print(f"about {tokens / pace:,.0f} s at {pace:,.0f} tokens/s", flush=True)
    digests: dict[str, str] = {}
    pending: deque[tuple[str, Future[str]]] = deque()
    with (
        ThreadPoolExecutor(max_workers=1) as writer,
        progress(total=tokens, what="capture hidden states", unit="tok", unit_scale=True) as bar,
    ):
        for batch in forward.batches([row.token_ids for row in missing]):
            for number, aux, last in batch:
                row = missing[number]
                metadata = {**described, "argmax": argmax_agreement(forward.head, row, last)}
                made = (row.key, row.token_ids, aux.cpu(), last.cpu(), metadata)
                if forward.device == "cpu":
                    digests[row.key] = store.write(*made)
                else:
                    pending.append((row.key, writer.submit(store.write, *made)))
                bar.update(len(row.token_ids))
            while len(pending) > PENDING_WRITES:
                key, write = pending.popleft()
                digests[key] = write.result()
        digests.update((key, write.result()) for key, write in pending)
    forward.close()
    return digests


def capture_with_sglang(
    options, turn_format: TurnFormat, store: HiddenStore, missing: Sequence[Row], described: dict
) -> dict[str, str]:
    """Capture the rows with two servers, one after the other; returns key -> SHA-256."""
    from eaglet.sglang_server import in_flight, served
    from eaglet.sglang_states import LAST, Staging, aux_arguments, states
    from eaglet.target_weights import embedding_and_head

    if not options.server:
        raise ConfigError("hidden_states.backend: sglang needs --server, the config's server section")
    server = {**options.server, **options.server_tuning}
    architecture, hidden_size = turn_format.architecture, turn_format.hidden_size
    arguments = aux_arguments(described["layers"], turn_format.num_layers, architecture)
    dtype = DTYPES[described["dtype"]] if not described["dtype"].startswith("float8") else torch.bfloat16
    log, at_once = Path(options.store) / "logs" / "hidden_states.sglang.log", server.get("max_in_flight", 32)
    log.parent.mkdir(parents=True, exist_ok=True)
    rows, staging = sorted(missing, key=lambda row: -len(row.token_ids)), Staging(store)
    longest = len(rows[0].token_ids)
    if unstaged := [row for row in rows if not staging.has(row.key)]:
        with served(options.turn_format, server, arguments, log, longest=longest) as client:
            found = in_flight(lambda row: states(client, row.token_ids, 3 * hidden_size), unstaged, at_once)
            for row, aux in progress(found, total=len(unstaged), what="auxiliary layers from SGLang"):
                staging.write(row.key, aux.to(dtype))
    matrix = embedding_and_head(turn_format.target)[1].float()
    digests = {}
    with served(options.turn_format, server, LAST, log, longest=longest) as client:
        found = in_flight(lambda row: states(client, row.token_ids, hidden_size), rows, at_once)
        for row, last in progress(found, total=len(rows), what="last states from SGLang"):
            agreement = argmax_agreement(lambda x: torch.nn.functional.linear(x, matrix), row, last)
            metadata = {**described, "argmax": agreement}
            digests[row.key] = store.write(row.key, row.token_ids, staging.read(row.key), last, metadata)
            staging.remove(row.key)
    return digests


@torch.inference_mode()
def argmax_agreement(head: Callable[[torch.Tensor], torch.Tensor], row: Row, last: torch.Tensor) -> dict[str, int]:
    """{checked, agreed}: at how many of some evenly spaced output tokens the written one is the target's most likely."""
    predicting = range(row.prompt_tokens - 1, len(row.token_ids) - 1)  # position p predicts token p + 1
    count = min(CHECKED_POSITIONS, len(predicting))
    positions = [predicting[i * len(predicting) // count] for i in range(count)]
    best = head(last[positions]).argmax(-1).tolist()
    return {
        "checked": count,
        "agreed": sum(row.token_ids[p + 1] == token for p, token in zip(positions, best, strict=True)),
    }


def write_index(path: str | Path, rows: Iterable[Row], digests: dict[str, str], metadata: dict) -> None:
    """The shard's rows in their order: sample_id, key, tokens, sha256 of the file."""
    with RecordWriter(path, "hidden_index", metadata) as index:
        index.write_rows(
            {"sample_id": row.sample_id, "key": row.key, "tokens": len(row.token_ids), "sha256": digests[row.key]}
            for row in rows
        )


def summary(store: HiddenStore, rows: Sequence[Row], described: dict, hidden_size: int) -> dict:
    """The report: a function of the shard and the stored files alone, whoever captured them and when."""
    agreements = [store.metadata(row.key).get("argmax", {}) for row in rows]
    checked, agreed = (sum(a.get(name, 0) for a in agreements) for name in ("checked", "agreed"))
    return {
        "rows": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
        "files": len({row.key for row in rows}),
        "bytes": sum(store.path(key).stat().st_size for key in {row.key for row in rows}),
        "layers": described["layers"],
        "dtype": described["dtype"],
        "hidden_size": hidden_size,
        "argmax": {"checked": checked, "agreed": agreed, "share": round(agreed / checked, 4) if checked else None},
    }


def refuse_other_tokens(shard: str, argmax: dict, temperature: float | None) -> None:
    """Raise TargetError where greedy sampling wrote tokens that these hidden states do not predict."""
    print(
        f"the written token is the target's most likely one at {argmax['agreed']} of {argmax['checked']} places",
        flush=True,
    )
    if temperature == 0 and argmax["checked"] and argmax["share"] < GREEDY_SHARE:
        raise TargetError(
            f"{shard}: sampling was greedy, but at only {argmax['share']:.0%} of {argmax['checked']} places the written token is the "
            "most likely one by these hidden states; the server ran another model, revision or precision than target.model: "
            "compare the server's /model_info with the config"
        )


if __name__ == "__main__":
    program.run(main)
