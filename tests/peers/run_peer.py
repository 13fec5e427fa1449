"""What a peer computes with a drafter that eaglet saved, as JSON; in the peers' environment, fp32 on the CPU.

    run_peer.py specforge|speculators                          of the case: {"version", "loss": the peer's own loss of each
                                                               step, "logits": [step][row][position][Vd]}
    run_peer.py specforge|speculators DRAFTER INPUTS           of another drafter/ and rows (safetensors, as case.py writes
                                                               them): {"version", "drafts": [row][position], target ids}

It calls the installed packages.  TORCHDYNAMO_DISABLE=1 must be set: SpecForge compiles on import.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from case import FOLDER, STEPS, rows
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig


def specforge(folder: Path, inputs: dict[str, Tensor], steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(losses, logits [step][row] of [positions, Vd]) of LlamaForCausalLMEagle3 in OnlineEagle3Model, the offline strategy.

    Its loss has no CPU form (Triton); the package's own reference for it takes its place.
    """
    import specforge.algorithms.eagle3.model as model_module
    import specforge.core.loss as loss_module
    from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy

    losses, logits = [], []

    def recorded(step_logits, target_p, position_mask):
        logits.append(step_logits.detach())
        losses.append(loss_module._compute_loss(step_logits, target_p, position_mask))
        return losses[-1]

    model_module.LogSoftmaxLoss = SimpleNamespace(apply=recorded)
    # Not from_pretrained: its rotary tables are no checkpoint's and stay empty under transformers' lazy construction.
    draft = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(folder, pretraining_tp=1), attention_backend="sdpa")
    told = draft.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert told.missing_keys == ["embed_tokens.weight"] and not told.unexpected_keys, told
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(inputs["embedding"])
    head = TargetHead(str(folder))
    with torch.no_grad():
        head.fc.weight.copy_(inputs["head"])
    strategy = Eagle3TrainStrategy(
        model_module.OnlineEagle3Model(draft, length=steps, attention_backend="sdpa"), target_head=head
    )
    samples = []
    for row in rows(inputs):
        mask = torch.zeros(len(row["token_ids"]), dtype=torch.long)
        mask[row["prompt"] :] = 1
        raw = {"input_ids": row["token_ids"], "loss_mask": mask}
        raw |= {"hidden_state": row["last"][None], "aux_hidden_state": row["aux"][None]}
        samples.append(normalize_offline_sample(raw, 2048))
    tensors = build_offline_collator()(samples)
    batch = TrainBatch(["0"], "eagle3", tensors, {"target_repr": "hidden_state", "ttt_length": steps})
    strategy.forward_loss(batch)
    by_row = [[step[n, : len(row["token_ids"]) - 1] for n, row in enumerate(rows(inputs))] for step in logits]
    return losses, by_row


def speculators(folder: Path, inputs: dict[str, Tensor], steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The same of Eagle3DraftModel set to the classic options, its weights eaglet's under the names it uses, both rows in one pack."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.eagle3.data import shift_batch
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from speculators.train.data import CollateFn

    layer = LlamaConfig.from_pretrained(folder)
    layer._attn_implementation = "eager"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=layer.draft_vocab_size,
            norm_before_residual=False,
            eagle_aux_hidden_state_layer_ids=layer.eagle_config["eagle_aux_hidden_state_layer_ids"],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    ours = load_file(folder / "model.safetensors")
    model.load_vocab_mappings(ours["t2d"], ours["d2t"])
    state = {name.replace("midlayer.", "layers.0."): x for name, x in ours.items() if name not in ("t2d", "d2t")}
    state["embed_tokens.weight"] = inputs["embedding"]
    state["verifier_lm_head.weight"] = inputs["head"][ours["t2d"]]
    state["verifier_norm.weight"] = torch.ones(layer.hidden_size)
    told = model.load_state_dict(state, strict=False)
    assert not told.unexpected_keys and set(told.missing_keys) <= {"t2d", "d2t"}, told
    # Its states come before the target's final norm and ours after it: a norm that changes nothing stands in.
    model.verifier_norm.forward = lambda x: x

    logits = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: logits.append(output.detach()[0]))
    samples = []
    for row in rows(inputs):
        length = len(row["token_ids"])
        mask = torch.zeros(length, dtype=torch.bool)
        mask[row["prompt"] :] = True
        samples.append(
            {
                "hidden_states": row["aux"],
                "input_ids": row["token_ids"],
                "verifier_last_hidden_states": row["last"],
                "loss_mask": mask,
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
    total = sum(len(row["token_ids"]) - 1 for row in rows(inputs))
    batch = CollateFn(total, layer.hidden_size, dtype=torch.float32, preprocess=shift_batch)(samples)
    loss_config = resolve_loss_config("kl_div", "eager")
    _, _, metrics = model(**batch, ttt_steps=steps, ttt_step_loss_decay=1.0, loss_config=loss_config)
    lengths = [len(row["token_ids"]) - 1 for row in rows(inputs)]
    return [metrics[f"loss_{k}_sum"] for k in range(steps)], [list(step.split(lengths)) for step in logits[:steps]]


def main() -> None:
    name, folder, inputs, steps = sys.argv[1], FOLDER, FOLDER / "inputs.safetensors", STEPS
    if len(sys.argv) > 2:
        folder, inputs, steps = Path(sys.argv[2]), Path(sys.argv[3]), 1
    losses, logits = {"specforge": specforge, "speculators": speculators}[name](folder, load_file(inputs), steps)
    if folder == FOLDER:
        told = {"loss": [x.item() for x in losses], "logits": [[x.tolist() for x in step] for step in logits]}
    else:
        d2t = load_file(folder / "model.safetensors")["d2t"]
        best = [row.argmax(-1) for row in logits[0]]
        told = {"drafts": [(i + d2t[i]).tolist() for i in best]}
    print(json.dumps({"version": version(name), **told}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
