"""Records of public datasets, in six formats, turned into one shape: messages and tools as OpenAI's chat API has them.

    messages: [{"role": system | user | assistant | tool, "content": str, …}], ending with a user or tool turn
    tools:    [{"type": "function", "function": {"name", "description", "parameters": JSON Schema}}] or None

Only the last user or tool turn is answered, so a conversation is cut there: a final assistant turn would be somebody
else's answer.  Earlier turns stay as they are, with `reasoning_content` and `tool_calls`; the `arguments` of a call are
an object here (whether a template wants text is known where it is rendered).  Function names keep their dots.

A record that cannot be turned into this shape is refused with one of `REASONS`; nothing is repaired by guessing.  This
module does not know files, tokenizers or templates.
"""

import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eaglet.errors import ConfigError

REASONS = {
    "unreadable_record": "the line or element is no JSON object, or holds values that JSON cannot write",
    "missing_field": "a field that the format or the prompt template needs is absent or null",
    "bad_turn": "a turn is no object, has an unknown role, or its content is not text",
    "bad_tools": "the tools are no list of named functions with a JSON Schema",
    "bad_tool_call": "an earlier tool call has no name, or arguments that are not a JSON object",
    "empty_turn": "a turn says nothing",
    "no_user_turn": "there is nothing to answer",
    "lone_surrogate": "the text holds half of a surrogate pair and cannot be written as UTF-8",
    "duplicate": "the same conversation came earlier",
}

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


class Refused(Exception):
    """A record that is dropped: `reason` is a key of `REASONS`, `detail` says what was found."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    messages: list[dict]
    tools: list[dict] | None


@dataclass(frozen=True)
class Reading:
    """How to read a dataset's records: `format`, `fields`, `prompt` and `system` of its config block."""

    format: str
    fields: Mapping[str, str]  # a part's name in the format -> where the record has it, dots for what lies within
    prompt: str | None = None
    system: str | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "Reading":
        """Raises ConfigError for a field that the format has not got, or a prompt template that cannot be filled."""
        reading = cls(params["format"], params.get("fields") or {}, params.get("prompt"), params.get("system"))
        known = FIELDS[reading.format]
        if unknown := sorted(set(reading.fields) - set(known)):
            raise ConfigError(f"fields: format {reading.format} has no {', '.join(unknown)}; it has {', '.join(known)}")
        if reading.format == "instruction":
            for _ in _template_parts(reading.prompt or ""):
                pass
        return reading

    def conversation(self, record: Mapping[str, Any]) -> Conversation:
        """The record's conversation, cut behind its last user or tool turn.  Raises Refused."""
        turns, tools = _READERS[self.format](record, self)
        turns = _until_last_question(_from_first_question([_with_our_role(turn) for turn in turns]))
        messages = [message for message in map(_message, turns) if message]
        if self.system and not (messages and messages[0]["role"] == "system"):
            messages.insert(0, {"role": "system", "content": self.system})
        return Conversation(messages, tools or None)

    def required(self, record: Mapping[str, Any], part: str) -> Any:
        """The part where `fields`, or the format itself, says that it is; refused when absent or null."""
        return _field(record, self.fields.get(part, FIELDS[self.format][part]))

    def optional(self, record: Mapping[str, Any], part: str) -> Any:
        try:
            return self.required(record, part)
        except Refused:
            return None


# What each format calls its parts.
FIELDS = {
    "messages": {"messages": "messages", "tools": "tools"},
    "instruction": {"system": "system", "tools": "tools"},
    "sharegpt": {"conversations": "conversations", "system": "system", "tools": "tools"},
    "glaive": {"system": "system", "chat": "chat"},
    "xlam": {"query": "query", "tools": "tools"},
    "bfcl": {"question": "question", "function": "function"},
}


# --- Formats: each returns turns, whose roles may be aliases, and checked tools ---


def _read_messages(record: Mapping, reading: Reading) -> tuple[list, list | None]:
    turns = _json_inside(reading.required(record, "messages"), "bad_turn")
    return _list(turns, "bad_turn"), _tools(reading.optional(record, "tools"))


def _read_instruction(record: Mapping, reading: Reading) -> tuple[list, list | None]:
    filled = "".join(text if not is_field else _as_text(_field(record, text)) for is_field, text in _parts(reading))
    turns = [{"role": "user", "content": filled}]
    if system := reading.optional(record, "system"):
        turns.insert(0, {"role": "system", "content": system})
    return turns, _tools(reading.optional(record, "tools"))


def _read_sharegpt(record: Mapping, reading: Reading) -> tuple[list, list | None]:
    turns = []
    for turn in _list(_json_inside(reading.required(record, "conversations"), "bad_turn"), "bad_turn"):
        if not isinstance(turn, dict):
            raise Refused("bad_turn", f"expected an object with `from` and `value`, found {_shown(turn)}")
        role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if role == "function_call":
            turns.append({"role": "assistant", "content": "", "tool_calls": [_json_inside(content, "bad_tool_call")]})
        else:
            turns.append({"role": role, "content": content})
    if (system := reading.optional(record, "system")) and not (turns and turns[0]["role"] == "system"):
        turns.insert(0, {"role": "system", "content": system})
    return turns, _tools(reading.optional(record, "tools"))


_GLAIVE_TURN = re.compile(r"(?:\A\s*|\n\s*\n\s*|<\|endoftext\|>\s*)(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_OFFER = re.compile(r",? with access to the following functions\. Use them if required\s*-?\s*\Z")


def _read_glaive(record: Mapping, reading: Reading) -> tuple[list, list | None]:
    system = _text(reading.optional(record, "system") or "").strip().removeprefix("SYSTEM:").strip()
    start = re.search(r"^\s*\{", system, re.MULTILINE)
    tools = None
    if start:
        tools = _tools(list(_concatenated(system[start.start() :])), standardize=True)
        # "… with access to the following functions -" points at text that the template now renders itself.
        system = _GLAIVE_OFFER.sub(".", system[: start.start()].strip())
    lead, *marked = _GLAIVE_TURN.split(_text(reading.required(record, "chat")))
    if lead.strip():
        raise Refused(
            "bad_turn", f"the chat does not begin with USER:, ASSISTANT: or FUNCTION RESPONSE:, but {_shown(lead)}"
        )
    turns = [
        {"role": _GLAIVE_ROLES[role], "content": text.replace("<|endoftext|>", "").strip()}
        for role, text in zip(marked[::2], marked[1::2], strict=True)
    ]
    called = None
    for turn in _until_last_question(turns):
        if turn["role"] == "assistant":
            turn["content"], mark, call = (part.strip() for part in turn["content"].partition("<functioncall>"))
            if mark:
                turn["tool_calls"] = [_tool_call(_glaive_call(call))]
                called = turn["tool_calls"][0]["function"]["name"]
        elif turn["role"] == "tool" and called:
            turn["name"] = called
    return [{"role": "system", "content": system}, *turns], tools


def _concatenated(text: str) -> Iterator[Any]:
    """JSON values that follow one another without commas or brackets."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            raise Refused("bad_tools", f"not JSON ({error}): {_shown(text[at:])}") from error
        yield value


_GLAIVE_ARGUMENTS = re.compile(
    r"""\A\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*'(?P<arguments>.*)'\s*\}\Z""", re.DOTALL
)


def _glaive_call(text: str) -> dict:
    """`{"name": "f", "arguments": '{"a": 1}'}`: JSON but for the single quotes around the inner JSON."""
    if quoted := _GLAIVE_ARGUMENTS.match(text):
        return {"name": quoted["name"], "arguments": quoted["arguments"].replace("\\'", "'")}
    return _json_inside(text, "bad_tool_call")


def _read_xlam(record: Mapping, reading: Reading) -> tuple[list, list | None]:
    tools = _list(_json_inside(reading.required(record, "tools"), "bad_tools"), "bad_tools")
    turns = [{"role": "user", "content": reading.required(record, "query")}]
    return turns, _tools([_from_flat_parameters(tool) for tool in tools], standardize=True)


def _from_flat_parameters(tool: Any) -> Any:
    """xLAM's `parameters` maps each name straight to {type, description, default}; a schema needs one more level."""
    flat = tool.get("parameters") if isinstance(tool, dict) else None
    if not isinstance(flat, dict) or isinstance(flat.get("properties"), dict):
        return tool
    properties, required = {}, []
    for name, parameter in flat.items():
        if not isinstance(parameter, dict):
            raise Refused("bad_tools", f"parameter {name!r}: expected an object, found {_shown(parameter)}")
        said = str(parameter.get("type", ""))
        optional = bool(re.search(r"\boptional\b", said, re.IGNORECASE)) or "default" in parameter
        if parameter.get("required", not optional):
            required.append(name)
        kept = {key: value for key, value in parameter.items() if key not in ("type", "required")}
        properties[name] = {**_python_type(said), **kept}
    return {**tool, "parameters": {"type": "object", "properties": properties, "required": required}}


def _python_type(annotation: str) -> dict:
    """The JSON Schema of a Python annotation such as `List[int], optional`; {} (anything) for what JSON has no type."""
    annotation = re.sub(r",\s*(optional|required)\b.*", "", annotation.strip(), flags=re.IGNORECASE)
    parts = re.fullmatch(r"(\w[\w.]*)\s*(?:\[(.*)\])?", annotation, re.DOTALL)
    if not parts:
        return {}
    name, inner = parts[1].split(".")[-1], parts[2]
    if name == "Optional" and inner:
        return _python_type(inner)
    if name == "Union" and inner:
        return {"anyOf": [_python_type(part) for part in _top_level(inner)]}
    kind = TYPES.get(name.lower())
    if kind == "array" and inner:
        items = {_key(found): found for found in map(_python_type, _top_level(inner)) if found}
        return {"type": "array", "items": next(iter(items.values()))} if len(items) == 1 else {"type": "array"}
    return {"type": kind} if kind else {}


def _top_level(text: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _read_bfcl(record: Mapping, reading: Reading) -> tuple[list, list | None]:
    """The first of `question`'s turns: the later ones follow answers that nobody has given yet."""
    question = _list(reading.required(record, "question"), "bad_turn")
    if question and isinstance(question[0], list):
        question = question[0]
    function = reading.optional(record, "function")
    if function is None:
        raise Refused(
            "bad_tools", f"no `function`: the tools of this file lie elsewhere; the record has {_names(record)}"
        )
    return question, _tools(function, standardize=True)


_READERS: dict[str, Callable[[Mapping, Reading], tuple[list, list | None]]] = {
    "messages": _read_messages,
    "instruction": _read_instruction,
    "sharegpt": _read_sharegpt,
    "glaive": _read_glaive,
    "xlam": _read_xlam,
    "bfcl": _read_bfcl,
}


# --- Turns ---


def _with_our_role(turn: Any) -> dict:
    if not isinstance(turn, dict):
        raise Refused("bad_turn", f"expected an object with `role` and `content`, found {_shown(turn)}")
    role = turn.get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise Refused("bad_turn", f"role {_shown(role)} is none of {', '.join(ROLES)}")
    return {**turn, "role": ROLES[role.lower()]}


def _from_first_question(turns: Sequence[dict]) -> list[dict]:
    """Without the answers in front of the first user turn, whose questions are lost (ShareGPT pages begin so)."""
    for first, turn in enumerate(turns):
        if turn["role"] == "user":
            return [turn for turn in turns[:first] if turn["role"] == "system"] + list(turns[first:])
    raise Refused("no_user_turn", f"roles are {', '.join(turn['role'] for turn in turns) or 'none'}")


def _until_last_question(turns: Sequence[dict]) -> Sequence[dict]:
    last = max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "tool")), default=-1)
    return turns[: last + 1]


def _content(content: Any, role: str) -> str:
    """Text as it is; text parts joined; null as nothing; what a tool returned as JSON if it is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if role == "tool":
        return json.dumps(content, ensure_ascii=False)
    raise Refused("bad_turn", f"the content of a {role} turn is not text: {_shown(content)}")


def _message(turn: Mapping) -> dict | None:
    """A turn's known keys in their usual order, with calls and reasoning under one name; None for no system text."""
    message = {"role": turn["role"], "content": _content(turn.get("content"), turn["role"])}
    if turn["role"] == "system" and _says_nothing(message["content"]):
        return None
    if turn["role"] == "assistant":
        reasoning = next((turn[name] for name in REASONING_NAMES if turn.get(name)), None)
        if reasoning is not None:
            message["reasoning_content"] = _text(reasoning)
        calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else None)
        if calls:
            calls = _list(_json_inside(calls, "bad_tool_call"), "bad_tool_call")
            message["tool_calls"] = [_tool_call(call) for call in calls]
    elif turn["role"] == "tool":
        message |= {name: turn[name] for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}
    if turn["role"] != "tool" and "tool_calls" not in message and _says_nothing(message["content"]):
        raise Refused("empty_turn", f"a {turn['role']} turn is {_shown(message['content'])}")
    return message


def _says_nothing(content: str) -> bool:
    return not content.strip()


def _tool_call(call: Any) -> dict:
    """{"id"?, "type": "function", "function": {"name", "arguments": object}} from a wrapped or a bare call."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise Refused("bad_tool_call", f"a call needs a name, found {_shown(call)}")
    arguments = _json_inside(inner.get("arguments"), "bad_tool_call")
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise Refused(
            "bad_tool_call", f"arguments of {inner['name']}: expected a JSON object, found {_shown(arguments)}"
        )
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": inner["name"], "arguments": arguments}}


# --- Tools ---

TYPES = {
    **dict.fromkeys(("object", "dict", "hashmap", "map", "mapping"), "object"),
    **dict.fromkeys(("array", "list", "tuple", "set", "arraylist", "sequence", "iterable"), "array"),
    **dict.fromkeys(("number", "float", "double"), "number"),
    **dict.fromkeys(("integer", "int", "long", "short", "byte"), "integer"),
    **dict.fromkeys(("string", "str", "char"), "string"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("null", "none", "nonetype"), "null"),
    **dict.fromkeys(("any", ""), None),  # JSON Schema says "anything" by naming no type
}
SUBSCHEMAS = ("items", "additionalProperties", "not")  # keywords that hold one schema
SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def _tools(tools: Any, *, standardize: bool = False) -> list[dict] | None:
    """Wrapped tools from wrapped or bare ones; `standardize` turns other languages' type names into JSON Schema's.

    Tools that are OpenAI's already keep every key, in its order: a template may render them as they stand.
    """
    tools = _json_inside(tools, "bad_tools")
    if tools is None or tools == "":
        return None
    if isinstance(tools, dict):
        tools = [tools]
    return [_tool(tool, standardize) for tool in _list(tools, "bad_tools")]


def _tool(tool: Any, standardize: bool) -> dict:
    tool = _json_inside(tool, "bad_tools")
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refused("bad_tools", f"a function needs a name, found {_shown(tool)}")
    if not isinstance(function.get("parameters", {}), dict):
        raise Refused(
            "bad_tools", f"parameters of {function['name']}: expected a schema, found {_shown(function['parameters'])}"
        )
    if standardize:
        parameters = standard_schema(function.get("parameters") or {"type": "object", "properties": {}})
        function = {**function, "parameters": parameters}
    return tool if function is tool.get("function") else {"type": "function", "function": function}


def standard_schema(schema: Any) -> Any:
    """A JSON Schema from one with Python's, Java's or JavaScript's type names and the non-standard `optional`.

    dict → object, float → number, tuple → array, any → no type, and so on by `TYPES`.  A property of the name `type`
    or `optional` is a property and stays; values under `default` and `enum` are data and stay.  Raises Refused.
    """
    if not isinstance(schema, dict):
        if isinstance(schema, bool):
            return schema
        raise Refused("bad_tools", f"expected a schema, found {_shown(schema)}")
    made = {}
    for key, value in schema.items():
        if key == "optional":
            continue
        if key == "type":
            if kind := _standard_type(value):
                made[key] = kind
        elif key in SUBSCHEMAS:
            made[key] = standard_schema(value)
        elif key in SUBSCHEMA_MAPS and isinstance(value, dict):
            made[key] = {name: standard_schema(part) for name, part in value.items()}
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            made[key] = [standard_schema(part) for part in value]
        else:
            made[key] = value
    return made


def _standard_type(kind: Any) -> str | list[str] | None:
    if isinstance(kind, list):
        kinds = [_standard_type(part) for part in kind]
        return None if None in kinds else kinds
    if not isinstance(kind, str) or kind.lower() not in TYPES:
        raise Refused("bad_tools", f"type {_shown(kind)} is none that JSON Schema, Python, Java or JavaScript has")
    return TYPES[kind.lower()]


# --- Values ---


def _field(record: Mapping, path: str) -> Any:
    """`record[path]`, or what the dotted path leads to, through JSON inside strings; refused when absent or null."""
    value: Any = record.get(path)
    if value is None and "." in path:
        value = record
        for name in path.split("."):
            value = _json_inside(value, "missing_field")
            value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        raise Refused("missing_field", f"no field `{path}`; the record has {_names(record)}")
    return value


def _names(record: Mapping) -> str:
    return ", ".join(map(str, record)).encode("utf-8", "backslashreplace").decode() or "no fields"


def _json_inside(value: Any, reason: str) -> Any:
    """What a string of JSON says; anything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Refused(reason, f"not JSON ({error}): {_shown(value)}") from error


def _list(value: Any, reason: str) -> list:
    if not isinstance(value, list):
        raise Refused(reason, f"expected a list, found {_shown(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused("bad_turn", f"expected text, found {_shown(value)}")
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shown(value: Any) -> str:
    """A short, printable excerpt for a message."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return repr(text[:60])


def _parts(reading: Reading) -> list[tuple[bool, str]]:
    return list(_template_parts(reading.prompt or ""))


def _template_parts(template: str) -> Iterator[tuple[bool, str]]:
    """(is a field, text) of a template `… {field} …`, where `{{` and `}}` stand for braces.  Raises ConfigError."""
    try:
        for literal, field, form, conversion in string.Formatter().parse(template):
            if literal:
                yield False, literal
            if field is not None:
                if not field or form or conversion:
                    raise ValueError(f"{{{field}}} must be the name of a field and nothing else")
                yield True, field
    except ValueError as error:
        raise ConfigError(
            f"prompt: {template!r} is no template ({error}); write {{field}}, and {{{{ for a brace"
        ) from error
