"""Hidden-state capture against the bare forward pass of the same rows: tokens per second of each, and their ratio.

    python tests/bench/hidden_states.py [--model FOLDER] [--rows 48] [--tokens 300] [--threads 2]

Without a model folder, a random model of SmolLM2-135M's size.  The capture is the stage's own: hooks, conversion to
bfloat16, digests, files and the check against the head.  Both run the same rows in turn, several times, and the best counts.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import hidden_states
from eaglet.digests import hidden_key
from eaglet.forward import HiddenForward, auxiliary_layers
from eaglet.hidden_store import HiddenStore
from eaglet.targets import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        target = Target(str(options.model or random_model(Path(folder) / "model")), dtype="float32")
        layers = auxiliary_layers(target.text_config().num_hidden_layers)
        described = {"fingerprint": target.fingerprint(), "layers": layers, "dtype": "bfloat16"}
        rows = some_rows(options.rows, options.tokens, target.text_config().vocab_size, described)
        tokens = options.rows * options.tokens
        bare, captured = [], []
        for number in range(options.rounds):
            forward = HiddenForward(target, layers)
            forward.close()  # without its hooks, `states` cannot run; the decoder can
            bare.append(tokens / bare_seconds(forward, rows))
            forward = HiddenForward(target, layers)
            begun = time.perf_counter()
            hidden_states.capture(forward, HiddenStore(Path(folder) / f"store-{number}"), rows, described)
            captured.append(tokens / (time.perf_counter() - begun))
        print(f"bare forward pass: {max(bare):,.0f} tokens/s; capture: {max(captured):,.0f} tokens/s")
        print(
            f"ratio: {max(captured) / max(bare):.3f} ({options.rows} rows of {options.tokens} tokens, {options.threads} threads)"
        )


def random_model(folder: Path) -> Path:
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def some_rows(count: int, length: int, vocab_size: int, described: dict) -> list[hidden_states.Row]:
    random = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        ids = torch.randint(vocab_size, (length,), generator=random).tolist()
        rows.append(hidden_states.Row(f"{number:016x}", hidden_key(*described.values(), ids), ids, length // 2))
    return rows


@torch.inference_mode()
def bare_seconds(forward: HiddenForward, rows: list[hidden_states.Row]) -> float:
    begun = time.perf_counter()
    for row in rows:
        forward.decoder(input_ids=torch.tensor([row.token_ids]), use_cache=False)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
