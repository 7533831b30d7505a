"""Peak memory above what a loaded variant holds, measured in a process of its own.

The process loads one variant, runs one short input, gives back what the allocator keeps, and then runs the shape: the
highest resident set since then, minus the resident set before. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch comes

SHAPE = "8x512"
SELECTIONS = ("dense", "heads 0.25")


def measure(
    names: Sequence[str], model: str, shape: str, arguments: Sequence[str], *, seconds: float = 120
) -> dict[str, float | None]:
    """MiB of each variant by name; None where its process failed."""
    made: dict[str, float | None] = {}
    for name in names:
        command = [sys.executable, __file__, "--variant", name, "--model", model, "--shape", shape, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
            made[name] = json.loads(done.stdout.splitlines()[-1])["mib"]
        except (subprocess.SubprocessError, ValueError, IndexError):
            made[name] = None
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--path", default="auto")
    parser.add_argument("--prototype", type=Path)
    args = parser.parse_args()
    print(json.dumps({"mib": _mebibytes(args)}))


def _mebibytes(args: Any) -> float | None:
    import torch

    from budgetformer.metrics import peak_memory
    from inputs import make_inputs
    from models import demo_texts, load
    from variants import Options, variants

    torch.set_num_threads(1)
    model = load(args.model, args.cache)
    options = Options(cache=args.cache, path=args.path, prototype=args.prototype)
    variant = next(one for one in variants(model, 1, options) if one.name == args.variant)
    runner = variant.build()
    texts, _ = demo_texts("test")
    short = make_inputs("1x16", model.tokenizer, texts)
    runner.settle(short)
    runner.prepare(short)()
    call = runner.prepare(make_inputs(args.shape, model.tokenizer, texts))
    with peak_memory(torch.device("cpu")) as peak:
        call()
    return peak.megabytes


if __name__ == "__main__":
    main()
