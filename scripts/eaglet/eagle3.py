"""EAGLE-3: the drafter, its training-time test, and its loss, from top to bottom in one file.

The classic set that SGLang and vLLM load: `fc` from 3H to H without a norm in front, one decoder layer whose attention
reads [norm(embedding), norm(hidden)], the residual taken before the norm, full attention.  Paper: EAGLE-3,
arXiv:2503.01840.  The conventions, held by tests/test_eagle3.py:

- alignment: position t takes embed(x[t+1]) and fc(aux[t]); its target is softmax(lm_head(last[t+1])), which predicts x[t+2];
- step k of the training-time test takes, at the same t, the drafter's own output of step k-1, the true token x[t+1+k] and
  the target of last[t+1+k]; its rotary position is t+k;
- attention: the keys of step 0 are causal; each later step adds one key at its own position only; one softmax over both;
- what counts: target j = t+1+k counts at every step if x[j] is an output token, since these are the tokens that a drafter
  is asked to continue.  So the same targets serve all steps, and each is computed once.

A position that carries no loss in any step gives only its `fc` and its first key and value; queries, the output
projection, the feedforward part and the head run where loss needs them.  Rows lie one after another without padding.

Sizes in comments: H hidden size, A attention heads, KV key-value heads, G = A/KV, D head size, V vocabulary, Vd draft
vocabulary, K steps; M positions of a batch, N of them with a query, J targets.  This module knows no files and no
tokenizer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCORES_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}  # attention scores in memory at once, in fp32
LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}  # draft logits in memory at once, in fp32
LEAST_QUERIES = 32  # in a block of attention, however many keys it sees


@dataclass(frozen=True)
class Eagle3Config:
    """The drafter's sizes.  `layer_ids` are indices into transformers' hidden_states (k is the input of layer k)."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layer_ids: tuple[int, int, int]


# --------------------------------------------------------------------------------------------------------------------
# The model.  Names of modules are the keys of the checkpoint.


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products with `x` are computed in: autocast's dtype where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class RMSNorm(nn.Module):
    """Reads the residual stream in its own precision; what it returns goes into matrix products."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps).to(product_dtype(x))


class Attention(nn.Module):
    """The four projections; q, k and v read 2H: the normed embedding, then the normed hidden state."""

    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)


class MLP(nn.Module):
    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, c: Eagle3Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # of the hidden state
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer after its attention: output projection, residual, norm, SwiGLU, residual.  [..., H], [..., A·D]."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(nn.Module):
    """The drafter.  `embed_tokens` [V, H] is the target's, frozen, and no part of the checkpoint.

    `d2t` int64 [Vd] is an offset: draft id i stands for target id i + d2t[i].  `t2d` bool [V] marks the target ids that
    the draft vocabulary holds.
    """

    def __init__(self, config: Eagle3Config, embed_tokens: Tensor):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.set_embedding(embed_tokens)

    def set_embedding(self, embed_tokens: Tensor) -> None:
        """Share the target's embedding [V, H].  Raises ValueError if it is of another size."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        if embed_tokens.shape != expected:
            raise ValueError(f"the embedding is {tuple(embed_tokens.shape)}, the drafter's config says {expected}")
        self.register_buffer("embed_tokens", embed_tokens.detach(), persistent=False)

    def set_draft_vocab(self, target_ids: Tensor) -> None:
        """Make the draft vocabulary these target ids: int64 [Vd], ascending."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids), device=target_ids.device))
        self.t2d.zero_()[target_ids] = True

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, aux: Tensor) -> Tensor:
        """fc: the three auxiliary hidden states [..., 3H], low to high -> g [..., H]."""
        return self.fc(aux.to(self.fc.weight.dtype))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary embedding, fp32 [*positions, 1, D], broadcast over heads."""
        c = self.config
        exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=positions.device) / c.head_dim
        angles = positions[..., None, None].float() * c.rope_theta**-exponents
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def step(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, cache, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass of the decoder layer while decoding.

        token_ids int64 [B, T] are x[t+1]; hidden [B, T, H] is fuse(aux[t]) where the target has been, and this
        method's own second result where it has not; positions int64 [B, T] are t.  `cache.append(keys, values)`, each [B, KV, T, D],
        returns all keys and values [B, KV, S, D], the new ones last.  `mask` bool, broadcast to [B, 1, T, S], is True where a
        query may look; None is causal.  Returns the logits over the draft vocabulary [B, T, Vd] and the hidden state for the next step
        [B, T, H] (before the final norm).
        """
        c, layer, attention = self.config, self.midlayer, self.midlayer.self_attn
        batch, length = token_ids.shape
        embedded = layer.input_layernorm(self.embed_tokens[token_ids].to(hidden.dtype))
        x = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)
        cos, sin = self.rotary(positions)
        q = rotate(attention.q_proj(x).view(batch, length, c.num_attention_heads, c.head_dim), cos, sin)
        k = rotate(attention.k_proj(x).view(batch, length, c.num_key_value_heads, c.head_dim), cos, sin)
        v = attention.v_proj(x).view(batch, length, c.num_key_value_heads, c.head_dim)
        keys, values = cache.append(k.transpose(1, 2), v.transpose(1, 2))
        if mask is None and length > 1:
            mask = torch.ones(length, keys.shape[2], dtype=torch.bool, device=keys.device).tril(keys.shape[2] - length)
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
        hidden = layer.finish(hidden, attended.transpose(1, 2).reshape(batch, length, -1))
        return self.lm_head(self.norm(hidden)), hidden

    def forward(self, batch: "Batch", target_head: Tensor, weight: Tensor) -> "Losses":
        """The training-time test over a batch.

        target_head [Vd, H]: the rows of the target's head that the draft vocabulary keeps.  weight fp32 [K, J]: what the
        cross-entropy of target j at step k counts in the sum.  Runs under autocast as the caller set it.
        """
        layer = self.midlayer
        steps = batch.ahead.shape[0]
        fused = self.fc(batch.aux)  # [M, H]
        hidden_for_keys = layer.hidden_norm(fused.float())
        hidden = fused[batch.query].float()  # the residual stream stays in fp32 [N, H]
        project = _Projections(self, layer.input_layernorm(self.embed_tokens[batch.next_ids].float()), batch)
        keys, values = project.keys_values(hidden_for_keys)
        own_keys, own_values, outputs = [], [], []
        for k in range(steps):
            normed = hidden_for_keys[batch.query] if k == 0 else layer.hidden_norm(hidden)
            if k > 0:
                own_key, own_value = project.own_key_value(normed, k)
                own_keys.append(own_key)
                own_values.append(own_value)
            q = project.query(normed, k)
            attended = attend(q, keys, values, own_keys, own_values, batch.rows)
            hidden = layer.finish(hidden, attended)
            outputs.append(self.norm(hidden[batch.predicts[k]]))
        return draft_loss(torch.stack(outputs), self.lm_head.weight, batch.targets, target_head, weight)


def initial_drafter(
    config: Eagle3Config,
    embed_tokens: Tensor,
    head: Tensor,
    target_ids: Tensor,
    seed: int,
    layer: Mapping[str, Tensor] | None = None,
) -> Eagle3Drafter:
    """Untrained, seeded weights: matrices normal with deviation 0.02 (Llama's), norms 1, the head the target's rows.

    embed_tokens, head [V, H]: the target's; target_ids int64 [Vd]: the draft vocabulary, ascending.  layer: see
    `begin_with`.
    """
    random = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(config, embed_tokens)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=random)
        drafter.lm_head.weight.copy_(head[target_ids])
        if layer:
            begin_with(drafter, layer)
    drafter.set_draft_vocab(target_ids)
    return drafter


def begin_with(drafter: Eagle3Drafter, layer: Mapping[str, Tensor]) -> None:
    """Make an untrained drafter the target's last layer on its highest auxiliary state; what that layer lacks stays random.

    layer: the target's last decoder layer and final norm in Llama's names (target_weights.last_layer), of the drafter's
    sizes.  The halves of q, k and v that read the embedding are new, and so is most of `fc`.
    """
    h, mid = drafter.config.hidden_size, drafter.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(mid.self_attn, name).weight[:, h:] = layer[f"self_attn.{name}.weight"]
    mid.self_attn.o_proj.weight.copy_(layer["self_attn.o_proj.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mid.mlp, name).weight.copy_(layer[f"mlp.{name}.weight"])
    mid.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
    mid.post_attention_layernorm.weight.copy_(layer["post_attention_layernorm.weight"])
    drafter.norm.weight.copy_(layer["norm.weight"])
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, 2 * h :] += torch.eye(h)


def layer_fits(config: Eagle3Config, layer: Mapping[str, Tensor]) -> bool:
    """Whether a target's last layer has the drafter's sizes, so that the drafter can begin with it."""
    c, h = config, config.hidden_size
    expected = {
        "self_attn.q_proj.weight": (c.num_attention_heads * c.head_dim, h),
        "self_attn.k_proj.weight": (c.num_key_value_heads * c.head_dim, h),
        "self_attn.v_proj.weight": (c.num_key_value_heads * c.head_dim, h),
        "self_attn.o_proj.weight": (h, c.num_attention_heads * c.head_dim),
        "mlp.gate_proj.weight": (c.intermediate_size, h),
        "mlp.up_proj.weight": (c.intermediate_size, h),
        "mlp.down_proj.weight": (h, c.intermediate_size),
    }
    return all(name in layer and tuple(layer[name].shape) == shape for name, shape in expected.items())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in Llama's half-split layout.  x [..., heads, D]; returns x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class _Projections:
    """q, k and v of a batch, with W·[e; h] computed as W_e·e + W_h·h.

    The embedding's half depends on the token alone, and step k at t reads the token of step 0 at t+k: so it is
    computed once for each token, and steps pick their rows.
    """

    def __init__(self, drafter: Eagle3Drafter, embedded: Tensor, batch: "Batch"):
        c, attention = drafter.config, drafter.midlayer.self_attn
        self.batch, self.head_dim, self.drafter = batch, c.head_dim, drafter
        h = c.hidden_size
        key_value = torch.cat([attention.k_proj.weight, attention.v_proj.weight])
        self.key_value_hidden, self.query_hidden = key_value[:, h:], attention.q_proj.weight[:, h:]
        self.key_value_embedded = F.linear(embedded, key_value[:, :h])  # [M, 2·KV·D]
        self.query_embedded = F.linear(embedded[batch.query], attention.q_proj.weight[:, :h])  # [N, A·D]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of step 0 at all positions, [M, KV, D]."""
        x = self._heads(self.key_value_embedded + F.linear(normed, self.key_value_hidden))
        keys, values = x.chunk(2, dim=-2)
        return rotate(keys, *self.drafter.rotary(self.batch.positions)), values

    def own_key_value(self, normed: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The key and value that step k adds at each query's own position, [N, KV, D]."""
        x = self._heads(
            self.key_value_embedded[self.batch.query[self.batch.ahead[k]]] + F.linear(normed, self.key_value_hidden)
        )
        keys, values = x.chunk(2, dim=-2)
        return rotate(keys, *self._rotary(k)), values

    def query(self, normed: Tensor, k: int) -> Tensor:
        """[N, A, D]"""
        x = self.query_embedded[self.batch.ahead[k]] + F.linear(normed, self.query_hidden)
        return rotate(self._heads(x), *self._rotary(k))

    def _rotary(self, k: int) -> tuple[Tensor, Tensor]:
        return self.drafter.rotary(self.batch.positions[self.batch.query] + k)


# --------------------------------------------------------------------------------------------------------------------
# The batch: which positions exist, which need a query, and what each predicts.


@dataclass(frozen=True)
class Row:
    """A row, or a window of a long one: what training needs of it.

    token_ids int [T]; aux [T, 3H]; last [T, H] (after the target's final norm: logits = lm_head(last)); targets
    j = first_target … T-1 carry loss, so first_target is the prompt's length, or later in a window; start is the
    window's place in its row.
    """

    token_ids: Tensor
    aux: Tensor
    last: Tensor
    first_target: int
    start: int = 0


@dataclass(frozen=True)
class Span:
    """Where a row lies in a batch: its queries in N, its keys in M.  Its queries are its last positions."""

    first_query: int
    queries: int
    first_key: int
    keys: int


@dataclass(frozen=True)
class Batch:
    """Rows one after another, without padding.  A row of T tokens has the positions t = 0 … T-2."""

    next_ids: Tensor  # int64 [M], x[t+1]
    aux: Tensor  # [M, 3H]
    positions: Tensor  # int64 [M], t in the row that a window was cut from
    query: Tensor  # int64 [N] into M: the positions with a query, t = max(0, first_target - K) … T-2
    ahead: Tensor  # int64 [K, N] into N: the position k further, whose next token is x[t+1+k]; at a row's end, its last
    targets: Tensor  # [J, H], last[j] for the targets j of all rows
    predicts: Tensor  # int64 [K, J] into N: t = j-1-k, the position that predicts target j at step k
    counted: Tensor  # bool [K, J]: whether that position exists (a prompt may be shorter than k)
    rows: tuple[Span, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], steps: int) -> "Batch":
        query, ahead, positions, predicts, counted, spans = [], [], [], [], [], []
        m = n = 0
        step = torch.arange(steps)[:, None]
        for row in rows:
            keys = len(row.token_ids) - 1
            first = max(0, row.first_target - steps)
            queries = keys - first
            spans.append(Span(n, queries, m, keys))
            positions.append(torch.arange(row.start, row.start + keys))
            query.append(torch.arange(m + first, m + keys))
            ahead.append((torch.arange(queries) + step).clamp(max=queries - 1) + n)
            t = torch.arange(row.first_target, keys + 1) - 1 - step
            predicts.append((t - first).clamp(min=0) + n)
            counted.append(t >= 0)
            m, n = m + keys, n + queries
        return cls(
            next_ids=torch.cat([row.token_ids[1:] for row in rows]).long(),
            aux=torch.cat([row.aux[:-1] for row in rows]),
            positions=torch.cat(positions),
            query=torch.cat(query),
            ahead=torch.cat(ahead, dim=1),
            targets=torch.cat([row.last[row.first_target :] for row in rows]),
            predicts=torch.cat(predicts, dim=1),
            counted=torch.cat(counted, dim=1),
            rows=tuple(spans),
        )

    def to(self, device: torch.device | str) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{n: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for n, v in values.items()})


def counted_targets(prompt_length: int, length: int, steps: int) -> list[int]:
    """How many targets of a row, or of a window, count at each step."""
    return [max(0, length - max(prompt_length, k + 1)) for k in range(steps)]


# --------------------------------------------------------------------------------------------------------------------
# Attention: causal keys of step 0, and one key of each later step at the query's own position.


def attend(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: list[Tensor], own_values: list[Tensor], rows: Sequence[Span]
) -> Tensor:
    """q [N, A, D]; keys, values [M, KV, D] of step 0; own_keys, own_values: one [N, KV, D] for each later step, the
    current one included.  Returns [N, A·D] in q's dtype.

    Query n of a row sees the row's keys up to its own position, and of each later step the key at its own position.
    Rows see only themselves: no score is computed that a mask would remove, but for a triangle in each block of queries.
    """
    kv = keys.shape[1]
    q = q.unflatten(1, (kv, -1)).permute(1, 2, 0, 3)  # [KV, G, N, D]
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [KV, M, D]
    if own_keys:
        own_k, own_v = torch.stack(own_keys).transpose(1, 2), torch.stack(own_values).transpose(1, 2)  # [k, KV, N, D]
    else:
        own_k = own_v = q.new_empty(0, kv, q.shape[2], q.shape[3])
    with torch.autocast(q.device.type, enabled=False):  # dtypes are chosen by hand in there
        out = _Attend.apply(*(x.contiguous() for x in (q, keys, values, own_k, own_v)), rows)
    return out.permute(2, 0, 1, 3).flatten(1)


def _blocks(rows: Sequence[Span], heads: int, at_once: int):
    """(queries, keys) slices into N and M: blocks of queries with the keys that the last of them sees."""
    for row in rows:
        size = max(LEAST_QUERIES, at_once // (heads * row.keys))
        for begin in range(0, row.queries, size):
            end = min(begin + size, row.queries)
            seen = row.keys - row.queries + end
            yield slice(row.first_query + begin, row.first_query + end), slice(row.first_key, row.first_key + seen)


class _Attend(torch.autograd.Function):
    """Probabilities are computed again in the backward pass, so that no score outlives its block of queries."""

    @staticmethod
    def probabilities(q: Tensor, keys: Tensor, own_scores: Tensor) -> Tensor:
        """One softmax in fp32 over the causal and the own scores: [KV, G·n, keys + k] for a block of n queries.

        The last n keys are the queries' own positions, so the causal mask is a triangle at the end.
        """
        (kv, group, n, size), seen = q.shape, keys.shape[1]
        scores = q.new_empty(kv, group, n, seen + own_scores.shape[-1], dtype=torch.float32)
        torch.mul((q.flatten(1, 2) @ keys.mT).view(kv, group, n, seen), 1 / math.sqrt(size), out=scores[..., :seen])
        scores[..., seen:] = own_scores
        scores[..., seen - n : seen] += torch.full((n, n), -torch.inf, device=q.device).triu(1)
        return scores.softmax(-1).flatten(1, 2)

    @staticmethod
    def forward(
        ctx, q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, rows: Sequence[Span]
    ) -> Tensor:
        kv, group, _, size = q.shape
        own_scores = torch.einsum("vgnd,kvnd->vgnk", q.float(), own_k.float()) / math.sqrt(size)
        own_p = torch.empty_like(own_scores)
        out = torch.empty_like(q)
        for at, seen in _blocks(rows, kv * group, SCORES_AT_ONCE[q.device.type]):
            n, s = at.stop - at.start, seen.stop - seen.start
            p = _Attend.probabilities(q[:, :, at], keys[:, seen], own_scores[:, :, at])
            own_p[:, :, at] = p[..., s:].view(kv, group, n, -1)
            out[:, :, at] = (p[..., :s].to(values.dtype) @ values[:, seen]).view(kv, group, n, size)
        out += torch.einsum("vgnk,kvnd->vgnd", own_p, own_v.float()).to(out.dtype)
        ctx.save_for_backward(q, keys, values, own_k, own_v, own_scores, own_p, out)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, keys, values, own_k, own_v, own_scores, own_p, out = ctx.saved_tensors
        kv, group, _, size = q.shape
        scale = 1 / math.sqrt(size)
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)  # [KV, G, N, 1], sum of p · dp over all keys
        grad_q, grad_keys, grad_values = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for at, seen in _blocks(ctx.rows, kv * group, SCORES_AT_ONCE[q.device.type]):
            n, s = at.stop - at.start, seen.stop - seen.start
            q_block, grad_block = q[:, :, at].flatten(1, 2), grad[:, :, at].flatten(1, 2)  # [KV, G·n, D]
            p = _Attend.probabilities(q[:, :, at], keys[:, seen], own_scores[:, :, at])[..., :s]
            grad_values[:, seen] += p.to(grad.dtype).mT @ grad_block
            grad_scores = (
                (grad_block @ values[:, seen].mT).float().sub_(delta[:, :, at].flatten(1, 2)).mul_(p).mul_(scale)
            )
            grad_scores = grad_scores.to(q.dtype)
            grad_q[:, :, at] = (grad_scores @ keys[:, seen]).view(kv, group, n, size)
            grad_keys[:, seen] += grad_scores.mT @ q_block
        grad_own = torch.einsum("vgnd,kvnd->vgnk", grad.float(), own_v.float()).sub_(delta).mul_(own_p).mul_(scale)
        grad_q += torch.einsum("vgnk,kvnd->vgnd", grad_own, own_k.float()).to(q.dtype)
        grad_own_k = torch.einsum("vgnk,vgnd->kvnd", grad_own, q.float()).to(own_k.dtype)
        grad_own_v = torch.einsum("vgnk,vgnd->kvnd", own_p, grad.float()).to(own_v.dtype)
        return grad_q, grad_keys, grad_values, grad_own_k, grad_own_v, None


# --------------------------------------------------------------------------------------------------------------------
# The loss: soft cross-entropy against the target's distribution over the draft vocabulary.


@dataclass(frozen=True)
class Losses:
    total: Tensor  # scalar, differentiable: sum over steps and targets of weight · cross-entropy
    by_step: Tensor  # fp32 [K]: sum of the cross-entropy over the targets with weight
    agreements: Tensor  # int64 [K]: targets with weight whose best token is the drafter's best


def draft_loss(outputs: Tensor, head: Tensor, targets: Tensor, target_head: Tensor, weight: Tensor) -> Losses:
    """outputs [K, J, H] after the final norm; head, target_head [Vd, H]; targets [J, H]; weight fp32 [K, J]."""
    dtype = product_dtype(outputs)
    arguments = (
        outputs.to(dtype),
        head.to(dtype),
        targets.to(dtype),
        target_head.to(dtype),
        weight,
        torch.is_grad_enabled(),
    )
    return Losses(*_DraftLoss.apply(*arguments))


class _DraftLoss(torch.autograd.Function):
    """Both heads, softmax and cross-entropy in chunks of targets.

    The gradient for the drafter's outputs and head is made in the forward pass, while a chunk's logits exist: they are
    computed once and never all in memory.  A target's distribution is computed once and serves all steps.
    """

    @staticmethod
    def forward(
        ctx, outputs: Tensor, head: Tensor, targets: Tensor, target_head: Tensor, weight: Tensor, with_grad: bool
    ):
        steps, count, _ = outputs.shape
        with torch.autocast(outputs.device.type, enabled=False):  # the caller chose dtypes
            total = torch.zeros((), device=outputs.device)
            by_step = torch.zeros(steps, device=outputs.device)
            agreements = torch.zeros(steps, dtype=torch.int64, device=outputs.device)
            grad_outputs = torch.empty_like(outputs) if with_grad else None
            grad_head = torch.zeros(head.shape, device=head.device) if with_grad else None
            size = max(1, LOGITS_AT_ONCE[outputs.device.type] // (steps * len(head)))
            for begin in range(0, count, size):
                chunk = slice(begin, begin + size)
                w = weight[:, chunk]
                target_logits = F.linear(targets[chunk], target_head).float()  # [c, Vd]
                p = target_logits.softmax(-1)
                x = outputs[:, chunk].reshape(-1, outputs.shape[-1])  # [K·c, H]
                logits = F.linear(x, head).float().view(steps, -1, len(head))
                best, token = logits.max(-1)  # [K, c]
                cross = torch.bmm(logits.transpose(0, 1), p[..., None]).squeeze(-1).T  # sum of p · logits
                q = logits.softmax(-1)
                # log-sum-exp = best - log q[best], and q[best] ≥ 1/Vd: no need to pass over the logits again
                cross = best - q.gather(-1, token[..., None]).squeeze(-1).log() - cross
                counted = w > 0
                total += (w * cross).sum()
                by_step += (cross * counted).sum(1)
                agreements += ((token == target_logits.argmax(-1)) & counted).sum(1)
                if with_grad:
                    grad_logits = q.sub_(p).flatten(0, 1).to(head.dtype)  # of the unweighted cross-entropy
                    w = w.reshape(-1, 1)
                    grad_outputs[:, chunk] = (w * (grad_logits @ head)).view(steps, -1, outputs.shape[-1])
                    grad_head += grad_logits.mT @ (w * x).to(head.dtype)
        ctx.save_for_backward(grad_outputs, grad_head)
        ctx.mark_non_differentiable(by_step, agreements)
        ctx.head_dtype = head.dtype
        return total, by_step, agreements

    @staticmethod
    def backward(ctx, grad_total: Tensor, *_: Tensor):
        grad_outputs, grad_head = ctx.saved_tensors
        return grad_outputs * grad_total, (grad_head * grad_total).to(ctx.head_dtype), None, None, None, None
