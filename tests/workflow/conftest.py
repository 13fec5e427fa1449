"""A workflow that has run to its end, made once, and copies of it."""

import json
import shutil

import pytest

from tiny import build_taught_target
from workflow_runs import Workflow


@pytest.fixture(scope="session")
def taught_target(tmp_path_factory):
    return build_taught_target(tmp_path_factory.mktemp("taught") / "model")


@pytest.fixture
def workflow(tmp_path, taught_target):
    """A workflow in which nothing has run yet."""
    return Workflow(tmp_path, taught_target)


@pytest.fixture(scope="session")
def _finished(tmp_path_factory, taught_target):
    made = Workflow(tmp_path_factory.mktemp("finished"), taught_target)
    made.first = made.run()
    return made


@pytest.fixture
def finished(_finished, tmp_path):
    """A workflow that has run to its end, copied with its time stamps, so that each test can edit its own."""
    made = Workflow.__new__(Workflow)
    made.folder = tmp_path / "copy"
    shutil.copytree(_finished.folder, made.folder, symlinks=True)
    made.config = json.loads(json.dumps(_finished.config))
    made.first = _finished.first
    return made
