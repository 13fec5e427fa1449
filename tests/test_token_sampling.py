"""The next token is chosen as SGLang's /generate does: same parameters, same defaults, same filters in the same order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglet.token_sampling import SamplingParams, kept_tokens, next_tokens


def filters_by_full_sort(probabilities: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """SGLang's `top_k_top_p_min_p_sampling_from_probs_torch`, in plain steps over the whole vocabulary."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i].item())
    kept, before = {}, 0.0
    for rank, token in enumerate(order):
        weight = probabilities[token].item()
        within_k = params.top_k == -1 or rank < params.top_k
        if within_k and before <= params.top_p and weight >= probabilities.max().item() * params.min_p:
            kept[token] = weight
        before += weight
    return kept


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.95, 0.999, 1.0]),
    top_k=st.sampled_from([-1, 1, 2, 5, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_the_filters_keep_what_a_full_sort_keeps(seed, top_p, top_k, min_p, spread) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(torch.randn(300, generator=generator).double() * spread, dim=-1)
    params = SamplingParams(top_p=top_p, top_k=top_k, min_p=min_p)
    ids, weights = kept_tokens(probabilities, params)
    ids = torch.arange(300) if ids is None else ids
    expected = filters_by_full_sort(probabilities, params)
    assert dict(zip(ids.tolist(), weights.tolist(), strict=True)) == pytest.approx(expected)
    assert ids.tolist() == sorted(ids.tolist())


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    expected = torch.softmax(logits / 0.5, dim=-1)
    draws = [(i + 0.5) / 2000 for i in range(2000)]
    params = [SamplingParams(temperature=0.5)] * 2000
    counts = torch.bincount(torch.tensor(next_tokens(logits.repeat(2000, 1), params, draws)), minlength=4)
    assert torch.allclose(counts / 2000, expected, atol=1e-3)


def test_rows_have_parameters_of_their_own() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9], [0.0, 3.0, 2.9], [0.0, 3.0, 2.9]])
    params = [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams()]
    before = logits.clone()
    assert next_tokens(logits, params, [0.99, 0.99, 0.99]) == [1, 1, 2]
    assert torch.equal(logits, before)


def test_the_largest_draw_stays_within_the_kept_tokens() -> None:
    logits = torch.full((1, 7), 0.0)
    assert next_tokens(logits, [SamplingParams(top_k=3)], [1 - 1e-17])[0] < 7


def test_defaults_are_sglangs() -> None:
    params = SamplingParams.from_json({"temperature": None, "skip_special_tokens": False, "n": 1, "stop": None})
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 1.0, 1.0, -1)
    assert SamplingParams.from_json({"max_new_tokens": None}).max_new_tokens is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", 2.5),
        ("min_p", -1),
        ("max_new_tokens", -1),
        ("max_new_tokens", True),
        ("min_new_tokens", 200),
        ("sampling_seed", 1.5),
        ("sampling_seed", 2**63),
        ("stop_token_ids", [1, "2"]),
        ("frequency_penalty", 0.5),
        ("regex", "a+"),
        ("no_such_field", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams.from_json({field: value})
