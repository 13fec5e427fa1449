"""The embedded engine gives the model's own tokens, to each request what it would get alone, in SGLang's shapes."""

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from eaglet.engine import Engine, QueueFull, Request, RequestRefused
from eaglet.engine_http import EngineServer
from eaglet.errors import TargetError
from eaglet.token_sampling import SamplingParams
from tiny import build_tiny_target

CONTEXT = 512
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("tiny"))


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def make(folder: Path) -> Iterator:
    engines = []

    def made(**settings: object) -> Engine:
        engine = Engine(load(folder), **{"end_ids": [2], "context_length": CONTEXT, **settings})
        engines.append(engine)
        engine.start()
        return engine

    yield made
    for engine in engines:
        engine.stop()


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 250) for _ in range(rng.randint(1, 60))] for _ in range(number)]


def ask(engine: Engine, asked: list[list[int]], **params: object) -> list[Request]:
    made = [Request(ids, SamplingParams(**{"sampling_seed": seed, **params})) for seed, ids in enumerate(asked)]
    for request in made:
        engine.submit(request)
    for request in made:
        assert request.done.wait(60)
        assert request.error is None
    return made


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(make, folder: Path) -> None:
    engine, model = make(max_running=3), load(folder)
    asked = prompts(8)
    for ids, request in zip(asked, ask(engine, asked, max_new_tokens=40, **GREEDY), strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
        assert request.output_ids == expected


@pytest.mark.parametrize("params", [GREEDY, {"temperature": 0.9, "top_p": 0.95}, {"temperature": 1.3}])
def test_tokens_do_not_depend_on_the_company(make, params: dict) -> None:
    asked = prompts(24)
    together = ask(make(max_running=20), asked, max_new_tokens=32, ignore_eos=True, **params)
    alone = make(max_running=20)
    for seed in (0, 7, 23):
        request = Request(asked[seed], SamplingParams(max_new_tokens=32, ignore_eos=True, sampling_seed=seed, **params))
        alone.submit(request)
        assert request.done.wait(60)
        assert request.output_ids == together[seed].output_ids


def test_a_seed_decides_the_tokens(make) -> None:
    engine, ids = make(), prompts(1)[0]
    first, again, other = (
        ask(engine, [ids], max_new_tokens=30, ignore_eos=True, sampling_seed=seed)[0].output_ids for seed in (5, 5, 6)
    )
    assert first == again != other


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_the_matched_end_token_is_part_of_the_output(make) -> None:
    engine, ids = make(), prompts(1)[0]
    free = ask(engine, [ids], max_new_tokens=30, ignore_eos=True, **GREEDY)[0]
    assert free.finish_reason == {"type": "length", "length": 30}
    stop = next(t for i, t in enumerate(free.output_ids) if i > 1 and t not in free.output_ids[:i])
    ended = ask(engine, [ids], max_new_tokens=30, ignore_eos=True, stop_token_ids=frozenset([stop]), **GREEDY)[0]
    assert ended.finish_reason == {"type": "stop", "matched": stop}
    assert ended.output_ids == free.output_ids[: free.output_ids.index(stop) + 1]
    engine.end_ids = frozenset([stop])
    assert ask(engine, [ids], max_new_tokens=30, **GREEDY)[0].output_ids == ended.output_ids
    assert ask(engine, [ids], max_new_tokens=30, ignore_eos=True, **GREEDY)[0].output_ids == free.output_ids
    late = ask(engine, [ids], max_new_tokens=30, min_new_tokens=20, **GREEDY)[0]
    assert len(late.output_ids) >= 20 and stop not in late.output_ids[:20]


def test_no_tokens_wanted_none_made(make) -> None:
    request = ask(make(), [[1, 2, 3]], max_new_tokens=0)[0]
    assert request.output_ids == [] and request.finish_reason == {"type": "length", "length": 0}


def test_a_nan_is_reported_as_sglang_does(make) -> None:
    engine = make()
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(float("nan"))
    assert ask(engine, [[5, 6]], **GREEDY)[0].finish_reason == {"type": "stop", "matched": "NaN happened"}


def test_an_aborted_request_leaves_and_the_next_takes_its_place(make) -> None:
    engine = make(max_running=1)
    endless = Request([1, 2], SamplingParams(max_new_tokens=CONTEXT - 2, ignore_eos=True))
    waiting = Request([3, 4], SamplingParams(max_new_tokens=2, ignore_eos=True))
    engine.submit(endless)
    engine.submit(waiting)
    engine.abort(endless)
    assert endless.done.wait(10) and endless.finish_reason["type"] == "abort"
    assert waiting.done.wait(10) and len(waiting.output_ids) == 2
    assert engine.running == 0


def test_stopping_ends_what_is_under_way(make) -> None:
    engine = make(max_running=1)
    requests_made = [Request([1], SamplingParams(max_new_tokens=500, ignore_eos=True)) for _ in range(3)]
    for request in requests_made:
        engine.submit(request)
    engine.stop()
    assert all(r.done.is_set() and r.finish_reason["type"] == "abort" for r in requests_made)
    with pytest.raises(QueueFull):
        engine.submit(Request([1], SamplingParams()))


# ---- memory and limits -----------------------------------------------------------------------------------------------


def test_requests_wait_for_room_in_the_cache_and_keep_their_tokens(make) -> None:
    """Long and short rows through a cache that holds about two long ones: it is reshaped, and nothing is lost."""
    asked = [ids * (5 if i % 4 == 0 else 1) for i, ids in enumerate(prompts(12, seed=1))]
    roomy = ask(make(), asked, max_new_tokens=50, ignore_eos=True, **GREEDY)
    bytes_per_token = 2 * 8 * 2 * 16 * 4
    tight = make(cache_bytes=bytes_per_token * 1024)
    assert tight.max_total_tokens <= 2048
    for ours, theirs in zip(ask(tight, asked, max_new_tokens=50, ignore_eos=True, **GREEDY), roomy, strict=True):
        assert ours.output_ids == theirs.output_ids


@pytest.mark.parametrize(
    ("ids", "limit", "message"),
    [
        ([1, 99999], 8, r"input_ids\[1\] is 99999; the model's vocabulary has the ids 0 to"),
        ([-1], 8, r"input_ids\[0\] is -1"),
        ([], 8, "empty"),
        ([1] * CONTEXT, 1, "longer than the model's context length"),
        ([1] * 500, 100, "500 tokens in the input and 100 for the completion"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(make, ids: list[int], limit: int, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        make().submit(Request(ids, SamplingParams(max_new_tokens=limit)))


def test_without_a_limit_the_context_is_the_limit(make) -> None:
    request = ask(make(), [[1] * (CONTEXT - 5)], max_new_tokens=None, ignore_eos=True)[0]
    assert len(request.output_ids) == 5


def test_sliding_windows_are_refused(folder: Path) -> None:
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    with pytest.raises(TargetError, match="sglang"):
        Engine(MistralForCausalLM(config).eval(), end_ids=[2], context_length=64)


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(make, folder: Path) -> Iterator:
    servers = []

    def served(api_key: str | None = None, **settings: object) -> tuple[EngineServer, str]:
        server = EngineServer(
            0, make(**settings), AutoTokenizer.from_pretrained(folder), {"model_path": str(folder)}, api_key=api_key
        )
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server, f"http://127.0.0.1:{server.server_port}"

    yield served
    for server in servers:
        server.shutdown()
        server.server_close()


def test_generate_answers_in_sglangs_shape(serve) -> None:
    _, url = serve()
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, **GREEDY}}
    answer = requests.post(f"{url}/generate", json=body, timeout=10).json()
    assert len(answer["output_ids"]) == 4
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["e2e_latency"] > 0 and meta["id"] and isinstance(answer["text"], str)


def test_one_connection_carries_many_requests_and_many_connections_at_once(serve) -> None:
    server, url = serve(max_running=8)

    def many(seed: int) -> list[list[int]]:
        with requests.Session() as session:
            return [
                session.post(
                    f"{url}/generate",
                    json={"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "sampling_seed": seed}},
                    timeout=30,
                ).json()["output_ids"]
                for ids in prompts(4, seed)
            ]

    with ThreadPoolExecutor(8) as pool:
        first, second = list(pool.map(many, range(8))), list(pool.map(many, range(8)))
    assert first == second
    assert server.engine.statistics.requests == 64


@pytest.mark.parametrize(
    ("body", "nested", "message"),
    [
        ({"input_ids": [1] * 600}, True, "longer than"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 600}}, True, "for the completion"),
        ({"input_ids": [99999]}, True, "vocabulary"),
        ({"input_ids": "text"}, False, "list of integers"),
        ({"input_ids": [[1, 2]]}, False, "list of integers"),
        ({"input_ids": [1.5]}, False, "list of integers"),
        ({"text": "hello"}, False, "text"),
        ({"input_ids": [1], "stream": True}, False, "stream"),
        ({"input_ids": [1], "sampling_params": {"top_q": 1}}, False, "top_q"),
        ({"input_ids": [1], "sampling_params": []}, False, None),
        (b"{nonsense", False, "not JSON"),
        (b"[1]", False, "object"),
    ],
)
def test_a_bad_request_is_answered_with_400_and_the_reason(serve, body: object, nested: bool, message: str) -> None:
    _, url = serve()
    data = body if isinstance(body, bytes) else json.dumps(body)
    reply = requests.post(f"{url}/generate", data=data, timeout=10)
    if message is None:  # an empty list is an empty set of parameters
        assert reply.status_code == 200
        return
    assert reply.status_code == 400
    found = reply.json()
    assert message in (found["error"]["message"] if nested else found["message"])


def test_a_full_queue_is_answered_with_503(serve) -> None:
    server, url = serve(max_running=1, max_queued=1)
    endless = {"input_ids": [1], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
    server.engine.model.forward = slowed(server.engine.model.forward)
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: requests.post(f"{url}/generate", json=endless, timeout=60), range(6)))
    assert {200, 503} == {reply.status_code for reply in replies}
    refused = next(reply.json() for reply in replies if reply.status_code == 503)
    assert refused["object"] == "error" and refused["code"] == 503 and "queue is full" in refused["message"]


def test_a_client_that_goes_away_frees_its_row(serve) -> None:
    server, _ = serve(max_running=1)
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}})
    server.engine.model.forward = slowed(server.engine.model.forward)
    connection = socket.create_connection(("127.0.0.1", server.server_port))
    connection.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    wait_until(lambda: server.engine.running == 1)
    connection.close()
    wait_until(lambda: server.engine.running == 0)
    assert server.engine.statistics.output_tokens < 500


def test_the_models_own_template_renders_the_prompt(serve, folder: Path) -> None:
    _, url = serve()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"thinking": False}}
    found = requests.post(f"{url}/v1/tokenize", json=body, timeout=10).json()
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tools=tools, thinking=False, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert found == {"tokens": expected, "count": len(expected), "max_model_len": CONTEXT}
    assert requests.post(f"{url}/v1/tokenize", json={"messages": []}, timeout=10).status_code == 400


def test_arguments_of_earlier_calls_come_as_text_and_reach_the_template_as_objects(serve, folder: Path) -> None:
    _, url = serve()
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "5"})
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    call["function"] = {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    assert requests.post(f"{url}/v1/tokenize", json={"messages": messages}, timeout=10).json()["tokens"] == expected


def test_the_server_says_what_it_is(serve) -> None:
    _, url = serve()
    model = requests.get(f"{url}/model_info", timeout=5).json()
    server = requests.get(f"{url}/get_server_info", timeout=5).json()
    assert model["reasoning_parser"] is None and model["architectures"] == ["LlamaForCausalLM"]
    assert server["context_length"] == CONTEXT and not server["enable_strict_thinking"]
    assert requests.get(f"{url}/nothing", timeout=5).status_code == 404


def test_with_a_key_only_health_is_open(serve) -> None:
    _, url = serve(api_key="k3y")
    assert requests.get(f"{url}/health", timeout=5).status_code == 200
    assert requests.get(f"{url}/model_info", timeout=5).status_code == 401
    assert requests.post(f"{url}/generate", json={"input_ids": [1]}, timeout=5).status_code == 401
    key = {"Authorization": "Bearer k3y"}
    assert requests.get(f"{url}/model_info", headers=key, timeout=5).status_code == 200


def test_an_engine_that_makes_no_progress_is_not_healthy(serve) -> None:
    server, url = serve()
    server.patience = 0.2
    server.engine.model.forward = slowed(server.engine.model.forward, 1.0)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("POST", "/generate", json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}))
    wait_until(lambda: requests.get(f"{url}/health", timeout=5).status_code == 503)
    assert connection.getresponse().status == 200
    wait_until(lambda: requests.get(f"{url}/health", timeout=5).status_code == 200)


def slowed(forward, seconds: float = 0.02):
    def slow(**arguments: object):
        time.sleep(seconds)
        return forward(**arguments)

    return slow


def wait_until(holds) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
