"""Turn formats: what is inferred about each family, what is refused, and what the config may override."""

import json
from functools import cache
from pathlib import Path

import pytest

from eaglet.errors import TargetError, TurnFormatError
from eaglet.inference import for_arguments, infer
from eaglet.rendering import Renderer
from eaglet.targets import Target
from eaglet.turn_format import Marker, TurnFormat
from families import FAMILIES, Family, chat_template, family, family_target, saved_target, vocabulary
from tiny import build_tiny_tokenizer

DOCS = Path(__file__).parents[1] / "docs" / "turn-formats.md"
USER = {"role": "user", "content": "Is it raining in Oslo?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """family name, and what to change → its target."""

    def make(name: str, **changed):
        return family_target(tmp_path_factory.mktemp("family"), family(name), **changed)

    return make


@pytest.fixture(scope="module")
def inferred(tmp_path_factory):
    """A family → its turn format, inferred once."""

    @cache
    def make(name: str) -> TurnFormat:
        return infer(family_target(tmp_path_factory.mktemp("family"), family(name)))

    return make


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_familys_boundaries_are_inferred(family, inferred):
    found = inferred(family.name)
    text = vocabulary(family.vocabulary).decode
    assert found.owner == family.owner
    assert (found.opening and found.opening.text) == family.opening
    assert (found.closing and found.closing.text) == family.closing
    assert {text([number]) for number in found.end_of_turn_ids} == set(family.end_of_turn)
    if family.marker_ids:
        assert (found.opening.ids[0], found.closing.ids[0]) == family.marker_ids
    assert found.past_reasoning == family.past_reasoning
    assert found.reasoning_field == family.reasoning_field
    calls = found.tool_calls
    assert (calls and (calls.call_begin and calls.call_begin.text, calls.call_end.text)) == family.call
    assert (calls and calls.arguments) == family.call_form
    assert found.interleaved == (family.name == "gpt-oss")


def docs_row(family: Family, found: TurnFormat) -> str:
    """The family's line in the table of docs/turn-formats.md."""

    def marker(marker: Marker | None) -> str:
        return (
            f"`{json.dumps(marker.text, ensure_ascii=False)[1:-1]}` {' '.join(map(str, marker.ids))}" if marker else "–"
        )

    text = vocabulary(family.vocabulary).decode
    ends = ", ".join(f"`{text([number])}` {number}" for number in found.end_of_turn_ids)
    calls = found.tool_calls
    called = f"{marker(calls.call_begin)} … {marker(calls.call_end)} ({calls.arguments})" if calls else "–"
    past = found.past_reasoning.replace("_", " ")
    cells = [family.name, found.owner, marker(found.opening), marker(found.closing), ends, called, past]
    return "| " + " | ".join(cells).replace("<|", "<\\|").replace("|>", "\\|>") + " |"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_docs_show_what_is_inferred(family, inferred):
    assert docs_row(family, inferred(family.name)) in DOCS.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_prompts_of_a_family_end_as_its_format_says(family, inferred):
    """Plain, with tools, with history, and after two tool results: the loss starts right behind the opening marker."""
    found = inferred(family.name)
    renderer = Renderer(found.target)
    tools = [WEATHER] if renderer.tools_rendered else None
    said = {"role": "assistant", "content": "It is.", "reasoning_content": "Oslo is wet."}
    conversations = [([USER], None), ([USER], tools), ([USER, said, USER], None)]
    if tools:
        conversations.append(([USER, *two_results(one_a_turn=family.template.startswith(("gpt-oss", "llama")))], tools))
    for messages, offered in conversations:
        prompt = renderer.prompt_ids(messages, offered)
        assert found.opens(prompt)
        assert tuple(prompt[len(prompt) - len(found.generation_prompt.ids) :]) == found.generation_prompt.ids


def two_results(*, one_a_turn: bool) -> list[dict]:
    """Two calls and their results: in one assistant's turn, or one after the other."""
    calls = [
        {
            "id": f"functions.get_weather:{n}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": city}},
        }
        for n, city in enumerate(("Oslo", "Bergen"))
    ]
    results = [{"role": "tool", "tool_call_id": c["id"], "name": "get_weather", "content": "Rain."} for c in calls]
    said = {"role": "assistant", "content": "", "reasoning_content": "I look it up."}
    if one_a_turn:
        return [
            m for call, result in zip(calls, results, strict=True) for m in ({**said, "tool_calls": [call]}, result)
        ]
    return [{**said, "tool_calls": calls}, *results]


def test_a_saved_folder_gives_the_same_format(tmp_path, target):
    saved, shared = infer(saved_target(tmp_path, family("Kimi-K2.5"))), infer(target("Kimi-K2.5"))
    assert (saved.opening, saved.closing, saved.tool_calls) == (shared.opening, shared.closing, shared.tool_calls)
    assert saved.vocabulary_sha256 == shared.vocabulary_sha256


def test_a_file_gives_back_the_same_format(tmp_path, target):
    for name in ("Kimi-K2.5", "gpt-oss", "SmolLM2-Instruct"):
        found = infer(target(name))
        found.save(tmp_path / "turn_format.json")
        loaded = TurnFormat.load(tmp_path / "turn_format.json")
        assert json.dumps(loaded.facts()) == json.dumps(found.facts())
        assert loaded.how.keys() >= {"owner", "closing", "end_of_turn_ids"} and all(loaded.how.values())


def test_a_file_of_another_version_is_refused(tmp_path, target):
    path = tmp_path / "turn_format.json"
    infer(target("Kimi-K2.5")).save(path)
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "shape": "round"}))
    with pytest.raises(TurnFormatError, match="shape"):
        TurnFormat.load(path)
    with pytest.raises(TurnFormatError, match="cannot be read"):
        TurnFormat.load(tmp_path / "nothing.json")


def test_think_end_is_just_past_the_closing_marker(target):
    found = infer(target("markers of many tokens"))
    output = [65, 66, *found.closing.ids, 67]
    assert found.think_end(output) == 2 + len(found.closing.ids)
    assert found.think_end([65, 66, *found.closing.ids[:-1]]) == -1


def test_datasets_with_other_arguments_have_their_own_format(target):
    found = infer(target("Kimi-K2.5"))
    assert for_arguments(found, {}) is found
    assert for_arguments(found, {"thinking": False}).owner == "off"
    with pytest.raises(TurnFormatError, match="enable_thinking"):
        for_arguments(found, {"enable_thinking": False})


class TestOverrides:
    def test_an_override_is_used_and_recorded(self, target):
        found = infer(target("Kimi-K2-Thinking"), {"end_of_turn_ids": [163586]})
        assert found.end_of_turn_ids == (163586,)
        assert found.overridden == {"end_of_turn_ids": [163585, 163586]}
        assert "target.turn_format.end_of_turn_ids" in found.how["end_of_turn_ids"]

    def test_a_marker_may_be_given_as_text_or_ids(self, target):
        found = infer(target("Kimi-K2-Thinking"), {"closing": "<|im_middle|>", "opening": {"ids": [163588]}})
        assert found.closing == Marker((163601,), "<|im_middle|>")
        assert found.opening == Marker((163588,), "<|im_assistant|>")

    @pytest.mark.parametrize(
        ("overrides", "told"),
        [
            ({"closng": "x"}, "did you mean closing"),
            ({"owner": "parser"}, "prompt, model, off, none"),
            ({"end_of_turn_ids": "2"}, "list of token ids"),
            ({"closing": 7}, "the marker's text"),
            ({"tool_calls": {"begin": "x"}}, "call_begin"),
            ({"owner": "prompt", "opening": "<|im_user|>"}, "does not end with the opening marker"),
            ({"closing": None, "owner": "model"}, "no opening marker"),
            ({"end_of_turn_ids": [999999]}, "embedding has 163840 rows"),
        ],
    )
    def test_overrides_that_cannot_work_are_refused(self, target, overrides, told):
        with pytest.raises(TurnFormatError, match=told):
            infer(target("Kimi-K2-Thinking"), overrides)


class TestRefusals:
    def test_an_argument_that_changes_nothing(self, target):
        with pytest.raises(TurnFormatError, match=r"enable_thinking.*arguments that this template has: thinking"):
            infer(target("Kimi-K2.5", template_arguments={"enable_thinking": True}))

    def test_an_argument_that_says_the_default_is_none_of_those(self, target):
        assert infer(target("Kimi-K2.5", template_arguments={"thinking": True})).owner == "prompt"

    def test_todays_date_in_a_prompt(self, target):
        with pytest.raises(TurnFormatError, match="date_string"):
            infer(target("Llama-3.1, date_string pinned", template_arguments={}))
        with pytest.raises(TurnFormatError, match="with the date written in"):
            infer(target("gpt-oss", template=chat_template("gpt-oss")))

    def test_tools_that_the_template_drops(self, target):
        dropping = target("SmolLM2-Instruct")
        assert not infer(dropping).tools_rendered
        with pytest.raises(TargetError, match="does not write them into the prompt"):
            Renderer(dropping).prompt_ids([USER], [WEATHER])

    def test_ids_that_do_not_start_alike_with_the_generation_prompt(self, target):
        marked = chat_template("chatml").replace(
            "{%- if messages[0]", "{{ 'A' if add_generation_prompt else 'B' }}{%- if messages[0]"
        )
        with pytest.raises(TurnFormatError, match="do not start"):
            infer(target("SmolLM2-Instruct", template=marked))

    def test_a_prompt_that_changes_when_it_is_answered(self, target):
        fickle = chat_template("chatml").replace(
            "{{ m.content }}<|im_end|>", "{{ m.content }}{{ '.' if not loop.last }}<|im_end|>"
        )
        with pytest.raises(TurnFormatError, match="do not start alike"):
            infer(target("SmolLM2-Instruct", template=fickle))

    def test_a_marker_whose_tokens_melt_into_the_text_around_it(self, tmp_path):
        tokenizer = build_tiny_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template.replace("<think>", "assistant answer ").replace(
            "</think>", " an"
        )
        tokenizer.save_pretrained(tmp_path)
        shape = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 64}
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 512,
            "eos_token_id": 2,
            **shape,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(TurnFormatError, match="no ids of its own"):
            infer(Target(str(tmp_path)))

    def test_a_tokenizer_that_renders_otherwise_than_the_given_template(self, target, tmp_path, monkeypatch):
        template = tmp_path / "template.jinja"
        template.write_text(chat_template("chatml"))
        class_ = type(vocabulary("chatml"))

        class Rewriting(class_):
            def apply_chat_template(self, conversation, **settings):
                return super().apply_chat_template(
                    [{**m, "content": m["content"].upper()} for m in conversation], **settings
                )

        rewriting = target("SmolLM2-Instruct", chat_template=str(template))
        tokenizer = rewriting.tokenizer()
        tokenizer.__class__ = Rewriting
        monkeypatch.setattr(type(rewriting), "tokenizer", lambda self: tokenizer)
        with pytest.raises(TurnFormatError, match=r"target\.chat_template: the tokenizer's own code"):
            infer(rewriting)

    def test_an_id_that_the_model_does_not_have(self, target, tmp_path):
        small = target("Kimi-K2.5")
        path = small.folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 1000}))
        with pytest.raises(TurnFormatError, match="do not belong"):
            infer(small)

    def test_a_target_without_any_chat_template(self, target):
        with pytest.raises(TargetError, match="no chat template"):
            infer(target("SmolLM2-Instruct", template=""))
