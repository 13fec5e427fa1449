"""A wrong config is refused before any work, with one message that names the key."""

import copy

import pytest
import yaml

from eaglet.config import ROOT, checked_config, read_config
from eaglet.errors import ConfigError

DEFAULT = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def refusal(edit) -> str:
    config = copy.deepcopy(DEFAULT)
    edit(config)
    with pytest.raises(ConfigError) as error:
        checked_config(config)
    return str(error.value)


def test_the_default_config_is_valid_and_gets_every_default():
    config = read_config(ROOT / "config" / "config.yaml")
    assert config["server"]["give_up_after"] == 900
    assert config["datasets"]["notes"]["template_arguments"] == {}
    assert config["evaluation"]["min_acceptance"] is None


def test_an_unknown_key_is_named_with_the_nearest_known_one():
    assert "samplng: unknown key; did you mean sampling?" in refusal(lambda c: c.update(samplng={}))
    assert "drafter.epoch: unknown key; did you mean epochs?" in refusal(lambda c: c["drafter"].update(epoch=3))


def test_a_dataset_name_that_cannot_be_a_file_name_is_refused():
    assert "'Bad Name' does not match" in refusal(lambda c: c["datasets"].update({"Bad Name": c["datasets"]["notes"]}))


def test_a_missing_file_is_named_with_its_key():
    message = refusal(lambda c: c["datasets"]["notes"]["source"].update(path="nowhere.jsonl"))
    assert "datasets.notes.source.path: no file nowhere.jsonl" in message


def test_a_hub_dataset_without_a_revision_is_refused():
    def edit(config):
        config["datasets"]["notes"]["source"] = {"hub": "owner/name"}

    assert "datasets.notes.source: found hub; Exactly one of" in refusal(edit)


def test_a_hub_target_without_a_revision_is_refused():
    assert "target.revision: the hub id owner/model needs a commit" in refusal(
        lambda c: c["target"].update(model="owner/model")
    )


@pytest.mark.parametrize("flag", ["reasoning-parser", "reasoning_parser"])
def test_a_reasoning_parser_is_refused_with_the_reason(flag):
    message = refusal(lambda c: c.update(server={"engine": "sglang", "arguments": {flag: "kimi_k2"}}))
    assert f"server.arguments.{flag}: is refused: a reasoning parser restructures what the model wrote" in message


@pytest.mark.parametrize("flag", ["allow-auto-truncate", "enable-strict-thinking", "model-path", "port"])
def test_flags_that_would_change_the_tokens_or_belong_to_eaglet_are_refused(flag):
    message = refusal(lambda c: c.update(server={"engine": "sglang", "arguments": {flag: True}}))
    assert f"server.arguments.{flag}: is refused" in message


@pytest.mark.parametrize("flag", ["enable-deterministic-inference", "enable_deterministic_inference"])
def test_min_p_and_deterministic_inference_exclude_each_other(flag):
    def edit(config):
        config["server"] = {"engine": "sglang", "arguments": {flag: True}}
        config["sampling"]["min_p"] = 0.1

    message = refusal(edit)
    assert "sampling.min_p: 0.1 and server.arguments.enable-deterministic-inference exclude each other" in message


@pytest.mark.parametrize("field", ["type", "function"])
def test_fields_around_tools_cannot_replace_the_tools(field):
    message = refusal(lambda c: c["target"].update(tool_fields={"defer_loading": None, field: {}}))
    assert f"target.tool_fields.{field}: is refused: it would replace the tool's own" in message


def test_all_problems_are_told_at_once():
    def edit(config):
        config["samplng"] = {}
        config["shards"]["count"] = 0

    message = refusal(edit)
    assert "samplng" in message and "shards.count" in message


@pytest.mark.parametrize("name", ["kimi-k2.5", "qwen3-8b"])
def test_the_configs_for_gpus_ask_for_revisions_and_are_valid_with_them(name):
    path = ROOT / "config" / f"{name}.yaml"
    with pytest.raises(ConfigError, match=r"target\.revision: 'REVISION' does not match"):
        read_config(path)
    config = checked_config(yaml.safe_load(path.read_text().replace("revision: REVISION", f"revision: '{'0' * 40}'")))
    assert config["server"]["engine"] == "sglang"
