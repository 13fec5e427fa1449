"""The training-time test written down plainly: one row, all positions, dense masks, every step's head and target.

It computes what nobody needs and stores what it computes; its only merit is that it can be read against the formulas.
"""

import math

import torch

from eaglet.eagle3 import Eagle3Drafter, Row, rotate


def plain_losses(drafter: Eagle3Drafter, row: Row, steps: int, target_head: torch.Tensor) -> list[list[torch.Tensor]]:
    """[step][counted target] -> soft cross-entropy of one row, in the order of the targets."""
    c, layer, attention = drafter.config, drafter.midlayer, drafter.midlayer.self_attn
    x, length = row.token_ids.long(), len(row.token_ids)
    positions = range(length - 1)  # t

    def projected(tokens, hidden, weight, heads):
        e = layer.input_layernorm(drafter.embed_tokens[tokens].float())
        return (torch.cat([e, layer.hidden_norm(hidden)], -1) @ weight.T).view(len(tokens), heads, c.head_dim)

    hidden = row.aux[:-1].float() @ drafter.fc.weight.T  # g
    keys, values, losses = [], [], []
    for k in range(steps):
        tokens = x[[min(t + 1 + k, length - 1) for t in positions]]  # beyond the end: any token, it counts nowhere
        place = torch.tensor([row.start + t + k for t in positions])
        q = rotate(projected(tokens, hidden, attention.q_proj.weight, c.num_attention_heads), *drafter.rotary(place))
        keys.append(
            rotate(projected(tokens, hidden, attention.k_proj.weight, c.num_key_value_heads), *drafter.rotary(place))
        )
        values.append(projected(tokens, hidden, attention.v_proj.weight, c.num_key_value_heads))
        attended = []
        for t in positions:
            for head in range(c.num_attention_heads):
                kv = head * c.num_key_value_heads // c.num_attention_heads
                seen_keys = [keys[0][s, kv] for s in range(t + 1)] + [keys[i][t, kv] for i in range(1, k + 1)]
                seen_values = [values[0][s, kv] for s in range(t + 1)] + [values[i][t, kv] for i in range(1, k + 1)]
                scores = torch.stack(seen_keys) @ q[t, head] / math.sqrt(c.head_dim)
                attended.append(scores.softmax(0) @ torch.stack(seen_values))
        attended = torch.stack(attended).view(length - 1, -1)
        hidden = hidden + attended @ attention.o_proj.weight.T
        normed = layer.post_attention_layernorm(hidden)
        gate, up = normed @ layer.mlp.gate_proj.weight.T, normed @ layer.mlp.up_proj.weight.T
        hidden = hidden + (gate * gate.sigmoid() * up) @ layer.mlp.down_proj.weight.T
        logits = drafter.norm(hidden) @ drafter.lm_head.weight.T
        step = []
        for t in positions:
            j = t + 1 + k
            if row.first_target <= j <= length - 1:
                p = (row.last[j].float() @ target_head.T).softmax(0)
                step.append(-(p * logits[t].log_softmax(0)).sum())
        losses.append(step)
    return losses
