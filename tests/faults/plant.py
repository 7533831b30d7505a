"""Plants faults in a copy of the package, one by one, and asks the tests named for each to notice. `make faults`.

A fault is an exact replacement of text, so that it cannot drift away from the code unnoticed: where the text is gone,
or a fault survives its tests, the script fails. First the tests run on the copy as it is, and must pass.
`python tests/faults/plant.py WORD` plants only the faults whose name has the word in it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAILED = 1  # pytest's exit code when tests ran and some failed


@dataclass(frozen=True)
class Fault:
    """`old` in the package's `file` becomes `new`; one of `tests` is to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "pads are counted in the router's pooling",
        "router.py",
        "mean = x.masked_fill(~real, 0.0).sum(1) / real.sum(1).clamp_min(1)",
        "mean = x.mean(1)",
        ("tests/test_router.py", "tests/test_invariants.py::test_7_the_router_ignores_padding"),
    ),
    Fault(
        "pads are counted as positions",
        "encoder.py",
        "positions = (keep.long().cumsum(1) - 1).clamp_min(0) + self.config.position_offset",
        "positions = torch.arange(input_ids.shape[1]).expand_as(input_ids) + self.config.position_offset",
        ("tests/test_encoder.py::test_padding_on_either_side_or_none_is_the_same",),
    ),
    Fault(
        "the attention mask is ignored",
        "attention.py",
        ".masked_fill(~keep, -math.inf)[:, None, None]",
        "[:, None, None]",
        ("tests/test_attention.py::test_both_paths_equal_the_reference",),
    ),
    Fault(
        "the wrong axis of W_O is gated",
        "attention.py",
        "out = out.unflatten(1, (H, -1)).unbind(1)",
        "out = out.T.unflatten(1, (H, -1)).unbind(1)",
        ("tests/test_attention.py::test_both_paths_choose_and_compute_the_same",),
    ),
    Fault(
        "an input is gated by its neighbour's gates",
        "attention.py",
        "return context * gates[:, :, None, None].to(context.dtype), weights",
        "return context * gates.roll(1, 0)[:, :, None, None].to(context.dtype), weights",
        ("tests/test_attention.py::test_both_paths_equal_the_reference",),
    ),
    Fault(
        "the gate does not zero what the output projection sees",
        "attention.py",
        "return context * gates[:, :, None, None].to(context.dtype), weights",
        "return context * gates[:, :, None, None].clamp_min(1e-3).to(context.dtype), weights",
        ("tests/test_invariants.py::test_6_reference_equals_training_path_equals_dispatch",),
    ),
    Fault(
        "a head that was not chosen is computed",
        "attention.py",
        "run = self._skipping if may_skip(left, explore if gates is None else None) else self._masked",
        "run = self._masked",
        ("tests/test_invariants.py::test_5_skipped_is_not_computed",),
    ),
    Fault(
        "units are skipped while routers explore",
        "skipping.py",
        "exploring = learning and (explore is None or explore.sample)",
        "exploring = False",
        ("tests/test_skipping.py::test_units_run_while_somebody_learns_from_what_they_would_say",),
    ),
    Fault(
        "a second answer costs nothing",
        "hf.py",
        "ran[again] += 1",
        "ran[again] += 0",
        ("tests/test_cascade.py",),
    ),
    Fault(
        "the twin learns with the model",
        "hf.py",
        "        if mode and self.twin is not None:",
        "        if mode and self.twin is not None and self.training:",
        ("tests/test_twin.py::test_training_leaves_the_twin_and_what_it_reads_as_they_are",),
    ),
    Fault(
        "answers of the twin are not put back in their places",
        "engine/twin_path.py",
        "made[~second], made[second] = first, later",
        "made[: len(first)], made[len(first) :] = first, later",
        ("tests/test_twin.py::test_budgets_of_one_beside_others_are_put_back_in_their_places",),
    ),
    Fault(
        "noise stays on in use",
        "estimators.py",
        "if not training or explore.noise == 0.0:",
        "if explore.noise == 0.0:",
        ("tests/test_estimators.py::test_use_is_hard_and_deterministic",),
    ),
    Fault(
        "use explores as training does",
        "schedule.py",
        "noise=0.0, target=self.budget.first_target, sample=False)",
        "noise=1.0, target=self.budget.first_target, sample=True)",
        ("tests/test_hf.py::test_the_last_steps_of_training_see_what_use_sees", "tests/test_engine_torch.py"),
    ),
    Fault(
        "one budget is shared by the batch",
        "router.py",
        "torch.sigmoid(self.controller(pooled)[:, 0])",
        "torch.sigmoid(self.controller(pooled)[:, 0]).mean().expand(len(pooled))",
        ("tests/test_invariants.py::test_4_neighbours_change_nothing",),
    ),
    Fault(
        "the routing of the batch before is used",
        "router.py",
        "            return self._route(pooled, explore, count)",
        """            stale = vars(self).get("stale")
            if stale is None or len(stale.share) != len(x):
                self.stale = stale = self._route(pooled, explore, count)
            return stale""",
        ("tests/test_encoder.py",),
    ),
    Fault(
        "one unit more than wanted runs",
        "estimators.py",
        "return order.argsort(dim=-1) < count[:, None]",
        "return order.argsort(dim=-1) <= count[:, None]",
        ("tests/test_estimators.py::test_top_units_by_hand",),
    ),
    Fault(
        "ties go to the last unit",
        "estimators.py",
        "    order = scores.argsort(dim=-1, descending=True, stable=True)\n    return",
        "    order = scores.shape[-1] - 1 - scores.flip(-1).argsort(dim=-1, descending=True, stable=True)\n    return",
        ("tests/test_estimators.py::test_ties_go_to_the_lowest_index",),
    ),
    Fault(
        "routers are not read back from a folder",
        "hf.py",
        "    @initialization.guard_torch_init_functions()\n    @torch.no_grad()\n    def initialize_weights",
        "    @torch.no_grad()\n    def initialize_weights",
        ("tests/test_hf.py::test_saving_and_loading_is_bitwise",),
    ),
    Fault(
        "the multiplier is not saved",
        "hf.py",
        'self.register_buffer("multiplier", torch.zeros(()))',
        'self.register_buffer("multiplier", torch.zeros(()), persistent=False)',
        ("tests/test_hf.py::test_saving_and_loading_is_bitwise",),
    ),
    Fault(
        "the task's loss has no gradient to the router",
        "estimators.py",
        "value = hard + (soft - soft.detach())",
        "value = hard + 0.0 * (soft - soft.detach())",
        ("tests/test_estimators.py::test_the_task_teaches_how_many_and_which",),
    ),
    Fault(
        "the budget's loss has no gradient to the router",
        "losses.py",
        "return price.detach() * (cost - target)",
        "return price.detach() * (cost.detach() - target)",
        ("tests/test_losses.py", "tests/test_blocks.py::test_the_loss_teaches_both_routers"),
    ),
    Fault(
        "weights of examples are dropped",
        "losses.py",
        "return loss if sample_weight is None else (loss * sample_weight).mean()",
        "return loss.mean()",
        ("tests/test_sklearn.py::test_a_weight_is_a_number_of_copies",),
    ),
    Fault(
        "the engine takes its heads in another order",
        "engine/torch_path.py",
        "self.out.index_select(1, rows)",
        "self.out.index_select(1, rows.view(-1, size).flip(0).flatten())",
        ("tests/test_engine_torch.py::test_equals_the_model",),
    ),
    Fault(
        "the kernels' gates come back head by head reversed",
        "engine/native.py",
        "        return Output(logits, chosen, wanted, hidden, ran)\n\n    def _checked",
        "        return Output(logits, chosen[:, :, ::-1], wanted, hidden, ran)\n\n    def _checked",
        ("tests/test_engine_equality.py::test_every_path_equals_the_training_path",),
    ),
    Fault(
        "the engine rounds a budget down",
        "engine/budgets.py",
        "np.floor(total + 0.5) - low.sum(1)",
        "np.floor(total) - low.sum(1)",
        ("tests/test_engine_budgets.py",),
    ),
    Fault(
        "answers come in the order of their lengths",
        "metrics.py",
        "back = torch.tensor([i for rows in batches for i in rows]).argsort()",
        "back = torch.arange(len(encoded))",
        ("tests/test_metrics.py::test_answers_come_in_the_order_of_the_inputs",),
    ),
)


def run(tests: tuple[str, ...], source: Path) -> subprocess.CompletedProcess[str]:
    """pytest on the package in `source`."""
    paths = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def planted(fault: Fault, source: Path) -> tuple[bool, str]:
    """Whether it was noticed, and by which test, or what went wrong."""
    path = source / "budgetformer" / fault.file
    before = path.read_text("utf-8")
    if before.count(fault.old) != 1:
        return False, f"its text is {before.count(fault.old)} times in {fault.file}, where it must be once"
    path.write_text(before.replace(fault.old, fault.new), "utf-8")
    try:
        done = run(fault.tests, source)
    finally:
        path.write_text(before, "utf-8")
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == FAILED and failed is not None:
        return True, failed[1].removeprefix("tests/")
    return False, "SURVIVED" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "_lib_sanitized"))
        where = subprocess.run(
            [sys.executable, "-c", "import budgetformer; print(budgetformer.__file__)"],
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert where.startswith(str(source)), f"the tests would see {where.strip()}, not the copy"
        sound = run(tuple(dict.fromkeys(test for fault in chosen for test in fault.tests)), source)
        if sound.returncode != 0:
            print(f"without a fault the tests do not pass:\n{sound.stdout[-3000:]}")
            return 1
        print("| fault | caught by |\n| --- | --- |")
        caught = 0
        for fault in chosen:
            noticed, how = planted(fault, source)
            caught += noticed
            print(f"| {fault.name} | {how} |", flush=True)
    print(f"\n{caught} of {len(chosen)} faults caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
