"""Small conversations with known text in them, rendered in many ways: the instrument with which inference looks.

The texts cannot occur in a template, so what stands before, between and behind them in a rendering was written by the
template.  This module renders and compares; what the differences mean is eaglet.inference.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from unittest import mock

from jinja2 import meta, nodes
from transformers.utils import chat_template_utils

from eaglet.errors import RecordError, TurnFormatError
from eaglet.rendering import PROBE_TOOL, Renderer, probe_call
from eaglet.turn_format import Marker

QUESTION, REASONING, ANSWER = "eaglet question", "eaglet reasoning", "eaglet answer"
USER = {"role": "user", "content": QUESTION}
SUPPLIED = {  # variables that whoever renders supplies: no arguments of the template's user
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now", "tojson", "namespace", "range", "dict", "lipsum", "cycler", "joiner"),
}


class Probe:
    """A renderer with the comparisons that inference needs.  All texts are with the target's template arguments."""

    def __init__(self, renderer: Renderer):
        self.renderer = renderer
        self.tokenizer = renderer.tokenizer
        self.tools = [PROBE_TOOL] if renderer.tools_rendered else None
        self.added = {int(i) for i in self.tokenizer.added_tokens_decoder}

    def text(
        self, messages: Sequence[Mapping], tools: Sequence | None = None, *, generation_prompt: bool = False
    ) -> str:
        return self.renderer.render(messages, tools, tokenize=False, generation_prompt=generation_prompt)

    def ids(
        self, messages: Sequence[Mapping], tools: Sequence | None = None, *, generation_prompt: bool = False
    ) -> list[int]:
        return self.renderer.render(messages, tools, tokenize=True, generation_prompt=generation_prompt)

    @cached_property
    def generation_prompt(self) -> Marker:
        """What `add_generation_prompt` adds.  Raises TurnFormatError when the ids do not start alike without it."""
        for name, (messages, tools) in conversations(self.renderer).items():
            without, whole = self.ids(messages, tools), self.ids(messages, tools, generation_prompt=True)
            if whole[: len(without)] != without:
                raise TurnFormatError(
                    f"the ids of a conversation ({name}) with the generation prompt do not start with its ids without it "
                    f"({self.renderer.decode(without[-8:])!r} against {self.renderer.decode(whole[: len(without)][-8:])!r}), so "
                    "no boundary between prompt and turn can be relied on; name a corrected template in target.chat_template"
                )
        before, whole = self.text([USER]), self.text([USER], generation_prompt=True)
        return Marker(tuple(self.ids([USER], generation_prompt=True)[len(self.ids([USER])) :]), whole[len(before) :])

    def turn(self, message: Mapping, tools: Sequence | None = None) -> str:
        """How the template writes an assistant's turn after the user's: header, parts and end of turn."""
        before, whole = self.text([USER], tools), self.text([USER, {"role": "assistant", **message}], tools)
        behind_question = before[before.rindex(QUESTION) + len(QUESTION) :]
        turn = whole[whole.rindex(QUESTION) + len(QUESTION) :]
        if not turn.startswith(behind_question):
            raise TurnFormatError(
                f"the template ends a user's turn with {behind_question!r}, but with {turn[: len(behind_question)]!r} when an "
                "answer follows, so a prompt and the same prompt with its answer do not start alike; name a corrected template "
                "in target.chat_template"
            )
        return turn[len(behind_question) :]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [self.renderer.decode([i]) for i in ids]

    def marker(self, text: str) -> Marker:
        """A marker by its text.  Raises TurnFormatError when its ids depend on what stands around it."""
        ids = self.encode(text)
        for around in ("a{}a", "\n{}\n", ". {} ", "{}\n\n"):
            if not ids or not contains(self.encode(around.format(text)), ids):
                raise TurnFormatError(
                    f"the marker {text!r} has no ids of its own (alone {ids}, in {around.format(text)!r} "
                    f"{self.encode(around.format(text))}); its tokens melt into the text around it, so boundaries cannot be "
                    "found in ids. Use a tokenizer that has it as an added token"
                )
        return Marker(tuple(ids), text)

    def within_added(self, text: str) -> str:
        """The part of a text from its first to its last added token; empty if it has none."""
        ids = self.encode(text)
        places = [n for n, i in enumerate(ids) if i in self.added and self.token_texts([i])[0].strip()]
        return self.renderer.decode(ids[places[0] : places[-1] + 1]) if places else ""

    def common_start(self, a: str, b: str) -> str:
        """The longest common start of two texts that ends where a token of `a` ends."""
        shared = len(common_prefix(a, b))
        end = 0
        for piece in self.token_texts(self.encode(a)):
            if end + len(piece) > shared:
                break
            end += len(piece)
        return a[:end]


def conversations(renderer: Renderer) -> dict[str, tuple[list[dict], list | None]]:
    """Conversations that between them reach every part of a template, by what they are."""
    said = {"role": "assistant", "content": ANSWER, "reasoning_content": REASONING}
    system = {"role": "system", "content": "eaglet system"}
    all_of_them = {
        "one question": ([USER], None),
        "a system message": ([system, USER], None),
        "an earlier turn": ([USER, said, USER], None),
        "a tool's result": (probe_call(True), [PROBE_TOOL] if renderer.tools_rendered else None),
    }
    if renderer.tools_rendered:
        all_of_them["a tool"] = ([USER], [PROBE_TOOL])
    return {name: case for name, case in all_of_them.items() if renders(renderer, *case)}


def renders(renderer: Renderer, messages: Sequence[Mapping], tools: Sequence | None) -> bool:
    """Whether the template takes the conversation at all (some refuse system messages, some know no tools)."""
    try:
        renderer.render(messages, tools, tokenize=False)
    except RecordError:
        return False
    return True


def every_rendering(renderer: Renderer, arguments: Mapping) -> dict[str, str]:
    """All `conversations` with `arguments` in place of the target's own; a refusal counts as a text of its own."""
    told = {}
    for name, (messages, tools) in conversations(renderer).items():
        for prompt in (False, True):
            try:
                text = renderer.render(messages, tools, arguments, tokenize=False, generation_prompt=prompt)
            except RecordError as error:
                text = f"refused: {error}"
            told[f"{name}, {'with' if prompt else 'without'} generation prompt"] = text
    return told


def template_variables(source: str) -> dict[str, list]:
    """The variables of a template that nobody but its user supplies, each with the constants it is compared with."""
    tree = chat_template_utils._compile_jinja_template(source).environment.parse(source)
    compared: dict[str, list] = {name: [] for name in sorted(meta.find_undeclared_variables(tree) - SUPPLIED)}
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        for name in (side.name for side in sides if isinstance(side, nodes.Name) and side.name in compared):
            compared[name] += [side.value for side in sides if isinstance(side, nodes.Const)]
    return compared


@contextmanager
def dated(day: datetime.datetime) -> Iterator[None]:
    """Let templates that ask for the date (`strftime_now`) be told another one."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return day

    with mock.patch.object(chat_template_utils, "datetime", Clock):
        yield


def contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    part = list(part)
    return any(list(ids[n : n + len(part)]) == part for n in range(len(ids) - len(part) + 1))


def common_prefix(a: Sequence, b: Sequence) -> Sequence:
    length = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def common_suffix(a: Sequence, b: Sequence) -> Sequence:
    length = len(common_prefix(a[::-1], b[::-1]))
    return a[len(a) - length :]
