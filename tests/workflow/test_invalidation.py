"""Which edit costs what: the table of docs/invalidation.md, line by line."""

import os
import shutil
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.workflow, pytest.mark.long]

AFTER_MERGE = {"merge", "hidden_states", "train", "evaluate", "audit"}
AFTER_VALIDATE = {"validate", *AFTER_MERGE}
AFTER_GENERATE = {"generate", *AFTER_VALIDATE}


def planned(workflow) -> list[str]:
    """The jobs that Snakemake would run now, less target rules and services."""
    jobs = workflow.run("--dry-run").jobs
    return [job for job in jobs if job.split()[0] not in {"all", "serve"}]


def stages(jobs: list[str]) -> set[str]:
    return {job.split()[0] for job in jobs}


def datasets(jobs: list[str]) -> set[str]:
    return {job.split()[1] for job in jobs if job.split()[0] in {"prompts", "generate", "validate"}}


class Costs(NamedTuple):
    """What a run up to the hidden states cost."""

    generated: int  # rows
    captured: int  # rows
    kept: int  # rows that validation let through now and that were not there before


def costs(workflow) -> Costs:
    """Run up to the hidden states and count."""
    generated, captured, checked = workflow.generated(), workflow.captured(), workflow.checked()
    workflow.run("--until", "hidden_states")
    return Costs(workflow.generated() - generated, workflow.captured() - captured, len(workflow.checked() - checked))


def test_one_edited_prompt_costs_one_generation_and_one_capture(finished):
    path = finished.folder / "apples.jsonl"
    path.write_text(path.read_text().replace("Write a short list.", "Write a long list."))
    jobs = planned(finished)
    assert stages(jobs) == {"prompts", *AFTER_GENERATE} and datasets(jobs) == {"apples"}
    cost = costs(finished)
    assert cost.generated == 1 and cost.captured == cost.kept <= 1


def test_an_edited_dataset_block_touches_that_dataset_alone(finished):
    finished.config["datasets"]["pears"]["system"] = "Answer in one word."
    jobs = planned(finished)
    assert stages(jobs) == {"prompts", *AFTER_GENERATE} and datasets(jobs) == {"pears"}
    cost = costs(finished)
    assert cost.generated == 4 and cost.captured == cost.kept


def test_a_new_dataset_costs_its_own_rows(finished):
    finished.write_dataset("plums", ["What is a walk?", "Write three short words."])
    finished.config["datasets"]["plums"] = {"source": {"path": "plums.jsonl"}, "format": "messages"}
    jobs = planned(finished)
    assert stages(jobs) == {"prompts", *AFTER_GENERATE} and datasets(jobs) == {"plums"}
    cost = costs(finished)
    assert cost.generated == 2 and cost.captured == cost.kept


def test_a_removed_dataset_generates_and_captures_nothing(finished):
    del finished.config["datasets"]["pears"]
    assert stages(planned(finished)) == AFTER_MERGE
    assert costs(finished) == (0, 0, 0)


def test_sampling_settings_ask_for_every_row_again(finished):
    finished.config["sampling"]["temperature"] = 0.5
    jobs = planned(finished)
    assert stages(jobs) == AFTER_GENERATE and datasets(jobs) == {"apples", "pears"}


def test_the_target_makes_everything_new_but_the_prompts(finished):
    config = finished.folder / "model" / "generation_config.json"
    config.write_text(config.read_text().replace('"bos_token_id": 1', '"bos_token_id": 0'))
    assert stages(planned(finished)) == {"turn_format", "serve_script", *AFTER_GENERATE}


def test_a_chat_template_makes_everything_new_but_the_prompts(finished):
    shutil.copy(finished.folder / "model" / "chat_template.jinja", finished.folder / "other.jinja")
    finished.config["target"]["chat_template"] = "other.jinja"
    assert stages(planned(finished)) == {"turn_format", "serve_script", *AFTER_GENERATE}


def test_a_validation_rule_starts_at_validate(finished):
    finished.config["validation"]["truncated"] = "quarantine"
    jobs = planned(finished)
    assert stages(jobs) == AFTER_VALIDATE and datasets(jobs) == {"apples", "pears"}


@pytest.mark.parametrize("edit", [{"count": 3}, {"seed": 1}])
def test_other_shards_generate_and_capture_nothing(finished, edit):
    finished.config["shards"].update(edit)
    assert stages(planned(finished)) == AFTER_MERGE
    assert costs(finished) == (0, 0, 0)


def test_other_layers_capture_every_row_and_generate_none(finished):
    finished.config["hidden_states"] = {"layers": [1, 3, 5]}
    assert stages(planned(finished)) == {"hidden_states", "train", "evaluate", "audit"}
    assert costs(finished) == (0, len(finished.checked()), 0)


def test_drafter_settings_start_at_train(finished):
    finished.config["drafter"]["epochs"] = 2
    assert stages(planned(finished)) == {"train", "evaluate", "audit"}


def test_draft_tokens_write_the_serving_script_and_measure_again_but_train_nothing(finished):
    finished.config["evaluation"]["draft_tokens"] = 3
    assert stages(planned(finished)) == {"serve_script", "evaluate", "audit"}


def test_other_evaluation_settings_only_measure_again(finished):
    finished.config["evaluation"]["speed_rows"] = 1
    assert stages(planned(finished)) == {"evaluate", "audit"}


def test_tuning_costs_nothing(finished):
    finished.config["server"].update(max_in_flight=3, request_timeout=99, linger=1)
    finished.config["hidden_states"] = {"batch_tokens": 64}
    assert planned(finished) == []


@pytest.mark.parametrize("text", ["\nANSWER = 42\n", "\n# a comment\n"])
def test_a_changed_program_reruns_its_stage_and_generates_nothing(finished, text):
    path = finished.folder / "scripts" / "generate.py"
    path.write_text(path.read_text() + text)
    jobs = planned(finished)
    assert stages(jobs) == AFTER_GENERATE
    assert costs(finished) == (0, 0, 0)


def test_time_stamps_alone_cost_nothing(finished):
    for path in sorted(finished.folder.rglob("*")):
        if path.is_file() and ".snakemake" not in path.parts:
            os.utime(path)
    assert planned(finished) == []


def test_a_fresh_clone_with_the_results_copied_in_generates_and_captures_nothing(finished, tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(finished.folder, clone, ignore=shutil.ignore_patterns(".snakemake"), copy_function=shutil.copy)
    finished.folder = clone
    assert costs(finished) == (0, 0, 0)
