"""The checkpoint has exactly the keys, shapes and config that SGLang and vLLM load, and is read back as written."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, LlamaConfig

from eaglet.drafter_files import drafter_config, load_drafter, save_drafter
from eaglet.eagle3 import Eagle3Drafter
from eaglet.errors import RecordError, TargetError
from small_drafter import SMALL

CONFIG = replace(SMALL, rope_theta=500000.0)
# As a table of the format, and not as the code derives it: H 16, Ht 16, 4 heads and 2 key-value heads of 8, I 24, Vd 20, V 50.
FORMAT = {
    "fc.weight": [16, 48],
    "midlayer.input_layernorm.weight": [16],
    "midlayer.hidden_norm.weight": [16],
    "midlayer.post_attention_layernorm.weight": [16],
    "midlayer.self_attn.q_proj.weight": [32, 32],
    "midlayer.self_attn.k_proj.weight": [16, 32],
    "midlayer.self_attn.v_proj.weight": [16, 32],
    "midlayer.self_attn.o_proj.weight": [16, 32],
    "midlayer.mlp.gate_proj.weight": [24, 16],
    "midlayer.mlp.up_proj.weight": [24, 16],
    "midlayer.mlp.down_proj.weight": [16, 24],
    "norm.weight": [16],
    "lm_head.weight": [20, 16],
    "d2t": [20],
    "t2d": [50],
}


@pytest.fixture
def drafter():
    torch.manual_seed(0)
    made = Eagle3Drafter(CONFIG, torch.randn(50, 16))
    made.set_draft_vocab(torch.arange(3, 43, 2))
    return made


@pytest.fixture
def saved(drafter, tmp_path):
    save_drafter(tmp_path, drafter, dtype=torch.float32)
    return tmp_path


def test_the_file_has_exactly_the_keys_and_shapes_of_the_format(saved):
    tensors = load_file(saved / "model.safetensors")
    assert {name: list(x.shape) for name, x in tensors.items()} == FORMAT
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    ids = torch.arange(20) + tensors["d2t"]
    assert ids.tolist() == list(range(3, 43, 2)), "d2t is an offset"
    assert tensors["t2d"].nonzero().squeeze(-1).tolist() == ids.tolist()


def test_the_config_says_what_the_servers_ask_for(saved):
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert config["target_hidden_size"] == 16 and config["tie_word_embeddings"] is False
    loaded = LlamaConfig.from_pretrained(saved)
    assert loaded.rope_parameters["rope_theta"] == 500000.0 and loaded.rope_parameters["rope_type"] == "default"
    assert loaded.head_dim == 8 and loaded.num_key_value_heads == 2


def test_a_drafter_is_read_as_it_was_written(saved, drafter):
    read = load_drafter(saved, drafter.embed_tokens)
    assert read.config == CONFIG and not read.training
    for name, value in drafter.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name
    assert torch.equal(read.embed_tokens, drafter.embed_tokens)


def test_the_same_drafter_gives_the_same_bytes(saved, drafter, tmp_path):
    save_drafter(tmp_path / "again", drafter, dtype=torch.float32)
    for name in ("config.json", "model.safetensors"):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_weights_are_saved_in_the_dtype_asked_for(drafter, tmp_path):
    save_drafter(tmp_path, drafter, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["d2t"].dtype == torch.int64
    assert load_drafter(tmp_path, drafter.embed_tokens, dtype=torch.float32).fc.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"fc.weigth": t.pop("fc.weight")}), r"fc\.weight is missing; fc\.weigth is not a key"),
        (lambda t: t.update({"norm.weight": torch.ones(8)}), r"norm\.weight is \[8\], expected \[16\]"),
        (lambda t: t.update({"d2t": torch.zeros(20, dtype=torch.int64)}), r"d2t .* t2d"),
        (lambda t: t["lm_head.weight"].fill_(float("nan")), r"lm_head\.weight holds a value that is not finite"),
    ],
)
def test_a_wrong_file_is_refused_by_key(saved, drafter, change, message):
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(RecordError, match=message):
        load_drafter(saved, drafter.embed_tokens)


def test_a_config_without_layer_ids_is_refused(saved, drafter):
    config = json.loads((saved / "config.json").read_text())
    del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecordError, match="eagle_aux_hidden_state_layer_ids"):
        load_drafter(saved, drafter.embed_tokens)


def test_an_embedding_of_another_target_is_refused(saved):
    with pytest.raises(ValueError, match="the embedding is"):
        load_drafter(saved, torch.zeros(49, 16))


def test_sizes_come_from_the_target_unless_given():
    target = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )
    more = {"draft_vocab_size": 10, "layer_ids": (2, 4, 5), "vocab_size": 100}
    config = drafter_config(target, **more)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    config = drafter_config(target, num_attention_heads=8, intermediate_size=7, **more)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 8, 8)
    assert config.intermediate_size == 7


def test_latent_attention_gives_no_head_size():
    target = DeepseekV3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=128)
    assert drafter_config(target, draft_vocab_size=10, layer_ids=(2, 4, 5), vocab_size=100).head_dim == 16


def test_heads_that_do_not_fit_are_refused():
    target = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(TargetError, match="3 key-value heads"):
        drafter_config(target, draft_vocab_size=10, layer_ids=(2, 4, 5), vocab_size=100, num_key_value_heads=3)
