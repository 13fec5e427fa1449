"""The stage validate: what is kept, what is set aside, what stops the run, and that a parser's damage cannot pass."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import validate
from eaglet.checks import REASONS
from eaglet.digests import sample_id
from eaglet.errors import ConfigError, RecordError, ValidationFailed
from eaglet.files import read_json
from eaglet.inference import infer
from eaglet.lengths import Lengths
from eaglet.records import RecordWriter, iter_rows, read_metadata, read_table, row_digest, row_digests
from eaglet.rendering import Renderer
from eaglet.targets import Target
from eaglet.turn_format import TurnFormat

END = 2  # <|im_end|> of the tiny target
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def turn_format(tiny_target) -> TurnFormat:
    return infer(Target(str(tiny_target)))


class Captured:
    """A folder with a captured dataset, as the stages before leave it."""

    def __init__(self, folder: Path, turn_format: TurnFormat):
        self.folder, self.turn_format = folder, turn_format
        self.renderer = Renderer(turn_format.target)
        self.prompts: list[dict] = []
        self.rows: list[dict] = []

    def add(
        self,
        output: str,
        *,
        question: str | None = None,
        finish: str = "stop",
        tools: Sequence | None = None,
        **changed,
    ) -> dict:
        messages = [{"role": "user", "content": question or f"Question {len(self.rows)}?"}]
        name = sample_id(messages, tools, {})
        self.prompts.append({"sample_id": name, "messages": messages, "tools": tools, "template_arguments": {}})
        row = {
            "sample_id": name,
            "prompt_ids": self.renderer.prompt_ids(messages, tools),
            "output_ids": self.renderer.tokenizer.encode(output, add_special_tokens=False),
            "finish_reason": finish,
            "matched_stop": END if finish == "stop" else None,
            "request_key": f"{len(self.rows):064x}",
            "server": 0,
        }
        self.rows.append({**row, **changed})
        return self.rows[-1]

    def validate(self, **params) -> dict:
        """Run the program; returns its report."""
        self.turn_format.save(self.folder / "turn_format.json")
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in self.prompts))
        with RecordWriter(self.folder / "raw.parquet", "raw", {"servers": [{"version": "x"}]}) as raw:
            raw.write_rows(self.rows)
        files = {"raw": "raw.parquet", "prompts": "prompts.jsonl", "turn-format": "turn_format.json"}
        files |= {"checked": "checked.parquet", "quarantine": "quarantine.parquet", "report": "report.json"}
        files["provenance"] = "provenance.json"
        flags = [part for name, file in files.items() for part in (f"--{name}", str(self.folder / file))]
        validate.main(["--dataset", "demo", "--params", json.dumps(params), *flags])
        return read_json(self.folder / "report.json")

    def checked(self) -> list[dict]:
        return list(iter_rows(self.folder / "checked.parquet", "checked"))

    def quarantined(self) -> list[dict]:
        return list(iter_rows(self.folder / "quarantine.parquet", "quarantine"))


@pytest.fixture
def captured(tmp_path, turn_format) -> Captured:
    return Captured(tmp_path, turn_format)


def good(number: int = 0) -> str:
    return f"Let me think about {number}.</think>The answer is {number}.<|im_end|>"


def test_good_rows_are_kept_as_they_were_captured(captured):
    for number in range(20):
        captured.add(good(number))
    captured.add("Let me think about it, and about", finish="length")
    report = captured.validate()
    checked = captured.checked()
    assert (report["rows_in"], report["rows_out"], report["quarantined"]) == (21, 21, 0)
    assert report["truncated"] == {"rows": 1, "share": round(1 / 21, 6)}
    for row, raw in zip(checked, captured.rows, strict=True):
        assert {name: row[name] for name in raw} == raw
        assert row["row_digest"] == row_digest(raw)
        assert row["think_end"] == captured.turn_format.think_end(raw["output_ids"])
    closing, ends = captured.turn_format.closing.ids[0], captured.turn_format.end_of_turn_ids
    finished = [row for row in checked if row["finish_reason"] == "stop"]
    assert all(row["output_ids"].count(closing) == 1 and row["output_ids"][-1] in ends for row in finished)
    assert checked[-1]["think_end"] == -1
    assert read_metadata(captured.folder / "checked.parquet", "checked")["servers"] == [{"version": "x"}]


def test_bad_rows_are_set_aside_with_all_their_reasons_and_an_excerpt(captured):
    for number in range(20):
        captured.add(good(number))
    captured.add("I say it twice.</think> And</think> again.")
    report = captured.validate(max_bad_fraction=0.1)
    (row,) = captured.quarantined()
    assert row["reasons"] == ["closing_repeated", "end_wrong"]
    assert "<think>⟦output⟧I say it twice.</think> And⟦here⟧</think> again." in row["excerpt"]
    assert report["dropped"] == {"closing_repeated": 1}  # the main one, so that rows add up
    assert report["reasons"]["end_wrong"]["rows"] == report["reasons"]["closing_repeated"]["rows"] == 1
    assert report["reasons"]["closing_repeated"]["excerpts"] == [
        {"sample_id": row["sample_id"], "excerpt": row["excerpt"]}
    ]
    provenance = read_json(captured.folder / "provenance.json")
    assert provenance["rows"] == {"in": 21, "out": 20, "dropped": {"closing_repeated": 1}}


def test_severities_follow_the_config(captured):
    captured.add(good())
    captured.add("No thought closed here.<|im_end|>")
    captured.add("It goes on and", finish="length")
    assert captured.validate(severity={"closing_missing": "keep"})["rows_out"] == 3
    assert captured.validate(severity={"closing_missing": "keep"}, truncated="quarantine")["dropped"] == {
        "truncated": 1
    }
    with pytest.raises(
        ValidationFailed, match=r"closing_missing.*\n.*No thought closed here(.|\n)*severity\.closing_missing"
    ):
        captured.validate(severity={"closing_missing": "stop"})
    with pytest.raises(ConfigError, match=r"validation\.severity\.closing_mising: no such reason"):
        captured.validate(severity={"closing_mising": "keep"})


def test_nothing_is_written_when_the_run_stops(captured):
    captured.add("No thought closed here.<|im_end|>")
    with pytest.raises(ValidationFailed, match="1 of 1 rows"):
        captured.validate()
    assert not any(
        (captured.folder / name).exists() for name in ("checked.parquet", "quarantine.parquet", "report.json")
    )


INCIDENT = {
    "reasoning stripped, opener and closer with it": lambda thought, answer: answer,
    "opener put in front of the output": lambda thought, answer: f"<think>{thought}</think>{answer}",
    "closer lost": lambda thought, answer: f"{thought}{answer}",
    "reasoning emptied": lambda thought, answer: f"</think>{answer}",
    "reasoning moved behind the answer": lambda thought, answer: f"{answer}{thought}</think>",
    "answer moved into the reasoning": lambda thought, answer: f"{thought}{answer}</think>",
    "everything emptied": lambda thought, answer: None,
}


@pytest.mark.parametrize("damage", INCIDENT.values(), ids=INCIDENT)
def test_rows_that_a_reasoning_parser_damaged_stop_the_run(captured, damage: Callable):
    """The incident that this project comes from: it must not come back in any of its shapes."""
    chance = random.Random(0)
    for number in range(200):
        thought, answer = f"Let me think about {number}.", f"The answer is {number}."
        written = damage(thought, answer) if chance.random() < 0.3 else f"{thought}</think>{answer}"
        captured.add("" if written is None else f"{written}<|im_end|>")
    with pytest.raises(ValidationFailed, match="A reasoning parser between") as stopped:
        captured.validate(max_bad_fraction=0.2)
    assert "--reasoning-parser" in str(stopped.value) and "validation.max_bad_fraction (20.0%)" in str(stopped.value)
    assert not (captured.folder / "checked.parquet").exists()


def test_a_prompt_whose_opener_was_stripped_stops_the_run(captured):
    for number in range(20):
        row = captured.add(good(number))
        row["prompt_ids"] = row["prompt_ids"][:-1]
    with pytest.raises(ValidationFailed, match=r"opening_missing: 20 rows(.|\n)*A reasoning parser between"):
        captured.validate(render_check=0)


def test_damage_of_another_kind_is_not_blamed_on_a_parser(captured):
    for _ in range(5):
        captured.add(good().removesuffix("<|im_end|>"))
    with pytest.raises(ValidationFailed) as stopped:
        captured.validate()
    assert "reasoning parser" not in str(stopped.value) and "end_wrong: 5 rows" in str(stopped.value)


def test_what_a_model_does_is_no_fault_of_the_capture(captured):
    for number in range(4):
        captured.add(good(number))
    captured.add("and so on " * 60, finish="length")
    report = captured.validate(max_bad_fraction=0.0)
    assert report["dropped"] == {"repetition_loop": 1} and report["bad"]["rows"] == 0


def test_a_prompt_that_renders_to_other_ids_now_stops_the_run(captured):
    for number in range(5):
        captured.add(good(number))
    captured.rows[3]["prompt_ids"] = [*captured.rows[3]["prompt_ids"][:1], *captured.rows[3]["prompt_ids"]]
    with pytest.raises(ValidationFailed, match=r"prompt_changed(.|\n)*target and generate"):
        captured.validate()
    assert captured.validate(render_check=0)["render_check"] == {"rows": 0, "changed": 0}


def test_the_rendering_check_takes_about_as_many_rows_as_it_is_told(captured):
    for number in range(200):
        captured.add(good(number))
    assert 25 < captured.validate(render_check=50)["render_check"]["rows"] < 90
    assert captured.validate(render_check=200)["render_check"]["rows"] == 200


def test_offered_tools_are_those_of_the_row(captured):
    called = 'I look.</think><tool_call>{"name": "get_weather", "arguments": {}}</tool_call><|im_end|>'
    captured.add(called, tools=[TOOL])
    captured.add(called)
    assert captured.validate(max_bad_fraction=0.5)["dropped"] == {"tool_unknown": 1}
    assert captured.checked()[0]["sample_id"] == captured.rows[0]["sample_id"]


def test_a_marker_that_a_question_spells_out_is_counted_or_refused(captured):
    captured.add(good())
    captured.add(good(), question="What does </think> mean, and <think>, and again </think>?")
    report = captured.validate()
    assert report["literal_markers"] == {"treatment": "count", "found": {"</think>": 2, "<think>": 1}}
    assert report["reasons"]["literal_marker"]["rows"] == 1 and report["rows_out"] == 2
    report = captured.validate(severity={"literal_marker": "quarantine"}, max_bad_fraction=1)
    assert report["dropped"] == {"literal_marker": 1}


def test_an_escaped_marker_is_no_reason(tmp_path, turn_format):
    escaping = replace(turn_format, target=replace(turn_format.target, literal_markers="escape"))
    captured = Captured(tmp_path, escaping)
    row = captured.add(good(), question="What does </think> mean?")
    assert escaping.closing.ids[0] not in row["prompt_ids"]
    report = captured.validate(severity={"literal_marker": "stop"})
    assert report["literal_markers"]["treatment"] == "escape" and report["reasons"]["literal_marker"]["rows"] == 0


def test_earlier_reasoning_is_counted_with_what_the_template_does_to_it(captured):
    captured.add(good())
    said = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B", "reasoning_content": "C"}]
    messages = [*said, {"role": "user", "content": "D"}]
    captured.prompts.append(
        {"sample_id": sample_id(messages, None, {}), "messages": messages, "tools": None, "template_arguments": {}}
    )
    ids = {"sample_id": captured.prompts[-1]["sample_id"], "prompt_ids": captured.renderer.prompt_ids(messages)}
    captured.rows.append({**captured.rows[0], **ids, "request_key": "1" * 64})
    assert captured.validate()["past_reasoning"] == {"rows": 1, "treatment": "since_last_user"}


def test_a_dataset_with_template_arguments_of_its_own_has_its_own_format(captured):
    captured.add("The answer is 7.<|im_end|>")
    captured.prompts[0]["template_arguments"] = {"thinking": False}
    captured.rows[0]["prompt_ids"] = captured.renderer.prompt_ids(
        captured.prompts[0]["messages"], None, {"thinking": False}
    )
    report = captured.validate()
    assert report["owner"] == "off" and report["rows_out"] == 1 and captured.checked()[0]["think_end"] == -1


def test_prompts_of_which_some_were_not_answered_are_passed_over(captured):
    for number in range(6):
        captured.add(good(number))
    del captured.rows[2], captured.rows[0]
    assert captured.validate()["rows_out"] == 4
    captured.rows.reverse()
    with pytest.raises(RecordError, match="do not belong together"):
        captured.validate()


def test_one_dataset_has_one_set_of_template_arguments(captured):
    for number in range(3):
        captured.add(good(number))
    captured.prompts[1]["template_arguments"] = {"thinking": False}
    with pytest.raises(RecordError, match=r"prompts\.jsonl:2: template_arguments"):
        captured.validate()


def test_an_empty_dataset_passes(captured):
    report = captured.validate()
    assert report["rows_in"] == report["rows_out"] == 0 and report["lengths"]["turn"] is None


def test_many_row_groups_come_out_in_order_and_the_same_from_any_number_of_threads(captured, monkeypatch):
    monkeypatch.setattr("eaglet.records.ROW_GROUP", 50)
    for number in range(420):
        captured.add(good(number) if number % 50 else good(number).replace("</think>", ""))
    report = captured.validate(render_check=10)
    assert (report["rows_out"], report["quarantined"]) == (411, 9)
    kept = [row["sample_id"] for row in captured.rows if captured.turn_format.think_end(row["output_ids"]) > 0]
    assert [row["sample_id"] for row in captured.checked()] == kept
    written = [captured.folder / name for name in ("checked.parquet", "quarantine.parquet", "report.json")]
    before = [path.read_bytes() for path in written]
    for threads in (1, 2, 3):
        monkeypatch.setattr("eaglet.validation.WORKERS", threads)
        captured.validate(render_check=10)
        assert [path.read_bytes() for path in written] == before


def test_a_fault_in_a_later_row_group_stops_the_run_with_its_message(captured, monkeypatch):
    monkeypatch.setattr("eaglet.records.ROW_GROUP", 10)
    for number in range(60):
        captured.add(good(number))
    captured.rows[45]["output_ids"] = [7, 10**6]
    with pytest.raises(ValidationFailed, match=f"row {captured.rows[45]['sample_id']} has id_out_of_range"):
        captured.validate()
    assert not (captured.folder / "checked.parquet").exists()


def test_the_report_names_every_reason(captured):
    captured.add(good())
    report = captured.validate()
    assert list(report["reasons"]) == list(REASONS)
    assert {entry["severity"] for entry in report["reasons"].values()} == {"keep", "quarantine", "stop"}
    assert report["lengths"]["reasoning"]["p50"] == captured.checked()[0]["think_end"]


def test_percentiles_are_those_of_the_sorted_lengths():
    import numpy as np

    chance = np.random.default_rng(0)
    lengths, parts = Lengths(), [chance.integers(0, high, 500) for high in (10, 3000, 50)]
    for part in parts:
        lengths.add(part)
    every = np.sort(np.concatenate(parts))
    told = lengths.summary()
    assert (told["rows"], told["min"], told["max"]) == (1500, every[0], every[-1])
    for percent in (1, 5, 25, 50, 75, 95, 99):
        assert told[f"p{percent}"] == every[int(np.ceil(1500 * percent / 100)) - 1]
    assert Lengths().summary() is None


def test_row_digests_of_a_table_are_those_of_its_rows(captured):
    for number in range(8):
        captured.add(good(number) if number else "")
    captured.rows[5]["output_ids"] = [-1, 2**31 - 1, 0]
    captured.validate(severity={"id_out_of_range": "quarantine"}, max_bad_fraction=1)
    table = read_table(captured.folder / "raw.parquet", "raw")
    assert row_digests(table) == [row_digest(row) for row in captured.rows]
    assert row_digests(table.slice(2, 2)) == [row_digest(row) for row in captured.rows[2:4]]
    assert row_digests(table.slice(0, 0)) == []
