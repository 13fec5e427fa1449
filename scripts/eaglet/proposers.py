"""How drafts come about: from an EAGLE-3 drafter as a chain or as a tree, or from the prompt itself (prompt lookup).

A proposer knows the tokens and the target's auxiliary layers that the loop of eaglet.speculative hands it.  The alignment is
that of eaglet.eagle3: the drafter's position t pairs embed(x[t+1]) with fc(aux[t]) where the target has been, and with the
drafter's own last hidden state where it has not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eaglet.eagle3 import Eagle3Drafter
from eaglet.speculative import Draft

LONGEST_MATCH = 3  # tokens that prompt lookup compares, then two, then one


class DrafterCache:
    """Keys and values [1, KV, S, D] of one sequence, in one allocation that grows by doubling."""

    def __init__(self):
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [1, KV, T, D] each; returns all of them, the new ones last."""
        end = self.length + keys.shape[2]
        if self._keys is None or end > self._keys.shape[2]:
            self._keys, self._values = (
                self._grown(old, new, end) for old, new in [(self._keys, keys), (self._values, values)]
            )
        self._keys[:, :, self.length : end], self._values[:, :, self.length : end] = keys, values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _grown(self, old: Tensor | None, new: Tensor, length: int) -> Tensor:
        room = new.new_empty(*new.shape[:2], max(256, 2 * length), new.shape[3])
        if old is not None:
            room[:, :, : self.length] = old[:, :, : self.length]
        return room

    def truncate(self, length: int) -> None:
        self.length = length


class EagleChain:
    """The drafter's most likely token, then what it finds most likely behind that one, and so on."""

    def __init__(self, drafter: Eagle3Drafter):
        self.drafter = drafter
        self.device = drafter.fc.weight.device

    def start(self, prompt_ids: Sequence[int], first: int, aux: Tensor) -> None:
        self.cache, self.known = DrafterCache(), 0
        self._extend([*prompt_ids[1:], first], aux)

    def advance(self, tokens: Sequence[int], aux: Tensor) -> None:
        self.cache.truncate(self.known)  # forget the drafter's own guesses at what the target has now computed
        self._extend(tokens, aux)

    def _extend(self, tokens: Sequence[int], aux: Tensor) -> None:
        positions = torch.arange(self.known, self.known + len(tokens), device=self.device)
        ids = torch.tensor([list(tokens)], device=self.device)
        logits, hidden = self.drafter.step(ids, self.drafter.fuse(aux)[None], positions[None], self.cache)
        self.known += len(tokens)
        self.logits, self.hidden = logits[:, -1], hidden[:, -1:]  # [1, Vd], [1, 1, H]

    def propose(self, depth: int, following: Sequence[int] | None = None) -> Draft:
        tokens: list[int] = []
        logits, hidden = self.logits, self.hidden
        for ahead in range(depth):
            token = self.drafter.to_target_ids(logits.argmax(-1))  # [1]
            tokens.append(int(token))
            if following is not None and tokens != list(following[: ahead + 1]):
                return Draft.chain(tokens + [tokens[-1]] * (depth - len(tokens)))  # as long, and its end cannot matter
            if ahead + 1 < depth:
                position = torch.full((1, 1), self.known + ahead, device=self.device)
                logits, hidden = self.drafter.step(token[None], hidden, position, self.cache)
                logits = logits[:, -1]
        return Draft.chain(tokens)


class EagleTree(EagleChain):
    """A tree that grows where the drafter is sure (EAGLE-2, arXiv:2406.16858, as SGLang and vLLM grow it).

    At each depth the `branches` most likely nodes get `branches` children each; of all nodes the `tokens` most likely are
    proposed.  A node's likelihood is the product of the drafter's probabilities from the root down, so a proposed node's
    parent is proposed as well.
    """

    def __init__(self, drafter: Eagle3Drafter, *, branches: int, tokens: int):
        super().__init__(drafter)
        self.branches, self.tokens = branches, tokens

    def propose(self, depth: int, following: Sequence[int] | None = None) -> Draft:
        if depth == 0:
            return Draft([], [])
        tokens, parents, scores = [], [], []  # of every node so far
        frontier, outputs = (
            [-1],
            (self.logits[None], self.hidden),
        )  # nodes whose children come next, [1, n, Vd], [1, n, H]
        visible = torch.ones(1, self.known, dtype=torch.bool, device=self.device)  # [n, S]: what each of them looks at
        for ahead in range(depth):
            likelihood = outputs[0][0].float().log_softmax(-1) + torch.tensor(
                [[scores[node] if node >= 0 else 0.0] for node in frontier], device=self.device
            )
            best = likelihood.topk(self.branches)  # [n, branches]
            first = len(tokens)
            tokens += self.drafter.to_target_ids(best.indices).flatten().tolist()
            parents += [node for node in frontier for _ in range(self.branches)]
            scores += best.values.flatten().tolist()
            if ahead + 1 == depth:
                break
            order = sorted(range(first, len(tokens)), key=lambda node: -scores[node])
            grown = sorted(order[: self.branches])
            rows = [(node - first) // self.branches for node in grown]  # where each one's parent stands in the frontier
            own = torch.eye(len(grown), dtype=torch.bool, device=self.device)
            visible = torch.cat([visible[rows], own], dim=1)
            ids = torch.tensor([[tokens[node] for node in grown]], device=self.device)
            positions = torch.full_like(ids, self.known + ahead)
            outputs = self.drafter.step(ids, outputs[1][:, rows], positions, self.cache, visible[None, None])
            frontier = grown
        chosen = sorted(sorted(range(len(tokens)), key=lambda node: -scores[node])[: self.tokens])
        place = {-1: -1, **{node: i for i, node in enumerate(chosen)}}
        return Draft([tokens[node] for node in chosen], [place[parents[node]] for node in chosen])


class PromptLookup:
    """No model: what followed the last tokens where they stood before, in the prompt or in the output."""

    def start(self, prompt_ids: Sequence[int], first: int, aux: Tensor) -> None:
        self.tokens = [*prompt_ids, first]

    def advance(self, tokens: Sequence[int], aux: Tensor) -> None:
        self.tokens += tokens

    def propose(self, depth: int, following: Sequence[int] | None = None) -> Draft:
        for length in range(min(LONGEST_MATCH, len(self.tokens) - 1), 0, -1):
            ending = self.tokens[-length:]
            for start in range(len(self.tokens) - length - 1, -1, -1):
                if self.tokens[start : start + length] == ending:
                    return Draft.chain(self.tokens[start + length : start + length + depth])
        return Draft([], [])
