"""`transformers.Trainer` with an order of the data that a resumed run repeats, and checkpoints that are whole."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.utils import logging

from budgetformer.errors import BudgetFormerError
from budgetformer.training import checkpoints


class LengthGrouped(Sampler[int]):
    """Random order, similar lengths within a batch over all processes; a function of seed and epoch alone.

    Trainer's own sampler draws from torch's global generator. Then a run resumed inside its second epoch sees another
    order than the run that never stopped, and processes differ in their order (so that inputs are left out) as soon
    as dropout has drawn unequal amounts of numbers in them.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, epoch: Callable[[], int]):
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch())
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=generator))


@contextlib.contextmanager
def without_bar() -> Iterator[None]:
    """No progress bar of transformers: one for each file that is saved would break the one of the training."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class BudgetTrainer(Trainer):
    """Trainer for one optimizer step per batch; `course` is what a checkpoint of this run may be resumed with."""

    def __init__(self, *args: Any, course: dict[str, Any], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.course = course

    def get_train_dataloader(self) -> DataLoader:
        """Batches in the order of `LengthGrouped`, each process its part of every batch."""
        args, data = self.args, self.train_dataset
        in_all = args.per_device_train_batch_size * args.world_size
        # global_step, not a counter of our own: it is the one thing that resuming restores before the first batch.
        order = LengthGrouped(data.lengths, in_all, args.seed, lambda: self.state.global_step // len(loader))  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
        loader = self.accelerator.prepare(
            DataLoader(
                data,  # pyright: ignore[reportArgumentType]
                batch_size=args.per_device_train_batch_size,
                sampler=order,
                collate_fn=self.data_collator,
                num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory,
            )
        )
        return loader

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        try:
            with without_bar():
                super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                # Trainer's pickle of its arguments is of no use to us, and no pickle of ours should lie about.
                (folder / "training_args.bin").unlink(missing_ok=True)
                checkpoints.seal(folder, self.course)
                checkpoints.prune(folder, self.state.best_global_step)
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.is_world_process_zero():
                shutil.rmtree(folder, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise BudgetFormerError(
                f"{folder}: the checkpoint cannot be written ({reason}); free some space or make the folder writable, "
                "then go on from the one before with --resume auto"
            ) from error
