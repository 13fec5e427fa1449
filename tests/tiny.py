"""A tiny target for tests: a random 8-layer Llama with a small tokenizer that thinks as the embedded target does.

Its generation prompt ends with the one-token `<think>`; `</think>`, `<|im_start|>`, `<|im_end|>` and the tool markers are one
token each.  Everything is seeded, so two builds are byte-identical.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
VOCABULARY = 512
TEXT = """def add(a, b): return a + b. The user asks a question and wants an answer. Write a short list of three
things for a walk in the rain. What is the capital of France? {"name": "get_weather", "arguments": {"city": "Paris"}}
system user assistant tool Complete this Python function. You have these tools."""

TEMPLATE = """{%- set thinking = thinking if thinking is defined else true -%}
{%- if tools -%}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}You have these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' -%}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set ns.last_user = loop.index -%}{%- endfor -%}
{%- set ns.users = 0 -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.users = ns.users + 1 -%}{%- endif -%}
{%- if message.role == 'assistant' -%}<|im_start|>assistant
{% if ns.users == ns.last_user and message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% else %}<think></think>{% endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}<|im_end|>
{% elif message.role != 'system' -%}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if thinking %}<think>{% else %}<think></think>{% endif %}{%- endif -%}"""


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `VOCABULARY` ids: 0–2 are `SPECIAL`, 3–6 `MARKERS` (not special, as Kimi's)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL + MARKERS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.add_tokens(MARKERS)  # as ordinary added tokens: kept when special tokens are skipped
    made.chat_template = TEMPLATE
    return made


def build_tiny_target(folder: str | Path, *, thinking: bool = True, seed: int = 0) -> Path:
    """Save the target as a Hugging Face folder and return its path; `thinking=False` takes the markers from the template."""
    folder = Path(folder)
    tokenizer = build_tiny_tokenizer()
    if not thinking:
        tokenizer.chat_template = TEMPLATE.replace("<think></think>", "").replace("<think>", "").replace("</think>", "")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,  # large enough that greedy decoding has clear winners
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[2, 0], pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_taught_target(folder: str | Path, *, steps: int = 120, seed: int = 0) -> Path:
    """The tiny target after a few seconds of training: most answers are reasoning, `</think>`, answer, `<|im_end|>`.

    It learns from rendered prompts followed by random words, so it knows the shape of a turn and nothing else.
    """
    folder = build_tiny_target(folder, seed=seed)
    tokenizer = build_tiny_tokenizer()
    model = LlamaForCausalLM.from_pretrained(folder)
    draw = random.Random(seed)
    words = TEXT.replace("{", "").replace("}", "").split()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = []
        for _ in range(16):
            question = " ".join(draw.choices(words, k=draw.randint(2, 8)))
            messages = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            parts = [" ".join(draw.choices(words, k=draw.randint(1, 3))) for _ in range(2)]
            turn = tokenizer.encode(f"{parts[0]}</think>{parts[1]}<|im_end|>")
            rows.append((tokenizer.encode(prompt), turn))
        width = max(len(prompt) + len(turn) for prompt, turn in rows)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), -100)
        for i, (prompt, turn) in enumerate(rows):
            ids[i, : len(prompt) + len(turn)] = torch.tensor(prompt + turn)
            labels[i, len(prompt) : len(prompt) + len(turn)] = torch.tensor(turn)
        loss = model(input_ids=ids, labels=labels).loss  # right padding: a causal model needs no mask for it
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
