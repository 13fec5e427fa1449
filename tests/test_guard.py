"""The guard lets a server through that gives tokens as they are, and names what is wrong with any other."""

import json
from dataclasses import replace

import pytest

from capturing import TOOL, Url, client_of
from eaglet import guard
from eaglet.errors import GuardError
from eaglet.guard import Sample, differences, facts_of
from eaglet.rendering import Renderer
from scripted_server import ScriptedServer
from tiny import build_tiny_target

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def server(tiny_format, tiny_renderer):
    with ScriptedServer(tiny_format, tiny_renderer) as running:
        yield running


def inspected(server, turn_format, context_length=256):
    client = client_of(server.url, turn_format)
    return guard.inspect(*guard.ask(client), turn_format, context_length)


def test_a_plain_server_passes_and_its_facts_hold_no_port_path_or_seed(server, tiny_format):
    facts = inspected(server, tiny_format)
    assert facts == {
        "engine": "sglang",
        "version": "0.0-scripted",
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "weight_version": "default",
        "flags": {"dtype": "float32"},
    }
    server.stop()
    server.start()
    assert inspected(server, tiny_format) == facts


@pytest.mark.parametrize(
    ("place", "name", "value", "flag"),
    [
        ("model_info", "reasoning_parser", "kimi_k2", "--reasoning-parser"),
        ("server_info", "reasoning_parser", "qwen3", "--reasoning-parser"),
        ("server_info", "enable_strict_thinking", True, "--enable-strict-thinking"),
        ("server_info", "allow_auto_truncate", True, "--allow-auto-truncate"),
        ("model_info", "preferred_sampling_params", {"temperature": 0.6}, "--preferred-sampling-params"),
        ("server_info", "enable_watermark", True, "--enable-watermark"),
        ("server_info", "skip_tokenizer_init", True, "--skip-tokenizer-init"),
        ("server_info", "load_format", "dummy", "--load-format dummy"),
    ],
)
def test_a_flag_that_would_spoil_tokens_is_refused_by_name(server, tiny_format, place, name, value, flag):
    getattr(server, place)[name] = value
    if place == "server_info":
        server.model_info.pop(name, None)
    with pytest.raises(GuardError, match="would spoil the capture") as caught:
        inspected(server, tiny_format)
    assert flag in str(caught.value) and "Start the server without" in str(caught.value)


def test_a_tool_call_parser_is_no_matter(server, tiny_format):
    server.model_info["tool_call_parser"] = "kimi_k2"
    inspected(server, tiny_format)


def test_all_problems_are_told_at_once(server, tiny_format):
    server.model_info["reasoning_parser"] = "kimi_k2"
    server.server_info |= {"allow_auto_truncate": True, "context_length": 100}
    with pytest.raises(GuardError) as caught:
        inspected(server, tiny_format)
    told = str(caught.value)
    assert all(part in told for part in ("--reasoning-parser", "--allow-auto-truncate", "--context-length 256"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "serves a Qwen3ForCausalLM, the target is a LlamaForCausalLM"),
        ({"model_type": "qwen3"}, "serves a model of type qwen3"),
        ({"vocab_size": 5}, "its vocabulary has 5 ids"),
        ({"model_path": "/models/Qwen3-8B"}, "it serves /models/Qwen3-8B, the target is "),
    ],
)
def test_another_model_or_vocabulary_is_refused(server, tiny_format, changes, message):
    server.model_info |= changes
    with pytest.raises(GuardError) as caught:
        inspected(server, tiny_format)
    assert message in str(caught.value)


def test_another_copy_of_the_same_model_passes_and_other_weights_do_not(server, tiny_format, tmp_path):
    server.model_info["model_path"] = str(build_tiny_target(tmp_path / "copy"))
    inspected(server, tiny_format)
    server.model_info["model_path"] = str(build_tiny_target(tmp_path / "other", seed=1))
    with pytest.raises(GuardError, match="--model-path"):
        inspected(server, tiny_format)


def test_a_model_on_another_machine_goes_by_its_name(server, tiny_format):
    target = replace(tiny_format.target, model="moonshotai/Kimi-K2.5", revision="a" * 40)
    turn_format = replace(tiny_format, target=target)
    for changes in (
        {"model_path": "/data/kimi-k2.5"},
        {"model_path": "/x", "served_model_name": "moonshotai/Kimi-K2.5"},
    ):
        server.model_info |= changes
        inspected(server, turn_format)
    server.server_info["revision"] = "b" * 40
    with pytest.raises(GuardError, match="--revision aaaa"):
        inspected(server, turn_format)


def test_a_shorter_context_than_configured_is_refused(server, tiny_format):
    server.server_info["context_length"] = 255
    with pytest.raises(GuardError, match=r"its context is 255 tokens, the config says 256.*--context-length 256"):
        inspected(server, tiny_format)
    server.server_info["context_length"] = None  # the model's own
    inspected(server, tiny_format)


def test_differences_are_semantic_only(tiny_format):
    said = {"dtype": "auto", "random_seed": 1, "tp_size": 1, "version": "0.5.23", "kv_cache_dtype": "auto"}
    before = facts_of({"weight_version": "default"}, said)
    assert differences(before, facts_of({"weight_version": "default"}, {**said, "tp_size": 8, "version": "0.6"})) == []
    now = facts_of({"weight_version": "2"}, {**said, "kv_cache_dtype": "fp8_e5m2", "quantization": "fp8"})
    assert differences(before, now) == [
        "weight_version: 'default' before, '2' now",
        "--kv-cache-dtype: 'auto' before, 'fp8_e5m2' now",
        "--quantization: not set before, 'fp8' now",
    ]


# ---- the probe


def test_the_probe_returns_a_request_that_the_server_answers(server, tiny_format, tiny_renderer):
    prompt_ids, sampling = guard.probe(client_of(server.url, tiny_format), tiny_renderer, tiny_format, 512)
    assert tiny_format.opens(prompt_ids)
    assert sampling["temperature"] == 0.0 and sampling["stop_token_ids"] == [0, 2]


def test_a_server_that_takes_the_closing_marker_out_of_the_ids_is_refused(server, tiny_format, tiny_renderer):
    honest = server.output
    marker = tiny_format.closing.ids[0]
    whole = {}

    def output(ids, sampling):
        whole["text"] = tiny_renderer.decode(honest(ids, sampling))
        return [token for token in honest(ids, sampling) if token != marker]

    class Stripping(type(tiny_renderer)):
        def decode(self, ids):
            return whole.get("text", super().decode(ids))

    server.output = output
    server.renderer = Stripping(tiny_format.target)
    with pytest.raises(GuardError, match=r"has </think> 1 times in the server's text and 0 times in its ids"):
        guard.probe(client_of(server.url, tiny_format), tiny_renderer, tiny_format, 512)


def test_a_server_that_refuses_the_probe_is_refused(server, tiny_format, tiny_renderer):
    server.faults = lambda number, body: "refused"
    with pytest.raises(GuardError, match="does not answer the probe"):
        guard.probe(client_of(server.url, tiny_format), tiny_renderer, tiny_format, 512)


def test_a_turn_format_of_another_template_is_noticed(server, tiny_format, tmp_path):
    plain = build_tiny_target(tmp_path / "plain", thinking=False)
    renderer = Renderer(replace(tiny_format.target, model=str(plain)))
    with pytest.raises(GuardError, match="another chat template"):
        guard.probe(client_of(server.url, tiny_format), renderer, tiny_format, 512)


# ---- the rendering


def samples(**changes):
    return [Sample(**{"sample_id": "a" * 16, "messages": QUESTION, "tools": None, "template_arguments": {}, **changes})]


def test_equal_renderings_pass_with_tools_and_template_arguments(server, tiny_format, tiny_renderer):
    client = client_of(server.url, tiny_format)
    several = samples() + samples(tools=[TOOL]) + samples(template_arguments={"thinking": False})
    assert guard.cross_check(client, tiny_renderer, several) == 3


def test_a_different_rendering_is_shown_side_by_side(server, tiny_format, tiny_renderer):
    class Sorting(type(tiny_renderer)):
        """Renders tools by code of its own, as some servers' tokenizers do."""

        def prompt_ids(self, messages, tools=None, template_arguments=None):
            tools = [json.loads(json.dumps(tool, sort_keys=True)) for tool in tools or []]
            return super().prompt_ids(messages, tools or None, template_arguments)

    server.renderer = Sorting(tiny_format.target)
    client = client_of(server.url, tiny_format)
    assert guard.cross_check(client, tiny_renderer, samples()) == 1
    with pytest.raises(GuardError) as caught:
        guard.cross_check(client, tiny_renderer, samples(tools=[TOOL]))
    told = str(caught.value)
    assert "sample aaaaaaaaaaaaaaaa otherwise than eaglet" in told
    assert "eaglet (apply_chat_template)" in told and "server (/v1/tokenize)" in told
    rows = [line.split(" | ") for line in told.splitlines() if " | " in line]
    left, right = ("".join(part.strip() for part in column) for column in zip(*rows[2:], strict=True))
    assert '"type"' in left and '"function":' in right


def test_fields_that_sglang_adds_to_tools_are_named_and_can_be_added_here(server, tiny_format, tiny_renderer):
    adding = replace(tiny_format.target, tool_fields={"defer_loading": None})
    server.renderer = type(tiny_renderer)(adding)
    client = client_of(server.url, tiny_format)
    with pytest.raises(GuardError, match=r'Set target.tool_fields: \{"defer_loading": null\}, which gives exactly'):
        guard.cross_check(client, tiny_renderer, samples(tools=[TOOL]))
    assert guard.cross_check(client, type(tiny_renderer)(adding), samples(tools=[TOOL])) == 1


def test_a_rendering_that_ends_early_is_different(server, tiny_format, tiny_renderer):
    class Short(type(tiny_renderer)):
        def prompt_ids(self, *arguments):
            return super().prompt_ids(*arguments)[:-1]

    server.renderer = Short(tiny_format.target)
    with pytest.raises(GuardError, match="different from id"):
        guard.cross_check(client_of(server.url, tiny_format), tiny_renderer, samples())


def test_arguments_of_earlier_calls_go_to_the_chat_api_as_text(server, tiny_format, tiny_renderer):
    seen = []
    render = server.tokenize
    server.tokenize = lambda body: seen.append(body) or render(body)
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    guard.cross_check(client_of(server.url, tiny_format), tiny_renderer, samples(messages=messages, tools=[TOOL]))
    assert seen[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


def test_a_server_without_tokenize_is_named(tiny_format, tiny_renderer):
    with ScriptedServer(tiny_format) as server, pytest.raises(GuardError, match="no /v1/tokenize"):
        guard.cross_check(client_of(Url(server.url), tiny_format), tiny_renderer, samples())
