"""The client gives checked answers, asks again where that helps, and stops where it does not."""

import threading
import time
from dataclasses import replace

import pytest

from capturing import FAST, Url, client_of
from eaglet import client as client_module
from eaglet.client import Answer, Expected, Failure, RowRefused, Stopped
from eaglet.errors import CaptureError, GuardError
from scripted_server import CORRUPTIONS, ScriptedServer, once

SAMPLING = {"temperature": 0.0, "max_new_tokens": 64, "sampling_seed": 1}
PROMPT = [20, 21, 22]


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(client_module, "LONGEST_DELAY", 0.05)


@pytest.fixture
def server(tiny_format):
    with ScriptedServer(tiny_format) as running:
        yield running


def test_an_answer_comes_back_whole(server, tiny_format):
    client = client_of(server.url, tiny_format)
    answer = client.generate(PROMPT, SAMPLING)
    assert answer.output_ids == server.output(PROMPT, SAMPLING)
    assert (answer.finish_reason, answer.matched_stop) == ("stop", answer.output_ids[-1])
    assert server.sampling == [SAMPLING]
    assert client.asked == 1 and not client.failures


def test_an_answer_at_its_length_has_no_stop(server, tiny_format):
    answer = client_of(server.url, tiny_format).generate(PROMPT, {**SAMPLING, "max_new_tokens": 2})
    assert (answer.finish_reason, answer.matched_stop, len(answer.output_ids)) == ("length", None, 2)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("reset", "connection_lost"),
        ("cut", "connection_lost"),
        ("truncated", "broken_json"),
        ("busy", "busy"),
        ("server_error", "server_error"),
        *((name, {"abort": "abort", "nan": "nan"}.get(name, "invalid")) for name in CORRUPTIONS),
    ],
)
def test_trouble_that_passes_is_counted_and_asked_again(server, tiny_format, fault, kind):
    server.faults = once(fault, fault)
    client = client_of(server.url, tiny_format)
    assert client.generate(PROMPT, SAMPLING).output_ids == server.output(PROMPT, SAMPLING)
    assert client.failures == {kind: 2} and client.asked == 3


def test_a_server_that_does_not_answer_in_time_is_asked_again(server, tiny_format):
    server.faults = once("hang")
    tuning = replace(FAST, request_timeout=0.2)
    client = client_of(server.url, tiny_format, tuning)
    client.generate(PROMPT, SAMPLING)
    assert client.failures == {"timeout": 1}


def test_400_is_the_rows_fault(server, tiny_format):
    server.faults = once("refused")
    client = client_of(server.url, tiny_format)
    with pytest.raises(RowRefused) as caught:
        client.generate(PROMPT, SAMPLING)
    assert caught.value.reason == "refused" and "The input is not allowed" in caught.value.message
    assert client.asked == 1


@pytest.mark.parametrize(("fault", "reason"), [("nan", "nan"), ("abort", "abort"), ("server_error", "server_error")])
def test_a_row_that_fails_again_and_again_is_refused_while_the_server_answers_others(
    server, tiny_format, fault, reason
):
    server.faults = lambda number, body: fault if body["input_ids"] == PROMPT else None
    client = client_of(server.url, tiny_format)
    client.known_good = ([30, 31], SAMPLING)
    with pytest.raises(RowRefused) as caught:
        client.generate(PROMPT, SAMPLING)
    assert caught.value.reason == reason


def test_a_server_that_fails_on_every_row_is_not_the_rows_fault(server, tiny_format):
    server.faults = lambda number, body: "server_error"
    client = client_of(server.url, tiny_format, replace(FAST, give_up_after=0.5))
    client.known_good = ([30, 31], SAMPLING)
    with pytest.raises(CaptureError, match="has given no answer for"):
        client.generate(PROMPT, SAMPLING)


def test_an_answer_that_stays_wrong_stops_the_capture(server, tiny_format):
    server.faults = lambda number, body: "unknown_stop"
    with pytest.raises(CaptureError, match=r"it stopped at 9 .* a turn ends with one of \[0, 2\]"):
        client_of(server.url, tiny_format).generate(PROMPT, SAMPLING)


def test_refused_connections_are_waited_out(server, tiny_format):
    server.stop()
    threading.Timer(0.3, server.start).start()
    client = client_of(server.url, tiny_format)
    client.generate(PROMPT, SAMPLING)
    assert client.failures["connection_refused"] > 1


def test_a_server_that_stays_away_is_given_up_with_its_name(server, tiny_format):
    server.stop()
    client = client_of(server.url, tiny_format, replace(FAST, give_up_after=0.3))
    began = time.monotonic()
    with pytest.raises(CaptureError, match=rf"{server.url} has given no answer .* refused.*run again"):
        client.generate(PROMPT, SAMPLING)
    assert 0.3 <= time.monotonic() - began < 3
    server.start()


def test_the_time_to_give_up_runs_from_the_first_failure_after_an_answer(server, tiny_format):
    client = client_of(server.url, tiny_format, replace(FAST, give_up_after=0.4))
    for _ in range(3):
        server.faults = once("busy", "busy", "busy")
        client.generate(PROMPT, SAMPLING)
        time.sleep(0.2)
    assert client.failures["busy"] == 9


def test_a_server_that_has_ended_for_good_is_not_waited_for(server, tiny_format):
    connection = Url(server.url, lives=False)
    server.stop()
    with pytest.raises(CaptureError, match="has ended"):
        client_of(connection, tiny_format).generate(PROMPT, SAMPLING)
    server.start()


def test_a_new_connection_is_confirmed_before_its_answer_counts(server, tiny_format):
    client, seen = client_of(server.url, tiny_format), []
    client.confirm = lambda: seen.append(client.asked)
    for _ in range(3):
        client.generate(PROMPT, SAMPLING)
    assert seen == [1]
    server.stop()
    server.start()
    for _ in range(2):
        client.generate(PROMPT, SAMPLING)
    assert len(seen) == 2

    def other():
        raise GuardError("another server")

    client.confirm = other
    server.stop()
    server.start()
    with pytest.raises(GuardError, match="another server"):
        client.generate(PROMPT, SAMPLING)


def test_a_wrong_token_is_an_error_at_once(server, tiny_format):
    server.token = "secret"
    with pytest.raises(GuardError, match=r"401.*server\.token_env"):
        client_of(server.url, tiny_format).generate(PROMPT, SAMPLING)
    client_of(Url(server.url, {"Authorization": "Bearer secret"}), tiny_format).generate(PROMPT, SAMPLING)


def test_a_server_without_the_native_api_is_named(server, tiny_format):
    with pytest.raises(GuardError, match="no /nothing"):
        client_of(server.url, tiny_format).get("/nothing")


def test_readiness_is_waited_for(server, tiny_format):
    server.stop()
    threading.Timer(0.3, server.start).start()
    client_of(server.url, tiny_format).wait_ready(5)
    server.stop()
    with pytest.raises(CaptureError, match=r"not ready within 0\.2 s"):
        client_of(server.url, tiny_format).wait_ready(0.2)
    server.start()


def test_stop_ends_a_wait(server, tiny_format):
    server.stop()
    client = client_of(server.url, tiny_format, replace(FAST, give_up_after=60))
    threading.Timer(0.2, client.stop).start()
    with pytest.raises(Stopped):
        client.generate(PROMPT, SAMPLING)
    server.start()


def answer(ids, reason, **changes):
    meta = {"prompt_tokens": 3, "completion_tokens": len(ids), "finish_reason": reason}
    return {"output_ids": ids, "meta_info": {**meta, **changes}}


EXPECTED = Expected(vocab_size=100, end_of_turn_ids=frozenset({2}))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "expected output_ids"),
        ({"output_ids": [1]}, "expected output_ids"),
        (
            answer([5, 2], {"type": "stop", "matched": 2}, completion_tokens=3),
            "2 output_ids came, the server counted 3",
        ),
        (
            answer([5, 2], {"type": "stop", "matched": 2}, prompt_tokens=4),
            "3 prompt ids were sent, the server counted 4",
        ),
        (answer([], {"type": "length"}), "0 output_ids came"),
        (answer([100, 2], {"type": "stop", "matched": 2}), "100, which is no id of the vocabulary"),
        (answer([-1, 2], {"type": "stop", "matched": 2}), "-1, which is no id"),
        (answer([True, 2], {"type": "stop", "matched": 2}), "True, which is no id"),
        (answer([5, "2"], {"type": "stop", "matched": 2}), "'2', which is no id"),
        (answer([5, 3], {"type": "stop", "matched": 3}), "stopped at 3"),
        (answer([5, 3], {"type": "stop", "matched": 2}), "with the last id 3"),
        (answer([5, 2], {"type": "stop", "matched": "</s>"}), "stopped at '</s>'"),
        (answer([5, 6], {"type": "length"}), "a length of 2 where 8 were allowed"),
        (answer([5, 6], {"type": "eos"}), "finish_reason is 'eos'"),
    ],
)
def test_a_wrong_answer_says_what_is_wrong(found, message):
    with pytest.raises(Failure) as caught:
        EXPECTED.check(found, prompt_tokens=3, max_new_tokens=8)
    assert caught.value.kind == "invalid" and message in caught.value.message


def test_an_abort_for_a_bad_request_is_the_rows_fault():
    found = answer([], {"type": "abort", "message": "too long", "status_code": 400})
    with pytest.raises(RowRefused, match="too long"):
        EXPECTED.check(found, 3, 8)


def test_right_answers_pass():
    assert EXPECTED.check(answer([5, 2], {"type": "stop", "matched": 2}), 3, 8) == Answer([5, 2], "stop", 2)
    assert EXPECTED.check(answer([5] * 8, {"type": "length"}), 3, 8) == Answer([5] * 8, "length", None)
