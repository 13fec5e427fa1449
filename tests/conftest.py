"""Fixtures that many tests share."""

import shutil
from pathlib import Path

import pytest
import torch

from eaglet.inference import infer
from eaglet.rendering import Renderer
from eaglet.targets import Target
from tiny import build_tiny_target

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    """The folder of a tiny target whose generation prompt opens the reasoning."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_format(tiny_target):
    """The turn format of `tiny_target`."""
    return infer(Target(str(tiny_target), dtype="float32"))


@pytest.fixture(scope="session")
def tiny_renderer(tiny_format):
    return Renderer(tiny_format.target)


@pytest.fixture(scope="session")
def audited_run(tmp_path_factory):
    """The folder in which a synthetic results/demo lies, complete and audited; not to be changed."""
    from synthetic_run import audit_run, build_synthetic_run  # here, since it imports most of eaglet

    folder = tmp_path_factory.mktemp("audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        build_synthetic_run()
        audit_run()
    return folder


@pytest.fixture
def demo_run(audited_run, tmp_path, monkeypatch):
    """results/demo of a copy of it, in the working directory, to be changed."""
    shutil.copytree(audited_run, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return Path("results/demo")
