"""The renderer: exactly what apply_chat_template gives, with what templates disagree about decided by trial."""

import json
from dataclasses import replace

import pytest

from eaglet.errors import RecordError, TargetError
from eaglet.rendering import Renderer
from eaglet.targets import Target
from families import chat_template, family, family_target
from turns import QUESTION, call, tool

TAKES_STRINGS = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name + ' ' + call.function.arguments }}</call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    """family name, and what to change of its target → its renderer."""

    def make(name: str, **changed) -> Renderer:
        return Renderer(family_target(tmp_path_factory.mktemp("family"), family(name), **changed))

    return make


@pytest.fixture(scope="module")
def tiny(tiny_target) -> Renderer:
    return Renderer(Target(str(tiny_target)))


def with_call(arguments: dict | str) -> list[dict]:
    said = {"role": "assistant", "content": None, "tool_calls": [call("get_weather", arguments)]}
    return [
        *QUESTION,
        said,
        {"role": "tool", "tool_call_id": "functions.get_weather:0", "name": "get_weather", "content": "Rain."},
    ]


def test_ids_are_those_of_apply_chat_template(tiny):
    tools = [tool("get_weather")]
    expected = tiny.tokenizer.apply_chat_template(QUESTION, tools=tools, add_generation_prompt=True, return_dict=False)
    assert tiny.prompt_ids(QUESTION, tools) == expected
    assert tiny.tokenizer.encode(tiny.prompt_text(QUESTION, tools), add_special_tokens=False) == expected
    assert tiny.decode(expected) == tiny.prompt_text(QUESTION, tools)


def test_a_datasets_arguments_go_before_the_targets(tiny):
    closed = Renderer(replace(tiny.target, template_arguments={"thinking": False}))
    assert closed.prompt_text(QUESTION).endswith("<think></think>")
    assert closed.prompt_text(QUESTION, None, {"thinking": True}).endswith("<think>")


@pytest.mark.parametrize(
    "name", ["Kimi-K2.5", "GLM-4.6", "gpt-oss", "MiniMax-M2", "Llama-3.1, date_string pinned", "markers of many tokens"]
)
def test_arguments_of_earlier_calls_may_come_as_object_or_as_string(name, renderer):
    made = renderer(name)
    tools = [tool("get_weather")]
    as_object, as_string = with_call({"city": "Oslo"}), with_call('{"city": "Oslo"}')
    assert made.tool_arguments == "object"
    assert made.prompt_ids(as_object, tools) == made.prompt_ids(as_string, tools)
    assert "Oslo" in made.prompt_text(as_string, tools) and '\\"' not in made.prompt_text(as_string, tools)


def test_a_template_that_takes_strings_gets_strings(renderer):
    made = renderer("SmolLM2-Instruct", template=TAKES_STRINGS)
    assert made.tool_arguments == "string"
    assert made.prompt_text(with_call({"city": "Oslo"})) == made.prompt_text(with_call('{"city": "Oslo"}'))
    assert 'get_weather {"city": "Oslo"}' in made.prompt_text(with_call({"city": "Oslo"}))


def test_a_template_that_writes_no_calls_says_so(renderer):
    assert renderer("SmolLM2-Instruct").tool_arguments is None


def test_arguments_that_are_no_json_are_refused_where_an_object_is_wanted(renderer):
    with pytest.raises(RecordError, match="not JSON"):
        renderer("GLM-4.6").prompt_ids(with_call('{"city": '), [tool("get_weather")])


@pytest.mark.parametrize("name", ["Kimi-K2.5", "gpt-oss"])
def test_earlier_reasoning_is_found_under_any_of_its_names(name, renderer):
    made = renderer(name)
    texts = set()
    for key in ("reasoning_content", "reasoning", "thinking"):
        messages = with_call({"city": "Oslo"})
        messages[1][key] = "I look it up."
        texts.add(made.prompt_text(messages, [tool("get_weather")]))
    assert len(texts) == 1 and "I look it up." in texts.pop()


def test_a_conversation_that_the_template_refuses_is_an_error_that_names_its_roles(renderer):
    messages = with_call({"city": "Oslo"})
    messages[1]["tool_calls"] *= 2
    with pytest.raises(RecordError, match="user, assistant, tool: This model only supports single"):
        renderer("Llama-3.1, date_string pinned").prompt_ids(messages, [tool("get_weather")])


def test_tools_that_the_template_drops_are_refused(renderer):
    with pytest.raises(TargetError, match=r"target\.chat_template"):
        renderer("SmolLM2-Instruct").prompt_ids(QUESTION, [tool("get_weather")])


def test_markers_are_found_in_what_people_wrote(tiny):
    parts = [{"type": "text", "text": "What is <think>?"}, {"type": "text", "text": "And <|im_end|><think>?"}]
    offered = tool("x")
    offered["function"]["description"] = "Returns </tool_call>."
    said = {"role": "assistant", "content": "<think>Hm.</think>A marker."}
    assert tiny.literal_markers([{"role": "user", "content": parts}, said], [offered]) == [
        "<think>",
        "<|im_end|>",
        "<think>",
        "</tool_call>",
    ]
    assert tiny.literal_markers([*QUESTION, said]) == []


def test_escaped_markers_stay_text(tiny):
    escaping = Renderer(replace(tiny.target, literal_markers="escape"))
    messages = [{"role": "user", "content": "What does <think> mean, or <|im_end|>?"}]
    escaped, counted = escaping.prompt_ids(messages), tiny.prompt_ids(messages)
    think, end = (tiny.tokenizer.convert_tokens_to_ids(text) for text in ("<think>", "<|im_end|>"))
    assert (counted.count(think), counted.count(end)) == (2, 2)
    assert (escaped.count(think), escaped.count(end)) == (1, 1)  # the template's own
    assert escaping.decode(escaped) == tiny.decode(counted) == tiny.prompt_text(messages)
    assert escaping.prompt_ids(QUESTION) == tiny.prompt_ids(QUESTION)
    assert escaping.escapes(messages) and not escaping.escapes(QUESTION) and not tiny.escapes(messages)


def test_the_models_own_markers_are_not_escaped(tiny):
    escaping = Renderer(replace(tiny.target, literal_markers="escape"))
    said = with_call({"city": "Oslo"})
    messages = [*said, {"role": "user", "content": "Why <think>?"}]
    tools = [tool("get_weather")]
    begin = tiny.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert escaping.prompt_ids(messages, tools).count(begin) == tiny.prompt_ids(messages, tools).count(begin) == 1


def test_a_tokenizer_that_cannot_escape_says_so(tiny, monkeypatch):
    escaping = Renderer(replace(tiny.target, literal_markers="escape"))
    monkeypatch.setattr(type(escaping.tokenizer), "_encode_without_added_tokens", lambda self, text: self.encode(text))
    with pytest.raises(TargetError, match=r"target\.literal_markers"):
        escaping.prompt_ids([{"role": "user", "content": "<think>"}])


def test_a_template_of_several_is_the_default_one(renderer):
    made = renderer("SmolLM2-Instruct", template={"default": chat_template("chatml"), "other": "x"})
    assert made.template == chat_template("chatml")
    assert json.dumps(made.prompt_text(QUESTION))
