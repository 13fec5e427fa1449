"""Speculative decoding: the output is the target's whatever is drafted, and a proposer sees the right hidden states."""

import pytest
import torch

from eaglet.eagle3 import Eagle3Config, Eagle3Drafter
from eaglet.forward import HiddenForward
from eaglet.proposers import EagleChain, EagleTree, PromptLookup
from eaglet.speculative import Draft, Greedy, NoDraft, Round, Sampling, TargetDecoder, decode
from eaglet.targets import Target
from eaglet.token_sampling import SamplingParams

LAYERS = [2, 4, 5]
PROMPT = [1, 40, 41, 42, 60, 61, 62, 7, 3]
LENGTH = 40


@pytest.fixture(scope="module")
def target(tiny_target):
    return TargetDecoder(Target(model=str(tiny_target), dtype="float32").load(), LAYERS)


@pytest.fixture(scope="module")
def plain(target):
    """The greedy continuation of PROMPT."""
    return run(target, NoDraft()).output_ids


def run(target, proposer, prompt=PROMPT, **more):
    options = {"max_new_tokens": LENGTH, "draft_tokens": 4, "stop_ids": ()} | more
    return decode(target, proposer, prompt, **options)


class Oracle:
    """Drafts the true continuation, with every `wrong`-th token replaced; keeps what it is told."""

    def __init__(self, truth, wrong=0, branches=1):
        self.truth, self.wrong, self.branches = truth, wrong, branches
        self.tokens, self.aux = [], []

    def start(self, prompt_ids, first, aux):
        self.tokens, self.aux, self.prompt = [*prompt_ids[1:], first], [aux], len(prompt_ids)

    def advance(self, tokens, aux):
        self.tokens += tokens
        self.aux.append(aux)

    def propose(self, depth, following=None):
        place = len(self.tokens) - self.prompt + 1
        right = [
            token if not self.wrong or (place + i + 1) % self.wrong else token + 1
            for i, token in enumerate(self.truth[place : place + depth])
        ]
        if self.branches == 1:
            return Draft.chain(right)
        tokens, parents, parent = [], [], -1  # at each depth some wrong siblings, the right one last
        for token in right:
            tokens += [(token + 10 + i) % 500 for i in range(self.branches - 1)] + [token]
            parents += [parent] * self.branches
            parent = len(tokens) - 1
        return Draft(tokens, parents)


def test_plain_decoding_is_what_transformers_generates(target, plain):
    own = target.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert plain == own[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("wrong", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("branches", [1, 3])
def test_greedy_output_does_not_depend_on_the_draft(target, plain, wrong, branches):
    decoded = run(target, Oracle(plain, wrong, branches))
    assert decoded.output_ids == plain
    assert 1 + sum(r.emitted for r in decoded.rounds) == LENGTH


def test_a_perfect_draft_is_accepted_whole_and_a_wrong_one_not_at_all(target, plain):
    assert [r.accepted for r in run(target, Oracle(plain)).rounds] == [4] * 7 + [3]
    assert {r.accepted for r in run(target, Oracle(plain, wrong=1)).rounds} == {0}


@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize("branches", [1, 3])
def test_the_proposer_gets_the_auxiliary_layers_of_the_tokens_that_stayed(target, plain, tiny_target, wrong, branches):
    oracle = Oracle(plain, wrong, branches)
    run(target, oracle)
    sequence = PROMPT + plain
    ((aux, _),) = HiddenForward(Target(model=str(tiny_target), dtype="float32"), LAYERS).states([sequence])
    told = torch.cat(oracle.aux)
    assert oracle.tokens[: len(sequence) - 1] == sequence[1:]  # position t is told x[t+1] …
    torch.testing.assert_close(told[: len(sequence) - 1], aux[:-1], rtol=1e-3, atol=1e-3)  # … with aux[t]


def test_the_output_ends_with_the_first_stop_token_even_inside_a_draft(target, plain):
    stop = plain[8]
    end = plain.index(stop) + 1
    decoded = run(target, Oracle(plain), stop_ids={stop})
    assert decoded.output_ids == plain[:end]
    last = decoded.rounds[-1]
    assert last.start + last.emitted == end and last.accepted <= last.emitted and last.proposed <= last.emitted


def test_rounds_count_what_was_drafted_and_kept(target, plain):
    decoded = run(target, Oracle(plain, wrong=3), max_new_tokens=8)
    # tokens 2, 5 and 8 of the output (from 1: 3, 6, 9) are drafted wrong
    assert decoded.rounds == [Round(1, 4, 1, 2), Round(3, 4, 2, 3), Round(6, 1, 1, 2)]


def test_a_tree_sees_only_its_own_branch():
    tree = Draft([7, 8, 9, 7], [-1, -1, 0, 1])
    assert tree.depths() == [1, 1, 2, 2] and not tree.is_chain
    assert tree.visible().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_greedy_walks_down_the_branch_that_the_target_takes():
    tree = Draft([5, 6, 7, 8], [-1, -1, 0, 1])
    best = [6, 0, 8, 0, 3]  # after the root 6, after token 1 (6) 8, after token 3 (8) the target adds 3
    logits = torch.nn.functional.one_hot(torch.tensor(best), 10).float()
    assert Greedy().walk(logits, tree) == ([1, 3], 3)


TREES = {
    "chain": Draft.chain([2, 0]),
    "siblings": Draft([2, 0, 4, 1], [-1, -1, 1, 1]),
    "nothing": Draft([], []),
    "unlikely": Draft.chain([3, 3]),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8), SamplingParams(temperature=1.3, top_p=0.9)])
def test_sampling_keeps_the_targets_distribution_whatever_is_drafted(name, params):
    """Chi-square over the first two tokens of many walks, against sampling them one after another."""
    draft, vocabulary, walks = TREES[name], 5, 6000
    generator = torch.Generator().manual_seed(1)
    after = (
        torch.randn(vocabulary + 1, vocabulary, generator=generator) * 1.5
    )  # logits after each token; last: the root's
    rule = Sampling(params, seed=2)
    logits = after[[vocabulary, *draft.tokens]]
    counts = torch.zeros(vocabulary, vocabulary)
    for _ in range(walks):
        path, added = rule.walk(logits, draft)
        tokens = [*(draft.tokens[i] for i in path), added]
        if len(tokens) == 1:
            tokens.append(rule.token(after[tokens[0]]))
        counts[tokens[0], tokens[1]] += 1
    first = rule._distribution(after[vocabulary])
    expected = torch.stack([first[t] * rule._distribution(after[t]) for t in range(vocabulary)]) * walks
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_sampled_decoding_ends_and_is_repeatable(target, plain):
    def sampled(seed):
        return run(target, Oracle(plain), rule=Sampling(SamplingParams(temperature=1.0), seed)).output_ids

    assert sampled(3) == sampled(3) != sampled(4)


@pytest.fixture(scope="module")
def drafter(target):
    torch.manual_seed(0)
    config = Eagle3Config(64, 128, 4, 2, 16, 512, 128, 1e-6, 10000.0, 1024, tuple(LAYERS))
    made = Eagle3Drafter(config, target.model.get_input_embeddings().weight)
    made.set_draft_vocab(torch.arange(128) * 4 + 1)
    return made.eval()


def test_the_drafters_cache_is_that_of_the_kept_tokens_alone(target, plain, drafter):
    """After rounds of accepted and rejected guesses its next draft is that of a drafter that starts there."""
    proposers = [EagleChain(drafter) for _ in range(2)]
    aux = torch.cat([target.start(PROMPT + plain)[:0, None].expand(0, 192), target.aux()])
    size = len(PROMPT)
    with torch.inference_mode():
        proposers[0].start(PROMPT, plain[0], aux[:size])
        for start, end in [(1, 2), (2, 5), (5, 6), (6, 11)]:
            proposers[0].propose(4)
            proposers[0].advance(plain[start:end], aux[size + start - 1 : size + end - 1])
        proposers[1].start(PROMPT + plain[:10], plain[10], aux[: size + 10])
        drafts = [proposer.propose(5) for proposer in proposers]
    assert drafts[0] == drafts[1]
    torch.testing.assert_close(proposers[0].hidden, proposers[1].hidden, rtol=1e-3, atol=1e-4)


def test_drafting_with_eagle_leaves_the_output_unchanged(target, plain, drafter):
    decoded = run(target, EagleChain(drafter))
    assert decoded.output_ids == plain
    assert all(r.proposed == min(4, LENGTH - r.start - 1) for r in decoded.rounds)


def test_prompt_lookup_continues_the_latest_repetition():
    proposer = PromptLookup()
    proposer.start([5, 6, 7, 8, 5, 6, 9, 5], 6, torch.empty(0))
    assert proposer.propose(3).tokens == [9, 5, 6]  # [5, 6] stood last before 9; three tokens nowhere
    proposer.advance([100], torch.empty(0))
    assert proposer.propose(3).tokens == []


def test_a_tree_of_one_branch_is_the_chain(target, plain, drafter):
    chain, tree = run(target, EagleChain(drafter)), run(target, EagleTree(drafter, branches=1, tokens=4))
    assert tree.output_ids == plain and tree.rounds == chain.rounds


def test_drafting_a_tree_leaves_the_output_unchanged_and_accepts_no_less(target, plain, drafter):
    chain = run(target, EagleChain(drafter))
    tree = run(target, EagleTree(drafter, branches=8, tokens=60))
    assert tree.output_ids == plain
    assert len(tree.rounds) <= len(chain.rounds)


def test_a_trees_nodes_are_what_the_drafter_says_along_their_own_branch(target, plain, drafter):
    """The tree's likelihoods, found in parallel under a mask, against chains forced down each branch."""
    tree = EagleTree(drafter, branches=3, tokens=1000)
    with torch.inference_mode():
        target.start(PROMPT)
        aux = target.aux()
        tree.start(PROMPT, plain[0], aux)
        draft = tree.propose(3)
        assert len(draft.tokens) == 3 + 9 + 9 and draft.depths() == [1] * 3 + [2] * 9 + [3] * 9
        children = draft.children()
        for node in [-1, *children]:
            branch, at = [], node
            while at >= 0:
                branch.insert(0, draft.tokens[at])
                at = draft.parents[at]
            chain = EagleChain(drafter)
            chain.start(PROMPT, plain[0], aux)
            logits, hidden = chain.logits, chain.hidden
            for ahead, token in enumerate(branch):
                position = torch.tensor([[len(PROMPT) + ahead]])
                logits, hidden = drafter.step(torch.tensor([[token]]), hidden, position, chain.cache)
                logits = logits[:, -1]
            best = drafter.to_target_ids(logits[0].topk(3).indices).tolist()
            if node in children:
                assert [draft.tokens[c] for c in children[node]] == best


def test_a_proposed_nodes_parent_is_proposed(target, plain, drafter):
    proposer = EagleTree(drafter, branches=4, tokens=10)
    with torch.inference_mode():
        target.start(PROMPT)
        proposer.start(PROMPT, plain[0], target.aux())
        draft = proposer.propose(4)
    assert len(draft.tokens) == 10 and all(parent < node for node, parent in enumerate(draft.parents))
