"""scikit-learn's face: an estimator over texts that trains as `budgetformer train` does and answers with the engine.

    classifier = BudgetFormerClassifier(target_budget=0.4).fit(texts, labels)
    classifier.predict_proba(["I lost my card"])

A fitted estimator holds its model folder as bytes, so it can be copied and sent to other processes as it is. `save` and
`load` write and read that folder, without a pickle.
"""

import contextlib
import functools
import json
import math
import numbers
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, compute_class_weight
from sklearn.utils.validation import check_is_fitted

from budgetformer.engine import Engine
from budgetformer.engine.engine import Answers, probabilities
from budgetformer.errors import DataError, ModelFolderError, UsageError
from budgetformer.folder import FILES, check_model_folder, read_json_object
from budgetformer.outputs import clear_output_folder, write_aside
from budgetformer.settings import PredictSettings, TrainSettings

ABOUT = "sklearn.json"  # what scikit-learn knows and a model folder does not: the labels' own type, the parameters
SAME = (  # parameters that are settings of `budgetformer train` under the same name
    *("model", "target_budget", "scope", "ffn_blocks", "relevance"),
    *("second_answers", "first_share", "whole_share", "levels"),
    *("max_length", "pooling", "freeze_embeddings"),
    *("epochs", "dense_epochs", "recovery_epochs", "batch_size", "learning_rate", "recovery_rate"),
    *("router_learning_rate", "weight_decay", "warmup_ratio"),
    *("label_smoothing", "distillation", "distillation_temperature", "bf16", "threads"),
)
IN_USE = ("budget", "margin", "dtype", "threads")  # of `budgetformer predict`
SHARES = ("head_share_", "units_share_")
MEASURED = 1000  # texts on which the shares are measured


class BudgetFormerClassifier(ClassifierMixin, BaseEstimator):
    """A text classifier in which every input runs only the attention heads it needs.

    X is a list, an array or a column of texts, or two columns of them (pairs). y holds one label a text, of any kind.

    Parameters are settings of `budgetformer train` (see its `--help`) under their names, and:
    class_weight: None, "balanced" or {label: weight}. budget, margin, dtype: of use, as in `Engine.load`; they may be
    changed after `fit`. random_state: a whole number, a generator, or None. verbose: notes and progress on stderr.

    Attributes:
        classes_: the labels, sorted; the columns of `predict_proba`.
        head_share_: the share of attention heads that run, mean over (at most 1,000) training texts.
        units_share_: the same of the FLOPs of all that has a budget; this is what `target_budget` aims at.
        pairs_: whether it was fitted on pairs; None when it was loaded from a folder that does not say.
    """

    def __init__(
        self,
        *,
        model="demo",
        target_budget=0.4,
        scope="heads",
        ffn_blocks=24,
        relevance=None,
        second_answers=None,
        first_share=None,
        whole_share=None,
        levels=None,
        max_length=128,
        pooling="mean",
        freeze_embeddings=True,
        epochs=4,
        dense_epochs=None,
        recovery_epochs=None,
        batch_size=32,
        learning_rate=1e-4,
        recovery_rate=None,
        router_learning_rate=1e-3,
        weight_decay=0.01,
        warmup_ratio=0.06,
        label_smoothing=0.0,
        distillation=0.5,
        distillation_temperature=2.0,
        class_weight=None,
        random_state=0,
        bf16="auto",
        threads=None,
        budget=None,
        margin=None,
        dtype="auto",
        verbose=False,
    ):
        self.model = model
        self.target_budget = target_budget
        self.scope = scope
        self.ffn_blocks = ffn_blocks
        self.relevance = relevance
        self.second_answers = second_answers
        self.first_share = first_share
        self.whole_share = whole_share
        self.levels = levels
        self.max_length = max_length
        self.pooling = pooling
        self.freeze_embeddings = freeze_embeddings
        self.epochs = epochs
        self.dense_epochs = dense_epochs
        self.recovery_epochs = recovery_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.recovery_rate = recovery_rate
        self.router_learning_rate = router_learning_rate
        self.weight_decay = weight_decay
        self.warmup_ratio = warmup_ratio
        self.label_smoothing = label_smoothing
        self.distillation = distillation
        self.distillation_temperature = distillation_temperature
        self.class_weight = class_weight
        self.random_state = random_state
        self.bf16 = bf16
        self.threads = threads
        self.budget = budget
        self.margin = margin
        self.dtype = dtype
        self.verbose = verbose

    # ------------------------------------------------------------------ fit

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "BudgetFormerClassifier":
        """Train the dense twin and then the budgeted model.

        sample_weight: factors of the texts' losses, 0 or more; a text of weight 0 is left out.

        Raises:
            UsageError: a parameter or a weight is outside its rule.
            DataError: a text or a label cannot be used, or there is a single class.
        """
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            settings = self._settings(scratch)
            texts, pairs = read_texts(X)
            classes, numbered = read_labels(y, len(texts))
            weights = read_sample_weight(sample_weight, numbered, classes)
            with _undisturbed(settings.threads):
                self._train(settings, texts, pairs, classes, numbered, weights)
            files = _read_folder(Path(scratch))
        self.classes_, self.pairs_, self.files_ = classes, pairs is not None, files
        self.__dict__.pop("_engine", None)
        self.head_share_, self.units_share_ = self._shares(texts, pairs)
        return self

    def _settings(self, folder: str) -> TrainSettings:
        values = {name: _plain(value) for name, value in self.get_params(deep=False).items()}
        PredictSettings(model=folder, **{name: values[name] for name in IN_USE})  # refused now, not after training
        if isinstance(values["budget"], str):
            raise UsageError(f"budget is {values['budget']!r}, which is for folders; name a share in (0, 1], or None")
        try:
            draw = check_random_state(values["random_state"])
        except ValueError as error:
            raise UsageError(f"random_state: {error}") from None
        fixed = isinstance(values["random_state"], numbers.Integral)
        return TrainSettings(
            data="X",
            output_dir=folder,
            seed=values["random_state"] if fixed else int(draw.randint(2**31 - 1)),
            quiet=not self.verbose,
            **{name: values[name] for name in SAME},
        )

    def _train(
        self,
        settings: TrainSettings,
        texts: list[str],
        pairs: list[str] | None,
        classes: np.ndarray,
        numbered: np.ndarray,
        weights: np.ndarray | None,
    ) -> None:
        """Leaves a model folder in `settings.output_dir`."""
        import torch

        from budgetformer.config import BudgetConfig
        from budgetformer.data import Rows
        from budgetformer.training import job, sources
        from budgetformer.training.fit import silent
        from budgetformer.training.settling import hold_out

        echo = functools.partial(print, file=sys.stderr) if self.verbose else silent
        names = _names(classes)
        kept = range(len(texts)) if weights is None else np.flatnonzero(weights).tolist()
        rows = Rows(
            source="X",
            texts=[texts[i] for i in kept],
            pairs=None if pairs is None else [pairs[i] for i in kept],
            labels=[names[numbered[i]] for i in kept],
            ids=None,
            lines=list(kept),
            bad=[],
            columns={},
        )
        budget, folder = job.budget_of(settings), Path(settings.output_dir)
        torch.manual_seed(settings.seed)
        splits = sources.Splits(rows, None, rows, names, [])
        model, tokenizer = sources.load_encoder(settings, splits, budget=BudgetConfig())
        budget.check_blocks(model.config.intermediate_size)
        tokenizer.model_max_length = settings.max_length  # use cuts texts where training did
        model.config.class_weights = self._class_weights(classes, numbered)
        model.config.label_smoothing = settings.label_smoothing
        encoded = sources.encode_rows(rows, tokenizer, names, settings)
        if weights is not None:
            encoded = encoded.with_column("sample_weight", (weights[kept] / weights[kept].mean()).tolist())
        held = None
        if budget.may_answer_twice:
            encoded, held = hold_out(encoded, settings.seed)
        options: dict[str, Any] = {"folder": folder, "echo": echo, "keep_checkpoints": False}
        job.fit_dense(model, encoded, None, settings, **options)
        budgeted, _ = job.fit_budgeted(model, budget, encoded, None, settings, held=held, **options)
        job.save_model(budgeted, tokenizer, folder)

    def _class_weights(self, classes: np.ndarray, numbered: np.ndarray) -> list[float] | None:
        if self.class_weight is None:
            return None
        try:
            weights = compute_class_weight(self.class_weight, classes=classes, y=classes[numbered])
            if not (np.isfinite(weights) & (weights >= 0)).all():
                raise ValueError("a weight is below 0 or not finite")
        except (ValueError, TypeError) as error:
            raise UsageError(f"class_weight: {error}; give None, 'balanced' or {{label: weight}}") from None
        return [float(weight) for weight in weights]

    def _shares(self, texts: list[str], pairs: list[str] | None) -> tuple[float, float]:
        from budgetformer.engine.counting import counted
        from budgetformer.tokens import tokenise

        engine, step = self._engine_now(), max(1, len(texts) // MEASURED)
        some = slice(0, step * MEASURED, step)
        seconds = None if pairs is None else pairs[some]
        tokens = tokenise(engine.tokenizer, texts[some], seconds, max_length=engine.max_length)
        output = engine.forward(tokens)
        work = counted(engine, np.array([len(one) for one in tokens]), output.gates, output.blocks)
        ran, every = work.units(engine.weights.budget)
        return float(output.gates.mean()), float(ran.sum() / every.sum())

    # ------------------------------------------------------------------ use

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each text.

        Raises:
            NotFittedError: `fit` comes first.
            DataError: a row of X holds no text.
        """
        logits = self._answer(X).output.logits
        return self.classes_[logits.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class, in the order of `classes_`: float64 (text, class). Raises as `predict`."""
        return probabilities(self._answer(X).output.logits.astype(np.float64), multi_label=False)

    def decision_function(self, X: Any) -> np.ndarray:
        """Logits (text, class); of two classes the log odds of the second (text,). Raises as `predict`."""
        logits = self._answer(X).output.logits.astype(np.float64)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def _answer(self, X: Any) -> Answers:
        engine = self._engine_now()
        texts, pairs = read_texts(X)
        if self.pairs_ is not None and self.pairs_ != (pairs is not None):
            fitted, given = ("pairs of texts", "single texts") if self.pairs_ else ("single texts", "pairs of texts")
            raise DataError(f"X holds {given}, and the model was fitted on {fitted}; give it what it knows")
        return engine.predict(texts, pairs, budget=self.budget, margin=self.margin)

    def _engine_now(self) -> Engine:
        """The engine for today's parameters; loaded again when they, or the model, have changed."""
        check_is_fitted(self)
        options = {"dtype": self.dtype, "threads": self.threads}
        asked, engine = self.__dict__.get("_engine", (None, None))
        if engine is None or asked != options:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                for name, content in self.files_.items():
                    (Path(folder) / name).write_bytes(content)
                engine = Engine.load(folder, **options)
            self._engine = (options, engine)
        return engine

    # ------------------------------------------------------------------ files

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model folder, which the command line and `Engine` read too.

        A random state or class weights that are no plain values are not kept: they matter to training alone.

        Raises:
            UsageError: the folder holds something, and `overwrite` is False or it is no model of ours.
            OSError: the disk is full, or the folder cannot be written.
        """
        check_is_fitted(self)
        parameters = {name: _plain(value) for name, value in self.get_params(deep=False).items()}
        about = {
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "pairs": self.pairs_,
            **{name: getattr(self, name) for name in SHARES if hasattr(self, name)},
            "parameters": {k: v for k, v in parameters.items() if v is None or isinstance(v, str | int | float)},
        }
        home = clear_output_folder(folder, overwrite=overwrite)
        files = {ABOUT: json.dumps(about, indent=1).encode(), **self.files_}
        for name in sorted(files, key=lambda name: name == "config.json"):  # last: there is never half a model
            with write_aside(home / name) as aside:
                aside.write_bytes(files[name])

    @classmethod
    def load(cls, folder: str | Path) -> "BudgetFormerClassifier":
        """A fitted estimator from a folder that `save` or `budgetformer train` wrote; the labels of the latter are
        strings.

        Raises:
            ModelFolderError: the folder is incomplete, damaged or hostile, or its texts have several labels.
        """
        home = Path(folder)
        check_model_folder(home)
        about = _read_about(home / ABOUT)
        made = cls(**about.get("parameters", {}))
        made.files_, made.pairs_ = _read_folder(home), about.get("pairs")
        engine = made._engine_now()
        if engine.multi_label:
            raise ModelFolderError(f"{home}: its texts have several labels; use budgetformer.engine.Engine")
        made.classes_ = _classes(about, engine.labels, home / ABOUT)
        for name in SHARES:
            if name in about:
                setattr(made, name, about[name])
        return made

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_engine"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        return tags


def read_texts(X: Any) -> tuple[list[str], list[str] | None]:
    """Texts, and second texts where X has two columns.

    Raises:
        DataError: X is no column or pair of columns, is empty, or a row has no text; which, and never what it holds.
    """
    if isinstance(X, str):
        raise DataError("X is a single text; give a list of texts")
    cells = np.asarray(X, dtype=object)
    cells = cells[:, 0] if cells.ndim == 2 and cells.shape[1] == 1 else cells
    if cells.ndim not in (1, 2) or (cells.ndim == 2 and cells.shape[1] != 2):
        raise DataError(f"X has the shape {cells.shape}; give a text, or a pair of texts, in each row")
    if len(cells) == 0:
        raise DataError("X is empty; give at least one text")
    columns = [cells.tolist()] if cells.ndim == 1 else cells.T.tolist()
    for column in columns:
        for row, cell in enumerate(column):
            if not isinstance(cell, str):
                nan = isinstance(cell, float) and math.isnan(cell)
                what = "None" if cell is None else "NaN" if nan else type(cell).__name__
                raise DataError(f"X: row {row} (from 0) is {what}, not a text; leave such rows out, or fill them")
    texts, *second = ([str(cell) for cell in column] for column in columns)
    return texts, second[0] if second else None


def read_labels(y: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The different labels, sorted, and the number of each row's label among them.

    Raises:
        DataError: not one label a row, a label is missing or no word, number or truth value, or all are the same.
    """
    if y is None:
        raise DataError("a classifier requires y to be passed, but the target y is None; give a label for each text")
    cells = np.asarray(y, dtype=object)
    cells = cells[:, 0] if cells.ndim == 2 and cells.shape[1] == 1 else cells
    if cells.ndim != 1:
        raise DataError(f"y has the shape {cells.shape}; give one label for each text")
    if len(cells) != rows:
        raise DataError(f"y has {len(cells)} labels and X has {rows} texts; give one label for each text")
    for row, label in enumerate(cells):
        if not isinstance(label, str | numbers.Real | np.bool_) or label != label:
            raise DataError(f"y: row {row} (from 0) has no label ({type(label).__name__}); leave such rows out")
        if isinstance(label, float) and label != np.floor(label):
            raise DataError(f"y: row {row} (from 0) is a real number; classes are words or whole numbers")
    if len({isinstance(label, str) for label in cells}) > 1:
        raise DataError("y mixes words and numbers, which have no order; give labels of one kind")
    classes, numbered = np.unique(np.asarray(y).ravel(), return_inverse=True)
    _check_several(classes)
    if len(set(_names(classes))) < len(classes):
        raise DataError("y: two labels read the same when written down; give each class a name of its own")
    return classes, numbered


def read_sample_weight(sample_weight: Any, numbered: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
    """Weights (row,), or None where all rows weigh the same.

    Raises:
        UsageError: not one finite number of at least 0 for each row, or all are 0.
        DataError: a single class has weight.
    """
    if sample_weight is None:
        return None
    try:
        weights = np.asarray(sample_weight, np.float64)
    except (TypeError, ValueError):
        raise UsageError("sample_weight holds what is no number; give one weight for each text") from None
    if weights.shape != numbered.shape:
        raise UsageError(f"sample_weight has the shape {weights.shape}; give one weight for each of {len(numbered)}")
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise UsageError("sample_weight: a weight is below 0 or not finite; weights are 0 or more")
    if not weights.any():
        raise UsageError("sample_weight: every weight is 0, so no text is left; give some texts weight")
    _check_several(classes[np.unique(numbered[weights > 0])])
    return None if np.ptp(weights) == 0 else weights


def _check_several(classes: np.ndarray) -> None:
    if len(classes) < 2:
        raise DataError(f"y: all rows have the class {_names(classes)[0]!r}; a classifier needs two classes")


def _names(classes: np.ndarray) -> list[str]:
    """Labels as a model folder names them."""
    return [str(label) for label in classes.tolist()]


def _plain(value: Any) -> Any:
    """A number or a word of numpy's as Python's own: parameter grids hold the former."""
    return value.item() if isinstance(value, np.generic) else value


def _read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a model, and what the engine found out about it."""
    names = [*FILES, "engine.json"]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _read_about(path: Path) -> dict[str, Any]:
    """What `save` wrote beside the model, checked; nothing where there is no file."""
    if not path.is_file():
        return {}
    about = read_json_object(path)
    parameters, shares = about.get("parameters", {}), [about[name] for name in SHARES if name in about]
    if (
        not isinstance(parameters, dict)
        or not set(parameters) <= set(BudgetFormerClassifier().get_params())
        or not isinstance(about.get("pairs"), bool | None)
        or not all(isinstance(share, float) for share in shares)
    ):
        raise ModelFolderError(f"{path}: not as we write it; remove the file")
    return about


def _classes(about: dict[str, Any], names: list[str], path: Path) -> np.ndarray:
    """The labels in their own type, held against the names in the model; those names where nothing else is known."""
    if "classes" not in about:
        return np.array(names)
    try:
        dtype = np.dtype(about["classes_dtype"])
        classes = np.array(about["classes"], dtype)
        if dtype.kind not in "biufUO" or _names(classes) != names:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ModelFolderError(f"{path}: its classes are not those of the model; remove the file") from None
    return classes


@contextlib.contextmanager
def _undisturbed(threads: int | None) -> Iterator[None]:
    """Training seeds every generator of this process and sets torch's threads; afterwards they are as before."""
    import torch

    words, arrays, before = random.getstate(), np.random.get_state(), torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            torch.set_num_threads(threads or before)
            yield
    finally:
        random.setstate(words)
        np.random.set_state(arrays)
        torch.set_num_threads(before)
