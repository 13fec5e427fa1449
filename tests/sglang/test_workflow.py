"""The default target's prompts, captured by the workflow from the real SGLang."""

import shutil

import pytest
import torch
import yaml

from eaglet.config import ROOT
from eaglet.records import iter_rows, read_metadata
from eaglet.targets import Target
from eaglet.turn_format import TurnFormat
from sglang_cpu import ARGUMENTS, ENVIRONMENT, MARKS, PYTHON
from workflow_runs import Workflow, left_behind

ROWS, TOKENS = 4, 48  # of each dataset; of each answer at most

pytestmark = [pytest.mark.workflow, *MARKS]


@pytest.fixture
def default_run(tmp_path, tiny_target):
    """The default config with SGLang as its engine and few prompts; what the store of this checkout has is not built again."""
    made = Workflow(tmp_path, tiny_target)
    made.config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text(encoding="utf-8"))
    made.config |= {
        "run": "trial",
        "server": {"engine": "sglang", "python": PYTHON, "arguments": ARGUMENTS, "environment": ENVIRONMENT},
        "sampling": {"temperature": 0, "max_new_tokens": TOKENS, "seed": 0},
        "validation": {"max_bad_fraction": 1.0},  # most answers are cut, and greedy decoding repeats itself
    }
    made.config["server"] |= {"context_length": 1024, "max_in_flight": 4, "start_timeout": 900}
    for dataset in made.config["datasets"].values():
        dataset["max_prompts"] = ROWS
    for kept in ("targets", "wheels"):
        if (ROOT / "results" / "store" / kept).is_dir():
            shutil.copytree(ROOT / "results" / "store" / kept, tmp_path / "results" / "store" / kept)
    return made


def test_the_workflow_captures_what_transformers_generates(default_run):
    done = default_run.snakemake("--until", "generate", timeout=2400)
    assert done.status == 0, done.output[-6000:]
    assert not left_behind(default_run)
    turn_format = TurnFormat.load(default_run.results("target/turn_format.json"))
    model = Target(str(default_run.results("target/model")), dtype="float32").load()
    ends = list(turn_format.end_of_turn_ids)
    for name in default_run.config["datasets"]:
        raw = default_run.results(f"raw/{name}.parquet")
        rows = list(iter_rows(raw, "raw"))
        assert len(rows) == ROWS
        (facts,) = read_metadata(raw, "raw")["servers"]
        assert facts["engine"] == "sglang" and not facts["flags"].get("reasoning_parser")
        for row in rows:
            assert row["prompt_ids"][-1] == turn_format.opening.ids[-1]
            prompt = torch.tensor([row["prompt_ids"]])
            made = model.generate(
                prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
            )
            assert row["output_ids"] == made[0, prompt.shape[1] :].tolist()
