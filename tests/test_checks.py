"""Checks of rows: each reason has a row that triggers it alone, good turns of every family pass, and parts give back the whole."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglet.checks import BITS, REASONS, repetition_loops
from eaglet.inference import infer
from eaglet.ragged import Ragged
from eaglet.rendering import Renderer
from families import FAMILIES, Family, family, family_target
from turns import QUESTION, call, findings, output_text, tool

CALLED = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
CALL = '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A family's name → (turn format, renderer)."""

    @cache
    def make(name: str):
        found = infer(family_target(tmp_path_factory.mktemp("family"), family(name)))
        return found, Renderer(found.target)

    return make


def codes(known, name: str, text: str, **settings) -> list[str]:
    """The reasons of one output given as text."""
    found, renderer = known(name)
    return findings(found, renderer, [renderer.tokenizer.encode(text, add_special_tokens=False)], **settings).codes(0)


THOUGHT = "It is wet.</think>"
ONLY = [  # reason, output of Kimi-K2.5
    ("closing_missing", "It rains.<|im_end|>"),
    ("closing_repeated", f"{THOUGHT}It</think> rains.<|im_end|>"),
    ("opening_repeated", f"<think>{THOUGHT}It rains.<|im_end|>"),
    ("reasoning_empty", "</think>It rains.<|im_end|>"),
    ("reasoning_empty", " \n</think>It rains.<|im_end|>"),
    ("answer_empty", f"{THOUGHT}<|im_end|>"),
    ("answer_empty", f"{THOUGHT}\n\n<|im_end|>"),
    ("end_wrong", f"{THOUGHT}It rains."),
    ("ids_after_end", f"{THOUGHT}It rains.<|im_end|>And<|im_end|>"),
    ("output_empty", ""),
    ("tool_calls_unbalanced", THOUGHT + CALLED.format(CALL.replace("<|tool_call_end|>", "")) + "<|im_end|>"),
    ("tool_calls_unbalanced", f"{THOUGHT}It rains.<|tool_call_end|><|im_end|>"),
    ("tool_calls_unbalanced", f"{THOUGHT}<|tool_calls_section_begin|>{CALL}<|im_end|>"),
    ("tool_calls_unbalanced", f"{THOUGHT}{CALL}{CALLED.format(CALL)}<|im_end|>"),
    ("tool_calls_nested", THOUGHT + CALLED.format(CALL.replace('{"city"', CALL + '{"city"')) + "<|im_end|>"),
    ("tool_arguments_invalid", THOUGHT + CALLED.format(CALL.replace("}", "")) + "<|im_end|>"),
    ("tool_arguments_invalid", THOUGHT + CALLED.format(CALL.replace('{"city": "Oslo"}', '["Oslo"]')) + "<|im_end|>"),
    ("tool_arguments_invalid", THOUGHT + CALLED.format(CALL.replace('"Oslo"', "NaN")) + "<|im_end|>"),
    (
        "tool_arguments_invalid",
        THOUGHT + CALLED.format(CALL.replace("<|tool_call_argument_begin|>", "")) + "<|im_end|>",
    ),
    ("tool_unknown", THOUGHT + CALLED.format(CALL.replace("get_weather", "get_water")) + "<|im_end|>"),
    ("repetition_loop", THOUGHT + "and so on " * 30 + "<|im_end|>"),
]


@pytest.mark.parametrize(("reason", "output"), ONLY)
def test_a_row_with_one_fault_has_one_reason(known, reason, output):
    assert codes(known, "Kimi-K2.5", output) == [reason]


def test_good_turns_have_no_reason(known):
    for output in (
        f"{THOUGHT}It rains.<|im_end|>",
        f"{THOUGHT}{CALLED.format(CALL)}[EOS]",
        f"{THOUGHT}Hm. {CALLED.format(CALL * 2)}<|im_end|>",
    ):
        assert codes(known, "Kimi-K2.5", output) == []


def test_a_prompt_that_does_not_open_the_reasoning(known):
    found, renderer = known("Kimi-K2.5")
    output = renderer.tokenizer.encode(f"{THOUGHT}It rains.<|im_end|>")
    for prompt in ([], [65, 66], list(found.generation_prompt.ids[:-1]), [*found.generation_prompt.ids, 66]):
        assert findings(found, renderer, [output], prompts=[prompt]).codes(0) == ["opening_missing"]


def test_a_model_that_opens_its_reasoning_itself(known):
    good = "<think>It is wet.</think>It rains.<|im_end|>"
    assert codes(known, "Kimi-K2-Thinking", good) == []
    assert codes(known, "Kimi-K2-Thinking", "\n" + good) == []
    assert codes(known, "Kimi-K2-Thinking", good.replace("<think>", "")) == ["opening_missing"]
    assert codes(known, "Kimi-K2-Thinking", "Well, " + good) == ["opening_missing"]
    assert codes(known, "Kimi-K2-Thinking", "<think>" + good) == ["opening_repeated"]
    assert codes(known, "Kimi-K2-Thinking", good.replace("It is wet.", "")) == ["reasoning_empty"]


def test_a_prompt_that_closed_the_reasoning(known):
    assert codes(known, "Kimi-K2.5, thinking=False", "It rains.<|im_end|>") == []
    assert codes(known, "Kimi-K2.5, thinking=False", "It is wet.</think>It rains.<|im_end|>") == ["closing_repeated"]
    assert codes(known, "Kimi-K2.5, thinking=False", "<|im_end|>") == ["answer_empty"]


def test_turns_without_reasoning(known):
    assert codes(known, "SmolLM2-Instruct", "It rains.<|im_end|>") == []
    assert codes(known, "SmolLM2-Instruct", "<|im_end|>") == ["answer_empty"]


def test_a_turn_cut_at_the_limit_may_lack_what_was_still_to_come(known):
    for output in (
        "It is",
        f"{THOUGHT}It ra",
        f"{THOUGHT}<|tool_calls_section_begin|><|tool_call_begin|>functions.get",
    ):
        assert codes(known, "Kimi-K2.5", output, finish="length") == ["truncated"]
    assert codes(known, "Kimi-K2.5", "</think>It", finish="length") == ["reasoning_empty", "truncated"]


def test_a_generation_that_ended_otherwise(known):
    assert codes(known, "Kimi-K2.5", f"{THOUGHT}It rains.<|im_end|>", finish="abort") == ["finish_unknown"]


def test_ids_that_the_model_does_not_have(known):
    found, renderer = known("Kimi-K2.5")
    good = renderer.tokenizer.encode(f"{THOUGHT}It rains.<|im_end|>")
    for strange in (-1, found.vocab_size):
        assert findings(found, renderer, [[66, strange, *good], good]).codes(0) == ["id_out_of_range"]
        assert findings(found, renderer, [good, [66, strange, *good]]).codes(0) == []
        prompts = [[strange, *found.generation_prompt.ids]]
        assert findings(found, renderer, [good], prompts=prompts).codes(0) == ["id_out_of_range"]


def test_parts_of_characters(known):
    found, renderer = known("Kimi-K2.5")
    euro, end = list("€".encode()), renderer.tokenizer.encode("<|im_end|>")
    thought = renderer.tokenizer.encode(THOUGHT)
    assert [renderer.decode(euro)] == ["€"] and "\ufffd" in renderer.decode(euro[:2])
    assert findings(found, renderer, [[*thought, *euro, *end]]).codes(0) == []
    assert findings(found, renderer, [[*thought, *euro[:2], *end]]).codes(0) == ["replacement_characters"]
    assert findings(found, renderer, [[*thought, *euro[:2]]], finish="length").codes(0) == ["truncated"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("aß€🦜\ufffd", max_size=6), st.integers(0, 9), st.sampled_from(["stop", "length"]))))
def test_parts_of_characters_are_judged_as_in_the_whole_text(known, rows):
    found, renderer = known("Kimi-K2.5")  # its first 256 ids are the bytes
    outputs = [list(text.encode())[cut // 4 : len(text.encode()) - cut % 4] for text, cut, _ in rows]
    finish = [finish for _, _, finish in rows]
    judged = findings(found, renderer, outputs, finish=finish).reasons & BITS["replacement_characters"] != 0
    whole = [
        renderer.decode(ids).rstrip("\ufffd" if how == "length" else "")
        for ids, how in zip(outputs, finish, strict=True)
    ]
    assert judged.tolist() == ["\ufffd" in text for text in whole]


def test_offered_tools_decide_which_call_is_known(known):
    output = THOUGHT + CALLED.format(CALL) + "<|im_end|>"
    assert codes(known, "Kimi-K2.5", output, offered=("get_weather", "other")) == []
    assert codes(known, "Kimi-K2.5", output, offered=()) == ["tool_unknown"]


def test_names_with_dots_are_read_whole(known):
    output = THOUGHT + CALLED.format(CALL.replace("get_weather", "weather.get")) + "<|im_end|>"
    assert codes(known, "Kimi-K2.5", output, offered=("weather.get",)) == []
    assert codes(known, "Kimi-K2.5", output, offered=("get",)) == ["tool_unknown"]


def test_gpt_oss_may_think_more_than_once_and_calls_at_the_end_of_its_turn(known):
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>It rains.<|return|>"
    called = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
    assert codes(known, "gpt-oss", thought + final) == []
    assert codes(known, "gpt-oss", thought + thought + final) == []
    assert codes(known, "gpt-oss", thought + called) == []
    assert codes(known, "gpt-oss", thought + called, offered=()) == ["tool_unknown"]
    assert codes(known, "gpt-oss", thought + called.replace("}", "")) == ["tool_arguments_invalid"]
    assert codes(known, "gpt-oss", thought + final.replace("<|return|>", "<|end|>")) == ["end_wrong"]


TALKING = [f for f in FAMILIES if f.owner in ("prompt", "model")]
CALLING = [f for f in FAMILIES if f.call]


@pytest.mark.parametrize("family", TALKING, ids=lambda family: family.name)
def test_what_a_family_writes_when_it_thinks_passes(family, known):
    found, renderer = known(family.name)
    output = renderer.tokenizer.encode(
        output_text(found, renderer, reasoning="Oslo is wet.", answer="It rains."), add_special_tokens=False
    )
    result = findings(found, renderer, [output], prompts=[renderer.prompt_ids(QUESTION)])
    assert result.codes(0) == []
    assert result.think_end[0] == found.think_end(output) > 0
    assert "Oslo is wet." in renderer.decode(output[: result.think_end[0]])
    assert "It rains." in renderer.decode(output[result.think_end[0] :])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.owner in ("off", "none")], ids=lambda family: family.name)
def test_what_a_family_writes_when_it_does_not_think_passes(family, known):
    found, renderer = known(family.name)
    output = renderer.tokenizer.encode(
        output_text(found, renderer, reasoning=None, answer="It rains."), add_special_tokens=False
    )
    result = findings(found, renderer, [output], prompts=[renderer.prompt_ids(QUESTION)])
    assert result.codes(0) == []
    assert result.think_end[0] == found.think_end(output) == -1


@pytest.mark.parametrize("family", CALLING, ids=lambda family: family.name)
def test_what_a_family_writes_when_it_calls_tools_is_read(family: Family, known):
    found, renderer = known(family.name)
    calls = [call("get_weather", {"city": "Oslo", "days": 2}), call("get_weather", {"city": "Bergen"}, 1)]
    calls = calls[:1] if family.name == "gpt-oss" else calls
    reasoning = "I look." if found.owner in ("prompt", "model") else None
    text = output_text(found, renderer, reasoning=reasoning, answer="", calls=calls)
    history = [*QUESTION, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls}]
    history += [{"role": "tool", "tool_call_id": c["id"], "name": "get_weather", "content": "Rain."} for c in calls]
    prompts = [renderer.prompt_ids(history, [tool("get_weather")] if found.tools_rendered else None)]

    def reasons(text: str, offered=("get_weather",)) -> list[str]:
        return findings(
            found,
            renderer,
            [renderer.tokenizer.encode(text, add_special_tokens=False)],
            prompts=prompts,
            offered=offered,
        ).codes(0)

    assert reasons(text) == []
    assert reasons(text, offered=("get",)) == ["tool_unknown"]
    assert reasons(text.replace("get_weather", "get_water")) == ["tool_unknown"]
    if found.tool_calls.call_begin:
        without_end = text.replace(found.tool_calls.call_end.text, "", 1)
        assert set(reasons(without_end)) <= {"tool_calls_unbalanced", "tool_calls_nested"} and reasons(without_end)
    if found.tool_calls.arguments != "other":
        assert reasons(text.replace('"Oslo"', "Oslo")) == ["tool_arguments_invalid"]


@st.composite
def rows(draw) -> list[tuple[str, str, str]]:
    """(reasoning, answer, finish reason) of a few rows; texts without markers and without lone surrogates."""
    words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), min_size=1, max_size=40)
    texts = words.filter(lambda text: text.strip())
    return draw(st.lists(st.tuples(texts, texts, st.sampled_from(["stop", "length"])), min_size=1, max_size=6))


@pytest.mark.parametrize(
    "name", ["Kimi-K2.5", "Kimi-K2-Thinking", "markers of many tokens", "GLM-4.6", "Qwen3-Thinking"]
)
@settings(max_examples=40, deadline=None)
@given(rows=rows())
def test_parts_joined_give_the_same_ids_and_parse_to_the_same_parts(name, rows, known):
    found, renderer = known(name)

    def encode(text: str) -> list[int]:
        return renderer.tokenizer.encode(text, add_special_tokens=False)

    opening = list(found.opening.ids) if found.owner == "model" else []
    ending = [found.end_of_turn_ids[0]]
    parts = [
        (
            opening + encode(reasoning) + list(found.closing.ids),
            encode(answer) + (ending if finish == "stop" else []),
            finish,
        )
        for reasoning, answer, finish in rows
    ]
    outputs = [before + behind for before, behind, _ in parts]
    result = findings(found, renderer, outputs, finish=[finish for *_, finish in parts])
    for row, (before, behind, _) in enumerate(parts):
        end = int(result.think_end[row])
        assert (outputs[row][:end], outputs[row][end:]) == (before, behind)
        assert outputs[row][:end] + outputs[row][end:] == outputs[row]
        assert found.think_end(outputs[row]) == end
        assert set(result.codes(row)) <= {"truncated", "repetition_loop"}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=8),
    sequence=st.lists(st.integers(0, 3), min_size=1, max_size=3),
)
def test_a_sequence_is_found_where_a_slow_search_finds_it(rows, sequence):
    ragged = Ragged.from_lists(rows)
    slow = [
        int(ragged.offsets[r]) + n
        for r, row in enumerate(rows)
        for n in range(len(row) - len(sequence) + 1)
        if row[n : n + len(sequence)] == sequence
    ]
    found = ragged.occurrences(sequence)
    assert found.tolist() == slow
    assert ragged.count(found).tolist() == [
        sum(ragged.offsets[r] <= p < ragged.offsets[r + 1] for p in slow) for r in range(len(rows))
    ]
    assert ragged.ends_with(sequence).tolist() == [row[-len(sequence) :] == sequence for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_loops_are_found_wherever_they_stand(data):
    period = data.draw(st.integers(1, 64))
    block = data.draw(st.lists(st.integers(0, 50), min_size=period, max_size=period))
    before, behind = (
        data.draw(st.lists(st.integers(60, 90), max_size=70, unique=True).map(lambda x: x[:30])) for _ in range(2)
    )
    times = max(6, -(-96 // period))
    looping, quiet = before + block * times + behind, list(range(100, 100 + data.draw(st.integers(0, 400))))
    rows = [quiet, looping, quiet, []]
    assert repetition_loops(Ragged.from_lists(rows)).tolist() == [False, True, False, False]


def test_short_repetitions_are_no_loops():
    rows = [[7] * 90, [1, 2, 3] * 30, list(range(60)) * 5, [*range(40), *[5] * 80]]
    assert not repetition_loops(Ragged.from_lists(rows)).any()


def test_every_reason_has_a_bit_of_its_own_and_a_sentence():
    assert len(set(BITS.values())) == len(REASONS) < 63
    assert all(reason.severity in ("keep", "quarantine", "stop") and reason.what for reason in REASONS.values())
    assert json.dumps(list(REASONS)) and np.int64(sum(BITS.values())) > 0
