"""Fixtures that many tests share."""

import pytest
import torch

from tiny import build_tiny_target

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    """The folder of a tiny target whose generation prompt opens the reasoning."""
    return build_tiny_target(tmp_path_factory.mktemp("tiny") / "model")
