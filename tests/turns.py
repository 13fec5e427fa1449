"""Turns for tests: what a model of a family writes for given reasoning, answer and calls, taken from its template's rendering."""

from collections.abc import Collection, Sequence

import numpy as np

from eaglet.checks import Findings, Vocabulary, check
from eaglet.probing import Probe
from eaglet.ragged import Ragged
from eaglet.rendering import Renderer
from eaglet.turn_format import TurnFormat

QUESTION = [{"role": "user", "content": "Is it raining in Oslo?"}]


def call(name: str, arguments: dict, number: int = 0) -> dict:
    """A tool call as messages hold it, with the id that Kimi's template writes."""
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str) -> dict:
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}}
    return {"type": "function", "function": {"name": name, "description": "Looks it up.", "parameters": schema}}


def output_text(
    found: TurnFormat, renderer: Renderer, *, reasoning: str | None, answer: str, calls: Sequence[dict] = ()
) -> str:
    """The text behind the generation prompt, up to the end of the turn."""
    message = {"content": answer, **({"reasoning_content": reasoning} if reasoning else {})}
    if calls:
        message["tool_calls"] = list(calls)
    turn = Probe(renderer).turn(message, [tool("get_weather")] if calls and found.tools_rendered else None)
    if reasoning and reasoning not in turn:  # a template that never writes reasoning
        turn = turn[turn.index(answer or renderer.decode(found.tool_calls.section_begin.ids)) :]
        written = (found.opening.text if found.owner == "model" else "") + reasoning + found.closing.text + turn
    else:
        written = turn.removeprefix(found.generation_prompt.text)
        written = written[len(found.opening.text) :] if found.owner == "prompt" and written == turn else written
    ends = [text for text in map(renderer.decode, ([i] for i in found.end_of_turn_ids)) if text in written]
    if not ends:  # a turn that ends by opening the next
        return written + renderer.decode([found.end_of_turn_ids[-1]])
    end = max(ends, key=written.rindex)
    return written[: written.rindex(end) + len(end)]


def findings(
    found: TurnFormat,
    renderer: Renderer,
    outputs: Sequence[Sequence[int]],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    finish: str | Sequence[str] = "stop",
    offered: Collection[str] = ("get_weather",),
) -> Findings:
    """The checks of rows, by default with a fitting prompt."""
    prompts = prompts or [list(found.generation_prompt.ids)] * len(outputs)
    finish_reasons = np.array([finish] * len(outputs) if isinstance(finish, str) else finish, object)
    vocabulary = Vocabulary(found.vocab_size, renderer)
    rows = Ragged.from_lists(prompts), Ragged.from_lists(outputs)
    return check(*rows, finish_reasons, found, vocabulary, lambda row: offered)
