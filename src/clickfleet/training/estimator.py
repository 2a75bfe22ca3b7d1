"""ClickClassifier: a model as an estimator of scikit-learn, for pipelines, cross-validation and grid searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from clickfleet.data.guess import guess
from clickfleet.data.schema import Dense, Schema, Slot, Transform
from clickfleet.errors import ConfigError, DataError, MissingError
from clickfleet.training.model import SavedModel
from clickfleet.training.network import Model
from clickfleet.training.run import fit
from clickfleet.training.signals import leave

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError:
    raise MissingError("scikit-learn", "sklearn") from None

LABEL, WEIGHT = "label", "weight"
SMALLEST = 1e-7
"""Scores closer than this to 0 or 1 count as this close, so that their logits are finite."""


class ClickClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A click model with the interface of a scikit-learn classifier. It separates two classes.

    `X` is a pandas or Polars frame, whose text, categories and ids are categorical, or an array of numbers. `sample_weight` weighs the
    rows. Missing values are allowed. Pickle and joblib store the files of a checkpoint.
    """

    def __init__(
        self,
        model: str | Mapping[str, Any] | type[Model] = "deepfm",
        *,
        epochs: int | Literal["auto"] = "auto",
        batch_size: int | Literal["auto"] = "auto",
        dim: int | Literal["auto"] = "auto",
        lr: float | Literal["auto"] = "auto",
        categorical_features: Sequence[int | str] | Literal["auto"] = "auto",
        settings: Mapping[str, Any] | None = None,
        random_state: int | np.random.RandomState | None = None,
        n_jobs: int | None = None,
    ) -> None:
        """Take the settings.

        `categorical_features` are the names or numbers of columns; `auto` guesses those of a frame, and takes every column of an array
        as a number. `settings` are further keywords of `clickfleet.train`, such as `{"train.loss.l2": 0.1}`. With a `random_state`,
        equal data gives equal models. `n_jobs` is the number of threads; default: 1. -1 means all cores.
        """
        super().__init__()
        self.model = model
        self.epochs = epochs
        self.batch_size = batch_size
        self.dim = dim
        self.lr = lr
        self.categorical_features = categorical_features
        self.settings = settings
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:  # noqa: N803
        """Train on rows and their classes."""
        table = self._table(X, reset=True)
        labels = column_or_1d(y, warn=True)
        if len(labels) != len(table):
            raise ValueError(f"X has {len(table)} rows, but y has {len(labels)} labels")
        check_classification_targets(labels)
        self.classes_, index = np.unique(labels, return_inverse=True)
        if len(self.classes_) > 2:
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {type_of_target(labels)}."
            )
        weights = None if sample_weight is None else _weights(sample_weight, len(table))
        seen = np.unique(index if weights is None else index[weights > 0])
        if len(seen) < 2:
            raise ValueError(f"y has only one class: {self.classes_[seen[0]]!r}")
        label = _free(LABEL, table.column_names)
        table = table.append_column(label, pa.array(index.astype(np.int64)))
        schema = self._schema(table, label, guessed=_is_frame(X))
        if weights is not None:
            name = _free(WEIGHT, table.column_names)
            table = table.append_column(name, pa.array(weights))
            schema = replace(schema, weight=name)
        result = self._run(lambda: fit(table, schema=schema, quiet=True, **self._keywords()))
        if result.signal is not None:  # as any other estimator, and unlike a run that can be resumed
            leave(result.signal)
        self.n_iter_ = result.step
        self.model_ = SavedModel(
            result.learner, None, result.threads, model_class=result.model_class, files=result.files
        )
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the probabilities of both classes for every row."""
        check_is_fitted(self)
        scores = self._run(lambda: self.model_.predict(self._table(X, reset=False))).astype(np.float64)
        return np.stack([1 - scores, scores], axis=1)

    def decision_function(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the logit of the second class for every row."""
        scores = np.clip(self.predict_proba(X)[:, 1], SMALLEST, 1 - SMALLEST)
        return np.asarray(np.log(scores) - np.log1p(-scores), np.float64)

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the more likely class of every row."""
        chosen = self.decision_function(X) > 0
        return np.asarray(self.classes_[chosen.astype(int)])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags

    def _schema(self, table: pa.Table, label: str, guessed: bool) -> Schema:
        """Return the schema of the columns of a table: numbers are dense columns, unless they are chosen or guessed to be categories."""
        names = [name for name in table.column_names if name != label]
        categorical = self._categorical(names)
        if categorical is None and guessed:
            try:
                return guess(table, label).schema
            except ConfigError as error:
                raise ValueError(str(error)) from error
        chosen = set(categorical or ())
        dense = tuple(_standard(name, table) for name in names if name not in chosen)
        return Schema(dense, tuple(Slot(name) for name in names if name in chosen), label)

    def _table(self, X: Any, reset: bool) -> pa.Table:  # noqa: N803
        """Check the inputs and return them as a table."""
        if _is_frame(X):
            validate_data(self, X, reset=reset, skip_check_array=True)
            table = pa.table(X)
            table = table.select([name for name in table.column_names if not name.startswith("__index_level_")])
            if not table.num_columns or not len(table):
                raise ValueError(f"Found array with {len(table)} sample(s) and {table.num_columns} feature(s)")
            return table
        categorical = self.categorical_features != "auto" and len(self.categorical_features) > 0
        array = validate_data(
            self, X, reset=reset, dtype=None if categorical else "numeric", ensure_all_finite="allow-nan"
        )
        names = [f"x{i}" for i in range(array.shape[1])]
        chosen = set(self._categorical(names) or ())
        columns = {name: self._column(array[:, i], name in chosen) for i, name in enumerate(names)}
        return pa.table(columns)

    def _column(self, column: NDArray[Any], categorical: bool) -> pa.Array:
        """Return a column of an array. Whole numbers in a categorical column are ids, whatever their type."""
        if not categorical:
            return pa.array(check_array(column[:, None], dtype=np.float64, ensure_all_finite="allow-nan")[:, 0])
        if column.dtype.kind == "f":
            whole = np.isnan(column) | (column == np.floor(column))
            return pa.array(column, pa.int64(), from_pandas=True) if whole.all() else pa.array(column.astype(str))
        return pa.array(column, from_pandas=True) if column.dtype.kind in "iub" else pa.array(map(str, column))

    def _categorical(self, names: Sequence[str]) -> list[str] | None:
        """Return the names of the categorical columns; None if they are to be guessed."""
        if isinstance(self.categorical_features, str):
            if self.categorical_features != "auto":
                raise ValueError(f"unknown categorical_features {self.categorical_features!r}; give a list, or 'auto'")
            return None
        chosen = [names[one] if isinstance(one, int | np.integer) else str(one) for one in self.categorical_features]
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise ValueError(f"categorical_features names {unknown[0]!r}, but the columns are {', '.join(names)}")
        return chosen

    def _keywords(self) -> dict[str, Any]:
        """Return the settings of the run as keywords of `train`."""
        given: dict[str, Any] = {
            "train__epochs": self.epochs,
            "data__batch_size": self.batch_size,
            "table__dim": self.dim,
            "dense__lr": self.lr,
        }
        keywords = {key: value for key, value in given.items() if value != "auto"}
        if self.random_state is not None:
            seed = check_random_state(self.random_state).randint(2**31 - 1)
            keywords |= {"train__seed": int(seed), "train__deterministic": True}
        if self.n_jobs is None or self.n_jobs > 0:
            keywords["train__threads"] = self.n_jobs or 1
        return {
            "model": self.model,
            **keywords,
            **{key.replace(".", "__"): v for key, v in (self.settings or {}).items()},
        }

    def _run(self, work: Any) -> Any:
        """Report bad data as scikit-learn does, by a ValueError."""
        try:
            return work()
        except DataError as error:
            raise ValueError(str(error)) from error


def _weights(given: ArrayLike, rows: int) -> NDArray[np.float32]:
    """Return the weights of the rows, checked."""
    weights: NDArray[np.float32] = check_array(given, ensure_2d=False, dtype=np.float32, input_name="sample_weight")
    if weights.shape != (rows,):
        raise ValueError(f"sample_weight has the shape {weights.shape}, but there are {rows} rows")
    if (weights < 0).any():
        raise ValueError("Negative values in sample_weight: weights must be 0 or more")
    if not weights.any():
        raise ValueError("all sample weights are zero")
    return weights


def _standard(name: str, table: pa.Table) -> Dense:
    values = table[name].to_numpy().astype(np.float64)
    values = values[np.isfinite(values)]
    mean, deviation = (float(values.mean()), float(values.std())) if len(values) else (0.0, 1.0)
    return Dense(name, Transform("standard", mean, deviation or 1.0))


def _is_frame(data: Any) -> bool:
    return hasattr(data, "__arrow_c_stream__")


def _free(name: str, taken: Sequence[str]) -> str:
    """Return a name that no column has."""
    while name in taken:
        name = f"_{name}"
    return name
