"""Each public format becomes the one shape, and each of its known breakages is read or refused under its reason."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglet.conversations import FIELDS, REASONS, Reading, Refused, standard_schema
from eaglet.errors import ConfigError


def read(record, format="messages", **block):
    return Reading.from_params({"format": format, **block}).conversation(record)


def refusal(record, format="messages", **block) -> Refused:
    with pytest.raises(Refused) as caught:
        read(record, format, **block)
    assert caught.value.reason in REASONS
    return caught.value


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


WEATHER = {
    "name": "get.weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
WRAPPED = {"type": "function", "function": WEATHER}
CALL = {"type": "function", "function": {"name": "get.weather", "arguments": {"city": "Bern"}}}


# --- the cut, and the turns ---


def test_a_final_answer_is_cut_off_since_the_target_answers_itself():
    assert read({"messages": [user("a"), assistant("b")]}).messages == [user("a")]


def test_a_conversation_is_cut_behind_its_last_user_or_tool_turn():
    turns = [user("a"), assistant("b"), user("c"), assistant("d"), assistant("e")]
    assert read({"messages": turns}).messages == turns[:3]
    tool = {"role": "tool", "content": "sunny", "tool_call_id": "1"}
    asked = [user("a"), assistant("", tool_calls=[CALL]), tool]
    assert read({"messages": [*asked, assistant("It is sunny.")]}).messages == asked


def test_what_stands_behind_the_cut_is_not_looked_at():
    assert read({"messages": [user("a"), assistant(None, tool_calls="broken")]}).messages == [user("a")]


def test_answers_in_front_of_the_first_question_are_left_out():
    turns = [{"role": "system", "content": "s"}, assistant("Hello!"), user("a")]
    assert read({"messages": turns}).messages == [turns[0], user("a")]


@pytest.mark.parametrize(
    "turns", [[], [assistant("a")], [{"role": "system", "content": "s"}], [{"role": "tool", "content": "x"}]]
)
def test_without_a_user_turn_there_is_nothing_to_answer(turns):
    assert refusal({"messages": turns}).reason == "no_user_turn"


@pytest.mark.parametrize("empty", ["", " \n", None, []])
def test_an_empty_user_or_assistant_turn_is_refused(empty):
    assert refusal({"messages": [user(empty)]}).reason == "empty_turn"
    assert refusal({"messages": [user("a"), assistant(empty), user("b")]}).reason == "empty_turn"


def test_an_empty_system_turn_says_nothing_and_goes():
    assert read({"messages": [{"role": "system", "content": ""}, user("a")]}).messages == [user("a")]


def test_a_tool_may_return_nothing_and_an_assistant_may_only_call():
    turns = [user("a"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": ""}]
    assert read({"messages": turns}).messages == turns


def test_reasoning_of_earlier_turns_is_kept_under_one_name():
    for name in ("reasoning_content", "reasoning", "thinking"):
        turns = [user("a"), assistant("b", **{name: "Hm."}), user("c")]
        assert read({"messages": turns}).messages[1] == assistant("b", reasoning_content="Hm.")


def test_text_parts_are_joined_and_images_refused():
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    assert read({"messages": [user(parts)]}).messages == [user("What is this?")]
    refused = refusal({"messages": [user([*parts, {"type": "image_url", "image_url": {"url": "x"}}])]})
    assert refused.reason == "bad_turn" and "not text" in refused.detail


def test_unknown_roles_and_turns_that_are_no_objects_are_refused():
    assert "'narrator' is none of" in refusal({"messages": [{"role": "narrator", "content": "a"}]}).detail
    assert refusal({"messages": [{"content": "a"}]}).reason == "bad_turn"
    assert refusal({"messages": ["a"]}).reason == "bad_turn"
    assert refusal({"messages": {"role": "user"}}).reason == "bad_turn"


def test_a_configured_system_message_goes_in_front_where_there_is_none():
    own = {"role": "system", "content": "Mine."}
    assert read({"messages": [user("a")]}, system="Yours.").messages == [
        {"role": "system", "content": "Yours."},
        user("a"),
    ]
    assert read({"messages": [own, user("a")]}, system="Yours.").messages == [own, user("a")]


# --- messages ---


def test_messages_calls_and_tools_may_be_json_inside_strings():
    called = {"id": "c1", "type": "function", "function": {"name": "get.weather", "arguments": '{"city": "Bern"}'}}
    turns = [user("a"), assistant(None, tool_calls=json.dumps([called])), {"role": "tool", "content": "sunny"}]
    record = {"messages": json.dumps(turns), "metadata": json.dumps({"tools": [WRAPPED]})}
    found = read(record, fields={"tools": "metadata.tools"})
    assert found.messages[1] == assistant("", tool_calls=[{"id": "c1", **CALL}])
    assert found.tools == [WRAPPED]


def test_a_legacy_function_call_becomes_a_tool_call():
    turns = [
        user("a"),
        assistant(None, function_call={"name": "f", "arguments": ""}),
        {"role": "function", "content": "1"},
    ]
    messages = read({"messages": turns}).messages
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert messages[2] == {"role": "tool", "content": "1"}


@pytest.mark.parametrize(
    "call", [{"name": "f", "arguments": "[1]"}, {"name": "f", "arguments": "{broken"}, {"arguments": {}}, "f()"]
)
def test_a_call_without_a_name_or_with_odd_arguments_is_refused(call):
    turns = [user("a"), assistant("", tool_calls=[call]), user("b")]
    assert refusal({"messages": turns}).reason == "bad_tool_call"


def test_tools_of_the_standard_shape_are_kept_as_they_are_and_bare_ones_wrapped():
    odd = {"type": "function", "strict": True, "function": {"parameters": {"type": "dict"}, "name": "f"}}
    found = read({"messages": [user("a")], "tools": [odd, WEATHER]}).tools
    assert found == [odd, WRAPPED]
    assert list(found[0]["function"]) == ["parameters", "name"]  # a template renders keys in their order
    assert read({"messages": [user("a")], "tools": []}).tools is None


@pytest.mark.parametrize(
    "tools", ["[broken", "text", [{"description": "no name"}], [{"name": "f", "parameters": "int"}], ["f"]]
)
def test_tools_that_are_no_functions_are_refused(tools):
    assert refusal({"messages": [user("a")], "tools": tools}).reason == "bad_tools"


def test_fields_says_where_the_messages_are_and_an_unknown_part_is_an_error():
    assert read({"conversation": [user("a")]}, fields={"messages": "conversation"}).messages == [user("a")]
    assert read({"a.b": [user("a")]}, fields={"messages": "a.b"}).messages == [user("a")]
    with pytest.raises(ConfigError, match="format messages has no mesages; it has messages, tools"):
        read({}, fields={"mesages": "x"})


def test_a_missing_field_names_those_that_the_record_has():
    assert "no field `messages`; the record has id, text" in refusal({"id": 1, "text": "a"}).detail


# --- instruction ---


def test_a_prompt_template_is_filled_from_the_record_and_braces_in_values_are_text():
    record = {"problem": "Sort {x}", "lang": "C", "seed": 3, "meta": {"level": "hard"}}
    found = read(record, "instruction", prompt="{{{lang}}} {seed} {meta.level}: {problem}")
    assert found.messages == [user("{C} 3 hard: Sort {x}")]


def test_a_field_that_the_record_has_not_got_is_named_with_those_that_it_has():
    refused = refusal({"problem": "a", "lang": None}, "instruction", prompt="{instruction}")
    assert refused.reason == "missing_field"
    assert "no field `instruction`; the record has problem, lang" in refused.detail
    assert refusal({"problem": "a", "lang": None}, "instruction", prompt="{lang}").reason == "missing_field"


@pytest.mark.parametrize("template", ["{", "a } b", "{}", "{x!r}", "{x:>3}"])
def test_a_template_that_is_none_is_a_config_error(template):
    with pytest.raises(ConfigError, match="is no template"):
        read({}, "instruction", prompt=template)


def test_instruction_takes_system_and_tools_from_the_fields_named():
    record = {"q": "a", "persona": "A bear.", "functions": [WEATHER]}
    found = read(record, "instruction", prompt="{q}", fields={"system": "persona", "tools": "functions"})
    assert found.messages == [{"role": "system", "content": "A bear."}, user("a")]
    assert found.tools == [WRAPPED]


# --- sharegpt ---


def said(role, value):
    return {"from": role, "value": value}


@pytest.mark.parametrize("name", ["gpt", "chatgpt", "bing", "bard"])
def test_every_model_of_sharegpt_is_the_assistant(name):
    turns = [said(name, "Welcome"), said("human", "a"), said(name, "b"), said("user", "c"), said(name, "d")]
    assert read({"conversations": turns}, "sharegpt").messages == [user("a"), assistant("b"), user("c")]


def test_sharegpt_system_and_tool_turns_and_openai_keys_are_read():
    turns = [said("system", "s"), {"role": "user", "content": "a"}, said("function_call", json.dumps(CALL["function"]))]
    found = read({"conversations": [*turns, said("observation", "sunny")], "tools": json.dumps([WEATHER])}, "sharegpt")
    assert found.messages == [
        {"role": "system", "content": "s"},
        user("a"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "sunny"},
    ]
    assert found.tools == [WRAPPED]


def test_sharegpt_empty_turns_are_refused():
    turns = [said("human", "a"), said("gpt", ""), said("human", "b")]
    assert refusal({"conversations": turns}, "sharegpt").reason == "empty_turn"
    assert refusal({"conversations": ["a"]}, "sharegpt").reason == "bad_turn"


# --- glaive ---

GLAIVE_SYSTEM = """SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -
{
    "name": "get_rate",
    "description": "Get the rate",
    "parameters": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
}

{
    "name": "get_news",
    "description": "News with a } in the text",
    "parameters": {"type": "object", "properties": {}}
}
"""
GLAIVE_CHAT = (
    "USER: What's a dollar\n\nin francs?\n\n\n"
    'ASSISTANT: Let me look. <functioncall> {"name": "get_rate", "arguments": \'{"to": "it\\\'s CHF"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"rate": 0.8}\n\n\n'
    "ASSISTANT: 0.8 francs. <|endoftext|>\n\n\nUSER: Thanks, and euros?\n\n\n"
    "ASSISTANT: <functioncall> {broken <|endoftext|>"
)


def test_glaive_functions_that_follow_one_another_become_tools():
    found = read({"system": GLAIVE_SYSTEM, "chat": GLAIVE_CHAT}, "glaive")
    assert [tool["function"]["name"] for tool in found.tools] == ["get_rate", "get_news"]
    assert found.messages[0] == {"role": "system", "content": "You are a helpful assistant."}


def test_glaive_chat_becomes_turns_with_calls_and_without_end_markers():
    messages = read({"system": GLAIVE_SYSTEM, "chat": GLAIVE_CHAT}, "glaive").messages
    call = {"type": "function", "function": {"name": "get_rate", "arguments": {"to": "it's CHF"}}}
    assert messages[1:] == [
        user("What's a dollar\n\nin francs?"),
        assistant("Let me look.", tool_calls=[call]),
        {"role": "tool", "content": '{"rate": 0.8}', "name": "get_rate"},
        assistant("0.8 francs."),
        user("Thanks, and euros?"),
    ]


def test_glaive_call_with_proper_json_arguments_is_read_and_a_broken_one_refused():
    chat = 'USER: a\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": {"x": 1}} <|endoftext|>\n\n\nUSER: b'
    messages = read({"system": "SYSTEM: No tools.", "chat": chat}, "glaive").messages
    assert messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    broken = chat.replace('{"x": 1}', "'{\"x\": 1'")
    assert refusal({"system": "SYSTEM: No tools.", "chat": broken}, "glaive").reason == "bad_tool_call"


def test_glaive_calls_that_are_no_objects_are_refused():
    for call in ("{broken", "[1]", "", "f()"):
        chat = f"USER: a\n\n\nASSISTANT: <functioncall> {call} <|endoftext|>\n\n\nFUNCTION RESPONSE: 1"
        assert refusal({"system": "", "chat": chat}, "glaive").reason == "bad_tool_call"


def test_glaive_without_functions_keeps_its_system_text():
    record = {
        "system": "SYSTEM: You are a helpful assistant, with no access to external functions.\n\n\n",
        "chat": "USER: a",
    }
    found = read(record, "glaive")
    assert found.tools is None
    assert found.messages[0]["content"] == "You are a helpful assistant, with no access to external functions."


def test_glaive_oddities_are_refused_by_name():
    assert refusal({"system": "", "chat": "Hello there"}, "glaive").reason == "bad_turn"
    assert refusal({"system": "SYSTEM: x\n{broken}", "chat": "USER: a"}, "glaive").reason == "bad_tools"
    assert refusal({"system": ""}, "glaive").reason == "missing_field"


# --- xlam ---


def test_xlam_flat_parameters_become_a_schema():
    tool = {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "q": {"type": "str", "description": "Query"},
            "n": {"type": "int, optional", "description": "How many"},
            "ids": {"type": "List[int]", "default": []},
            "pairs": {"type": "List[Tuple[str, float]]"},
            "either": {"type": "Union[int, str]"},
            "maybe": {"type": "Optional[bool]", "required": False},
            "f": {"type": "Callable[[float], float]"},
        },
    }
    record = {"query": "a", "tools": json.dumps([tool]), "answers": "[]"}
    found = read(record, "xlam")
    assert found.messages == [user("a")]
    assert found.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "q": {"type": "string", "description": "Query"},
            "n": {"type": "integer", "description": "How many"},
            "ids": {"type": "array", "items": {"type": "integer"}, "default": []},
            "pairs": {"type": "array", "items": {"type": "array"}},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "maybe": {"type": "boolean"},
            "f": {},
        },
        "required": ["q", "pairs", "either", "f"],
    }


def test_xlam_broken_tools_are_refused():
    assert refusal({"query": "a", "tools": "[{]"}, "xlam").reason == "bad_tools"
    assert refusal({"query": "a", "tools": [{"name": "f", "parameters": {"x": "int"}}]}, "xlam").reason == "bad_tools"
    assert refusal({"query": "a"}, "xlam").reason == "missing_field"


# --- bfcl ---


def test_bfcl_types_are_mapped_and_names_keep_their_dots():
    function = {
        "name": "math.area",
        "description": "Area.",
        "parameters": {
            "type": "dict",
            "properties": {
                "size": {"type": "float", "optional": True},
                "pair": {"type": "tuple", "items": {"type": "float"}},
                "thing": {"type": "any", "description": "Whatever"},
                "type": {"type": "HashMap", "default": {"type": "dict"}},
                "optional": {"type": "String", "enum": ["any", "dict"]},
            },
            "required": ["size"],
        },
    }
    found = read({"id": "x", "question": [[user("a")]], "function": [function]}, "bfcl")
    assert found.messages == [user("a")]
    assert found.tools == [
        {
            "type": "function",
            "function": {
                "name": "math.area",
                "description": "Area.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "size": {"type": "number"},
                        "pair": {"type": "array", "items": {"type": "number"}},
                        "thing": {"description": "Whatever"},
                        "type": {"type": "object", "default": {"type": "dict"}},
                        "optional": {"type": "string", "enum": ["any", "dict"]},
                    },
                    "required": ["size"],
                },
            },
        }
    ]


def test_bfcl_takes_the_first_of_several_turns_since_nobody_has_answered_it():
    system = {"role": "system", "content": "s"}
    record = {"question": [[system, user("a")], [user("b")]], "function": [WEATHER]}
    assert read(record, "bfcl").messages == [system, user("a")]


def test_bfcl_without_functions_of_its_own_is_refused():
    assert refusal({"question": [[user("a")]], "involved_classes": ["X"]}, "bfcl").reason == "bad_tools"


def test_a_type_that_no_language_has_is_refused():
    with pytest.raises(Refused, match="bad_tools: type 'strnig' is none"):
        standard_schema({"type": "object", "properties": {"x": {"type": "strnig"}}})


def test_type_lists_and_boolean_schemas_are_standard():
    assert standard_schema({"type": ["str", "null"], "additionalProperties": False}) == {
        "type": ["string", "null"],
        "additionalProperties": False,
    }


def test_every_format_says_what_its_parts_are_called():
    assert set(FIELDS) == {"messages", "instruction", "sharegpt", "glaive", "xlam", "bfcl"}


# --- anything at all ---

NAMES = [
    "role",
    "content",
    "from",
    "value",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "type",
    "properties",
    "text",
]
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "a", "{", "[1]", '{"name": "f"}', "[{"])
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner), max_leaves=6
)
ROLE = st.sampled_from(["user", "human", "assistant", "gpt", "tool", "system", "function_call", None])
ANY_CALL = st.fixed_dictionaries({"name": st.just("f") | JSON, "arguments": JSON})
TURN = st.fixed_dictionaries(
    {"role": ROLE, "content": st.just("a") | JSON},
    optional={"tool_calls": JSON | st.lists(ANY_CALL), "function_call": ANY_CALL, "thinking": JSON},
)
SCHEMA = st.fixed_dictionaries({"type": st.sampled_from(["dict", "any", "List[int]", "no"]) | JSON, "properties": JSON})
TOOL = st.fixed_dictionaries({"name": st.just("a.b") | JSON, "parameters": SCHEMA | JSON})
PIECES = ["USER: ", "\n\nASSISTANT: ", "\n\nFUNCTION RESPONSE: ", "<functioncall> ", "{", "[1]", '{"name": "f"}', "a"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@pytest.mark.parametrize("format", FIELDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_record_becomes_a_conversation_or_is_refused_under_a_known_reason(format, data):
    part = (
        TEXT
        | JSON
        | st.lists(TURN, max_size=4)
        | st.lists(TOOL, max_size=2)
        | st.lists(TURN, max_size=2).map(json.dumps)
    )
    record = {name: data.draw(part, label=name) for name in FIELDS[format].values()}
    try:
        found = read({**record, "x": 1}, format, **({"prompt": "{x}"} if format == "instruction" else {}))
    except Refused as refused:
        assert refused.reason in REASONS
        return
    assert found.messages[-1]["role"] in ("user", "tool")
    assert Reading("messages", {}).conversation(vars(found)) == found
