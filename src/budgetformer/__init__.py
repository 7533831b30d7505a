"""Text classification where every input activates only the attention heads it needs.

The names below load what they need on first use, so that `import budgetformer` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetformer.convert import from_pretrained_encoder
    from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification, BudgetFormerModel
    from budgetformer.ports.sklearn import BudgetFormerClassifier

    __version__: str

_HOMES = {
    "from_pretrained_encoder": "budgetformer.convert",
    "BudgetFormerConfig": "budgetformer.hf",
    "BudgetFormerModel": "budgetformer.hf",
    "BudgetFormerForSequenceClassification": "budgetformer.hf",
    "BudgetFormerClassifier": "budgetformer.ports.sklearn",
}

__all__ = [
    "BudgetFormerClassifier",
    "BudgetFormerConfig",
    "BudgetFormerForSequenceClassification",
    "BudgetFormerModel",
    "__version__",
    "from_pretrained_encoder",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name == "__version__":
        from importlib.metadata import version  # 0.03 s that only the asking should pay

        return version("budgetformer")
    raise AttributeError(f"module 'budgetformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
