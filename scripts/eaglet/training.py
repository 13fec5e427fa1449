"""Training a drafter: which tokens go into which optimizer step, the steps themselves, and how a stopped run goes on.

The order of the data is a pure function of the seed and the epoch, the learning rate one of the step, and nothing draws
random numbers after the weights are made.  So a checkpoint is weights, optimizer and step, and a run that goes on from one ends with the
bytes of a run that was never stopped.  The model and its loss are eaglet.eagle3; this module knows no files but the
checkpoints and the hidden store.
"""

import json
import math
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from eaglet.eagle3 import Batch, Eagle3Drafter, Row, counted_targets
from eaglet.errors import StoreError, TrainingFailed
from eaglet.files import atomic_path, write_text
from eaglet.hidden_store import HiddenStore
from eaglet.progress import progress

KEPT_CHECKPOINTS = 2
READ_AHEAD = 2  # micro-batches


@dataclass(frozen=True)
class Settings:
    """The drafter section of the config, without the drafter's sizes; meanings and limits in config/schema.yaml.

    Only the learning curve sets `row_share`, the share of the training rows that is trained on.
    """

    ttt_steps: int = 7
    step_weight_decay: float = 0.8
    epochs: int = 10
    learning_rate: float = 1e-4
    warmup_fraction: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    batch_tokens: int = 2048
    micro_batch_tokens: int | None = None
    max_length: int = 4096
    dtype: str = "auto"
    outside_vocabulary: str = "keep"
    skip_first_target: bool = False
    start: str = "target"
    seed: int = 0
    row_share: float = 1.0

    @classmethod
    def from_params(cls, params: dict) -> "Settings":
        return cls(**{name: params[name] for name in cls.__dataclass_fields__ if name in params})


# --------------------------------------------------------------------------------------------------------------------
# The data: windows, and the order in which they are taken.


@dataclass(frozen=True)
class Sample:
    """A row as the shards and indexes list it; its tokens and states lie in the hidden store under `key`."""

    key: str
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class Window:
    """Tokens start … end-1 of a sample; the targets first_target … end-1 carry loss (both count from the row's start)."""

    sample: Sample
    start: int
    end: int
    first_target: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def counted(self, steps: int) -> list[int]:
        return counted_targets(self.first_target - self.start, self.tokens, steps)


def windows(sample: Sample, max_length: int, *, skip_first_target: bool = False) -> list[Window]:
    """The whole row where it fits; else windows that share the row's targets, each with max_length // 2 tokens of context.

    Every target is in exactly one window.  A row without targets has no window.
    """
    first = sample.prompt_tokens + skip_first_target
    if first >= sample.tokens:
        return []
    if sample.tokens <= max_length:
        return [Window(sample, 0, sample.tokens, first)]
    cut = []
    while first < sample.tokens:
        start = max(0, first - max_length // 2)
        end = min(sample.tokens, start + max_length)
        cut.append(Window(sample, start, end, first))
        first = end
    return cut


def packed(items: Iterable[Window], tokens: int) -> list[list[Window]]:
    """Groups of at most so many tokens (a longer window is a group of its own), filled in the order given."""
    groups: list[list[Window]] = []
    room = 0
    for item in items:
        if item.tokens > room or not groups:
            groups.append([])
            room = tokens
        groups[-1].append(item)
        room -= item.tokens
    return groups


def epoch_steps(items: Sequence[Window], batch_tokens: int, seed: int, epoch: int) -> list[list[Window]]:
    """The windows of each optimizer step of an epoch: shuffled by seed and epoch, then packed."""
    order = list(items)
    random.Random(f"{seed} {epoch}").shuffle(order)
    return packed(order, batch_tokens)


def share(step: Sequence[Window], processes: int, process: int) -> list[Window]:
    """The part of an optimizer step that one process takes: the longest first, each to the one with the least so far."""
    loads, mine = [0] * processes, []
    for window in sorted(step, key=lambda w: -w.tokens):
        least = loads.index(min(loads))
        loads[least] += window.tokens
        if least == process:
            mine.append(window)
    return mine if processes > 1 else list(step)


class Reader:
    """Reads windows from the hidden store into batches, a few ahead of their use."""

    def __init__(self, store: HiddenStore, hidden_size: int, steps: int, dtype: torch.dtype):
        self.store, self.hidden_size, self.steps, self.dtype = store, hidden_size, steps, dtype

    def row(self, window: Window) -> Row:
        stored = self.store.read(window.sample.key)
        found = len(stored.token_ids), stored.last.shape[1]
        if found != (window.sample.tokens, self.hidden_size):
            raise StoreError(
                f"{self.store.path(window.sample.key)}: {found[0]} tokens of size {found[1]}; the shard and the target say "
                f"{window.sample.tokens} of size {self.hidden_size}; run hidden_states again"
            )
        cut = slice(window.start, window.end)
        aux, last = stored.aux[cut].to(self.dtype), stored.last[cut].to(self.dtype)
        return Row(stored.token_ids[cut], aux, last, window.first_target - window.start, window.start)

    def batch(self, group: Sequence[Window]) -> Batch:
        return Batch.of([self.row(window) for window in group], self.steps)

    def batches(self, groups: Iterable[Sequence[Window]]) -> Iterator[Batch]:
        with ThreadPoolExecutor(1) as pool:
            waiting = []
            try:
                for group in groups:
                    waiting.append(pool.submit(self.batch, group))
                    if len(waiting) > READ_AHEAD:
                        yield waiting.pop(0).result()
                while waiting:
                    yield waiting.pop(0).result()
            finally:
                for future in waiting:
                    future.cancel()


# --------------------------------------------------------------------------------------------------------------------
# The steps.


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """What `dtype` of the config means on a device: auto is bfloat16 where the device multiplies in it."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = any(torch.cpu.get_capabilities().get(feature) for feature in ("amx_bf16", "avx512_bf16"))
    return torch.bfloat16 if able else torch.float32


def learning_rate(step: int, steps: int, peak: float, warmup_fraction: float) -> float:
    """Of optimizer step 0 … steps-1: linear up to the peak, then a cosine down to (but not including) zero."""
    warmup = max(1, round(warmup_fraction * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def make_optimizer(drafter: Eagle3Drafter, settings: Settings) -> torch.optim.AdamW:
    """AdamW; no decay on norms.  Masters and moments in fp32."""
    matrices = [p for p in drafter.parameters() if p.ndim > 1]
    norms = [p for p in drafter.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


class Measured:
    """Sums over targets, for each step of the training-time test: cross-entropy, agreements, how many counted."""

    def __init__(self, steps: int, device: torch.device):
        self.sums = torch.zeros(3, steps, dtype=torch.float64, device=device)

    def add(self, by_step: Tensor, agreements: Tensor, counted: Tensor) -> None:
        self.sums += torch.stack([by_step.double(), agreements.double(), counted.double()])

    def means(self, accelerator: Accelerator) -> dict[str, list[float]]:
        """{loss, accuracy}, each [K], over all processes."""
        loss, agreements, counted = accelerator.reduce(self.sums, "sum").cpu()
        counted = counted.clamp(min=1)
        return {"loss": _rounded(loss / counted), "accuracy": _rounded(agreements / counted)}


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


class Trainer:
    """One drafter, its optimizer, and the target's head: forward, backward and update for groups of windows.

    target_head [Vd, H]: the head's rows of the draft vocabulary.  full_head [V, H] is needed only for
    outside_vocabulary: drop.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target_head: Tensor,
        reader: Reader,
        settings: Settings,
        accelerator: Accelerator,
        full_head: Tensor | None = None,
    ):
        self.accelerator, self.settings, self.reader = accelerator, settings, reader
        self.device, self.dtype = accelerator.device, reader.dtype
        self.drafter = drafter.to(self.device)
        self.target_head = target_head.to(self.device, self.dtype)
        self.full_head = full_head.to(self.device, self.dtype) if settings.outside_vocabulary == "drop" else None
        self.optimizer = make_optimizer(self.drafter, settings)
        decay = settings.step_weight_decay ** torch.arange(settings.ttt_steps, dtype=torch.float32)
        self.step_weights = decay.to(self.device)

    def forward(self, batch: Batch, counted: Sequence[int], measured: Measured) -> Tensor:
        """The loss of a batch, as its part of a sum in which `counted[k]` targets count at step k."""
        kept = batch.counted if self.full_head is None else batch.counted & self._inside_vocabulary(batch.targets)
        whole = torch.tensor(counted, dtype=torch.float32, device=self.device).clamp(min=1)
        weight = kept * (self.step_weights / whole)[:, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            losses = self.drafter(batch, self.target_head, weight)
        measured.add(losses.by_step, losses.agreements, kept.sum(1))
        return losses.total

    def _inside_vocabulary(self, targets: Tensor) -> Tensor:
        """bool [J]: whether the target's most likely token of the whole vocabulary is in the draft vocabulary."""
        return torch.cat([self.drafter.t2d[(part @ self.full_head.T).argmax(-1)] for part in targets.split(256)])

    def update(self, step: Sequence[Window], batches: Iterator[Batch], rate: float) -> dict:
        """One optimizer step over a step's windows; `batches` yields this process's part of them."""
        measured = Measured(self.settings.ttt_steps, self.device)
        counted = counted_in(step, self.settings.ttt_steps)
        for _ in self.micro_batches(step):
            self.forward(next(batches).to(self.device), counted, measured).backward()
        self._sum_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.max_grad_norm)
        if not norm.isfinite():
            raise TrainingFailed(
                f"the gradient is {norm.item()} at learning rate {rate:.3g}; lower drafter.learning_rate, or look for damaged "
                "hidden states with scripts/store.py verify"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**measured.means(self.accelerator), "grad_norm": round(norm.item(), 6)}

    def micro_batches(self, step: Sequence[Window]) -> list[list[Window]]:
        """This process's part of a step, in groups that go through the model at once."""
        mine = share(step, self.accelerator.num_processes, self.accelerator.process_index)
        return packed(mine, self.settings.micro_batch_tokens or self.settings.batch_tokens)

    def _sum_gradients(self) -> None:
        """Add up the processes' gradients: each is its part of one sum, also where a process had nothing to do."""
        if self.accelerator.num_processes == 1:
            return
        parameters = list(self.drafter.parameters())
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        flat = self.accelerator.reduce(flat, "sum")
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p)

    @torch.no_grad()
    def measure(self, items: Sequence[Window]) -> dict[str, list[float]]:
        """{loss, accuracy} by step over windows, without learning from them."""
        measured = Measured(self.settings.ttt_steps, self.device)
        for batch in self.reader.batches(self.micro_batches(items)):
            self.forward(batch.to(self.device), [1] * self.settings.ttt_steps, measured)
        return measured.means(self.accelerator)


def counted_in(items: Iterable[Window], steps: int) -> list[int]:
    """How many targets of some windows count at each step."""
    return [sum(column) for column in zip(*(window.counted(steps) for window in items), strict=True)]


# --------------------------------------------------------------------------------------------------------------------
# The run.


class Checkpoints:
    """The checkpoints of one training, in results/store/checkpoints/{key}/, and beside them its log so far.

    A checkpoint holds the log up to its step, so the two cannot contradict each other whatever a crash left behind.
    """

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "log.jsonl"

    def save(self, trainer: Trainer, step: int) -> None:
        state = {
            "step": step,
            "drafter": trainer.drafter.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "log": self.log.read_text(encoding="utf-8"),
        }
        with atomic_path(self.folder / f"step-{step:08d}.pt") as temporary:
            torch.save(state, temporary)
        for path in self._paths()[:-KEPT_CHECKPOINTS]:
            path.unlink()

    def restore(self, trainer: Trainer) -> int:
        """Load the last checkpoint that can be read; returns how many optimizer steps are behind it, 0 without one."""
        for path in reversed(self._paths()):
            try:
                state = torch.load(path, map_location=trainer.device, weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                print(f"{path}: damaged, passed over ({error})", file=sys.stderr)
                continue
            trainer.drafter.load_state_dict(state["drafter"])
            trainer.optimizer.load_state_dict(state["optimizer"])
            break
        else:
            state = {"step": 0, "log": ""}
        if trainer.accelerator.is_main_process:
            write_text(self.log, state["log"])
        trainer.accelerator.wait_for_everyone()
        return state["step"]

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.pt"))


def fit(
    trainer: Trainer, train: Sequence[Window], heldout: Sequence[Window], checkpoints: Checkpoints, every: int
) -> dict:
    """Train for settings.epochs, from the last checkpoint if there is one.  Returns {steps, resumed_from}.

    Logs one line for each optimizer step, and one after each epoch with the held-out loss, to checkpoints.log.
    """
    settings, accelerator = trainer.settings, trainer.accelerator
    plan = [
        (epoch, step)
        for epoch in range(settings.epochs)
        for step in epoch_steps(train, settings.batch_tokens, settings.seed, epoch)
    ]
    done = resumed = checkpoints.restore(trainer)
    first = accelerator.is_main_process
    batches = trainer.reader.batches(group for _, step in plan[done:] for group in trainer.micro_batches(step))
    total = sum(window.tokens for _, step in plan for window in step)
    with (
        open(checkpoints.log, "a", encoding="utf-8") as log,
        progress(total=total, what="train drafter", unit="tok", unit_scale=True, disable=not first) as bar,
    ):

        def write(**line) -> None:
            if first:
                log.write(json.dumps(line) + "\n")
                log.flush()

        bar.update(sum(window.tokens for _, step in plan[:done] for window in step))
        for epoch, step in plan[done:]:
            rate = learning_rate(done, len(plan), settings.learning_rate, settings.warmup_fraction)
            tokens, counted = sum(window.tokens for window in step), counted_in(step, settings.ttt_steps)
            result = trainer.update(step, batches, rate)
            done += 1
            write(step=done, epoch=epoch, lr=float(f"{rate:.6g}"), tokens=tokens, targets=counted, **result)
            if (done == len(plan) or plan[done][0] != epoch) and heldout:
                write(step=done, epoch=epoch, heldout=trainer.measure(heldout))
            if first and (done % every == 0 or done == len(plan)):
                checkpoints.save(trainer, done)
            bar.update(tokens)
            bar.set_postfix(loss=f"{result['loss'][0]:.3f}", accuracy=f"{result['accuracy'][0]:.3f}", refresh=False)
    accelerator.wait_for_everyone()
    return {"steps": len(plan), "resumed_from": resumed}
