"""Inference without padding and without transformers: a model folder, packed tokens, only the chosen heads.

The names below load what they need on first use, so that `import budgetformer.engine` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetformer.engine.engine import Answers, Engine
    from budgetformer.engine.packed import Output, Packed, Path
    from budgetformer.engine.weights import Weights, read_weights

_HOMES = {
    "Answers": "budgetformer.engine.engine",
    "Engine": "budgetformer.engine.engine",
    "Output": "budgetformer.engine.packed",
    "Packed": "budgetformer.engine.packed",
    "Path": "budgetformer.engine.packed",
    "Weights": "budgetformer.engine.weights",
    "read_weights": "budgetformer.engine.weights",
}

__all__ = ["Answers", "Engine", "Output", "Packed", "Path", "Weights", "read_weights"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'budgetformer.engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
