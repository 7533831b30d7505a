"""What `export` does with its settings; it returns the exit code."""

from pathlib import Path
from typing import Any

from budgetformer.cli.folders import Sources, made_aside, texts_of, usable
from budgetformer.cli.speaking import quieten_libraries, show
from budgetformer.errors import UsageError
from budgetformer.outputs import check_output_folder
from budgetformer.settings import ExportSettings


def export(settings: ExportSettings, sources: Sources) -> int:
    """Write a trained model in another form, and show what was checked."""
    check_output_folder(settings.output_dir, overwrite=settings.overwrite)
    if Path(settings.model).resolve().is_relative_to(Path(settings.output_dir).resolve()):
        raise UsageError(f"output folder {settings.output_dir}: holds the model to export; give another --output-dir")
    quieten_libraries()
    if settings.format == "onnx":
        from budgetformer.ports import onnx as port

        options: dict[str, Any] = {"dtype": settings.dtype}
    else:
        from budgetformer.ports import compact as port

        options = {"min_use": settings.min_use}
    if settings.check is None:
        from budgetformer.convert import PROBES

        texts, pairs = list(PROBES), None
    else:
        texts, pairs = texts_of(usable(settings, settings.check, require_labels=False))
    with made_aside(settings) as folder:
        report = port.export(settings.model, folder, texts, pairs, min_agreement=settings.min_agreement, **options)
    report = {"model": settings.model, "output": settings.output_dir, **report}
    if settings.json:
        show(report)
    else:
        for name, value in report.items():
            print(f"{name:>28}  {value}")
    return 0
