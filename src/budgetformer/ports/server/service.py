"""From texts to answers: tokenised here, queued, computed by the engine, and given up when nobody waits any more."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from budgetformer.engine.engine import probabilities
from budgetformer.engine.tokenizer import FolderTokenizer
from budgetformer.ports.server.measures import Measures
from budgetformer.ports.server.policy import Policy
from budgetformer.ports.server.process import Backend, EngineFailed, EngineLost
from budgetformer.ports.server.protocol import Refused
from budgetformer.ports.server.queue import Full, Job, Queue
from budgetformer.tokens import Tokens, tokenise

QUICK = 4096  # characters that are tokenised at once, in less time than a thread would take to begin

TextPair = tuple[str, str | None]
Message = Callable[[], Awaitable[Any]]


class HungUp(Exception):
    """The client is gone: there is nobody to answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may cost. texts: in one request. body: bytes. requests: in progress at once. seconds: each."""

    texts: int = 64
    body: int = 2_000_000
    requests: int = 512
    seconds: float = 30.0


@dataclass(frozen=True)
class Answered:
    """The answers to one request, and what they took. began: on the clock of `time.perf_counter`. probabilities: (text,
    class).
    """

    job: Job
    began: float
    characters: int
    tokenization_s: float
    probabilities: np.ndarray

    @property
    def logits(self) -> np.ndarray:
        """Float32 (text, class)."""
        return np.stack([row["logits"] for row in self.job.rows])

    @property
    def shares(self) -> list[float]:
        """The share of what has a budget that ran for each text."""
        return [float(row["share"]) for row in self.job.rows]

    @property
    def tokens(self) -> int:
        """All tokens of the request."""
        return sum(map(len, self.job.tokens))


class Service:
    """A model behind a queue. name: what it is called in the Open Inference Protocol."""

    def __init__(
        self,
        name: str,
        tokenizer: FolderTokenizer,
        backend: Backend,
        policy: Policy,
        *,
        batch_tokens: int = 1024,
        queue_tokens: int = 16384,
        limits: Limits | None = None,
    ) -> None:
        self.name, self.tokenizer, self.backend, self.policy = name, tokenizer, backend, policy
        self.limits, self.measures = limits or Limits(), Measures()
        self.batch_tokens, self.queue_tokens, self.in_progress = batch_tokens, queue_tokens, 0
        self.queue = Queue(
            backend,
            policy,
            batch_tokens=batch_tokens,
            max_tokens=queue_tokens,
            limit_s=self.limits.seconds,
            observe=self.measures.batch,
        )
        self.measures.watch(self._now, lambda: backend.restarts)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def _now(self) -> dict[str, float | None]:
        return {
            "queue_texts": len(self.queue),
            "queue_tokens": self.queue.waiting_tokens,
            "requests_in_progress": self.in_progress,
            "budget": self.queue.budget,
            "engine_up": float(self.backend.ready),
        }

    def admit(self) -> None:
        """Refuse a request before it is read, when there is no room for it.

        Raises:
            Refused: 429.
        """
        try:
            self.queue.check()
        except Full as full:
            raise _overloaded(full.retry_s) from None
        if self.in_progress > self.limits.requests:
            raise _overloaded(1)

    async def classify(
        self,
        texts: Sequence[TextPair],
        *,
        gone: Message,
        budget: float | None = None,
        truncate: bool = True,
        detail: bool = False,
    ) -> Answered:
        """Answer the texts of one request.

        gone: returns when the client has hung up. detail: also gates, wishes, FLOPs and a time that is the text's own.

        Raises:
            Refused: too many texts, one too long, a budget that is not allowed, no room, no time, no answer.
            HungUp: nothing more was computed.
        """
        if len(texts) > self.limits.texts:
            raise Refused(422, "Validation", f"{len(texts)} texts; at most {self.limits.texts} go into one request")
        if budget is not None and not self.policy.allows(budget):
            low, high = self.policy.limits
            raise Refused(422, "Validation", f"budget: this server takes {low:g} to {high:g}")
        began, characters = time.perf_counter(), sum(len(text) + len(pair or "") for text, pair in texts)
        try:
            async with asyncio.timeout(self.limits.seconds):
                if characters <= QUICK:
                    tokens = self._tokenise(texts)
                else:
                    tokens = await asyncio.get_running_loop().run_in_executor(self._threads, self._tokenise, texts)
                took = time.perf_counter() - began
                if not truncate and any(one.truncated for one in tokens):
                    longest = self.backend.facts["max_length"]
                    raise Refused(422, "Validation", f"a text is longer than {longest} tokens, and truncate is false")
                job = await self._computed(tokens, budget=budget, detail=detail, gone=gone)
        except TimeoutError:
            reason = f"no answer in {self.limits.seconds:g} s"
            raise Refused(503, "Unhealthy", reason, retry_s=1) from None
        self.measures.queue_seconds.observe(job.queue_s)
        logits = np.stack([row["logits"] for row in job.rows])
        return Answered(job, began, characters, took, probabilities(logits, self.backend.facts["multi_label"]))

    def _tokenise(self, texts: Sequence[TextPair]) -> list[Tokens]:
        """No message of a tokenizer is passed on: it may quote."""
        longest = self.backend.facts["max_length"]
        firsts = [text for text, _ in texts]
        pairs = [pair for _, pair in texts if pair is not None]
        if pairs and len(pairs) < len(texts):
            return [self._tokenise([one])[0] for one in texts]
        try:
            tokens = tokenise(self.tokenizer, firsts, pairs or None, max_length=longest)
        except (TypeError, ValueError) as error:
            reason = f"the tokenizer failed ({type(error).__name__}); is every text valid Unicode?"
            raise Refused(422, "Tokenizer", reason) from None
        if not all(map(len, tokens)):
            raise Refused(400, "Empty", "a text has no tokens")
        return tokens

    async def _computed(self, tokens: list[Tokens], *, budget: float | None, detail: bool, gone: Message) -> Job:
        try:
            job = self.queue.put(tokens, budget=budget, detail=detail)
        except Full as full:
            raise _overloaded(full.retry_s) from None
        watching = None
        try:
            await asyncio.sleep(0)  # the queue's turn: what it takes at once will be computed, whoever hangs up
            if job.waiting:
                watching = asyncio.ensure_future(_when(gone, job))
            await job.future
        except asyncio.CancelledError:
            if watching is not None and watching.done():
                raise HungUp from None
            raise
        except EngineLost as error:
            raise Refused(503, "Unhealthy", f"{error}; it is started again", retry_s=1) from None
        except EngineFailed as error:
            raise Refused(424, "Backend", f"the model failed ({error})") from None
        finally:
            if watching is not None:
                watching.cancel()
            if job.left:
                self.queue.drop(job)
        return job


async def _when(gone: Message, job: Job) -> None:
    await gone()
    job.future.cancel()


def _overloaded(retry_s: int) -> Refused:
    return Refused(429, "Overloaded", "too many texts wait; try again later", retry_s=retry_s)
