"""One record for each conversation, each drop counted under its reason, and a block that does not fit is refused."""

import json

import pytest
import yaml

import prompts
from eaglet.config import ROOT
from eaglet.conversations import REASONS, Reading
from eaglet.digests import sample_id
from eaglet.errors import SourceError


def run(tmp_path, rows, **block) -> tuple[list[dict], dict]:
    """The prompts and the report of a source; `rows` are objects, or lines as they stand."""
    source = tmp_path / "source.jsonl"
    source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    params = {"source": {"path": str(source)}, "format": "messages", "template_arguments": {}, **block}
    files = {name: tmp_path / f"{name}.json" for name in ("output", "report", "provenance")}
    paths = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    prompts.main(["--dataset", "d", "--store", str(tmp_path / "store"), "--params", json.dumps(params), *paths])
    lines = files["output"].read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], json.loads(files["report"].read_text(encoding="utf-8"))


def ask(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def test_a_prompt_says_what_it_is_and_where_it_came_from(tmp_path):
    rows, report = run(tmp_path, [ask("a"), "", ask("ü")], template_arguments={"thinking": True})
    assert rows[1] == {
        "sample_id": sample_id(ask("ü")["messages"], None, {"thinking": True}),
        "messages": ask("ü")["messages"],
        "tools": None,
        "template_arguments": {"thinking": True},
        "source": {"file": str(tmp_path / "source.jsonl"), "sha256": report["source"]["sha256"], "line": 3},
    }


def test_each_drop_is_counted_by_reason_and_shown_with_its_line(tmp_path):
    rows = [
        ask("a"),
        "{torn",
        ask(""),
        ask("a"),
        '{"messages": [{"role": "user", "content": "half \\ud83d"}]}',
        {"messages": [{"role": "assistant", "content": "x"}]},
        ask("b", tools="[broken"),
        ask("c"),
        ask("d"),
    ]
    kept, report = run(tmp_path, rows)
    assert [row["messages"][0]["content"] for row in kept] == ["a", "c", "d"]
    assert report["rows_in"] == 9 and report["rows_out"] == 3
    assert report["dropped"] == {
        "bad_tools": 1,
        "duplicate": 1,
        "empty_turn": 1,
        "lone_surrogate": 1,
        "no_user_turn": 1,
        "unreadable_record": 1,
    }
    lines = {reason: [example["line"] for example in shown] for reason, shown in report["examples"].items()}
    assert lines == {
        "bad_tools": [7],
        "duplicate": [4],
        "empty_turn": [3],
        "lone_surrogate": [5],
        "no_user_turn": [6],
        "unreadable_record": [2],
    }
    written = json.loads((tmp_path / "provenance.json").read_text())["rows"]
    assert written == {"in": 9, "out": 3, "dropped": report["dropped"]}


def test_records_that_end_in_the_same_prompt_are_duplicates(tmp_path):
    answered = [{"messages": [*ask("a")["messages"], {"role": "assistant", "content": f"{n}"}]} for n in range(3)]
    kept, report = run(tmp_path, answered)
    assert len(kept) == 1 and report["dropped"] == {"duplicate": 2}


def test_max_prompts_takes_the_first_accepted_and_reads_no_further(tmp_path):
    kept, report = run(tmp_path, [ask(""), ask("a"), ask("a"), ask("b"), ask("c"), ask("d")], max_prompts=2)
    assert [row["source"]["line"] for row in kept] == [2, 4]
    assert report["rows_in"] == 4 and report["dropped"] == {"duplicate": 1, "empty_turn": 1}


def test_a_prompt_keeps_its_id_when_other_rows_come_and_go(tmp_path):
    first, _ = run(tmp_path, [ask("a"), ask("b"), ask("c")])
    second, _ = run(tmp_path, [ask("c"), ask("x"), ask("a")])
    assert {row["sample_id"] for row in first} & {row["sample_id"] for row in second} == {
        first[0]["sample_id"],
        first[2]["sample_id"],
    }


def test_the_same_source_gives_the_same_bytes(tmp_path):
    run(tmp_path, [ask("a", tools=[{"name": "f", "parameters": {"type": "object"}}]), ask("b")])
    before = [(tmp_path / name).read_bytes() for name in ("output.json", "report.json")]
    run(tmp_path, [ask("a", tools=[{"name": "f", "parameters": {"type": "object"}}]), ask("b")])
    assert before == [(tmp_path / name).read_bytes() for name in ("output.json", "report.json")]


def test_a_block_that_fits_no_record_is_refused_with_the_fields_found(tmp_path):
    with pytest.raises(SourceError) as error:
        run(tmp_path, [{"problem": "a", "lang": "c"}] * 3, format="instruction", prompt="{instruction}")
    message = str(error.value)
    assert "source.jsonl: none of the 3 records read can be used as format instruction" in message
    assert "3 × missing_field, first in record 1: no field `instruction`; the record has problem, lang" in message
    assert "Set `format`, `fields` and `prompt`" in message
    assert not (tmp_path / "output.json").exists()


def test_more_unreadable_than_readable_records_are_refused(tmp_path):
    run(tmp_path, [ask("a"), "{torn"])
    with pytest.raises(SourceError, match="only 1 of the 3 records read can be used"):
        run(tmp_path, [ask("a"), "{torn", "{torn"])


def test_an_empty_source_is_refused(tmp_path):
    with pytest.raises(SourceError, match="holds no records"):
        run(tmp_path, [])


def test_a_hopeless_source_is_given_up_before_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "HOPELESS", 10)
    with pytest.raises(SourceError, match="none of the 10 records"):
        run(tmp_path, [{"x": n} for n in range(100)])


def test_the_report_describes_what_was_kept(tmp_path):
    system = {"role": "system", "content": "s"}
    talk = [system, *ask("aa")["messages"], {"role": "assistant", "content": "b"}, *ask("cc")["messages"]]
    _, report = run(tmp_path, [{"messages": talk}, ask("abc", tools=[{"name": "f"}, {"name": "g"}])])
    assert report["messages"] == {"assistant": 1, "system": 1, "user": 3}
    assert report["user_turns"] == {"1": 1, "2": 1}
    assert report["tools"] == {"prompts": 1, "total": 2}
    assert report["characters"] == {"total": 9, "longest": 6}


@pytest.mark.parametrize("config", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_every_dataset_of_the_configs_names_a_reading_that_exists(config):
    for block in yaml.safe_load(config.read_text()).get("datasets", {}).values():
        assert Reading.from_params(block)


def test_the_documentation_explains_every_reason_for_a_drop():
    documentation = (ROOT / "docs" / "prompts.md").read_text()
    assert all(f"| `{reason}` | {meaning} |" in documentation for reason, meaning in REASONS.items())
