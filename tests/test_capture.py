"""A capture asks for what is missing, in a good order, up to the cap, and makes the same file every time."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from capturing import FAST, capture, write_prompts
from eaglet import capture as capture_module
from eaglet import guard
from eaglet.capture import choose_samples
from eaglet.digests import request_key, row_seed
from eaglet.errors import CaptureError, GuardError, RecordError
from eaglet.journal import Index, entries
from eaglet.records import iter_rows, read_metadata
from eaglet.rendering import Renderer
from eaglet.window import Window
from scripted_server import ScriptedServer


@pytest.fixture
def server(tiny_format, tiny_renderer):
    with ScriptedServer(tiny_format, tiny_renderer) as running:
        yield running


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", 60)


def rows_of(path):
    return list(iter_rows(path, "raw"))


def ids_of_prompts(path):
    return [record["sample_id"] for record in records_of(path)]


def records_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_row_is_what_the_server_wrote_in_the_order_of_the_prompts(
    tmp_path, tiny_format, tiny_renderer, server, prompts
):
    raw, made = capture(tmp_path, prompts, tiny_format, server.url)
    rows = rows_of(raw)
    assert [row["sample_id"] for row in rows] == ids_of_prompts(prompts)
    for row, record in zip(rows, records_of(prompts), strict=True):
        assert row["prompt_ids"] == tiny_renderer.prompt_ids(record["messages"], record["tools"])
        sent = next(s for s in server.sampling if s.get("sampling_seed") == row_seed(0, row["sample_id"]))
        assert row["output_ids"] == server.output(row["prompt_ids"], sent)
        assert (row["finish_reason"], row["matched_stop"]) == ("stop", row["output_ids"][-1])
        assert row["server"] == 0
    assert (made.rows_in, made.rows_out, made.dropped.total()) == (60, 60, 0)
    assert made.output_tokens == sum(len(row["output_ids"]) for row in rows)


def test_sampling_is_explicit_and_the_key_covers_it(tmp_path, tiny_format, server, prompts):
    raw, _ = capture(tmp_path, prompts, tiny_format, server.url)
    row = rows_of(raw)[7]
    sent = next(s for s in server.sampling if s.get("sampling_seed") == row_seed(0, row["sample_id"]))
    assert sent == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 64,
        "stop_token_ids": [0, 2],
        "skip_special_tokens": False,
        "sampling_seed": row_seed(0, row["sample_id"]),
    }
    seed = sent.pop("sampling_seed")
    assert row["request_key"] == request_key(tiny_format.fingerprint, row["prompt_ids"], sent, seed)


def test_what_is_in_the_journal_is_not_asked_again_and_needs_no_server(tmp_path, tiny_format, server, prompts):
    raw, _ = capture(tmp_path, prompts, tiny_format, server.url)
    first = raw.read_bytes()
    raw.unlink()
    again, made = capture(tmp_path, prompts, tiny_format, None)
    assert again.read_bytes() == first and made.reused == 60 and made.answered == 0


def test_editing_one_prompt_asks_for_one_row(tmp_path, tiny_format, server, prompts):
    capture(tmp_path, prompts, tiny_format, server.url)
    lines = prompts.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[30])
    record["messages"][-1]["content"] += " And of Spain?"
    lines[30] = json.dumps({**record, "sample_id": "0" * 16})
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    _, made = capture(tmp_path, prompts, tiny_format, server.url)
    assert (made.reused, made.answered) == (59, 1)


def test_another_dataset_reuses_rows_of_a_server_with_the_same_settings(tmp_path, tiny_format, server, prompts):
    first, _ = capture(tmp_path, prompts, tiny_format, server.url)
    asked = server.requests
    second, made = capture(tmp_path, prompts, tiny_format, server.url, dataset="e")
    assert made.borrowed == 60 and made.answered == 0 and server.requests - asked == 1  # the probe
    assert rows_of(first) == rows_of(second)
    server.server_info["kv_cache_dtype"] = "fp8_e5m2"
    _, made = capture(tmp_path, prompts, tiny_format, server.url, dataset="f")
    assert made.borrowed == 0 and made.answered == 60


def test_a_server_with_other_settings_is_refused_by_the_journals_rows(tmp_path, tiny_format, server, prompts):
    capture(tmp_path, prompts, tiny_format, server.url, max_tokens=100)
    server.server_info["quantization"] = "fp8"
    with pytest.raises(GuardError, match=r"--quantization: not set before, 'fp8' now") as caught:
        capture(tmp_path, prompts, tiny_format, server.url)
    assert "d.jsonl aside" in str(caught.value)


def test_a_new_version_of_the_server_is_recorded_beside_the_old_one(tmp_path, tiny_format, server, prompts):
    capture(tmp_path, prompts, tiny_format, server.url, max_tokens=100)
    server.server_info["version"] = "0.1-scripted"
    raw, _ = capture(tmp_path, prompts, tiny_format, server.url)
    versions = [s["version"] for s in read_metadata(raw, "raw")["servers"]]
    assert versions == ["0.0-scripted", "0.1-scripted"]
    assert {row["server"] for row in rows_of(raw)} == {0, 1}


def test_the_guard_comes_before_the_first_request(tmp_path, tiny_format, server, prompts):
    server.model_info["reasoning_parser"] = "kimi_k2"
    with pytest.raises(GuardError, match="--reasoning-parser"):
        capture(tmp_path, prompts, tiny_format, server.url)
    assert server.requests == 0


def test_rendering_is_compared_for_each_kind_of_prompt(tmp_path, tiny_format, server, prompts, monkeypatch):
    kinds = []
    honest = guard.cross_check
    monkeypatch.setattr(
        guard,
        "cross_check",
        lambda c, r, samples: kinds.extend(bool(s.tools) for s in samples) or honest(c, r, samples),
    )
    _, made = capture(tmp_path, prompts, tiny_format, server.url)
    assert set(kinds) == {True, False} and 4 <= made.rendering_compared <= 6


def test_samples_are_spread_and_of_every_kind(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 100)
    order = ids_of_prompts(path)
    chosen = choose_samples(path, 8)
    places = [order.index(sample.sample_id) for sample in chosen]
    assert 8 <= len(chosen) <= 10 and min(places) < 10 and max(places) > 75
    assert {bool(sample.tools) for sample in chosen} == {True, False}
    assert choose_samples(path, 0) == []


# ---- what cannot be asked


def test_a_prompt_that_leaves_no_room_is_set_aside_and_counted(tmp_path, tiny_format, server, prompts):
    longest = max(len(ids) for ids in rendered(tiny_format, prompts))
    raw, made = capture(tmp_path, prompts, tiny_format, server.url, context_length=longest + 6)
    assert made.dropped["no_room"] == 60 - made.rows_out > 0
    assert made.set_aside[0]["reason"] == "no_room" and f"a context of {longest + 6}" in made.set_aside[0]["message"]
    assert all(len(row["prompt_ids"]) < longest for row in rows_of(raw))


def rendered(turn_format, prompts):
    renderer = Renderer(turn_format.target)
    return [renderer.prompt_ids(r["messages"], r["tools"]) for r in records_of(prompts)]


def test_a_refused_row_is_recorded_once_and_asked_again_only_on_request(tmp_path, tiny_format, server, prompts):
    refused = rendered(tiny_format, prompts)[3]
    server.faults = lambda number, body: "refused" if body["input_ids"] == refused else None
    raw, made = capture(tmp_path, prompts, tiny_format, server.url)
    assert made.dropped == {"refused": 1, "beyond_cap": 0} and made.rows_out == 59
    assert "The input is not allowed" in made.set_aside[0]["message"]
    first = raw.read_bytes()
    assert capture(tmp_path, prompts, tiny_format, None)[0].read_bytes() == first
    server.faults = lambda number, body: None
    _, made = capture(tmp_path, prompts, tiny_format, server.url, retry_refused=True)
    assert made.rows_out == 60 and made.answered == 1
    assert capture(tmp_path, prompts, tiny_format, None)[1].rows_out == 60


def test_a_server_that_refuses_everything_stops_the_capture(tmp_path, tiny_format, server, prompts):
    server.faults = lambda number, body: "refused" if number > 3 else None
    with pytest.raises(CaptureError, match=r"rows were refused.*--retry-refused"):
        capture(tmp_path, prompts, tiny_format, server.url)


def test_an_id_outside_the_vocabulary_is_never_sent(tmp_path, tiny_format, server, prompts, monkeypatch):
    honest = capture_module.Renderer.prompt_ids
    monkeypatch.setattr(
        capture_module.Renderer, "prompt_ids", lambda self, *a, **k: [*honest(self, *a, **k), tiny_format.vocab_size]
    )
    with pytest.raises(CaptureError, match=r"tokenizer and model .* do not belong together"):
        capture(tmp_path, prompts, tiny_format, server.url)
    assert server.requests == 0


def test_a_broken_prompts_file_is_named_with_its_line(tmp_path, tiny_format, server, prompts):
    with open(prompts, "a", encoding="utf-8") as stream:
        stream.write('{"messages": []}\n')
    with pytest.raises(RecordError, match=r"prompts\.jsonl:61"):
        capture(tmp_path, prompts, tiny_format, server.url)


def test_an_empty_dataset_makes_an_empty_file(tmp_path, tiny_format):
    (tmp_path / "none.jsonl").touch()
    raw, made = capture(tmp_path, tmp_path / "none.jsonl", tiny_format, None)
    assert rows_of(raw) == [] and made.rows_in == 0


def test_leftovers_of_a_kill_are_cleared(tmp_path, tiny_format, server, prompts):
    (tmp_path / "d.parquet.rows").write_bytes(b"torn")
    (tmp_path / ".d.parquet.rows.123.tmp").write_bytes(b"torn")
    (tmp_path / ".d.parquet.123.tmp").write_bytes(b"torn")
    capture(tmp_path, prompts, tiny_format, server.url)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.parquet", "generations", "prompts.jsonl"]


# ---- order and window


def test_prompts_with_a_common_prefix_follow_one_another(tmp_path, tiny_format, server, prompts):
    order = []
    server.faults = lambda number, body: order.append(tuple(body["input_ids"]))
    capture(tmp_path, prompts, tiny_format, server.url, tuning=replace(FAST, max_in_flight=1))
    asked = order[1:]  # after the probe
    shared = [common_prefix(a, b) for a, b in itertools.pairwise(asked)]
    in_file_order = [common_prefix(a, b) for a, b in itertools.pairwise(map(tuple, rendered(tiny_format, prompts)))]
    assert sum(shared) == sum(
        common_prefix(a, b) for a, b in itertools.pairwise(sorted(asked, key=lambda i: np.int32(i).tobytes()))
    )
    assert sum(shared) > 1.5 * sum(in_file_order)


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_slow_row_does_not_hold_up_those_behind_it_nor_the_memory(tmp_path, tiny_format, server, monkeypatch):
    monkeypatch.setattr(capture_module, "LOOK_AHEAD", 4)
    prompts = write_prompts(tmp_path / "p.jsonl", 100)
    delays = iter([0.0, 1.0])
    server.delay = lambda: next(delays, 0.0)
    most = []
    honest = Window.add
    monkeypatch.setattr(Window, "add", lambda self, rows: honest(self, rows) or most.append(len(self.rows)))
    tuning = replace(FAST, max_in_flight=2)
    raw, _ = capture(tmp_path, prompts, tiny_format, server.url, tuning=tuning)
    assert len(rows_of(raw)) == 100
    assert 8 < max(most) <= capture_module.WINDOW_CHUNKS * 8 + 8


# ---- the cap


@pytest.mark.parametrize("max_tokens", [1, 3, 50, 400, 700, 10**6])
@pytest.mark.parametrize("in_flight", [1, 8])
def test_the_cap_keeps_the_longest_prefix_within_it(tmp_path, tiny_format, server, prompts, max_tokens, in_flight):
    whole, _ = capture(tmp_path / "whole", prompts, tiny_format, server.url)
    tuning = replace(FAST, max_in_flight=in_flight)
    raw, made = capture(tmp_path, prompts, tiny_format, server.url, max_tokens=max_tokens, tuning=tuning)
    lengths = [len(row["output_ids"]) for row in rows_of(whole)]
    wanted = sum(total <= max_tokens for total in itertools.accumulate(lengths))
    assert rows_of(raw) == rows_of(whole)[:wanted]
    assert made.dropped["beyond_cap"] == 60 - wanted


def test_requests_stop_soon_after_the_cap_is_certain(tmp_path, tiny_format, server, monkeypatch):
    monkeypatch.setattr(capture_module, "LOOK_AHEAD", 64)
    prompts = write_prompts(tmp_path / "p.jsonl", 600)
    tuning = replace(FAST, max_in_flight=4)
    _, made = capture(tmp_path, prompts, tiny_format, server.url, max_tokens=2000, tuning=tuning)
    assert made.answered <= made.rows_out + 16


def test_a_larger_cap_uses_what_lay_beyond_the_smaller_one(tmp_path, tiny_format, server, prompts):
    _, small = capture(tmp_path, prompts, tiny_format, server.url, max_tokens=300)
    raw, large = capture(tmp_path, prompts, tiny_format, server.url)
    assert small.answered + large.answered == 60 and large.reused == small.answered
    assert max(server.answered.values()) == 2  # the probe, once for each capture
    assert len(Index(tmp_path / "generations" / "d.jsonl")) == 60
    assert sum(entry["kind"] == "row" for entry in entries(tmp_path / "generations" / "d.jsonl")) == 60
    assert len(rows_of(raw)) == 60
