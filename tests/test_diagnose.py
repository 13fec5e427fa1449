"""What parsers do to a boundary is named, with what can be saved, and a loss is an exit status of 1."""

import json

import pytest

import diagnose
from eaglet.config import ROOT
from eaglet.diagnosis import FINDINGS, VERDICTS
from eaglet.errors import SourceError
from eaglet.records import RecordWriter
from eaglet.targets import Target
from eaglet.turn_format import Marker, TurnFormat

OPEN, CLOSE, END = 3, 4, 2


def turn_format(owner="prompt", **more) -> TurnFormat:
    opening = Marker((OPEN,), "<think>")
    facts = {
        "target": Target("nowhere"),
        "fingerprint": "0" * 64,
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 8,
        "num_layers": 8,
        "context_length": 64,
        "owner": owner,
        "generation_prompt": opening,
        "opening": opening,
        "closing": Marker((CLOSE,), "</think>"),
        "end_of_turn_ids": (END,),
    }
    return TurnFormat(**{**facts, **more})


def run(tmp_path, capsys, records, *flags, format=None) -> tuple[int, dict]:
    """Exit status and JSON of diagnosing a JSONL file of `records`."""
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    if format:
        format.save(tmp_path / "turn_format.json")
        flags = (*flags, "--turn-format", str(tmp_path / "turn_format.json"))
    status = diagnose.main([str(path), "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def found(tmp_path, capsys):
    """Verdict and findings of one response."""

    def diagnosed(record, *flags, format=None):
        _, said = run(tmp_path, capsys, [record], *flags, format=format)
        return said["rows"][0]["verdict"], said["rows"][0]["findings"]

    return diagnosed


def chat(content, reasoning=None, finish="stop", tokens=None, **message):
    said = {"role": "assistant", "content": content, "reasoning_content": reasoning, **message}
    usage = {"completion_tokens": 50, "completion_tokens_details": {"reasoning_tokens": tokens}}
    return {"choices": [{"message": said, "finish_reason": finish}], "usage": usage}


@pytest.mark.parametrize(
    ("response", "verdict", "code"),
    [
        (chat("Hm.</think>Yes."), "whole", "marker_in_text"),
        (chat("<think>\nHm.\n</think>\n\nYes."), "whole", "marker_in_text"),
        (chat("Yes.", tokens=0), "none", "no_reasoning"),
        (chat(None, "Hm. And then", finish="length"), "unfinished", "cut_in_reasoning"),
        (chat("Hm. And then", finish="length", tokens=50), "unfinished", "cut_in_reasoning"),
        (chat("", "Hm.</think>Yes."), "misplaced", "marker_in_reasoning_field"),
        (chat("</think>\n\nYes.", "Hm."), "misplaced", "marker_in_content_field"),
        (chat("Hm.</think>Wait.</think>Yes."), "misplaced", "several_markers"),
        (chat("Hm.</think>Yes.<think>"), "misplaced", "opened_again"),
        (chat("Yes.", "Hm."), "lost", "split_by_parser"),
        (chat("", "Hm. Yes."), "lost", "answer_in_reasoning_field"),
        (chat("Yes.", tokens=20), "lost", "reasoning_dropped"),
        (chat("Hm. Yes."), "lost", "no_marker"),
        (chat("Hm. And then", finish="length"), "lost", "no_marker"),
        (chat("", None), "lost", "nothing_returned"),
    ],
)
def test_chat_responses_are_judged_by_where_the_marker_is(found, response, verdict, code):
    assert found(response) == (verdict, [code])


def test_calls_that_were_parsed_out_of_the_text_are_a_loss(found):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert found(chat("Hm.</think>", tool_calls=[call])) == ("lost", ["tool_calls_parsed", "marker_in_text"])
    assert found(chat(None, "Hm.", tool_calls=[call])) == ("lost", ["split_by_parser", "tool_calls_parsed"])


def test_a_cut_text_without_a_marker_is_unfinished_where_the_file_shows_that_no_parser_was_at_work(tmp_path, capsys):
    raw = [chat("Hm.</think>Yes."), chat("Hm. And then", finish="length")]
    status, said = run(tmp_path, capsys, raw)
    assert status == 0
    assert [row["verdict"] for row in said["rows"]] == ["whole", "unfinished"]
    status, said = run(tmp_path, capsys, [*raw, chat("Yes.", "Hm.")])
    assert status == 1
    assert [row["verdict"] for row in said["rows"]] == ["whole", "lost", "lost"]


@pytest.mark.parametrize(
    "record",
    [
        {"content": "Hm.</think>Yes.", "finish_reason": "stop"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Hm.</think>Yes."}]},
        {"messages": [{"role": "user", "content": "a"}], "reasoning": None, "content": "Hm.</think>Yes."},
        {"request": {"messages": []}, "response": chat("Hm.</think>Yes.")},
        {"text": "Hm.</think>Yes.", "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}},
        {"choices": [{"text": "Hm.</think>Yes.", "finish_reason": "stop"}]},
        {"content": [{"type": "text", "text": "Hm.</think>"}, {"type": "text", "text": "Yes."}]},
    ],
)
def test_the_shapes_in_which_responses_are_kept_are_read(found, record):
    assert found(record) == ("whole", ["marker_in_text"])


def test_every_choice_is_a_response(tmp_path, capsys):
    both = chat("Hm.</think>Yes.")
    both["choices"] += chat("Yes.", "Hm.")["choices"]
    _, said = run(tmp_path, capsys, [both])
    assert [(row["line"], row["choice"], row["verdict"]) for row in said["rows"]] == [(1, 0, "whole"), (1, 1, "lost")]


def test_other_markers_can_be_named(found):
    assert found(chat("[hm]a[/hm]b"), "--open", "[hm]", "--close", "[/hm]") == ("whole", ["marker_in_text"])


# --- ids ---


def ids(output, prompt=(1, OPEN), finish="stop"):
    return {"prompt_ids": list(prompt), "output_ids": list(output), "finish_reason": finish}


@pytest.mark.parametrize(
    ("row", "verdict", "codes"),
    [
        (ids([7, CLOSE, 8, END]), "whole", ["exact"]),
        (ids([7, 7, 7], finish="length"), "unfinished", ["cut_in_reasoning"]),
        (ids([7, CLOSE, 8], finish="length"), "whole", ["exact"]),
        (ids([7, 8, END]), "lost", ["no_marker"]),
        (ids([7, CLOSE, 8]), "lost", ["end_missing"]),
        (ids([7, CLOSE, 8, CLOSE, END]), "misplaced", ["several_markers"]),
        (ids([7, OPEN, 8, CLOSE, END]), "misplaced", ["opened_again"]),
        (ids([OPEN, 7, CLOSE, END], prompt=[1]), "misplaced", ["opening_in_output"]),
        (ids([7, CLOSE, 8, END], prompt=[1]), "lost", ["prompt_not_opened"]),
        (ids([]), "lost", ["nothing_returned"]),
    ],
)
def test_rows_of_ids_are_judged_against_the_turn_format(found, row, verdict, codes):
    assert found(row, format=turn_format()) == (verdict, codes)


def test_where_the_model_opens_its_reasoning_itself_the_opening_marker_belongs_to_the_output(found):
    owned = turn_format("model")
    assert found(ids([OPEN, 7, CLOSE, 8, END], prompt=[1]), format=owned) == ("whole", ["exact"])
    assert found(ids([8, END], prompt=[1]), format=owned) == ("none", ["no_reasoning"])
    assert found(ids([OPEN, 8, END], prompt=[1]), format=owned) == ("lost", ["no_marker"])


def test_a_turn_may_think_again_where_the_format_says_so(found):
    row = ids([7, CLOSE, 8, OPEN, 7, CLOSE, 9, END])
    assert found(row, format=turn_format(interleaved=True)) == ("whole", ["exact"])


def test_white_space_behind_the_opening_marker_is_no_part_of_it_in_the_output(found):
    spaced = turn_format(opening=Marker((OPEN, 9), "<think>\n"))
    assert found(ids([7, OPEN, 8, CLOSE, END], prompt=[1, OPEN, 9]), format=spaced) == ("misplaced", ["opened_again"])


def test_native_answers_of_sglang_are_read_by_their_ids(found):
    answer = {"output_ids": [7, CLOSE, 8, END], "text": "a</think>b", "meta_info": {"finish_reason": {"type": "stop"}}}
    assert found(answer, format=turn_format()) == ("whole", ["exact"])
    assert found(answer) == ("whole", ["marker_in_text"])


def test_ids_without_a_turn_format_are_refused_with_the_remedy(found):
    with pytest.raises(SourceError, match=r"responses\.jsonl:1: holds ids.*--turn-format"):
        found(ids([7, CLOSE, 8, END]))


def test_a_raw_file_of_eaglet_is_read_as_it_is(tmp_path, capsys):
    row = {"sample_id": "0" * 16, "matched_stop": END, "request_key": "1" * 64, "server": 0, **ids([7, CLOSE, 8, END])}
    with RecordWriter(tmp_path / "raw.parquet", "raw", {"servers": []}) as writer:
        writer.write_rows([row])
    turn_format().save(tmp_path / "turn_format.json")
    assert diagnose.main([str(tmp_path / "raw.parquet"), "--turn-format", str(tmp_path / "turn_format.json")]) == 0
    assert "1 responses: 1 whole" in capsys.readouterr().out


# --- the report ---


def test_text_names_each_troubled_response_with_its_line_and_sums_up(tmp_path, capsys):
    path = tmp_path / "responses.jsonl"
    rows = [chat("Hm.</think>Yes."), *[chat("Yes.", "Hm.")] * 3]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert diagnose.main([str(path), "--limit", "2"]) == 1
    said = capsys.readouterr().out
    assert f"{path}:2: lost: reasoning and content came in separate fields" in said
    assert f"{path}:4" not in said and "… and 1 more" in said
    assert "4 responses: 1 whole, 3 lost" in said
    assert "can be saved: both texts; marker, white space and ids would be guesses" in said
    assert "capture these prompts again" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{torn", r"responses\.jsonl:1: not JSON"),
        ('{"question": 1}', r"responses\.jsonl:1: no response found among the fields question"),
        ("", "holds no responses"),
    ],
)
def test_a_file_that_holds_no_responses_is_refused_by_name(tmp_path, line, message):
    path = tmp_path / "responses.jsonl"
    path.write_text(line)
    with pytest.raises(SourceError, match=message):
        diagnose.main([str(path)])


def test_every_finding_has_a_verdict_and_says_what_can_be_saved():
    assert all(verdict in VERDICTS and found and saved for verdict, found, saved in FINDINGS.values())


def test_the_documentation_explains_every_finding():
    documentation = (ROOT / "docs" / "watching.md").read_text()
    for code, (verdict, what, saved) in FINDINGS.items():
        assert f"| `{code}` | {verdict} | {what} | {saved} |" in documentation
