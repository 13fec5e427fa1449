"""Fine-tuning a small chat model on whole conversations, on a CPU, so that it writes turns of its chat template's shape.

Only the last layers learn, in one pass; the loss counts the tokens of the answered turn alone.  What is prompt and
what is answer comes from the template's own rendering, never from comparing ids with the padding's.  Knows nothing
about where the model came from or what the conversations are about.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from eaglet.errors import TargetError
from eaglet.progress import progress

IGNORED = -100  # a label that does not count


@dataclass(frozen=True)
class Recipe:
    layers: int = 10  # the last so many learn
    learning_rate: float = 4e-4  # the peak; linear warm-up, then linear to a tenth
    warmup_steps: int = 5
    embedding_learning_rate: float = 4e-3  # of the new tokens' embeddings
    new_token_weight: float = 6.0  # how often a new token counts in the loss
    batch_size: int = 4  # conversations of one step
    epochs: int = 1
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Lesson:
    """One conversation as ids: the model reads `prompt_ids` and learns to write `output_ids`."""

    prompt_ids: list[int]
    output_ids: list[int]


def teach(
    model, tokenizer, conversations: Sequence[dict], new_tokens: Sequence[int], recipe: Recipe, *, threads: int
) -> dict:
    """Train `model` (float32, head tied to the embedding) in place; returns the facts of the training.

    `new_tokens` are the ids whose embeddings mean nothing yet: they start at random and learn.  A conversation is
    {"messages": […, the assistant's turn], "tools": […] or None}.  The same arguments on the same kind of CPU with the
    same number of threads give the same weights.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(recipe.seed)
    lessons = [as_lesson(tokenizer, **conversation) for conversation in conversations]
    learning = _unfreeze(model, recipe.layers)
    embeddings = NewEmbeddings(model, new_tokens)
    groups = [{"params": learning}, {"params": [embeddings.rows], "lr": recipe.embedding_learning_rate}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    batches = [batch for epoch in range(recipe.epochs) for batch in _batches(lessons, recipe, epoch)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, len(batches), recipe))
    # Where the CPU multiplies bfloat16 itself it is about three times as fast; elsewhere it is slower than float32.
    fast_bfloat16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    losses = []
    model.train()
    with progress(total=sum(_tokens(batch) for batch in batches), what="teach", unit="tok") as bar:
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16):
                loss = output_loss(model, embeddings, batch, recipe.new_token_weight)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learning, recipe.max_grad_norm)
            optimizer.step()
            embeddings.store()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
            bar.update(_tokens(batch))
    model.eval().requires_grad_(True)
    return {
        "recipe": asdict(recipe),
        "conversations": len(lessons),
        "prompt_tokens": sum(len(lesson.prompt_ids) for lesson in lessons),
        "output_tokens": sum(len(lesson.output_ids) for lesson in lessons),
        "steps": len(batches),
        "loss_first_steps": round(sum(losses[:5]) / len(losses[:5]), 3),
        "loss_last_steps": round(sum(losses[-5:]) / len(losses[-5:]), 3),
        "threads": threads,
        "autocast": "bfloat16" if fast_bfloat16 else None,
    }


def as_lesson(tokenizer, messages: Sequence[dict], tools: Sequence[dict] | None = None) -> Lesson:
    """Split a conversation's rendering into what the model reads and what it writes, its end of turn included."""
    prompt = tokenizer.apply_chat_template(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    output = whole.removeprefix(prompt).rstrip("\n")
    if not whole.startswith(prompt) or not output.endswith(tokenizer.eos_token):
        raise TargetError(
            f"the chat template renders an answered turn that its generation prompt does not begin: {whole!r}"
        )
    encode = tokenizer.encode
    return Lesson(encode(prompt, add_special_tokens=False), encode(output, add_special_tokens=False))


class NewEmbeddings:
    """The rows of a tied embedding that belong to new tokens, learned through the head alone.

    As inputs the rows always have their current values, but no gradient flows back to them there: that would need a
    backward pass through the layers that do not learn.
    """

    def __init__(self, model, ids: Sequence[int]):
        self.weight = model.get_input_embeddings().weight  # [V, H]
        self.ids = torch.tensor(ids)
        norm = self.weight.norm(dim=1).mean()
        self.rows = torch.nn.Parameter(norm * functional.normalize(torch.randn(len(ids), self.weight.shape[1]), dim=1))
        self.store()

    @torch.no_grad()
    def store(self) -> None:
        self.weight[self.ids] = self.rows

    def logits(self, model, hidden: Tensor) -> Tensor:
        """The head's logits of `hidden`, [N, H] -> [N, V], in float32, differentiable in `rows`."""
        nothing = functional.linear(hidden.float(), self.rows - self.rows.detach())  # zero, but with a gradient
        return model.lm_head(hidden).float().index_add(-1, self.ids, nothing.float())


def output_loss(model, embeddings: NewEmbeddings, batch: Sequence[Lesson], new_token_weight: float) -> Tensor:
    """Mean cross-entropy over the batch's output tokens, those among the new tokens counted `new_token_weight` times.

    The head, a fifth of such a model, is applied only to the positions that predict an output token.
    """
    length = rounded_up(max(len(lesson.prompt_ids) + len(lesson.output_ids) for lesson in batch) - 1)
    inputs = torch.zeros(len(batch), length, dtype=torch.long)
    labels = torch.full((len(batch), length), IGNORED)
    for row, lesson in enumerate(batch):
        ids = torch.tensor(lesson.prompt_ids + lesson.output_ids)
        inputs[row, : len(ids) - 1] = ids[:-1]
        labels[row, len(lesson.prompt_ids) - 1 : len(ids) - 1] = ids[len(lesson.prompt_ids) :]
    # Padding is on the right and attention is causal, so no real position sees it and no mask is needed.
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)  # [B·T, H]
    labels = labels.flatten()
    counted_first = (labels == IGNORED).long().argsort(stable=True)
    chosen = counted_first[: rounded_up(int((labels != IGNORED).sum()))]  # and a few that are ignored
    wanted = labels[chosen]
    weights = torch.where(torch.isin(wanted, embeddings.ids), new_token_weight, 1.0) * (wanted != IGNORED)
    losses = functional.cross_entropy(
        embeddings.logits(model, hidden[chosen]), wanted, ignore_index=IGNORED, reduction="none"
    )
    return (losses * weights).sum() / weights.sum()


def rounded_up(length: int, multiple: int = 32) -> int:
    """Few distinct shapes: the CPU's matrix kernels are prepared, and kept in memory, for each shape anew."""
    return -(-length // multiple) * multiple


def _unfreeze(model, layers: int) -> list[torch.nn.Parameter]:
    """Let only the last layers learn (the layers in front then need no backward pass)."""
    model.requires_grad_(False)
    learning = [parameter for layer in model.model.layers[-layers:] for parameter in layer.parameters()]
    for parameter in learning:
        parameter.requires_grad_(True)
    return learning


def _batches(lessons: Sequence[Lesson], recipe: Recipe, epoch: int) -> Iterator[list[Lesson]]:
    """Each lesson once, in batches of similar length (little padding), the batches in random order."""
    chance = random.Random(f"{recipe.seed} {epoch}")
    shuffled = chance.sample(lessons, len(lessons))
    window = recipe.batch_size * 8
    batches = []
    for start in range(0, len(shuffled), window):
        near = sorted(
            shuffled[start : start + window], key=lambda lesson: len(lesson.prompt_ids) + len(lesson.output_ids)
        )
        batches += [near[i : i + recipe.batch_size] for i in range(0, len(near), recipe.batch_size)]
    return iter(chance.sample(batches, len(batches)))


def _rate(step: int, steps: int, recipe: Recipe) -> float:
    """The learning rate of a step as a share of the peak."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    return 0.1 + 0.9 * (1 - done)


def _tokens(batch: Sequence[Lesson]) -> int:
    return sum(len(lesson.prompt_ids) + len(lesson.output_ids) for lesson in batch)
