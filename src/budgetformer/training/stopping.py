"""What stands between a training loop and the person who waits for it: a clean stop and a bar of progress."""

import math
import signal
import sys
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback


class StopCleanly(TrainerCallback):
    """Ctrl-C or SIGTERM: finish the step, keep a checkpoint, end. A second signal ends at once.

    A checkpoint within an epoch is written without an evaluation: the run that never stopped has none there either.
    """

    def __init__(self):
        self.asked: str | None = None
        self._within_epoch = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopCleanly":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        except ValueError:  # not in the main thread: signals are somebody else's
            self._before.clear()
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt(self.asked)
        self.asked = signal.Signals(number).name

    def on_step_end(self, args, state, control, **kwargs):
        """Called by Trainer after each optimizer step."""
        self._agree(args.device)
        if self.asked is not None:
            control.should_training_stop = True
            # At the end of an epoch Trainer evaluates and saves anyway, in this order.
            self._within_epoch = state.global_step % (state.max_steps // state.num_train_epochs) != 0
            control.should_save = self._within_epoch and args.save_strategy != "no"

    def on_epoch_end(self, args, state, control, **kwargs):
        """Called by Trainer when it leaves an epoch, be it in the middle."""
        if self._within_epoch:
            control.should_evaluate = control.should_save = False

    def _agree(self, device: torch.device) -> None:
        """All processes stop after the same step, also when the signal reached one of them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            numbers = {None: 0, "SIGINT": int(signal.SIGINT), "SIGTERM": int(signal.SIGTERM)}
            highest = torch.tensor(numbers[self.asked], device=device)
            torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
            self.asked = signal.Signals(int(highest)).name if int(highest) else None


class Progress(TrainerCallback):
    """A bar on stderr with loss, score, heads and the time left; a line now and then where stderr is no terminal."""

    def __init__(self, label: str, metric: str):
        self.label = label
        self.shown = {"loss": "loss", f"eval_{metric}": metric, "eval_head_share": "heads"}
        self.bar: Any = None
        self.last: dict[str, float] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar."""
        from tqdm import tqdm

        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc=self.label,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
        )

    def on_step_end(self, args, state, control, **kwargs):
        """Move the bar."""
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the newest figures."""
        logs = logs or {}
        self.last.update({name: logs[key] for key, name in self.shown.items() if key in logs})
        if self.bar is not None and not math.isnan(self.last.get("loss", math.nan)):
            self.bar.set_postfix({k: f"{v:.3f}" for k, v in self.last.items()}, refresh=False)

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        self.bar.close()
