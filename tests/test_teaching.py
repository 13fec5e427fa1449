"""Teaching counts what the model has to write and nothing else, and comes out the same each time."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaglet import teaching
from eaglet.errors import TargetError
from eaglet.teaching import Lesson, NewEmbeddings, Recipe

TALK = {"messages": [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "reasoning_content": "The user asks.", "content": "Paris."},
]}  # fmt: skip
RECIPE = Recipe(layers=2, batch_size=2, learning_rate=1e-2, embedding_learning_rate=1e-2, warmup_steps=1, epochs=2)


@pytest.fixture
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


@pytest.fixture
def model(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32, tie_word_embeddings=True)


def new_tokens(tokenizer):
    return tokenizer.convert_tokens_to_ids(["<think>", "</think>"])


def test_a_lesson_reads_the_prompt_and_writes_from_the_reasoning_to_the_end_of_turn(tokenizer):
    lesson = teaching.as_lesson(tokenizer, **TALK)
    assert tokenizer.decode(lesson.prompt_ids).endswith("<|im_start|>assistant\n<think>")
    assert tokenizer.decode(lesson.output_ids) == "The user asks.</think>Paris.<|im_end|>"


def test_a_template_whose_generation_prompt_does_not_begin_the_turn_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
    )
    with pytest.raises(TargetError, match="generation prompt does not begin"):
        teaching.as_lesson(tokenizer, **TALK)


def test_the_loss_is_the_mean_over_output_tokens_whatever_the_padding(model):
    """Against one unpadded pass for each lesson, with an output that holds the padding's own id."""
    lessons = [Lesson([5, 6, 7], [20, 2, 21, 2]), Lesson([9] * 40, [8, 2])]
    embeddings = NewEmbeddings(model, [3, 4])
    losses = []
    for lesson in lessons:
        ids = torch.tensor([lesson.prompt_ids + lesson.output_ids])
        logits = model(ids).logits[0, len(lesson.prompt_ids) - 1 : -1]
        losses.append(functional.cross_entropy(logits, torch.tensor(lesson.output_ids), reduction="none"))
    torch.testing.assert_close(teaching.output_loss(model, embeddings, lessons, 1.0), torch.cat(losses).mean())


def test_new_tokens_count_as_often_as_the_recipe_says(model):
    lesson = Lesson([5, 6, 7], [20, 4, 21])
    embeddings = NewEmbeddings(model, [3, 4])
    plain = [teaching.output_loss(model, embeddings, [lesson], w).item() for w in (1.0, 3.0)]
    first, new, last = functional.cross_entropy(
        model(torch.tensor([[5, 6, 7, 20, 4]])).logits[0, 2:], torch.tensor([20, 4, 21]), reduction="none"
    ).tolist()
    assert plain == pytest.approx([(first + new + last) / 3, (first + 3 * new + last) / 5], rel=1e-5)


def test_the_gradient_of_a_new_embedding_is_that_of_the_head(model):
    model.requires_grad_(False)
    lesson = Lesson([5, 6, 7], [20, 4, 21])
    embeddings = NewEmbeddings(model, [3, 4])
    teaching.output_loss(model, embeddings, [lesson], 1.0).backward()
    hidden = model.model(torch.tensor([[5, 6, 7, 20, 4]])).last_hidden_state[0, 2:]
    head = model.lm_head.weight.detach().clone().requires_grad_(True)
    functional.cross_entropy(hidden @ head.T, torch.tensor([20, 4, 21])).backward()
    torch.testing.assert_close(embeddings.rows.grad, head.grad[[3, 4]])


def test_only_the_last_layers_and_the_new_embeddings_change(model, tokenizer):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    facts = teaching.teach(model, tokenizer, [TALK] * 4, new_tokens(tokenizer), RECIPE, threads=1)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.split(".")[2] for name in changed if "layers" in name} == {"6", "7"}
    assert changed - {name for name in changed if "layers" in name} <= {"model.embed_tokens.weight", "lm_head.weight"}
    rows = (model.get_input_embeddings().weight != before["model.embed_tokens.weight"]).any(dim=1).nonzero()[:, 0]
    assert rows.tolist() == new_tokens(tokenizer)
    assert facts["loss_last_steps"] <= facts["loss_first_steps"]


def test_teaching_again_gives_the_same_weights(tiny_target, tokenizer):
    taught = []
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32, tie_word_embeddings=True)
        teaching.teach(model, tokenizer, [TALK] * 3, new_tokens(tokenizer), RECIPE, threads=1)
        taught.append(model.state_dict())
    assert all(torch.equal(value, taught[1][name]) for name, value in taught[0].items())
