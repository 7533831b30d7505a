"""Settings: every one declared once, resolved from flag, environment, file and default, and written down."""

from budgetformer.settings.commands import (
    ConvertSettings,
    EvaluateSettings,
    InspectSettings,
    PredictSettings,
    TrainSettings,
    TuneSettings,
    demo_encoder,
    locate_model,
)
from budgetformer.settings.resolving import resolve, save

__all__ = [
    "ConvertSettings",
    "EvaluateSettings",
    "InspectSettings",
    "PredictSettings",
    "TrainSettings",
    "TuneSettings",
    "demo_encoder",
    "locate_model",
    "resolve",
    "save",
]
