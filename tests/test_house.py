"""The house's own order: what is pinned, documented and licensed in one place agrees with the others."""

import re

import yaml

import config_docs
from eaglet.config import ROOT


def requirements(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def normal(requirement: str) -> str:
    name, version = requirement.split("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}"


def test_the_conda_environment_pins_what_requirements_in_pins():
    environment = yaml.safe_load((ROOT / "envs" / "workflow.yaml").read_text())
    assert environment["dependencies"][-1]["pip"] == requirements("requirements.in")


def test_every_requirement_is_in_the_pinned_list():
    pinned = {normal(line) for line in requirements("requirements.txt")}
    assert {normal(line) for line in requirements("requirements.in")} <= pinned


def test_the_config_readme_shows_the_schema():
    assert config_docs.main([]) == 0


def test_every_stage_has_a_rule_file_and_a_program():
    stages = [
        "target",
        "prompts",
        "serve",
        "generate",
        "validate",
        "merge",
        "hidden_states",
        "train",
        "evaluate",
        "audit",
    ]
    assert [s for s in stages if not (ROOT / "rules" / f"{s}.smk").is_file()] == []
    assert [s for s in stages if not (ROOT / "scripts" / f"{s}.py").is_file()] == []
