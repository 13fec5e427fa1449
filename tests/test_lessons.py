"""The lessons are right in themselves: the functions do what they say, the calls fit their schemas, nothing is copied."""

import doctest
import importlib.util
import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from eaglet import lessons
from eaglet.config import ROOT
from eaglet.records import iter_jsonl


@pytest.fixture(scope="module")
def conversations():
    return lessons.conversations()


def last_turn(lesson):
    return lesson["messages"][-1]


def test_every_function_passes_its_own_examples():
    spec = importlib.util.spec_from_file_location("lesson_functions", lessons.FOLDER / "functions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 80


def test_the_taught_code_is_the_function_itself():
    for function in lessons.read_functions(lessons.FOLDER / "functions.py"):
        scope = {}
        exec("from typing import *\n" + function["answer"], scope)
        assert callable(scope[function["name"]])
        assert function["stub"].rstrip().endswith('"""')
        assert function["thinking"] and not function["thinking"].startswith("#")


def test_every_call_fits_the_schema_that_it_was_offered(conversations):
    calls = [lesson for lesson in conversations if lesson["tools"]]
    assert len(calls) > 90
    for lesson in calls:
        (tool,) = lesson["tools"]
        (call,) = last_turn(lesson)["tool_calls"]
        assert call["function"]["name"] == tool["function"]["name"]
        Draft202012Validator(tool["function"]["parameters"]).validate(call["function"]["arguments"])


def test_every_lesson_thinks_and_answers(conversations):
    for lesson in conversations:
        turn = last_turn(lesson)
        assert turn["reasoning_content"].strip()
        assert turn["content"].strip() or turn.get("tool_calls")
        assert lesson["messages"][-2]["role"] == "user"


def test_the_same_seed_gives_the_same_lessons(conversations):
    assert lessons.conversations(seed=0) == conversations != lessons.conversations(seed=1)


def test_the_prompts_of_the_default_run_are_not_taught(conversations):
    taught = {lesson["messages"][-2]["content"] for lesson in conversations}
    asked = {row["messages"][-1]["content"] for _, row in iter_jsonl(ROOT / "config" / "prompts" / "notes.jsonl")}
    assert not taught & asked


def test_talk_is_plain_text_with_all_its_parts():
    for talk in yaml.safe_load((lessons.FOLDER / "talk.yaml").read_text(encoding="utf-8")):
        assert all(isinstance(talk[part], str) and talk[part] for part in ("user", "think", "answer")), json.dumps(talk)
        assert len(talk.get("earlier", [])) % 2 == 0
