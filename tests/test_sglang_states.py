"""The SGLang backend of hidden_states, with a scripted server in SGLang's place (tests/sglang runs the real one)."""

import threading
from contextlib import contextmanager

import pytest
import torch

import hidden_states
from eaglet import sglang_server
from eaglet.client import RowRefused
from eaglet.errors import CaptureError, ConfigError
from eaglet.forward import HiddenForward
from eaglet.hidden_store import HiddenStore
from eaglet.records import iter_rows
from eaglet.sglang_server import in_flight
from eaglet.sglang_states import aux_arguments, states
from tiny_shard import build_tiny_shard, tiny_turn_format

LOCK = threading.Lock()  # one forward pass at a time: the layer tap holds the last one's states


class Scripted:
    """Answers as SGLang would: the auxiliary layers if `aux`, else the last state; fails after `answers`."""

    def __init__(self, forward, aux, answers=None):
        self.forward, self.aux, self.answers, self.asked = forward, aux, answers, 0
        self.connection = self

    def describe(self):
        return "the scripted server"

    def ask(self, body):
        self.asked += 1
        if self.answers is not None and self.asked > self.answers:
            raise CaptureError("the server has ended")
        assert body["sampling_params"]["max_new_tokens"] == 1 and body["return_hidden_states"] is True
        with LOCK:
            ((aux, last),) = self.forward.states([body["input_ids"]])
        return {"meta_info": {"hidden_states": [(aux if self.aux else last).tolist()], "cached_tokens": 0}}


@pytest.fixture
def run(tmp_path, tiny_target, monkeypatch):
    """run(answers): capture a shard of five rows from scripted servers; returns (servers, store, index)."""
    shard, facts = build_tiny_shard(tmp_path, tiny_target, rows=5, max_new_tokens=8)
    forward = HiddenForward(tiny_turn_format(tiny_target).target, [2, 4, 5])
    servers = []

    def capture(answers=None):
        @contextmanager
        def served(turn_format, server, arguments, log, *, longest):
            servers.append(Scripted(forward, "speculative-algorithm" in arguments, answers))
            yield servers[-1]

        monkeypatch.setattr(sglang_server, "served", served)
        index = tmp_path / "index.parquet"
        hidden_states.main(
            [
                *("--shard", str(shard), "--turn-format", str(facts), "--store", str(tmp_path / "store")),
                *("--params", '{"backend": "sglang", "dtype": "float32"}', "--server", '{"max_in_flight": 2}'),
                *("--index", str(index), "--report", str(tmp_path / "report.json")),
            ]
        )
        return index

    return capture, servers, HiddenStore(tmp_path / "store/hidden"), forward, shard


def test_both_servers_answers_make_the_stored_row(run):
    capture, servers, store, forward, shard = run
    index = capture()
    assert [server.aux for server in servers] == [True, False]
    for row, entry in zip(iter_rows(shard, "shard"), iter_rows(index, "hidden_index"), strict=True):
        ((aux, last),) = forward.states([row["prompt_ids"] + row["output_ids"]])
        stored = store.read(entry["key"])
        assert torch.equal(stored.aux, aux) and torch.equal(stored.last, last)
    assert not list((store.root / "staging").iterdir())


def test_an_interrupted_capture_asks_for_what_it_lacks(run):
    capture, servers, store, _, _ = run
    with pytest.raises(CaptureError):
        capture(answers=3)
    staged = len(list((store.root / "staging").iterdir()))
    assert 0 < staged < 5
    capture()
    assert servers[1].aux and servers[1].asked == 5 - staged
    assert len(list(store.keys())) == 5


def test_a_row_with_missing_positions_is_refused():
    class Cached(Scripted):
        def ask(self, body):
            return {"meta_info": {"hidden_states": [[[0.0] * 192] * 2], "cached_tokens": 3}}

    with pytest.raises(CaptureError, match=r"\[2, 192\] for 5 tokens.*\(3 tokens came from its cache\).*prefix cache"):
        states(Cached(None, True), [1, 2, 3, 4, 5], 192)


def test_a_refused_row_says_why():
    class Refusing(Scripted):
        def ask(self, body):
            raise RowRefused("refused", "longer than the context")

    with pytest.raises(CaptureError, match="2 tokens was refused: longer than the context"):
        states(Refusing(None, True), [1, 2], 192)


def test_the_backend_needs_the_servers_section(tmp_path, tiny_target):
    shard, facts = build_tiny_shard(tmp_path, tiny_target, rows=1, max_new_tokens=2)
    flags = ["--shard", str(shard), "--turn-format", str(facts), "--store", str(tmp_path / "store")]
    flags += ["--params", '{"backend": "sglang"}', "--index", str(tmp_path / "i"), "--report", str(tmp_path / "r.json")]
    with pytest.raises(ConfigError, match="needs --server"):
        hidden_states.main(flags)


IDS = "return-aux-hidden-state-layer-ids"


def test_layers_are_named_as_each_family_counts_them():
    assert IDS not in aux_arguments([2, 15, 27], 30, "LlamaForCausalLM")  # its default
    assert aux_arguments([3, 15, 27], 30, "LlamaForCausalLM")[IDS] == [2, 14, 26]
    assert aux_arguments([3, 30, 57], 61, "DeepseekV3ForCausalLM")[IDS] == [3, 30, 57]
    assert aux_arguments([2, 30, 57], 61, "KimiK25ForConditionalGeneration")[IDS] == [1, 29, 56]
    for layers, architecture in [([0, 4, 5], "LlamaForCausalLM"), ([1, 30, 57], "DeepseekV3ForCausalLM")]:
        with pytest.raises(ConfigError, match="cannot return the inputs"):
            aux_arguments(layers, 61, architecture)


def test_work_in_flight_is_bounded_and_keeps_its_order():
    assert list(in_flight(lambda x: x * x, range(7), 3)) == [(x, x * x) for x in range(7)]
    assert list(in_flight(str, [], 3)) == []
