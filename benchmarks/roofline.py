"""What this machine could do at most: peak rates per precision, memory bandwidth, and the ceiling that follows.

A pass cannot be faster than its operations at the peak rate of one core, times cores, nor than the bytes it has to
move. Peaks are measured before anything else, each the best of many short bursts: other work can only lower them.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from budgetformer.config import EncoderConfig
from budgetformer.engine import native
from inputs import Inputs

BURST = 0.02
ITEM_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
GEMM_SHAPES = ((384, 1536, 384), (384, 768, 768), (192, 96, 384))  # rows, columns, depth: layers of both models


@dataclass(frozen=True)
class Peak:
    """Operations per second of one core. gemm: the best product of matrices. registers: multiply-adds alone, without
    reading a weight; None where it was not measured. source: what was timed."""

    gemm: float
    registers: float | None
    source: str


@dataclass(frozen=True)
class Machine:
    """Peaks by precision, and bytes per second that one core copies (read and written bytes together)."""

    peaks: dict[str, Peak]
    bandwidth: float


def measure(*, seconds: float = 1.0) -> Machine:
    """The machine's limits, `seconds` for each number."""
    return Machine({precision: _peak(precision, seconds) for precision in ITEM_BYTES}, _bandwidth(seconds))


def _peak(precision: str, seconds: float) -> Peak:
    """From the engine's own micro-kernel where it is compiled, else from torch's products."""
    path = next((one for one in native.paths() if native.has(one, precision)), None)
    bursts = max(1, round(seconds / BURST / (len(GEMM_SHAPES) + 1)))
    if path is not None:
        gemm = max(native.gemm_rate(path, precision, *shape, BURST) for shape in GEMM_SHAPES for _ in range(bursts))
        registers = max(native.peak_rate(path, precision, BURST) for _ in range(bursts))
        return Peak(gemm, registers, f"micro-kernel {path}")
    return Peak(max(_torch_rate(precision, shape, bursts) for shape in GEMM_SHAPES), None, "torch matmul")


def _torch_rate(precision: str, shape: tuple[int, int, int], bursts: int) -> float:
    rows, columns, depth = shape
    torch.set_num_threads(1)
    if precision == "int8":
        a = torch.randint(-99, 99, (rows, depth), dtype=torch.int8)
        b = torch.randint(-99, 99, (depth, columns), dtype=torch.int8)
        call = lambda: torch._int_mm(a, b)  # noqa: E731
    else:
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        x, weight = torch.randn(rows, depth, dtype=kind), torch.randn(columns, depth, dtype=kind)
        call = lambda: torch.nn.functional.linear(x, weight)  # noqa: E731

    def rate() -> float:
        start, done = time.process_time(), 0
        while time.process_time() - start < BURST:
            call()
            done += 1
        return done * 2 * rows * columns * depth / (time.process_time() - start)

    call()
    return max(rate() for _ in range(bursts))


def _bandwidth(seconds: float) -> float:
    source, target = np.ones(16 << 20), np.ones(16 << 20)  # 128 MiB each, beyond caches; touched, so no page is missing
    best, until, copies = 0.0, time.perf_counter() + seconds, 0
    while copies < 5 or time.perf_counter() < until:
        start = time.process_time()
        np.copyto(target, source)
        best = max(best, 2 * source.nbytes / (time.process_time() - start))
        copies += 1
    return best


def least_bytes(
    inputs: Inputs, gates: np.ndarray | None, blocks: np.ndarray | None, config: EncoderConfig, precision: str
) -> float:
    """Bytes that a pass moves at least: the weights that any input uses once, and the residual stream of each layer.

    gates (inputs, layer, head), blocks (inputs, layer, block): None where all run.
    """
    width, layers = config.hidden_size, config.num_layers
    heads = float(layers) if gates is None else gates.any(0).mean(-1).sum()
    inner = float(layers) if blocks is None else blocks.any(0).mean(-1).sum()
    weights = heads * 4 * width * width + inner * 2 * width * config.intermediate_size
    stream = (2 * layers + 1) * inputs.tokens * width * 4
    return float(weights * ITEM_BYTES[precision] + stream)


def least_seconds(flops: float, moved: float, precision: str, machine: Machine, threads: int) -> float:
    """The ceiling: no pass of so many operations and bytes takes less."""
    return max(flops / (machine.peaks[precision].gemm * threads), moved / (machine.bandwidth * threads))


def describe(machine: Machine) -> dict[str, Any]:
    """For the file."""
    peaks = {precision: vars(peak) for precision, peak in machine.peaks.items()}
    return {"peaks": peaks, "bandwidth": machine.bandwidth}
