"""Hidden states from the real SGLang (on the CPU) against those of transformers."""

import json

import pytest
import torch

import hidden_states
from eaglet.hidden_store import HiddenStore
from eaglet.records import iter_rows
from sglang_cpu import ARGUMENTS, ENVIRONMENT, MARKS, PYTHON
from tiny_shard import build_tiny_shard

SERVER = {"python": PYTHON, "arguments": ARGUMENTS, "environment": ENVIRONMENT}

pytestmark = MARKS


def capture(folder, shard, name, **params):
    index = folder / f"{name}.index.parquet"
    hidden_states.main(
        [
            *("--shard", str(shard[0]), "--turn-format", str(shard[1]), "--store", str(folder / name)),
            *("--params", json.dumps({"dtype": "float32", **params}), "--server", json.dumps(SERVER)),
            *("--index", str(index), "--report", str(folder / f"{name}.report.json")),
        ]
    )
    store = HiddenStore(folder / name / "hidden")
    return [store.read(row["key"]) for row in iter_rows(index, "hidden_index")], store


@pytest.mark.parametrize("layers", ["auto", [1, 4, 7]])
def test_sglang_returns_the_states_that_transformers_computes(tmp_path, tiny_target, layers):
    shard = build_tiny_shard(tmp_path, tiny_target, rows=5)
    theirs, store = capture(tmp_path, shard, "sglang", backend="sglang", layers=layers)
    ours, _ = capture(tmp_path, shard, "transformers", backend="transformers", layers=layers)
    assert len(theirs) == 5 and not list((store.root / "staging").iterdir())
    for a, b in zip(theirs, ours, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        torch.testing.assert_close(a.aux, b.aux, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a.last, b.last, rtol=1e-3, atol=1e-3)
    reports = [json.loads((tmp_path / f"{name}.report.json").read_text()) for name in ("sglang", "transformers")]
    assert reports[0] == reports[1]
