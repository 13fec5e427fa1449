"""Speculative decoding: a draft is proposed, the target verifies all of it in one pass, and keeps what it would have
written itself.

Whoever drafts, the output is the target's: at temperature 0 the same tokens, else tokens of the same distribution.  This
module knows the target with its key-value cache, the rule of acceptance, and the loop; it does not know how a draft
comes about (eaglet.proposers), nor what is counted (eaglet.acceptance).

Positions: after `start` the target has read the prompt; the last token of `output` is always known but not yet read.
A pass reads it and the draft behind it, so its first row of logits says what follows the known tokens.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from eaglet.errors import TargetError
from eaglet.forward import LayerTap, decoder_of
from eaglet.token_sampling import SamplingParams, kept_tokens


@dataclass(frozen=True)
class Draft:
    """Proposed tokens.  parents[i] is the token that token i follows, −1 for the last known token; parents come first.

    A chain has parents −1, 0, 1, …; siblings stand in the order in which they are to be tried.
    """

    tokens: list[int]
    parents: list[int]

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "Draft":
        return cls(list(tokens), list(range(-1, len(tokens) - 1)))

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.tokens) - 1))

    def depths(self) -> list[int]:
        """How many tokens lie between each token and the last known one, itself included: from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def children(self) -> dict[int, list[int]]:
        """Token (−1: the last known one) -> its children, in order."""
        found: dict[int, list[int]] = {}
        for token, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(token)
        return found

    def visible(self) -> Tensor:
        """bool [n + 1, n + 1]: row i may look at column j.  Row and column 0 are the last known token."""
        mask = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        mask[:, 0] = True
        for token, parent in enumerate(self.parents):
            mask[token + 1] |= mask[parent + 1]
        return mask


class Proposer(Protocol):
    """Drafts for one sequence after another."""

    def start(self, prompt_ids: Sequence[int], first: int, aux: Tensor) -> None:
        """A new sequence: the prompt, the first token after it, and aux [P, 3H] of the prompt's positions."""

    def propose(self, depth: int, following: Sequence[int] | None = None) -> Draft:
        """A draft that reaches at most `depth` tokens ahead; it may be empty.

        `following`: the tokens that will follow, where they are known (`replay`); what stands behind a wrong token need not be right.
        """

    def advance(self, tokens: Sequence[int], aux: Tensor) -> None:
        """These tokens were added.  aux [len(tokens), 3H] is of the positions in front of each of them."""


class NoDraft:
    """Decoding as without a drafter: every pass of the target reads one token."""

    def start(self, prompt_ids: Sequence[int], first: int, aux: Tensor) -> None:
        pass

    def propose(self, depth: int, following: Sequence[int] | None = None) -> Draft:
        return Draft([], [])

    def advance(self, tokens: Sequence[int], aux: Tensor) -> None:
        pass


class TargetDecoder:
    """The target with the key-value cache of one sequence, and the auxiliary layers of its last pass."""

    def __init__(self, model: torch.nn.Module, layers: Sequence[int]):
        self.model, self.decoder, self.head = model, decoder_of(model), model.get_output_embeddings()
        self.device = next(model.parameters()).device
        self._tap = LayerTap(self.decoder, layers)
        self._draft = Draft([], [])

    def start(self, prompt_ids: Sequence[int]) -> Tensor:
        """Read a prompt; returns the logits [V] of the token that follows it."""
        self.cache = DynamicCache(config=self.model.config.get_text_config())
        logits = self._read(prompt_ids, last_only=True)[-1]
        if not all(layer.is_croppable for layer in self.cache.layers):
            raise TargetError(
                f"{type(self.model).__name__}: its cache cannot take back rejected tokens (sliding window or recurrent layers); "
                "evaluate with server.engine: sglang"
            )
        return logits

    def verify(self, token: int, draft: Draft) -> Tensor:
        """Read the last known token and the draft; returns logits [n + 1, V], row 0 those that follow `token`."""
        self._draft, self._read_before = draft, self.cache.get_seq_length()
        if draft.is_chain:
            return self._read([token, *draft.tokens])
        positions = torch.tensor([0, *draft.depths()], device=self.device) + self._read_before
        visible = draft.visible().to(self.device)
        known = torch.ones(len(visible), self._read_before, dtype=torch.bool, device=self.device)
        mask = torch.cat([known, visible], dim=1)[None, None]  # [1, 1, n + 1, known + n + 1]
        return self._read([token, *draft.tokens], attention_mask=mask, position_ids=positions[None])

    def keep(self, path: Sequence[int]) -> None:
        """Of the last draft keep these tokens (each the child of the one before) in the cache, and forget the others."""
        if list(path) == list(range(len(path))):
            self.cache.crop(len(path) - len(self._draft.tokens))
            return
        start = self._read_before + 1
        kept = torch.tensor([*range(start), *(start + i for i in path)], device=self.device)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]

    def aux(self, rows: Sequence[int] | None = None) -> Tensor:
        """[n, 3H]: the auxiliary layers of the last pass, of all its positions or of some."""
        aux = self._tap.aux()[0]
        return aux if rows is None else aux[list(rows)]

    def read_all(self, token_ids: Sequence[int]) -> Tensor:
        """`last` [T, H] of a whole sequence, in one pass that leaves the cache alone; `aux` then covers all of it."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        return self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]

    def _read(self, token_ids: Sequence[int], *, last_only: bool = False, **more: Tensor) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self.device)
        hidden = self.decoder(input_ids=ids, cache=self.cache, use_cache=True, **more).last_hidden_state[0]
        return self.head(hidden[-1:] if last_only else hidden)

    def close(self) -> None:
        self._tap.close()


class Greedy:
    """Acceptance at temperature 0: a drafted token stays if it is the target's most likely one."""

    def token(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def walk(self, logits: Tensor, draft: Draft) -> tuple[list[int], int]:
        """(the accepted tokens of the draft, from the root on; the token that the target adds).  logits [n + 1, V]."""
        best = logits.argmax(dim=-1).tolist()
        children, path, node = draft.children(), [], -1
        while (
            child := next((c for c in children.get(node, ()) if draft.tokens[c] == best[node + 1]), None)
        ) is not None:
            path.append(child)
            node = child
        return path, best[node + 1]


class Sampling:
    """Acceptance when sampling: what comes out has exactly the target's distribution p, whatever was drafted.

    The drafted tokens are taken as given, not as samples, so the rule of speculative sampling (Leviathan et al.,
    arXiv:2211.17192; Chen et al., arXiv:2302.01318) has a point mass as its q: a token is accepted with probability p(token),
    else p loses it and is normalised, and the next sibling is tried against what is left (SGLang's rule as well).
    """

    def __init__(self, params: SamplingParams, seed: int):
        self.params = params
        self.generator = torch.Generator().manual_seed(seed)

    def token(self, logits: Tensor) -> int:
        return self._draw(self._distribution(logits))

    def walk(self, logits: Tensor, draft: Draft) -> tuple[list[int], int]:
        children, path, node = draft.children(), [], -1
        while True:
            p = self._distribution(logits[node + 1])
            for child in children.get(node, ()):
                token = draft.tokens[child]
                if torch.rand((), generator=self.generator, dtype=torch.float64) < p[token]:
                    break
                p[token] = 0
                p /= p.sum()
            else:
                return path, self._draw(p)
            path.append(child)
            node = child

    def _distribution(self, logits: Tensor) -> Tensor:
        """p, float64 [V], on the CPU: temperature, then the filters of the server."""
        p = (logits.double() / self.params.temperature).softmax(-1).cpu()
        ids, weights = kept_tokens(p, self.params)
        if ids is None:
            return p
        return torch.zeros_like(p).index_put_((ids,), weights / weights.sum())

    def _draw(self, p: Tensor) -> int:
        return int(torch.multinomial(p, 1, generator=self.generator))


@dataclass(frozen=True)
class Round:
    """One pass of the target over a draft."""

    start: int  # index into output_ids of the first token that it added
    proposed: int  # how many tokens ahead the draft reached (no further than the output went on)
    accepted: int  # drafted tokens that stayed
    emitted: int  # tokens added: the accepted ones and the target's own, unless the output ended before it

    @classmethod
    def of(cls, draft: Draft, start: int, accepted: int, emitted: int, *, stopped: bool) -> "Round":
        """`stopped`: the last emitted token ended the output, so what was drafted beyond it does not count."""
        reach = max(draft.depths(), default=0)
        return cls(start, min(reach, emitted) if stopped else reach, min(accepted, emitted), emitted)


@dataclass
class Decoded:
    """What decoding one prompt gave.  The first token comes from reading the prompt and belongs to no round."""

    output_ids: list[int]
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0  # from the first token to the last, drafting included, the target's reading of the prompt not


@torch.inference_mode()
def decode(
    target: TargetDecoder,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    draft_tokens: int,
    stop_ids: Collection[int],
    rule: Greedy | Sampling | None = None,
) -> Decoded:
    """Continue a prompt until one of `stop_ids` or `max_new_tokens`; drafts reach at most `draft_tokens` ahead."""
    rule = rule or Greedy()
    decoded = Decoded([rule.token(target.start(prompt_ids))])
    output, drafts = decoded.output_ids, not isinstance(proposer, NoDraft)
    begun = time.perf_counter()
    if drafts:
        proposer.start(prompt_ids, output[0], target.aux())
    while output[-1] not in stop_ids and len(output) < max_new_tokens:
        draft = proposer.propose(min(draft_tokens, max_new_tokens - len(output) - 1))
        path, following = rule.walk(target.verify(output[-1], draft), draft)
        target.keep(path)
        added = [*(draft.tokens[i] for i in path), following]
        end = next((i + 1 for i, token in enumerate(added) if token in stop_ids), len(added))
        decoded.rounds.append(Round.of(draft, len(output), len(path), end, stopped=added[end - 1] in stop_ids))
        output += added[:end]
        if drafts:
            proposer.advance(added, target.aux([0, *(i + 1 for i in path)]))
    decoded.seconds = time.perf_counter() - begun
    return decoded


@torch.inference_mode()
def replay(
    proposer: Proposer,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    aux: Tensor,
    *,
    max_new_tokens: int,
    draft_tokens: int,
) -> list[Round]:
    """The rounds in which `decode` would come to a greedy output, found without the target: its answers are known.

    aux [len(prompt_ids) + len(output_ids), 3H]: of the whole sequence, from one pass.
    """
    at, known, rounds = len(prompt_ids), 1, []  # `known` output tokens; output token i stands at position at + i
    proposer.start(prompt_ids, output_ids[0], aux[:at])
    while known < len(output_ids):
        draft = proposer.propose(min(draft_tokens, max_new_tokens - known - 1), output_ids[known:])
        children, node, accepted = draft.children(), -1, 0
        while known + accepted < len(output_ids):
            following = output_ids[known + accepted]
            child = next((c for c in children.get(node, ()) if draft.tokens[c] == following), None)
            if child is None:
                break
            node, accepted = child, accepted + 1
        end = min(known + accepted + 1, len(output_ids))
        stopped = end == len(output_ids) and end < max_new_tokens
        rounds.append(Round.of(draft, known, accepted, end - known, stopped=stopped))
        proposer.advance(output_ids[known:end], aux[at + known - 1 : at + end - 1])
        known = end
    return rounds
