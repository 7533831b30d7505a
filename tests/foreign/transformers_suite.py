"""transformers' own tests of a model, on ours: ModelTesterMixin, ConfigTester and the overfitting test, as they are.

`make test-foreign` fetches the tests (they are in the source package of the installed release, not in its wheel) and
runs this file; by hand: `pytest -m slow tests/foreign/transformers_suite.py`. It is no part of the ordinary suite. Six
models: ours as made from sizes, and as converted from each family of checkpoints. Each runs some 160 tests, of which
those for other hardware or other kinds of model skip, with transformers' own reasons.
"""

import contextlib
import importlib
import sys
import types
import unittest
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.convert import from_pretrained_encoder
from budgetformer.errors import UsageError
from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification, BudgetFormerModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SOURCE = Path(sys.prefix) / "foreign" / f"transformers-{transformers.__version__}" / "tests"
# What the source package leaves out, and the tests of a text encoder do without.
LEFT_OUT = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {}},
}
BUDGET = BudgetConfig(target=0.5, router_hidden=11)
LABELS = 3


def theirs(name):
    """A module of transformers' tests."""
    if not SOURCE.is_dir():
        pytest.fail(f"{SOURCE} is not there; run: make test-foreign", pytrace=False)
    if "tests" not in sys.modules:
        package = types.ModuleType("tests")
        package.__path__ = [str(SOURCE)]
        sys.modules["tests"] = package
        (SOURCE / "__init__.py").touch()
        for path, names in LEFT_OUT.items():
            for module in (path.partition(".")[0], path):
                sys.modules.setdefault(f"tests.{module}", types.ModuleType(f"tests.{module}"))
            vars(sys.modules[f"tests.{path}"]).update(names)
    return importlib.import_module(f"tests.{name}")


common = theirs("test_modeling_common")
transformers.logging.set_verbosity_warning()  # some of the tests listen for a warning
modeling_auto.MODEL_MAPPING_NAMES["budgetformer"] = "BudgetFormerModel"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["budgetformer"] = "BudgetFormerForSequenceClassification"


def own_config():
    sizes = EncoderConfig.preset("tiny")
    return BudgetFormerConfig(**asdict(sizes), budget=asdict(BUDGET), num_labels=LABELS)


def converted_config(config_class, **changes):
    """The config of a small fine-tuned checkpoint of a family, converted."""
    import tempfile

    sizes = dict(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=130,
        num_labels=LABELS,
    )
    config = config_class(**{**sizes, **changes})
    dense = transformers.AutoModelForSequenceClassification.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        dense.save_pretrained(folder)
        return from_pretrained_encoder(folder, budget=BUDGET).config


CONFIGS = {
    "own": own_config,
    "bert": lambda: converted_config(transformers.BertConfig),
    "roberta": lambda: converted_config(transformers.RobertaConfig),
    "xlm_roberta": lambda: converted_config(transformers.XLMRobertaConfig),
    "distilbert": lambda: converted_config(transformers.DistilBertConfig, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "electra": lambda: converted_config(transformers.ElectraConfig, embedding_size=16),
}


class Facts:
    """What the mixin wants to know about a model."""

    batch_size, seq_length, is_training = 13, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, num_labels = 32, 2, 4, LABELS
    sequence_classification_class = BudgetFormerForSequenceClassification

    def __init__(self, parent, make_config):
        self.parent, self.config = parent, make_config()

    def get_config(self):
        return BudgetFormerConfig(**self.config.to_dict())

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        inputs = {
            "input_ids": common.ids_tensor([self.batch_size, self.seq_length], config.vocab_size),
            "attention_mask": common.random_attention_mask([self.batch_size, self.seq_length]),
        }
        if config.token_types:
            inputs["token_type_ids"] = common.ids_tensor([self.batch_size, self.seq_length], config.token_types)
        return config, inputs


class Suite(common.ModelTesterMixin, theirs("test_training_mixin").TrainingTesterMixin):
    all_model_classes = (BudgetFormerModel, BudgetFormerForSequenceClassification)
    model_tester = None  # the mixin's is abstract

    def setUp(self):
        self.model_tester = Facts(self, CONFIGS[self.family])
        self.config_tester = theirs("test_configuration_common").ConfigTester(
            self, config_class=BudgetFormerConfig, hidden_size=32, num_heads=4, num_layers=2
        )

    @contextlib.contextmanager
    def subTest(self, msg="", **parameters):
        """Theirs, but for regression: this is a classifier, and says so."""
        if "regression" in str(msg):
            with pytest.raises(UsageError, match="problem_type='regression'"):
                yield
        else:
            with super().subTest(msg, **parameters):
                yield

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_training_overfit(self):
        """With every head on: while a budget is learned its price moves, so there is no one loss that falls."""
        self.model_tester.config.budget |= {"target": 1.0}
        super().test_training_overfit()

    def _create_text_training_batch(self, batch_size, seq_length, vocab_size):
        """Theirs is a language model's, whose labels are the tokens: here two texts of two classes."""
        tokens = torch.arange(batch_size * seq_length).view(batch_size, seq_length) % (vocab_size - 4) + 4
        return {"input_ids": tokens, "labels": torch.arange(batch_size)}


for _family in CONFIGS:
    _name = f"Test_{_family}"
    globals()[_name] = type(_name, (Suite, unittest.TestCase), {"family": _family, "__module__": __name__})
