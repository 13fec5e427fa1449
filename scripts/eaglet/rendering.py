"""From messages to the ids that the model reads: the tokenizer's own `apply_chat_template`, and nothing beside it.

What a template disagrees with others about is decided here by trial: whether the arguments of an earlier tool call
are an object or a string.  This module loads the tokenizer only, never a model, and does not know what a turn's
markers mean.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from eaglet.errors import RecordError, TargetError
from eaglet.targets import Target

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "eaglet_probe",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"eaglet_key": {"type": "string", "description": "What to look up."}},
            "required": ["eaglet_key"],
        },
    },
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
PROBE_ARGUMENTS = {"eaglet_key": "eaglet value"}


class Renderer:
    """Renders conversations for one target.

    `messages` are dicts {role, content, …} of the OpenAI form; `tools` are {"type": "function", "function": schema};
    `template_arguments` are added to the target's own.
    """

    def __init__(self, target: Target, tokenizer: PreTrainedTokenizerBase | None = None):
        self.target = target
        self.tokenizer = tokenizer or target.tokenizer()
        self._apply_chat_template = self.tokenizer.apply_chat_template
        if not self.tokenizer.chat_template and not renders_by_code(self.tokenizer):
            raise TargetError(
                f"target.model: the tokenizer of {target.model} has no chat template; name one in target.chat_template"
            )

    def prompt_ids(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        template_arguments: Mapping | None = None,
    ) -> list[int]:
        """The prompt with its generation prompt.  Raises RecordError when the template refuses the conversation."""
        return self.render(messages, tools, template_arguments, tokenize=True)

    def prompt_text(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        template_arguments: Mapping | None = None,
    ) -> str:
        """The text that `prompt_ids` tokenizes."""
        return self.render(messages, tools, template_arguments, tokenize=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens kept, no space cleaned up: for people, never to be tokenized again."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_each(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each of the rows of ids; for thousands of short ones much faster than `decode` of each."""
        if self.tokenizer.is_fast:
            return self.tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
        return [self.decode(row) for row in rows]

    def render(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping] | None = None,
        template_arguments: Mapping | None = None,
        *,
        tokenize: bool,
        generation_prompt: bool = True,
    ) -> Any:
        """`prompt_ids` or `prompt_text`, with or without the generation prompt."""
        if tools and not self.tools_rendered:
            raise TargetError(
                f"a prompt offers tools, but the chat template of {self.target.model} does not write them into the prompt, so the "
                "model would not know them; use a dataset without tools, or name a template that has them in target.chat_template"
            )
        return self._apply(self.adapted(messages), tools, template_arguments, tokenize, generation_prompt)

    def adapted(self, messages: Sequence[Mapping]) -> list[dict]:
        """The messages with earlier reasoning and the arguments of earlier tool calls in the form that the template takes.

        Raises RecordError when arguments given as a string are no JSON and the template wants an object.
        """
        if any(name in message for message in messages for name in REASONING_FIELDS):
            messages = [_with_reasoning(message, self.reasoning_field) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            as_object = self.tool_arguments != "string"
            messages = [_with_arguments(message, as_object) for message in messages]
        return [dict(message) for message in messages]

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that become control ids wherever they stand: special tokens, and added tokens that the template writes."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        texts = {t.content for t in tokens if t.content.strip() and (t.special or t.content in self.template)}
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @cached_property
    def _control_pattern(self) -> re.Pattern:
        return re.compile("|".join(map(re.escape, self.control_texts)) or "(?!)")

    def literal_markers(self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None = None) -> list[str]:
        """The control texts that messages (other than the model's own) and tools spell out, each time."""
        given = [*(message for message in messages if message.get("role") != "assistant"), *(tools or [])]
        return [found for part in given for text in _strings(part) for found in self._spelled(text)]

    def _spelled(self, text: str) -> Iterator[str]:
        """The control texts in a text.  Some tokenizers have a thousand, so only what starts like one is compared."""
        pattern, alike = self._control_starts
        for start in pattern.finditer(text):
            found = next((control for control in alike[start.group()] if text.startswith(control, start.start())), None)
            if found:
                yield found

    @cached_property
    def _control_starts(self) -> tuple[re.Pattern, dict[str, list[str]]]:
        """(what finds the first three characters of a control text, three characters → control texts, longest first)."""
        starts = sorted({control[:3] for control in self.control_texts}, key=len, reverse=True)
        alike = {
            start: [c for c in self.control_texts if c.startswith(start) or start.startswith(c)] for start in starts
        }
        return re.compile("|".join(map(re.escape, starts)) or "(?!)"), alike

    def escapes(self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None = None) -> bool:
        """Whether `prompt_ids` writes markers of these messages as text, which no server's own rendering does."""
        return self.target.literal_markers == "escape" and bool(self.literal_markers(messages, tools))

    @property
    def template(self) -> str:
        """The text of the template that renders conversations without tools; empty where only code renders."""
        return self.tokenizer.get_chat_template() if self.tokenizer.chat_template else ""

    def by_template_alone(self) -> "Renderer":
        """The same without what the tokenizer's class does on its own."""
        alone = Renderer(self.target, self.tokenizer)
        alone._apply_chat_template = functools.partial(PreTrainedTokenizerBase.apply_chat_template, self.tokenizer)
        return alone

    @cached_property
    def reasoning_field(self) -> str | None:
        """The field of a message that the template writes as reasoning; None when it writes none of those in use."""
        text = "eaglet reasoning"
        for name in REASONING_FIELDS:
            said = {"role": "assistant", "content": "eaglet answer", name: text}
            try:
                if text in self._apply(
                    [{"role": "user", "content": "eaglet question"}, said], None, None, False, False
                ):
                    return name
            except RecordError:
                continue
        return None

    @cached_property
    def tools_rendered(self) -> bool:
        """Whether the template writes the tools that are offered into the prompt."""
        try:
            text = self._apply([{"role": "user", "content": "eaglet question"}], [PROBE_TOOL], None, False, True)
        except RecordError:
            return False
        return PROBE_TOOL["function"]["name"] in text

    @cached_property
    def tool_arguments(self) -> str | None:
        """`object` or `string`: the form in which the template writes an earlier call's arguments as one JSON object.

        Found by rendering the same call both ways; where both do, `object`, which is what inference servers pass.
        None when the template writes arguments in neither form.
        """
        for form in ("object", "string"):
            try:
                text = self._apply(probe_call(form == "object"), [PROBE_TOOL], None, False, False)
            except RecordError:
                continue
            if _holds_json(text, PROBE_ARGUMENTS) or (form == "object" and _holds_parts(text)):
                return form
        return None

    def _apply(
        self,
        messages: Sequence[Mapping],
        tools: Sequence | None,
        arguments: Mapping | None,
        tokenize: bool,
        prompt: bool,
    ) -> Any:
        merged = {**self.target.template_arguments, **(arguments or {})}
        tools = [{**tool, **self.target.tool_fields} for tool in tools or []]
        escaping = tokenize and self.escapes(messages, tools)
        if escaping:
            messages = [m if m.get("role") == "assistant" else self._marked(m) for m in messages]
            tools = self._marked(tools)
        try:
            rendered = self._apply_chat_template(
                list(messages),
                tools=tools or None,
                add_generation_prompt=prompt,
                tokenize=tokenize and not escaping,
                **merged,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RecordError(
                f"the chat template of {self.target.model} refuses a conversation of roles "
                f"{', '.join(str(m.get('role')) for m in messages)}: {error}"
            ) from error
        if escaping:
            rendered = self._encoded_with_escapes(rendered)
        if isinstance(rendered, Mapping):
            rendered = rendered["input_ids"]
        return [int(i) for i in rendered] if tokenize else rendered

    def _marked(self, value: Any) -> Any:
        return chat_template_utils.mark_control_tokens(value, self._control_pattern)

    def _encoded_with_escapes(self, text: str) -> list[int]:
        try:
            return chat_template_utils.encode_marked_chat(self.tokenizer, text)
        except ValueError as error:
            raise TargetError(
                f"target.literal_markers: this tokenizer cannot escape ({error}); set it to count, and "
                "validation.severity.literal_marker to quarantine if such prompts are not wanted"
            ) from error


def probe_call(as_object: bool) -> list[dict]:
    """A conversation in which one earlier turn calls `PROBE_TOOL` and is answered."""
    call = {"id": "call_0", "type": "function", "function": {"name": "eaglet_probe", "arguments": PROBE_ARGUMENTS}}
    return [
        {"role": "user", "content": "eaglet question"},
        _with_arguments({"role": "assistant", "content": "", "tool_calls": [call]}, as_object),
        {"role": "tool", "tool_call_id": "call_0", "name": "eaglet_probe", "content": "eaglet result"},
    ]


def _strings(value: Any) -> Iterator[str]:
    """All texts within a message or a tool."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def _with_reasoning(message: Mapping, field: str | None) -> dict:
    """The message with its reasoning under `field`; unchanged where the template reads none."""
    said = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if field is None or said is None:
        return dict(message)
    return {**{key: value for key, value in message.items() if key not in REASONING_FIELDS}, field: said}


def _with_arguments(message: Mapping, as_object: bool) -> dict:
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments", {})
        if as_object and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise RecordError(
                    f"an earlier tool call's arguments are not JSON ({error}): {arguments[:80]!r}"
                ) from error
        elif not as_object and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _holds_json(text: str, value: Mapping) -> bool:
    """Whether the text holds `value` as a JSON object that is not itself inside a JSON string."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            found, _ = decoder.raw_decode(text, start)
        except ValueError:
            found = None
        if found == value or (isinstance(found, dict) and value in found.values()):
            return True
        start = text.find("{", start + 1)
    return False


def _holds_parts(text: str) -> bool:
    """Whether key and value stand in the text as parts of their own (templates that write arguments as XML)."""
    (key, value), *_ = PROBE_ARGUMENTS.items()
    return key in text and value in text and f"'{key}'" not in text and f'\\"{key}' not in text


def renders_by_code(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's class renders with code of its own (Kimi's does, for tools)."""
    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
