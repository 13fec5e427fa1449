"""The case that eaglet and its peers compute: a small drafter as eaglet saves it, and two rows.

    python tests/peers/case.py      # writes tests/peers/case/ again (needed only if the case itself changes)

case/ holds the drafter's config.json and model.safetensors, and inputs.safetensors with the target's embedding and head and
the rows' tokens and states.  Two rows of different lengths, so that padding and packing take part.
"""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent / "case"
STEPS = 3
PROMPTS = (7, 4)  # prompt lengths of the two rows; each is at least STEPS
OUTPUTS = (6, 5)


def rows(inputs: dict[str, torch.Tensor] | None = None) -> list[dict]:
    """[{token_ids, aux, last, prompt}] of the case, or of other inputs, whose prompt lengths are in `prompts`."""
    inputs = inputs or load_file(FOLDER / "inputs.safetensors")
    prompts = inputs["prompts"].tolist() if "prompts" in inputs else PROMPTS
    named = ("token_ids", "aux", "last")
    return [{**{name: inputs[f"{name}_{n}"] for name in named}, "prompt": prompt} for n, prompt in enumerate(prompts)]


def write() -> None:
    from eaglet.drafter_files import save_drafter
    from eaglet.eagle3 import Eagle3Drafter
    from small_drafter import SMALL

    config = replace(SMALL, head_dim=4)
    random = torch.Generator().manual_seed(0)
    embedding = torch.randn(50, 16, generator=random)
    drafter = Eagle3Drafter(config, embedding)
    with torch.no_grad():
        for p in drafter.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3, generator=random)
    drafter.set_draft_vocab(torch.randperm(50, generator=random)[:20].sort().values)
    save_drafter(FOLDER, drafter, dtype=torch.float32)
    inputs = {"embedding": embedding, "head": torch.randn(50, 16, generator=random)}
    for n, length in enumerate(p + o for p, o in zip(PROMPTS, OUTPUTS, strict=True)):
        inputs[f"token_ids_{n}"] = torch.randint(0, 50, (length,), generator=random)
        inputs[f"aux_{n}"] = torch.randn(length, 48, generator=random)
        inputs[f"last_{n}"] = torch.randn(length, 16, generator=random)
    save_file(inputs, FOLDER / "inputs.safetensors")


if __name__ == "__main__":
    import sys

    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "scripts"), str(root / "tests")]
    write()
