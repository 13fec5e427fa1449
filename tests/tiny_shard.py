"""A shard of real greedy answers of the tiny target, with its turn format: what the stages after `merge` start from."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import hidden_states
from eaglet.digests import content_key, request_key
from eaglet.drafter_files import drafter_config, save_drafter
from eaglet.eagle3 import initial_drafter
from eaglet.records import RecordWriter, row_digest
from eaglet.targets import Target
from eaglet.turn_format import Marker, TurnFormat

TEXTS = [
    "Write a short list of three things",
    "What is the capital of France?",
    "Complete this Python function",
    "a b c",
]


def tiny_turn_format(folder: Path) -> TurnFormat:
    """The facts of `tiny.build_tiny_target`, written down and not inferred."""
    target = Target(model=str(folder), dtype="float32")
    return TurnFormat(
        target=target,
        fingerprint=target.fingerprint(),
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        num_layers=8,
        context_length=1024,
        owner="prompt",
        generation_prompt=Marker((3,), "<think>"),
        opening=Marker((3,), "<think>"),
        closing=Marker((4,), "</think>"),
        end_of_turn_ids=(0, 2),
    )


def build_tiny_shard(
    folder: Path, target_folder: Path, *, rows: int = 6, max_new_tokens: int = 24
) -> tuple[Path, Path]:
    """Write turn_format.json and shard-0.parquet below `folder`; returns (shard, turn format).

    Odd rows are held out.  Rows alternate between the datasets `lists` and `chats`.
    """
    turn_format = tiny_turn_format(target_folder)
    tokenizer, model = turn_format.target.tokenizer(), turn_format.target.load()
    records = []
    for number in range(rows):
        text = f"{TEXTS[number % len(TEXTS)]} {number}"
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
        with torch.inference_mode():
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False)[0].tolist()
        output = whole[len(prompt) :]
        stopped = output[-1] in turn_format.end_of_turn_ids
        row = {
            "sample_id": content_key(text)[:16],
            "prompt_ids": prompt,
            "output_ids": output,
            "finish_reason": "stop" if stopped else "length",
            "matched_stop": output[-1] if stopped else None,
            "request_key": request_key(turn_format.fingerprint, prompt, {"temperature": 0}, number),
            "server": 0,
        }
        more = {
            "think_end": turn_format.think_end(output),
            "row_digest": row_digest(row),
            "dataset": ["lists", "chats"][number // 2 % 2],
            "split": ["train", "heldout"][number % 2],
        }
        records.append({**row, **more})
    shard, facts = folder / "shards" / "shard-0.parquet", folder / "turn_format.json"
    facts.parent.mkdir(parents=True, exist_ok=True)
    turn_format.save(facts)
    with RecordWriter(shard, "shard", {}) as writer:
        writer.write_rows(records)
    return shard, facts


@dataclass
class TinyRun:
    """What the stages after hidden_states read, in one folder."""

    shard: Path
    index: Path
    turn_format: Path
    store: Path
    drafter: Path

    @property
    def flags(self) -> list[str]:
        """The paths as flags of scripts/export.py."""
        return [
            *("--shards", str(self.shard), "--indexes", str(self.index), "--turn-format", str(self.turn_format)),
            *("--store", str(self.store), "--drafter", str(self.drafter)),
        ]


def build_tiny_run(folder: Path, target_folder: Path, *, rows: int = 6) -> TinyRun:
    """A captured shard and an untrained drafter for every third id, all in float32."""
    shard, facts = build_tiny_shard(folder, target_folder, rows=rows)
    run = TinyRun(shard, folder / "index.parquet", facts, folder / "store", folder / "drafter")
    hidden_states.main(
        [
            *("--shard", str(shard), "--turn-format", str(facts), "--store", str(run.store)),
            *("--params", json.dumps({"dtype": "float32"}), "--index", str(run.index)),
            *("--report", str(folder / "report.json")),
        ]
    )
    target = tiny_turn_format(target_folder).target
    embedding = target.load().get_input_embeddings().weight
    config = drafter_config(target.text_config(), draft_vocab_size=32, layer_ids=(2, 4, 5), vocab_size=512)
    drafter = initial_drafter(config, embedding, embedding, torch.arange(32) * 3, 0)
    save_drafter(run.drafter, drafter, dtype=torch.float32)
    return run
