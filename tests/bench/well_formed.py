"""How many of a target's sampled answers have the shape of a thinking turn, for each prompt file.

Well formed: non-empty reasoning, the closing marker once, a non-empty answer, ended by the model itself.

    python tests/bench/well_formed.py --model results/demo/target/model results/demo/prompts/*.jsonl
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from eaglet.progress import progress
from eaglet.records import iter_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", type=Path, help="prompts/{dataset}.jsonl")
    parser.add_argument("--model", required=True)
    parser.add_argument("--sample", type=int, help="only so many random prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print so many answers of each file")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
    started, total = time.monotonic(), Counter()
    for path in options.prompts:
        records = [record for _, record in iter_jsonl(path)]
        if options.sample:
            records = random.Random(options.seed).sample(records, min(options.sample, len(records)))
        outcomes, tokens = Counter(), 0
        for record, ids in zip(records, answers(model, tokenizer, records, options), strict=True):
            outcome = shape(tokenizer, ids, record.get("tools"))
            tokens += len(ids)
            outcomes[outcome] += 1
            if sum(outcomes.values()) <= options.show:
                print(f"--- {outcome}: {json.dumps(record['messages'][-1]['content'])}\n{tokenizer.decode(ids)}")
        total += outcomes
        print(path.stem, told(outcomes), f"{tokens / len(records):.0f} tokens a row", flush=True)
    print("all", told(total), f"{time.monotonic() - started:.0f} s", flush=True)


@torch.inference_mode()
def answers(model, tokenizer, records, options) -> list[list[int]]:
    """The output ids of each record, its end of turn included; finished rows leave the batch."""
    prompts = [
        tokenizer.apply_chat_template(r["messages"], tools=r.get("tools"), tokenize=False, add_generation_prompt=True)
        for r in records
    ]
    order = sorted(range(len(records)), key=lambda i: len(prompts[i]))
    found: list[list[int]] = [[] for _ in records]
    for start in progress(range(0, len(order), options.batch), what="sample", unit="batch"):
        rows = order[start : start + options.batch]
        batch = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True, add_special_tokens=False)
        tokens, seen = batch["input_ids"], batch["attention_mask"]
        cache = DynamicCache()
        for _ in range(options.max_new_tokens):
            positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            output = model(tokens, attention_mask=seen, position_ids=positions, past_key_values=cache, logits_to_keep=1)
            tokens = sampled(output.logits[:, -1].float(), options)
            for i, token in zip(rows, tokens[:, 0].tolist(), strict=True):
                found[i].append(token)
            going = (tokens[:, 0] != tokenizer.eos_token_id).nonzero()[:, 0]
            if not len(going):
                break
            if len(going) < len(rows):
                cache.batch_select_indices(going)
                tokens, seen, rows = tokens[going], seen[going], [rows[i] for i in going]
            seen = torch.nn.functional.pad(seen, (0, 1), value=1)
    return found


def sampled(logits: torch.Tensor, options) -> torch.Tensor:
    """[B, V] -> [B, 1].  The nucleus is sought among the 1024 likeliest tokens, which spares a sort of the vocabulary."""
    likeliest, ids = (logits / options.temperature).topk(1024)
    probabilities = (likeliest - (logits / options.temperature).logsumexp(-1, keepdim=True)).exp()
    outside = probabilities.cumsum(-1) - probabilities >= options.top_p
    return ids.gather(1, torch.multinomial(probabilities.masked_fill(outside, 0), 1))


def shape(tokenizer, ids: list[int], tools) -> str:
    """`well formed` (with `call`: it calls an offered tool with arguments of its schema), or what is wrong."""
    text = tokenizer.decode(ids)
    closings = text.count("</think>")
    if not text.endswith(tokenizer.eos_token):
        return "cut in the answer" if closings else "cut in the reasoning"
    reasoning, _, answer = text.removesuffix(tokenizer.eos_token).partition("</think>")
    if closings != 1:
        return f"{min(closings, 2)} closing markers"
    if not reasoning.strip() or not answer.strip():
        return "empty part"
    if "tool_call>" in answer:
        return "well formed, call" if is_call(answer, tools or []) else "broken call"
    return "well formed, no call" if tools else "well formed"


def is_call(answer: str, tools) -> bool:
    found = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", answer, re.DOTALL)
    try:
        call = json.loads(found[1]) if found else {}
    except ValueError:
        return False
    known = {tool["function"]["name"]: tool["function"]["parameters"].get("properties", {}) for tool in tools}
    arguments = call.get("arguments")
    return isinstance(arguments, dict) and arguments.keys() <= known.get(call.get("name"), {}).keys()


def told(outcomes: Counter) -> str:
    good = sum(count for outcome, count in outcomes.items() if outcome.startswith("well formed"))
    share = f"{good}/{outcomes.total()} = {good / outcomes.total():.0%}"
    return f"{share} well formed ({', '.join(f'{what} {count}' for what, count in outcomes.most_common())})"


if __name__ == "__main__":
    main()
