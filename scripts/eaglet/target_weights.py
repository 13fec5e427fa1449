"""The target's embedding, head and last layer: read from its safetensors files without loading the model.

Training needs these few matrices of a model that may be a terabyte.  Names differ between families only in front
(`model.embed_tokens.weight`, `language_model.model.embed_tokens.weight`), so they are found by their ends.
"""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from eaglet.errors import TargetError
from eaglet.targets import Target

EMBEDDING = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
HEAD = ("lm_head.weight", "embed_out.weight")
LAST_LAYER = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
CHANGES_LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}  # name -> harmless value


def embedding_and_head(target: Target) -> tuple[Tensor, Tensor]:
    """The target's input embedding [V, H] and output head [V, H], as saved; one tensor twice where they are tied.

    Raises TargetError where the weights are no safetensors, where a matrix is not found exactly once, and where the
    model changes its logits behind the head.
    """
    config = target.text_config()
    for name, harmless in CHANGES_LOGITS.items():
        value = getattr(config, name, None)
        if value not in (None, harmless):
            raise TargetError(
                f"target.model: {target.model} has {name}: {value}; a drafter's target must be softmax(lm_head(h))"
            )
    files = tensor_files(target.weights_folder)
    embedding = _read(files, EMBEDDING, target)
    tied = getattr(config, "tie_word_embeddings", False)
    head = embedding if tied or not _find(files, HEAD) else _read(files, HEAD, target)
    for name, matrix in (("embedding", embedding), ("head", head)):
        if matrix.ndim != 2 or matrix.shape[1] != config.hidden_size or not matrix.is_floating_point():
            raise TargetError(
                f"target.model: {target.model}: its {name} is {matrix.dtype} {list(matrix.shape)}, expected floating point "
                f"[vocabulary, {config.hidden_size}]; a target whose head is quantized cannot be used"
            )
    return embedding, head


def last_layer(target: Target) -> dict[str, Tensor]:
    """The target's last decoder layer and its final norm: the names of `LAST_LAYER` and norm.weight -> tensor.

    Empty where the layer is not of Llama's kind (latent attention, experts): then there is nothing to begin with.
    """
    files = tensor_files(target.weights_folder)
    number = target.text_config().num_hidden_layers - 1
    found = {name: _find(files, (f".layers.{number}.{name}",)) for name in LAST_LAYER}
    if any(len(names) != 1 for names in found.values()):
        return {}
    first = found["input_layernorm.weight"][0]
    places = {name: names[0] for name, names in found.items()}
    places["norm.weight"] = first.split(".layers.")[0] + ".norm.weight"
    tensors = {}
    for name, place in places.items():
        if place not in files:
            return {}
        with safe_open(files[place], framework="pt") as file:
            tensors[name] = file.get_tensor(place)
    return tensors if all(x.is_floating_point() for x in tensors.values()) else {}


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    if not found:
        raise TargetError(
            f"target.model: {folder} has no .safetensors files; save the model with save_pretrained first"
        )
    return found


def _find(files: dict[str, Path], endings: tuple[str, ...]) -> list[str]:
    return [
        name for name in files if name.endswith(endings) and not any(p in name for p in ("vision", "visual", "mtp"))
    ]


def _read(files: dict[str, Path], endings: tuple[str, ...], target: Target) -> Tensor:
    names = _find(files, endings)
    if len(names) > 1:  # a model may carry further layers with copies (multi-token prediction): the outermost is meant
        shortest = min(len(name) for name in names)
        names = [name for name in names if len(name) == shortest]
    if len(names) != 1:
        raise TargetError(
            f"target.model: {target.model}: expected one tensor named …{' or …'.join(endings)}, found {', '.join(names) or 'none'}"
        )
    with safe_open(files[names[0]], framework="pt") as file:
        return file.get_tensor(names[0])
