"""The stored figures are what the peers compute.  `make test-peers`; EAGLET_UPDATE_FIXTURES=1 stores them again."""

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ.get("EAGLET_PEERS_PYTHON")

pytestmark = [pytest.mark.peers, pytest.mark.skipif(not PYTHON, reason="needs the peers: make test-peers")]


@pytest.mark.parametrize("peer", ["specforge", "speculators"])
def test_the_stored_figures_are_the_peers(peer):
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([PYTHON, HERE / "run_peer.py", peer], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    path = HERE / f"{peer}.json"
    if os.environ.get("EAGLET_UPDATE_FIXTURES"):
        path.write_text(json.dumps(found) + "\n")
    stored = json.loads(path.read_text())
    assert found["version"] == stored["version"]
    assert found["loss"] == pytest.approx(stored["loss"], abs=1e-6)
    for step, wanted in zip(found["logits"], stored["logits"], strict=True):
        for row, wanted_row in zip(step, wanted, strict=True):
            for position, wanted_position in zip(row, wanted_row, strict=True):
                assert position == pytest.approx(wanted_position, abs=1e-5)
