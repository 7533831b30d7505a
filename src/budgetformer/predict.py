"""Rows to answers with a trained model: in batches sorted by length, in the order they came, an error for a bad row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.errors import BudgetFormerError, ModelFolderError, UsageError
from budgetformer.folder import check_model_folder
from budgetformer.tokens import Tokens, longest_input, tokenise

if TYPE_CHECKING:
    from budgetformer.data import Rows
    from budgetformer.hf import BudgetFormerForSequenceClassification
    from budgetformer.report.picture import Inspection

MULTI_LABEL = "multi_label_classification"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model says about one row; everything but `id` is None when `error` says why there is no answer.

    label: the most probable class; of a multi-label model all classes at 0.5 and above, joined by the label separator.
    score: the probability of the most probable class. scores: that of every class, or of the `top` ones. heads_used:
    heads that ran. budget: their share of all heads. truncated: tokens were cut off.
    """

    id: str | None
    label: str | None = None
    score: float | None = None
    scores: dict[str, float] | None = None
    heads_used: int | None = None
    budget: float | None = None
    error: str | None = None
    truncated: bool = False

    def row(self) -> dict[str, Any]:
        """The answer as it is written."""
        names = ("id", "label", "score", "scores", "heads_used", "budget", "error")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A loaded model with how it is to be used. `budget` None: the share that the model learned, for each text."""

    model: "BudgetFormerForSequenceClassification"
    tokenizer: Any
    max_length: int
    budget: float | None = None
    batch_size: int = 32
    label_separator: str = "|"
    top: int | None = None  # how many classes to give the scores of, the most probable first; None: all, in order

    @classmethod
    def load(cls, folder: str | Path, *, max_length: int | None = None, **options: Any) -> "Predictor":
        """Load a model folder.

        Raises:
            ModelFolderError: incomplete, damaged or hostile.
            UsageError: `max_length` is more than the model has positions.
        """
        model, tokenizer = load_model(folder)
        return cls(
            model=model, tokenizer=tokenizer, max_length=longest_input(model.config, tokenizer, max_length), **options
        )

    @property
    def labels(self) -> list[str]:
        """The names of the classes in the model's order."""
        names: Any = self.model.config.id2label
        return [names[number] for number in sorted(names)]

    def predict(self, rows: "Rows", *, first_number: int = 1) -> list[Answer]:
        """An answer for each row, in order. Rows are named by their id, or by their number where there are no ids.

        Batches are formed of texts of like length among all the rows given, which so should be many times a batch.
        """
        ids = rows.ids or [str(number) for number in range(first_number, first_number + len(rows))]
        bad = iter(rows.bad)
        answers: dict[int, Answer] = {}
        wanted: list[int] = []
        for place, text in enumerate(rows.texts):
            if text is None:
                answers[place] = Answer(id=ids[place], error=next(bad).reason)
            else:
                wanted.append(place)
        texts = [rows.texts[place] or "" for place in wanted]
        pairs = None if rows.pairs is None else [rows.pairs[place] or "" for place in wanted]
        ready: list[tuple[int, Tokens]] = []
        for place, tokens in zip(wanted, self._tokenise(texts, pairs), strict=True):
            if isinstance(tokens, str):
                answers[place] = Answer(id=ids[place], error=tokens)
            else:
                ready.append((place, tokens))
        ready.sort(key=lambda item: len(item[1]))
        for start in range(0, len(ready), self.batch_size):
            batch = ready[start : start + self.batch_size]
            for (place, _), answer in zip(batch, self._answer([tokens for _, tokens in batch]), strict=True):
                answers[place] = Answer(id=ids[place], **answer)
        return [answers[place] for place in range(len(rows))]

    def _tokenise(self, texts: Sequence[str], pairs: Sequence[str] | None) -> "list[Tokens | str]":
        """The tokens of each text, or what is wrong with it. No message of a tokenizer is passed on: it may quote."""
        try:
            tokens = tokenise(self.tokenizer, texts, pairs, max_length=self.max_length)
        except BudgetFormerError:
            raise
        except (TypeError, ValueError) as error:
            if len(texts) == 1:
                return [f"the tokenizer failed ({type(error).__name__}); is the text valid Unicode?"]
            each = range(len(texts))
            return [self._tokenise([texts[i]], None if pairs is None else [pairs[i]])[0] for i in each]
        return [item if len(item) else "the text has no tokens" for item in tokens]

    def _answer(self, batch: list[Tokens]) -> list[dict[str, Any]]:
        """The fields of each answer; when a batch fails its rows are tried one by one."""
        import torch

        try:
            with torch.inference_mode():
                output = self._run(batch)
        except BudgetFormerError:
            raise
        except (RuntimeError, IndexError, MemoryError) as error:
            if len(batch) == 1:
                return [{"error": f"the model failed ({type(error).__name__})"}]
            return [self._answer([tokens])[0] for tokens in batch]
        chances = probabilities(output.logits.float(), self.model.config.problem_type).tolist()
        heads = output.gates.sum((1, 2)).tolist()
        shares = output.head_share.tolist()
        return [
            {**self._say(chance), "heads_used": int(used), "budget": round(share, 4), "truncated": tokens.truncated}
            if all(map(math.isfinite, chance))
            else {"error": "the model's answer is not a finite number", "truncated": tokens.truncated}
            for chance, used, share, tokens in zip(chances, heads, shares, batch, strict=True)
        ]

    def _run(self, batch: list[Tokens]) -> Any:
        from budgetformer.text import collator

        tensors = collator(self.tokenizer.pad_token_id or 0)([tokens.item() for tokens in batch])
        return self.model(**tensors, budget=self.budget)

    def _say(self, chances: list[float]) -> dict[str, Any]:
        labels = self.labels
        best = max(range(len(chances)), key=chances.__getitem__)
        label = labels[best]
        if self.model.config.problem_type == MULTI_LABEL:
            label = self.label_separator.join(
                name for name, chance in zip(labels, chances, strict=True) if chance >= 0.5
            )
        shown = range(len(chances))
        if self.top is not None:
            shown = sorted(shown, key=chances.__getitem__, reverse=True)[: self.top]
        scores = {labels[i]: round(chances[i], 6) for i in shown}
        return {"label": label, "score": round(chances[best], 6), "scores": scores}

    def inspect(self, text: str, pair: str | None = None) -> "Inspection":
        """What the model does with one text: budget and heads of every layer, and the probabilities.

        Raises:
            UsageError: the tokenizer cannot read the text.
        """
        import torch

        from budgetformer.metrics import work
        from budgetformer.report.picture import Inspection

        (tokens,) = self._tokenise([text], None if pair is None else [pair])
        if isinstance(tokens, str):
            raise UsageError(f"text: {tokens}")
        with torch.inference_mode():
            output = self._run([tokens])
        config = self.model.config
        done = work(torch.tensor([len(tokens)]), output.gates.sum(2), config)
        return Inspection(
            text=text if pair is None else f"{text} | {pair}",
            tokens=len(tokens),
            labels=self.labels,
            probabilities=probabilities(output.logits.float(), config.problem_type)[0].tolist(),
            # A named budget is not the controllers' wish: then what each layer was given is its budget.
            wanted=(output.wanted[0] if self.budget is None else output.gates[0].mean(-1)).tolist(),
            gates=output.gates[0].int().tolist(),
            head_share=float(output.head_share[0]),
            flops_share=float(done.total[0] / done.total_dense[0]),
        )


def probabilities(logits: Any, problem_type: str | None) -> Any:
    """Probabilities (batch, labels): of each class by itself in a multi-label model, else over the classes."""
    return logits.sigmoid() if problem_type == MULTI_LABEL else logits.softmax(-1)


def load_model(folder: str | Path) -> "tuple[BudgetFormerForSequenceClassification, Any]":
    """Model (in eval mode) and tokenizer of a folder, checked first; nothing is fetched.

    Raises:
        ModelFolderError: incomplete, damaged or hostile, or weights are missing for what `config.json` describes.
    """
    check_model_folder(folder)
    from transformers import AutoTokenizer

    from budgetformer.hf import BudgetFormerForSequenceClassification

    try:
        loaded: Any = BudgetFormerForSequenceClassification.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        model, report = loaded
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except BudgetFormerError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    except Exception as error:
        # What the loaders raise for a damaged folder is not promised anywhere, and long.
        first = (str(error).splitlines() or [""])[0][:200]
        raise ModelFolderError(
            f"{folder}: cannot be loaded ({type(error).__name__}: {first}); make it again"
        ) from error
    missing = sorted(report["missing_keys"])
    if any(name.startswith("classifier") for name in missing):
        raise ModelFolderError(f"{folder}: has no classifier; train one with: budgetformer train --model SOURCE")
    if missing:
        raise ModelFolderError(f"{folder}: model.safetensors lacks {missing[0]} ({len(missing)} in all); copy it again")
    return model.eval(), tokenizer
