"""The target model as a thing to load and to name: where it is, what it holds, and its fingerprint.

A target is a Hugging Face folder, or a hub id at a commit.  This module knows nothing about turns or prompts.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eaglet.digests import content_key, file_sha256
from eaglet.errors import TargetError

DESCRIPTIVE = {".json", ".jinja", ".model", ".txt", ".py", ".tiktoken"}  # config, tokenizer, template, remote code
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}
SAMPLE_BLOCKS, SAMPLE_BYTES = 16, 1 << 16


@dataclass(frozen=True)
class Target:
    """A target model as the config names it.  `model` is a folder or a hub id; a hub id needs `revision`, a commit."""

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None  # path of a file that replaces the tokenizer's own
    template_arguments: dict = field(default_factory=dict)
    tool_fields: dict = field(default_factory=dict)  # what the server adds around each tool before it renders
    literal_markers: str = "count"  # count | escape: markers that messages spell out
    dtype: str = "auto"  # auto (as saved) | float32 | bfloat16 | float16

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "Target":
        known = {name: params[name] for name in cls.__dataclass_fields__ if name in params}
        return cls(**known)

    def as_params(self) -> dict:
        return asdict(self)

    @cached_property
    def folder(self) -> Path:
        """The local folder with config and tokenizer; downloaded without weights for a hub id.  Raises TargetError."""
        return self._obtain(weights=False)

    @cached_property
    def weights_folder(self) -> Path:
        """The local folder with everything, weights included."""
        return self._obtain(weights=True)

    def _obtain(self, *, weights: bool) -> Path:
        local = Path(self.model)
        if local.is_dir():
            if not (local / "config.json").is_file():
                raise TargetError(f"target.model: {self.model} has no config.json; name a Hugging Face model folder")
            return local
        if not self.revision:
            raise TargetError(
                f"target.model: {self.model} is no folder here, and as a hub id it needs target.revision, a commit"
            )
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        patterns = None if weights else [f"*{suffix}" for suffix in sorted(DESCRIPTIVE)]
        try:
            return Path(snapshot_download(self.model, revision=self.revision, allow_patterns=patterns))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise TargetError(
                f"target.model: {self.model} at {self.revision} could not be fetched ({error}); check the id, the commit, "
                "the network and HF_TOKEN, or download it and name the folder"
            ) from error

    def config(self):
        """The model's transformers config."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)

    def text_config(self):
        """The config of the language model: the whole config, or its text part for a multimodal model."""
        return self.config().get_text_config()

    def tokenizer(self):
        """The tokenizer, with the chat template of `chat_template` where one is configured."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        if self.chat_template:
            path = Path(self.chat_template)
            if not path.is_file():
                raise TargetError(f"target.chat_template: no file {path}")
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        return tokenizer

    def load(self, device: str = "cpu"):
        """The causal language model in evaluation mode, in `dtype`, on `device`."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.weights_folder, dtype=self.dtype, trust_remote_code=self.trust_remote_code
        )
        return model.to(device).eval()

    def fingerprint(self) -> str:
        """64 hex digits that change when anything changes that the model's answers depend on.

        Covers the content of config, generation config, tokenizer, chat template and remote code; names, sizes,
        safetensors headers and sampled blocks of the weights; the revision; the dtype.  A hub id at a commit is
        pinned by the commit, so its weights are not fetched for this.
        """
        folder = self.folder
        described = [
            [p.name, file_sha256(p)] for p in sorted(folder.iterdir()) if p.is_file() and p.suffix in DESCRIPTIVE
        ]
        weights = []
        if Path(self.model).is_dir():
            weights = [_weights_facts(p) for p in sorted(folder.iterdir()) if p.is_file() and p.suffix in WEIGHTS]
        template = Path(self.chat_template).read_text(encoding="utf-8") if self.chat_template else None
        return content_key([described, weights, self.revision, template, self.dtype])


def _weights_facts(path: Path) -> list:
    """[name, size, header digest, digest of sampled blocks]: cheap for terabytes, and it notices a retrained model."""
    size = path.stat().st_size
    header, sampled = None, hashlib.sha256()
    with open(path, "rb") as stream:
        if path.suffix == ".safetensors":
            length = int.from_bytes(stream.read(8), "little")
            header = hashlib.sha256(stream.read(length)).hexdigest()
            json_start = 8 + length
        else:
            json_start = 0
        span = max(0, size - json_start - SAMPLE_BYTES)
        for block in range(SAMPLE_BLOCKS):
            stream.seek(json_start + span * block // (SAMPLE_BLOCKS - 1))
            sampled.update(stream.read(SAMPLE_BYTES))
    return [path.name, size, header, sampled.hexdigest()]


def context_length(config: Any) -> int:
    """The longest sequence, in tokens, that a (text) config says its model takes."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if value := getattr(config, name, None):
            return int(value)
    raise TargetError(
        f"the model's config names no context length; set server.context_length ({json.dumps(config.model_type)})"
    )
