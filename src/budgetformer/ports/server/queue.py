"""Texts wait here, and are computed together: whatever waits when the engine is free, up to a number of tokens.

Nothing waits for a batch to fill. A text whose request is no longer wanted (the client hung up, the time is over) is
taken out before it is computed.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from budgetformer.ports.server.policy import Policy
from budgetformer.ports.server.process import Backend, EngineFailed, EngineLost
from budgetformer.ports.server.worker import Arrays, batch_of
from budgetformer.tokens import Tokens


class Full(Exception):
    """There is no room, or no time to answer; `retry_s` is when there may be."""

    def __init__(self, retry_s: int) -> None:
        super().__init__(retry_s)
        self.retry_s = retry_s


@dataclass(eq=False)
class Job:
    """The texts of one request.

    budget: the share asked for and, once the first text was taken, the one used; None is the model's own. rows: what
    was answered for each text, arrays without the batch. waiting: texts that were not taken yet. left: those that were
    not answered yet. queue_s: until the first text was taken. engine_s: of the batches that held texts of it.
    """

    tokens: list[Tokens]
    budget: float | None
    detail: bool
    future: "asyncio.Future[None]"
    rows: list[Arrays] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    taken: bool = False
    waiting: int = 0
    left: int = 0
    queue_s: float = 0.0
    engine_s: float = 0.0


@dataclass(eq=False)
class Row:
    """One text of a job. again: it was in a batch that was lost, and is tried by itself."""

    job: Job
    place: int
    tokens: Tokens
    again: bool = False

    @property
    def alone(self) -> bool:
        """What is looked at closely is measured alone; what may have killed an engine must not take others along."""
        return self.again or self.job.detail


class Queue:
    """A bounded queue in front of one engine.

    batch_tokens: tokens computed together. max_tokens: tokens that may wait; a request larger than that is taken when
    nothing else waits. limit_s: what cannot be answered in this time is refused at once. observe: called with the
    tokens, the seconds and the shares of each batch.
    """

    def __init__(
        self,
        backend: Backend,
        policy: Policy,
        *,
        batch_tokens: int,
        max_tokens: int,
        limit_s: float,
        observe: Callable[[int, float, np.ndarray], None] = lambda tokens, seconds, shares: None,
    ) -> None:
        self.waiting_tokens = 0
        self.budget = policy.share(0.0)
        self._backend, self._policy, self._observe = backend, policy, observe
        self._batch_tokens, self._max_tokens, self._limit_s = batch_tokens, max_tokens, limit_s
        self._rows: deque[Row] = deque()
        self._wake = asyncio.Event()
        self._pace = 0.0  # seconds a token takes, smoothed; 0 while nothing is known

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def wait_s(self) -> float:
        """How long what waits now will take."""
        return self.waiting_tokens * self._pace

    def check(self, tokens: int = 0) -> None:
        """Raise Full when so many more tokens are too many."""
        if self._rows and (self.waiting_tokens + tokens > self._max_tokens or self.wait_s > self._limit_s):
            raise Full(max(1, math.ceil(self.wait_s)))

    def put(self, tokens: list[Tokens], *, budget: float | None = None, detail: bool = False) -> Job:
        """Queue the texts of a request; `future` is done when all are answered, or has the reason why they are not.

        Raises:
            Full: as `check`.
        """
        size = sum(map(len, tokens))
        self.check(size)
        job = Job(tokens, budget, detail, asyncio.get_running_loop().create_future(), [{} for _ in tokens])
        job.waiting = job.left = len(tokens)
        self._rows.extend(Row(job, place, one) for place, one in enumerate(tokens))
        self.waiting_tokens += size
        self._wake.set()
        return job

    def drop(self, job: Job) -> None:
        """Take out what is left of a job; nothing of it is computed any more."""
        self._rows = deque(row for row in self._rows if row.job is not job)
        self.waiting_tokens = sum(len(row.tokens) for row in self._rows)

    async def run(self) -> None:
        """Keep the engine busy, until cancelled."""
        while True:
            await self._wake.wait()
            await self._backend.up()  # taken not before it can be computed: until then, its client may hang up
            rows = self._take()
            if rows:
                await self._compute(rows)
            else:
                self._wake.clear()

    def _take(self) -> list[Row]:
        """The next batch, from the front of the queue: one kind of budget, named or the model's own, in a batch."""
        if not self._rows:
            return []
        self.budget = self._policy.share(max(self.waiting_tokens / self._batch_tokens - 1.0, 0.0))
        now, held = time.perf_counter(), 0
        rows: list[Row] = []
        while self._rows:
            row = self._rows[0]
            job = row.job
            budget = self.budget if not job.taken and job.budget is None else job.budget
            if rows and (
                row.alone
                or rows[0].alone
                or held + len(row.tokens) > self._batch_tokens
                or (budget is None) != (rows[0].job.budget is None)
            ):
                break
            if not job.taken:
                job.taken, job.budget, job.queue_s = True, budget, now - job.arrived
            rows.append(self._rows.popleft())
            job.waiting -= 1
            held += len(row.tokens)
        self.waiting_tokens -= held
        return rows

    async def _compute(self, rows: list[Row]) -> None:
        budgets = [row.job.budget for row in rows]
        named = None if budgets[0] is None else [budget or 0.0 for budget in budgets]
        arrays = batch_of([row.tokens for row in rows], named)
        began = time.perf_counter()
        try:
            seconds, found = await self._backend.compute(arrays, detail=rows[0].job.detail)
        except (EngineLost, EngineFailed) as error:
            self._try_again(rows, error)
            return
        took, size = time.perf_counter() - began, len(arrays["ids"])
        self._pace = took / size if not self._pace else 0.8 * self._pace + 0.2 * took / size
        self._observe(size, seconds, found["share"])
        for job in dict.fromkeys(row.job for row in rows):
            job.engine_s += seconds
        sound = np.all(np.isfinite(found["logits"]), axis=1)
        for number, row in enumerate(rows):
            if sound[number]:
                _hand_out(row, {name: array[number] for name, array in found.items()})
            else:
                self._give_up(row.job, EngineFailed("the answer is not a finite number"))

    def _try_again(self, rows: Sequence[Row], error: Exception) -> None:
        """Once, and each by itself: whichever of them it was, the others get their answers."""
        for row in reversed(rows):
            if row.job.future.done():
                continue
            if row.again or (len(rows) == 1 and isinstance(error, EngineFailed)):
                self._give_up(row.job, error)
            else:
                row.again = True
                self._rows.appendleft(row)
                row.job.waiting += 1
                self.waiting_tokens += len(row.tokens)

    def _give_up(self, job: Job, error: Exception) -> None:
        if not job.future.done():
            job.future.set_exception(error)
        self.drop(job)


def _hand_out(row: Row, answer: dict[str, Any]) -> None:
    job = row.job
    job.rows[row.place] = answer
    job.left -= 1
    if job.left == 0 and not job.future.done():
        job.future.set_result(None)
