"""Whether the drafter trains on a GPU as it does on the CPU.  Needs torch alone:

    python tests/gpu_check.py                  # a few steps in fp32 on both, compared; bf16 on the GPU; speed
    python tests/gpu_check.py --device cpu     # the same program without a GPU, to try it
    python tests/gpu_check.py --hidden 4096 --draft-vocab 32000 --rows 64   # sizes of an 8B target

Ends with status 1 where the GPU's losses, gradients or weights leave the CPU's.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from eaglet.eagle3 import Batch, Eagle3Config, Eagle3Drafter, Row

STEPS, DECAY = 4, 0.8
SMALL = Eagle3Config(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=1000,
    draft_vocab_size=300,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=4096,
    layer_ids=(2, 4, 5),
)


def make(config: Eagle3Config, lengths: list[tuple[int, int]], device: str, dtype: torch.dtype):
    """(drafter, batch, target head, weight) on a device, the same values on each."""
    random = torch.Generator().manual_seed(0)
    h = config.hidden_size
    drafter = Eagle3Drafter(config, torch.randn(config.vocab_size, h, generator=random))
    with torch.no_grad():
        for p in drafter.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02, generator=random)
    drafter.set_draft_vocab(torch.arange(config.draft_vocab_size))
    rows = [
        Row(
            torch.randint(0, config.vocab_size, (prompt + output,), generator=random),
            torch.randn(prompt + output, 3 * h, generator=random).to(dtype),
            torch.randn(prompt + output, h, generator=random).to(dtype),
            first_target=prompt,
        )
        for prompt, output in lengths
    ]
    batch = Batch.of(rows, STEPS).to(device)
    decay = DECAY ** torch.arange(STEPS, device=device)
    weight = batch.counted * (decay / batch.counted.sum(1))[:, None]
    head = torch.randn(config.draft_vocab_size, h, generator=random).to(device, dtype)
    return drafter.to(device), batch, head, weight


def train(parts, updates: int, bfloat16: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(losses, gradients of the first update, final weights) of some AdamW updates on one batch."""
    drafter, batch, head, weight = parts
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
    losses, first = [], {}
    for _ in range(updates):
        with torch.autocast(batch.aux.device.type, torch.bfloat16, enabled=bfloat16):
            loss = drafter(batch, head, weight).total
        loss.backward()
        first = first or {name: p.grad.float().cpu().clone() for name, p in drafter.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, {name: p.detach().float().cpu() for name, p in drafter.named_parameters()}


def agrees(name: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], allowed: float) -> bool:
    """Whether the largest relative distance of a tensor from its counterpart is allowed; prints it."""
    worst, at = max(((one[n] - other[n]).norm() / other[n].norm(), n) for n in one)
    print(json.dumps({"compared": name, "worst": float(worst), "tensor": at, "allowed": allowed}))
    return bool(worst <= allowed)


def compare(device: str) -> bool:
    lengths = [(40, 25), (9, 60), (120, 33), (2, 5), (600, 300)]
    cpu = train(make(SMALL, lengths, "cpu", torch.float32), 5, False)
    full = train(make(SMALL, lengths, device, torch.float32), 5, False)
    half = train(make(SMALL, lengths, device, torch.bfloat16), 5, True)
    print(json.dumps({"losses": {"cpu fp32": cpu[0], f"{device} fp32": full[0], f"{device} bf16": half[0]}}))
    good = [
        agrees("gradients, fp32", full[1], cpu[1], 1e-3),
        agrees("weights after 5 updates, fp32", full[2], cpu[2], 1e-2),
        agrees("gradients, bf16", half[1], cpu[1], 5e-2),
        max(abs(a - b) for a, b in zip(full[0], cpu[0], strict=True)) < 1e-3,
        max(abs(a - b) for a, b in zip(half[0], cpu[0], strict=True)) < 5e-2,
    ]
    return all(good)


def speed(options: argparse.Namespace) -> None:
    config = Eagle3Config(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(1, options.hidden // 512),
        head_dim=128,
        vocab_size=128000,
        draft_vocab_size=options.draft_vocab,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        layer_ids=(2, 16, 29),
    )
    cuda = options.device == "cuda"
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        parts = make(config, [(options.prompt, options.output)] * options.rows, options.device, dtype)
        train(parts, 2, name == "bf16")
        before = time.perf_counter()
        train(parts, options.updates, name == "bf16")
        seconds = (time.perf_counter() - before) / options.updates
        tokens = options.rows * (options.prompt + options.output)
        peak = torch.cuda.max_memory_allocated() >> 20 if cuda else None
        told = {"dtype": name, "hidden": options.hidden, "tokens_per_second": round(tokens / seconds), "peak_mib": peak}
        print(json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--output", type=int, default=400)
    parser.add_argument("--updates", type=int, default=5)
    options = parser.parse_args()
    good = compare(options.device)
    speed(options)
    print("the device trains as the CPU does" if good else "THE DEVICE DOES NOT TRAIN AS THE CPU DOES")
    sys.exit(not good)


if __name__ == "__main__":
    main()
