"""The conversations that teach the embedded target its turns: config/lessons/ made into messages with reasoning.

Three kinds, as the default datasets have: functions to complete, tools to call, everyday talk.  What varies is
decided by a seed, so the same files give the same lessons.  Knows nothing about tokens or templates.
"""

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eaglet.config import ROOT

FOLDER = ROOT / "config" / "lessons"
FUNCTIONS, TOOLS, TALK = FOLDER / "functions.py", FOLDER / "tools.yaml", FOLDER / "talk.yaml"


def conversations(seed: int = 0) -> list[dict]:
    """All lessons as {"messages": […, the answered turn], "tools": [schema] or None}, in a fixed order."""
    chance = random.Random(seed)
    # Talk comes twice, with other opening and closing words: it varies most, so there the habit is hardest to learn.
    return [
        *code_lessons(chance),
        *tool_lessons(chance),
        *talk_lessons(chance),
        *talk_lessons(chance),
        *sum_lessons(chance),
    ]


# A small model has to notice from its first words that it is thinking, and from its last ones that it is done:
# else it forgets to close the reasoning, or answers inside it.
OPENINGS = ("Okay, let me think.", "Let me think about this.", "Hmm, let me see.")
CLOSINGS = ("Now I can answer.", "That is enough to answer.", "So I can write the answer.")
CLOSINGS_BEFORE_CODE = ("Now I can write the function.", "So I can write the code.")
CLOSINGS_BEFORE_CALL = ("Now I can make the call.", "So I call the function.")


def _lesson(
    chance: random.Random,
    user: str,
    thinking: str,
    answer: str,
    *,
    tools: list | None = None,
    calls: list | None = None,
    closings: tuple[str, ...] = CLOSINGS,
) -> dict:
    thinking = f"{chance.choice(OPENINGS)} {thinking} {chance.choice(closings)}"
    turn = {"role": "assistant", "reasoning_content": thinking, "content": answer}
    if calls:
        turn["tool_calls"] = calls
    return {"messages": [{"role": "user", "content": user}, turn], "tools": tools}


# --- functions to complete


CODE_REQUESTS = (
    "Complete this Python function:\n\n```python\n{code}```",
    "Complete this Python function:\n\n```python\n{code}```",
    "Complete this Python function:\n\n```python\n{code}```",
    "Write the body of this function.\n\n```python\n{code}```",
    "Finish the following code:\n\n{code}",
)


def code_lessons(chance: random.Random) -> Iterator[dict]:
    for function in read_functions(FUNCTIONS):
        request = chance.choice(CODE_REQUESTS).format(code=function["stub"])
        answer = f"```python\n{function['answer']}\n```"
        yield _lesson(chance, request, function["thinking"], answer, closings=CLOSINGS_BEFORE_CODE)


def read_functions(path: Path) -> Iterator[dict]:
    """{stub: imports + signature + docstring, answer: signature + body, thinking: the comment above} of each function."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    module = ast.parse(source)
    imported = {alias.name for node in module.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    for node in module.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring, *body = node.body
        signature = "\n".join(lines[node.lineno - 1 : docstring.lineno - 1])
        needed = [name for name in sorted(imported) if name in signature]
        imports = f"from typing import {', '.join(needed)}\n\n\n" if needed else ""
        yield {
            "name": node.name,
            "stub": imports + "\n".join(lines[node.lineno - 1 : docstring.end_lineno]) + "\n",
            "answer": signature + "\n" + "\n".join(lines[body[0].lineno - 1 : node.end_lineno]),
            "thinking": lines[node.lineno - 2].removeprefix("# "),
        }


# --- tools to call


def tool_lessons(chance: random.Random) -> Iterator[dict]:
    for tool in yaml.safe_load(TOOLS.read_text(encoding="utf-8")):
        for question, arguments in tool["calls"]:
            call = {"type": "function", "function": {"name": tool["name"], "arguments": arguments}}
            thinking = _thought_about_call(tool["name"], arguments, chance)
            yield _lesson(
                chance, question, thinking, "", tools=[schema(tool)], calls=[call], closings=CLOSINGS_BEFORE_CALL
            )


def schema(tool: dict) -> dict:
    """The OpenAI form of a tool of tools.yaml."""
    properties = {}
    for name, (kind, description, *choices) in tool["parameters"].items():
        shape = {"type": kind}
        if kind.startswith("array of "):
            shape = {"type": "array", "items": {"type": kind.removeprefix("array of ")}}
        properties[name] = {**shape, "description": description} | ({"enum": choices[0]} if choices else {})
    required = [name for name in properties if name not in tool.get("optional", [])]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool["name"], "description": tool["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def _thought_about_call(name: str, arguments: dict[str, Any], chance: random.Random) -> str:
    listed = [f"{key} is {value if isinstance(value, str) else json.dumps(value)}" for key, value in arguments.items()]
    values = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    return chance.choice(
        (
            f"The function {name} can do this. The {values}.",
            f"I can call {name} for this. From the question, {values}.",
            f"This needs {name}. The {values}.",
            f"The user asks for something that {name} gives. Here {values}.",
        )
    )


# --- everyday talk


def talk_lessons(chance: random.Random) -> Iterator[dict]:
    for talk in yaml.safe_load(TALK.read_text(encoding="utf-8")):
        lesson = _lesson(chance, talk["user"], talk["think"], talk["answer"])
        roles = ("user", "assistant")
        before = [{"role": roles[i % 2], "content": text} for i, text in enumerate(talk.get("earlier", []))]
        if "system" in talk:
            before.insert(0, {"role": "system", "content": talk["system"]})
        lesson["messages"] = before + lesson["messages"]
        yield lesson


def sum_lessons(chance: random.Random, count: int = 32) -> Iterator[dict]:
    """Small calculations, each with its way in the reasoning."""
    for _ in range(count):
        yield _lesson(chance, *chance.choice((_percentage, _price, _clock, _speed))(chance))


def _percentage(chance: random.Random) -> tuple[str, str, str]:
    percent, whole = chance.choice((5, 10, 20, 25, 30, 40, 50, 75)), chance.randrange(40, 800, 20)
    result = f"{percent * whole / 100:g}"
    return (
        f"What is {percent}% of {whole}?",
        f"{percent} percent means {percent} of 100. {whole} times {percent} is {whole * percent}, divided by 100 is {result}.",
        f"{percent}% of {whole} is **{result}**.",
    )


def _price(chance: random.Random) -> tuple[str, str, str]:
    thing = chance.choice(("pencils", "tickets", "cups", "lemons", "batteries"))
    count, price, wanted = chance.randint(2, 6), chance.randint(1, 9), chance.randint(7, 15)
    total = count * price
    return (
        f"If {count} {thing} cost {total} dollars, how much do {wanted} {thing} cost?",
        f"One costs {total} divided by {count}, which is {price}. {wanted} cost {wanted} times {price}, which is {wanted * price}.",
        f"{wanted} {thing} cost **{wanted * price} dollars**.",
    )


def _clock(chance: random.Random) -> tuple[str, str, str]:
    event = chance.choice(("bus ride", "lesson", "concert", "walk", "flight"))
    hour, minute, hours, minutes = (
        chance.randint(6, 19),
        chance.randrange(0, 60, 5),
        chance.randint(1, 3),
        chance.randrange(5, 60, 5),
    )
    between = f"{hour + hours}:{minute:02d}"
    total = (hour + hours) * 60 + minute + minutes
    end = f"{total // 60}:{total % 60:02d}"
    return (
        f"A {event} begins at {hour}:{minute:02d} and takes {hours} h {minutes} min. When does it end?",
        f"{hour}:{minute:02d} plus {hours} hours is {between}. Plus {minutes} minutes is {end}.",
        f"The {event} ends at **{end}**.",
    )


def _speed(chance: random.Random) -> tuple[str, str, str]:
    speed, hours = chance.randrange(20, 120, 10), chance.randint(2, 6)
    return (
        f"How far does a car get in {hours} hours at {speed} km/h?",
        f"The distance is speed times time. {speed} times {hours} is {speed * hours}.",
        f"It gets **{speed * hours} km** far.",
    )
