"""The guard: what a server must be before its tokens are trusted, asked and proved before the first request.

Three steps, each of which stops the run by name: what the server says it is (`/model_info`, `/server_info`), what it
does with one known prompt (`probe`), and whether it renders prompts as we do (`cross_check`).  The guard knows servers'
flags and what each does to tokens; it does not know datasets, journals or retries.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from eaglet.client import Answer, Client, RowRefused
from eaglet.errors import GuardError
from eaglet.rendering import Renderer
from eaglet.row_request import RESERVED_TOKENS
from eaglet.targets import Target
from eaglet.turn_format import Marker, TurnFormat

# Flags that change which tokens a server gives, whatever the request says.  A capture holds them constant.  What only
# changes speed or rounding (parallelism, memory, caches, backends, graphs) is not here.
SEMANTIC_FLAGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "enable_fp32_lm_head",
    "json_model_override_args",
    "load_format",
    "revision",
    "lora_paths",
    "model_impl",
    "speculative_algorithm",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "enable_deterministic_inference",
    "rl_on_policy_target",
    "enable_custom_logit_processor",
    "dllm_algorithm",
)
# (name in /model_info or /server_info, SGLang's flag, what it does to the data)
REFUSED_FLAGS = (
    ("reasoning_parser", "--reasoning-parser", "a reasoning parser restructures the output at the reasoning boundary"),
    ("enable_strict_thinking", "--enable-strict-thinking", "strict thinking changes which tokens are sampled"),
    ("allow_auto_truncate", "--allow-auto-truncate", "automatic truncation silently cuts prompts"),
    ("preferred_sampling_params", "--preferred-sampling-params", "the server adds sampling settings of its own"),
    ("enable_watermark", "--enable-watermark", "a watermark changes which tokens are sampled"),
    ("skip_tokenizer_init", "--skip-tokenizer-init", "without its tokenizer the server's rendering cannot be checked"),
)
PROBE_MESSAGES = [{"role": "user", "content": "Name three things to take along for a walk in the rain."}]
PROBE_TOKENS = 48
SGLANG_TOOL_FIELDS = {"defer_loading": None}  # what SGLang 0.5.23 adds around a tool's schema before it renders


@dataclass(frozen=True)
class Sample:
    """A conversation whose rendering is cross-checked."""

    sample_id: str
    messages: Sequence[Mapping]
    tools: Sequence[Mapping] | None
    template_arguments: Mapping[str, Any]


def ask(client: Client) -> tuple[dict, dict]:
    """(/model_info, /server_info).  Raises Failure, GuardError."""
    answers = client.get("/model_info"), client.get("/server_info")
    for path, answer in zip(("/model_info", "/server_info"), answers, strict=True):
        if not isinstance(answer, dict):
            raise GuardError(f"{path} answers {type(answer).__name__} where an object is expected; is this SGLang?")
    return answers


def facts_of(model_info: Mapping, server_info: Mapping) -> dict:
    """What must stay the same while rows are captured, and is stored with them: no ports, paths, times or sizes."""
    said = {**server_info, **model_info}
    flags = {name: said[name] for name in SEMANTIC_FLAGS if said.get(name) not in (None, False, [], {}, "", "{}")}
    return {
        "engine": said.get("engine", "sglang"),
        "version": said.get("version"),
        "model_type": said.get("model_type"),
        "architectures": said.get("architectures"),
        "weight_version": said.get("weight_version"),
        "flags": flags,
    }


def inspect(model_info: Mapping, server_info: Mapping, turn_format: TurnFormat, context_length: int) -> dict:
    """The server's facts.  Raises one GuardError that lists everything about it that would spoil the capture."""
    said = {**server_info, **model_info}
    problems = [
        f"{flag} is set ({said[name]!r}): {effect}. Start the server without {flag}"
        for name, flag, effect in REFUSED_FLAGS
        if said.get(name)
    ]
    problems += _model_problems(said, turn_format)
    served = server_info.get("context_length") or turn_format.context_length
    if served < context_length:
        problems.append(
            f"its context is {served} tokens, the config says {context_length}. Start it with --context-length "
            f"{context_length}, or set server.context_length: {served}"
        )
    if said.get("load_format") == "dummy":
        problems.append("--load-format dummy: its weights are random. Start the server without it")
    if problems:
        raise GuardError("this server would spoil the capture:\n" + "\n".join(f"  - {line}" for line in problems))
    return facts_of(model_info, server_info)


def _model_problems(said: Mapping, turn_format: TurnFormat) -> Iterable[str]:
    architectures, model_type = said.get("architectures"), said.get("model_type")
    if architectures and turn_format.architecture not in architectures:
        yield f"it serves a {', '.join(architectures)}, the target is a {turn_format.architecture}"
    elif model_type and model_type != turn_format.model_type:
        yield f"it serves a model of type {model_type}, the target is of type {turn_format.model_type}"
    if (vocab_size := said.get("vocab_size")) and vocab_size != turn_format.vocab_size:
        yield f"its vocabulary has {vocab_size} ids, the target's {turn_format.vocab_size}"
    if not _is_target(said, turn_format):
        target = turn_format.target
        yield (
            f"it serves {said.get('model_path')}, the target is {target.model}. Start it with --model-path {target.model}"
            f"{f' --revision {target.revision}' if target.revision else ''} (on another machine, where the files lie "
            f"elsewhere, add --served-model-name {target.model}), or set target.model to what is served"
        )
    revision = turn_format.target.revision
    if revision and said.get("revision") and said["revision"] != revision:
        yield f"it serves revision {said['revision']}, the target is {revision}. Start it with --revision {revision}"


def _is_target(said: Mapping, turn_format: TurnFormat) -> bool:
    """Whether the served model is the target: by content where its files are here, else by name."""
    path, target = Path(str(said.get("model_path"))), turn_format.target
    if (path / "config.json").is_file():
        if Path(target.model).is_dir() and path.resolve() == Path(target.model).resolve():
            return True
        return replace(target, model=str(path)).fingerprint() == turn_format.fingerprint
    names = {str(said.get(name)) for name in ("model_path", "served_model_name")}
    return bool({n.rstrip("/").rsplit("/", 1)[-1].lower() for n in names} & {_last_part(target)})


def _last_part(target: Target) -> str:
    return target.model.rstrip("/").rsplit("/", 1)[-1].lower()


def differences(before: Mapping, now: Mapping) -> list[str]:
    """What differs between two servers' facts in a way that changes tokens: all but the engine's version."""
    found = []
    for name in ("engine", "model_type", "architectures", "weight_version"):
        if before.get(name) != now.get(name):
            found.append(f"{name}: {before.get(name)!r} before, {now.get(name)!r} now")
    for flag in sorted({*before["flags"], *now["flags"]}):
        if before["flags"].get(flag) != now["flags"].get(flag):
            option = f"--{flag.replace('_', '-')}"
            found.append(f"{option}: {_set(before['flags'].get(flag))} before, {_set(now['flags'].get(flag))} now")
    return found


def _set(value: Any) -> str:
    return "not set" if value is None else repr(value)


def check_same(before: Mapping, now: Mapping, remedy: str) -> None:
    """Raise GuardError unless `now` gives tokens as `before` did."""
    if found := differences(before, now):
        raise GuardError(
            "this server was started with other settings than the one that answered before:\n"
            + "\n".join(f"  - {line}" for line in found)
            + f"\n{remedy}"
        )


def confirm(client: Client, facts: Mapping) -> None:
    """Raise GuardError unless the server is still the one with these facts, exactly.  Raises Failure when it is silent."""
    now = facts_of(*ask(client))
    check_same(facts, now, "Everything answered before is kept. Start the server as it was, and run again")
    if now != facts:
        raise GuardError(
            f"the server's version changed from {facts['version']} to {now['version']} during the capture. Everything "
            "answered before is kept; run again, and the rows to come are recorded under the new version"
        )


def probe(client: Client, renderer: Renderer, turn_format: TurnFormat, context_length: int) -> tuple[list[int], dict]:
    """Ask one known prompt, greedily, and check what comes back; returns the request that the server answered.

    Beyond the checks of every answer: each marker that stands in the server's text stands in the ids too, so nothing
    between the model and us took it out or put it in.  Raises GuardError.
    """
    prompt_ids = renderer.prompt_ids(PROBE_MESSAGES)
    if not turn_format.opens(prompt_ids):
        raise GuardError(
            f"the probe's prompt ends with {renderer.decode(prompt_ids[-8:])!r}, not as the turn format says a prompt does: "
            "turn_format.json was made for another chat template; run the target stage again"
        )
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": min(PROBE_TOKENS, context_length - RESERVED_TOKENS - len(prompt_ids)),
        "stop_token_ids": sorted(turn_format.end_of_turn_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    try:
        answer = client.generate(prompt_ids, sampling, row_attempts=1)
    except RowRefused as refused:
        raise GuardError(f"the server does not answer the probe, a short greeting: {refused.message}") from refused
    for marker in (turn_format.opening, turn_format.closing):
        if marker:
            _check_marker(marker, answer, renderer.decode(answer.output_ids))
    return prompt_ids, sampling


def _check_marker(marker: Marker, answer: Answer, decoded: str) -> None:
    text = marker.text.strip()
    if answer.text is not None and answer.text.count(text) != decoded.count(text):
        raise GuardError(
            f"the probe's answer has {text} {answer.text.count(text)} times in the server's text and "
            f"{decoded.count(text)} times in its ids: something between the model and the answer rewrites the reasoning. "
            "Start the server without parsers and plugins\n"
            f"  text: {answer.text!r}\n  ids decoded: {decoded!r}"
        )


def cross_check(client: Client, renderer: Renderer, samples: Iterable[Sample]) -> int:
    """Have the server render each sample as its chat endpoint would; returns how many were compared.

    Raises GuardError at the first that it renders otherwise: then the drafter would learn from prompts that
    production traffic never holds.
    """
    compared = 0
    for sample in samples:
        arguments = {**renderer.target.template_arguments, **sample.template_arguments}
        ours = renderer.prompt_ids(sample.messages, sample.tools, sample.template_arguments)
        body = {
            "messages": [_for_chat_api(message) for message in renderer.adapted(sample.messages)],
            **({"tools": sample.tools} if sample.tools else {}),
            **({"chat_template_kwargs": arguments} if arguments else {}),
        }
        theirs = _tokenized(client, body, sample.sample_id)
        if ours != theirs:
            raise GuardError(_rendering_difference(renderer, sample, ours, theirs))
        compared += 1
    return compared


def _tokenized(client: Client, body: Mapping, sample_id: str) -> list[int]:
    try:
        answer = client.patiently(lambda: client.post("/v1/tokenize", body))
    except RowRefused as refused:
        raise GuardError(
            f"the server's chat endpoint would refuse the conversation of sample {sample_id}: {refused.message}. "
            "Correct the prompt (its tools, mostly), or set server.render_samples: 0 to go without the check"
        ) from refused
    if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
        raise GuardError(f"/v1/tokenize gives no tokens for sample {sample_id}: {str(answer)[:200]}")
    return answer["tokens"]


def _for_chat_api(message: Mapping) -> dict:
    """The message as a chat API takes it: the arguments of a tool call are a string there."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"].get("arguments", {}))}}
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _rendering_difference(renderer: Renderer, sample: Sample, ours: list[int], theirs: list[int]) -> str:
    pairs = enumerate(zip_longest(ours, theirs))
    first = next(i for i, (a, b) in pairs if a != b)
    window = slice(max(0, first - 12), first + 24)
    left, right = ([repr(renderer.decode([i]))[1:-1] for i in ids[window]] for ids in (ours, theirs))
    return "\n".join(
        [
            f"the server renders sample {sample.sample_id} otherwise than eaglet: {len(ours)} ids here, {len(theirs)} there, "
            f"different from id {first} on. Its chat endpoint would feed the model other prompts than the drafter learns "
            "from.",
            *_side_by_side("eaglet (apply_chat_template)", "".join(left), "server (/v1/tokenize)", "".join(right)),
            f"  ids here:  {ours[window]}",
            f"  ids there: {theirs[window]}",
            _remedy(renderer, sample, theirs),
        ]
    )


def _remedy(renderer: Renderer, sample: Sample, theirs: list[int]) -> str:
    """What makes the two renderings one: tried out where it is known what SGLang adds to tools."""
    target = renderer.target
    adding = replace(target, tool_fields={**target.tool_fields, **SGLANG_TOOL_FIELDS})
    if sample.tools and target != adding:
        fields = Renderer(adding, renderer.tokenizer).prompt_ids(
            sample.messages, sample.tools, sample.template_arguments
        )
        if fields == theirs:
            return (
                "The tools alone differ: SGLang hands its template each tool with fields of its own. Set target.tool_fields: "
                f"{json.dumps(adding.tool_fields)}, which gives exactly the server's ids"
            )
    return (
        "Give both the same chat template (target.chat_template here, --chat-template there) and the same template "
        "arguments. If only tools differ: see target.tool_fields for fields that the server adds; where a tokenizer renders tools "
        "by code, put that rendering into a template for both."
    )


def _side_by_side(left_title: str, left: str, right_title: str, right: str, width: int = 52) -> Iterable[str]:
    columns = (
        [title, "-" * width, *wrap(text, width, drop_whitespace=False)]
        for title, text in ((left_title, left), (right_title, right))
    )
    return [f"  {a or '':{width}} | {b or ''}" for a, b in zip_longest(*columns)]
