"""schemathesis against the OpenAPI description of a running server: whatever it sends, the answer is as described."""

import subprocess
import sys
from pathlib import Path

import pytest

import server_helpers
import tiny

pytestmark = pytest.mark.slow


# What a schema cannot say: that a tensor's shape is that of its data.
CONFIG = """
[[operations]]
include-path = "/v2/models/{name}/infer"
[operations.checks]
positive_data_acceptance.enabled = false
"""
OPTIONS = ("--max-examples=50", "--seed=7", "--suppress-health-check=all", "--generation-database=none", "--no-color")


def test_an_adversary_finds_nothing(tmp_path):
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    folder = tmp_path / "tiny"
    folder.mkdir()
    with server_helpers.process(tiny.make_folder(folder, routed=True), "--name", "tiny") as (running, address):
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{address}/openapi.json", *OPTIONS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path, check=False)
        assert running.poll() is None
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "Selected: 11/11" in done.stdout
