"""Settings: every one declared once, resolved from flag, environment, file and default, and written down."""

from budgetformer.settings.commands import (
    CalibrateSettings,
    ConvertSettings,
    EvaluateSettings,
    ExportSettings,
    InspectSettings,
    PredictSettings,
    ReportSettings,
    ServeSettings,
    TrainSettings,
    TuneSettings,
    demo_encoder,
    locate_model,
)
from budgetformer.settings.resolving import resolve, save

__all__ = [
    "CalibrateSettings",
    "ConvertSettings",
    "EvaluateSettings",
    "ExportSettings",
    "InspectSettings",
    "PredictSettings",
    "ReportSettings",
    "ServeSettings",
    "TrainSettings",
    "TuneSettings",
    "demo_encoder",
    "locate_model",
    "resolve",
    "save",
]
