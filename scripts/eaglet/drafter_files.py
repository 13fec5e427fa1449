"""The drafter's checkpoint as SGLang and vLLM load it: one writer, one reader, and the exact set of keys and shapes.

SGLang skips unknown keys without a word, so a misspelt key would be an untrained weight: the set is checked on
writing and on reading.  `embed_tokens` is not written: both servers share the target's embedding with a drafter of the
same hidden size.  The layer ids always are: a config without them loads and accepts almost nothing.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eaglet.eagle3 import Eagle3Config, Eagle3Drafter
from eaglet.errors import RecordError, TargetError
from eaglet.files import read_json, write_bytes, write_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LOG = "log.jsonl"  # beside them where the drafter was trained here
ARCHITECTURE = "LlamaForCausalLMEagle3"


def drafter_config(
    target_config,
    *,
    draft_vocab_size: int,
    layer_ids: tuple[int, int, int],
    vocab_size: int,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
) -> Eagle3Config:
    """The drafter's sizes from the target's (text) config, but for those that are given.

    Latent attention (DeepSeek, Kimi) names a head size that is not one of plain attention, so there it is H / heads.
    Raises TargetError where heads and sizes do not fit.
    """
    heads = num_attention_heads or target_config.num_attention_heads
    key_value_heads = (
        num_key_value_heads or (None if num_attention_heads else target_config.num_key_value_heads) or heads
    )
    plain = num_attention_heads is None and getattr(target_config, "kv_lora_rank", None) is None
    size = head_dim or (plain and getattr(target_config, "head_dim", None)) or target_config.hidden_size // heads
    if heads % key_value_heads or size % 2:
        raise TargetError(
            f"drafter: {heads} attention heads, {key_value_heads} key-value heads of size {size}; the second must divide the "
            "first and the size must be even; set drafter.num_attention_heads, num_key_value_heads and head_dim"
        )
    rope = getattr(target_config, "rope_parameters", None) or {}
    return Eagle3Config(
        hidden_size=target_config.hidden_size,
        intermediate_size=intermediate_size or target_config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=getattr(target_config, "rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or getattr(target_config, "rope_theta", None) or 10000.0),
        max_position_embeddings=target_config.max_position_embeddings,
        layer_ids=tuple(layer_ids),
    )


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every tensor of model.safetensors, and of no other (REFERENCE of the format: docs/drafter.md)."""
    h, i, v, size = config.hidden_size, config.intermediate_size, config.draft_vocab_size, config.head_dim
    q, kv = config.num_attention_heads * size, config.num_key_value_heads * size
    return {
        "fc.weight": (h, 3 * h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (i, h),
        "midlayer.mlp.up_proj.weight": (i, h),
        "midlayer.mlp.down_proj.weight": (h, i),
        "norm.weight": (h,),
        "lm_head.weight": (v, h),
        "d2t": (v,),
        "t2d": (config.vocab_size,),
    }


def save_drafter(folder: str | Path, drafter: Eagle3Drafter, *, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors, weights in `dtype`.  The same drafter gives the same bytes."""
    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in drafter.state_dict().items()
    }
    check_tensors(tensors, drafter.config, "the drafter to be saved")
    write_json(Path(folder) / CONFIG, _to_json(drafter.config, dtype))
    write_bytes(Path(folder) / WEIGHTS, save(tensors, {"format": "pt"}))


def load_drafter(folder: str | Path, embed_tokens: Tensor, *, dtype: torch.dtype | None = None) -> Eagle3Drafter:
    """The drafter in evaluation mode.  embed_tokens [V, H]: the target's.  dtype: null keeps the file's.

    Raises RecordError with file and key where config or weights are not those of a classic EAGLE-3 drafter.
    """
    folder = Path(folder)
    config = read_config(folder)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (FileNotFoundError, SafetensorError) as error:
        raise RecordError(f"{folder / WEIGHTS}: cannot be read ({error}); run train again") from error
    check_tensors(tensors, config, str(folder / WEIGHTS))
    with torch.device("meta"):
        drafter = Eagle3Drafter(config, torch.empty(config.vocab_size, config.hidden_size))
    drafter.load_state_dict(tensors, assign=True)
    drafter.set_embedding(embed_tokens)
    return drafter.to(dtype).eval() if dtype else drafter.eval()


def read_config(folder: str | Path) -> Eagle3Config:
    """The sizes in a drafter's config.json.  Raises RecordError with the key that is missing or another's."""
    path = Path(folder) / CONFIG
    try:
        given = read_json(path)
    except (FileNotFoundError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read ({error}); run train again") from error
    if given.get("architectures") != [ARCHITECTURE] or given.get("num_hidden_layers") != 1:
        raise RecordError(
            f"{path}: architectures {given.get('architectures')} with {given.get('num_hidden_layers')} layers; "
            f"expected [{ARCHITECTURE!r}] with 1"
        )
    eagle = given.get("eagle_config", {})
    try:
        return Eagle3Config(
            **{name: given[name] for name in Eagle3Config.__dataclass_fields__ if name != "layer_ids"},
            layer_ids=tuple(eagle["eagle_aux_hidden_state_layer_ids"]),
        )
    except KeyError as error:
        raise RecordError(f"{path}: key {error} is missing; run train again") from error


def check_tensors(tensors: Mapping[str, Tensor], config: Eagle3Config, where: str) -> None:
    """Raises RecordError unless keys, shapes and the draft vocabulary are exactly those of `config`."""
    expected = expected_shapes(config)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not a key of this format" for name in tensors if name not in expected]
    problems += [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = problems or [
        f"{name} holds a value that is not finite" for name, x in tensors.items() if not x.isfinite().all()
    ]
    if not problems:
        ids = torch.arange(config.draft_vocab_size) + tensors["d2t"].cpu()
        marked = tensors["t2d"].cpu().nonzero().squeeze(-1)
        if tensors["d2t"].dtype != torch.int64 or tensors["t2d"].dtype != torch.bool or not torch.equal(ids, marked):
            problems = ["d2t (int64 offsets) and t2d (bool) do not name the same target ids in ascending order"]
    if problems:
        raise RecordError(f"{where}: {'; '.join(problems)}")


def _to_json(config: Eagle3Config, dtype: torch.dtype) -> dict:
    """What SGLang and vLLM read, in Llama's names.  `vocab_size` is the target's."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(config.layer_ids)},
    }
