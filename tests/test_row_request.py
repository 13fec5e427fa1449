"""A request is explicit, fits the context, and is named by everything that decides its answer."""

from dataclasses import replace

import pytest

from capturing import SETTINGS
from eaglet.digests import request_key, row_seed
from eaglet.errors import ConfigError
from eaglet.row_request import Requests


def test_the_length_is_fitted_to_the_context(tiny_format):
    requests = Requests(tiny_format, SETTINGS, 100)
    assert requests.make("a", [9] * 20).max_new_tokens == 64
    assert requests.make("a", [9] * 40).max_new_tokens == 100 - 6 - 40
    assert requests.make("a", [9] * 93).max_new_tokens == 1
    assert requests.make("a", [9] * 94) is None


def test_everything_that_decides_an_answer_changes_the_key(tiny_format):
    def key(turn_format=tiny_format, sample_id="a", prompt_ids=(9, 10), context=None, **changes):
        return Requests(turn_format, {**SETTINGS, **changes}, context).make(sample_id, list(prompt_ids)).key

    others = [
        key(replace(tiny_format, fingerprint="0" * 64)),
        key(replace(tiny_format, end_of_turn_ids=(2,))),
        key(sample_id="b"),
        key(prompt_ids=(9, 11)),
        key(context=40),
        *(key(**change) for change in ({"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1})),
        *(key(**change) for change in ({"max_new_tokens": 63}, {"seed": 1})),
    ]
    assert len({key(), *others}) == len(others) + 1
    assert key(temperature=0) == key(temperature=0.0)


def test_the_key_is_made_of_what_is_sent(tiny_format):
    requests = Requests(tiny_format, SETTINGS, None)
    request = requests.make("a", [9, 10])
    sent = requests.sampling(request)
    seed = sent.pop("sampling_seed")
    assert seed == row_seed(SETTINGS["seed"], "a")
    assert request.key == request_key(tiny_format.fingerprint, [9, 10], sent, seed)


def test_a_missing_setting_is_refused_so_that_no_server_chooses_it(tiny_format):
    with pytest.raises(ConfigError, match="min_p missing"):
        Requests(tiny_format, {name: value for name, value in SETTINGS.items() if name != "min_p"}, None)
