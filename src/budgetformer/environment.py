"""Where something ran: versions, processor, threads, engine. For bug reports and beside every measured number."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("budgetformer", "torch", "transformers", "tokenizers", "accelerate", "safetensors", "pyarrow", "numpy")


def environment() -> dict[str, Any]:
    """Versions of what computes, the processor, and what torch and the engine make of it; None for what is not there.

    engine_library: its path, or why there is none. engine_paths: the engine's paths on this processor, the best first,
    with the types that each computes in.
    """
    import torch

    from budgetformer.engine.engine import physical_cores

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: _version(name) for name in PACKAGES},
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "physical_cores": physical_cores(),
        "threads": torch.get_num_threads(),
        **_engine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _engine() -> dict[str, Any]:
    from budgetformer.engine import native
    from budgetformer.engine.torch_path import DTYPES

    try:
        native.library()
        library = str(native.library_path())
    except native.NoLibrary as error:
        library = f"none: {error}"
    paths = {path: [dtype for dtype in native.DTYPES if native.has(path, dtype)] for path in native.paths()}
    return {"engine_library": library, "engine_paths": {**paths, "torch": list(DTYPES)}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The model name that Linux gives; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
