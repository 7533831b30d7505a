"""Parquet files and Hugging Face data sets: columnar sources that know their types, turned into strings."""

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from budgetformer.data.readers import Reader, Record
from budgetformer.errors import BudgetFormerError, DataError, UsageError

_BATCH_ROWS = 4096


def read_parquet(path: Path, stack: ExitStack) -> Reader:
    """A reader of a parquet file; `stack` closes it.

    Raises:
        DataError: not a parquet file, damaged, a repeated column, or (while reading) a column that is no text.
    """
    try:
        file = stack.enter_context(pq.ParquetFile(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as parquet; is it cut short or another format?") from error
    schema = file.schema_arrow
    repeated = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{path}: column {repeated!r} stands twice; rename one of them")
    # Files that the datasets library wrote keep the names of the classes beside the numbers.
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        features = {}

    def records(wanted: Sequence[str]) -> Iterator[Record]:
        batches = file.iter_batches(_BATCH_ROWS, columns=list(dict.fromkeys(wanted)))
        return _records(str(path), batches, wanted, features)

    return Reader(name=str(path), columns=schema.names, records=records)


def hub_splits(name: str, config: str | None) -> list[str]:
    """The names of the splits of a data set on the Hugging Face hub (or in a local folder that looks like one).

    Raises:
        UsageError: the datasets library is not installed.
        DataError: there is no such data set or configuration.
        BudgetFormerError: the hub cannot be reached.
    """
    return _from_hub(name, config, lambda datasets: list(datasets.get_dataset_split_names(name, config)))


def read_hub(name: str, config: str | None, split: str) -> Reader:
    """A reader of one split of a data set. Class numbers become the names the data set gives them.

    Raises: as `hub_splits`.
    """
    table = _from_hub(name, config, lambda datasets: datasets.load_dataset(name, config, split=split))
    label = f"hf:{name}" if config is None else f"hf:{name}:{config}"

    def records(wanted: Sequence[str]) -> Iterator[Record]:
        batches = table.with_format("arrow").iter(_BATCH_ROWS)
        return _records(label, batches, wanted, table.features.to_dict())

    return Reader(name=f"{label} ({split})", columns=list(table.column_names), records=records)


def _from_hub(name: str, config: str | None, call) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"hf:{name}: needs the datasets library: pip install 'budgetformer[datasets]'")
    import datasets

    try:
        return call(datasets)
    except (FileNotFoundError, ValueError) as error:
        which = name if config is None else f"{name}, configuration {config}"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"hf:{name}: cannot load {which}: {reason}; check the name, configuration and split") from error
    except (OSError, RuntimeError) as error:
        raise BudgetFormerError(
            f"hf:{name}: the hub did not answer ({type(error).__name__}); check the network or use a local file"
        ) from error


def _records(
    name: str, batches: Iterable[pa.RecordBatch | pa.Table], wanted: Sequence[str], features: Mapping[str, Any]
) -> Iterator[Record]:
    number = 1
    try:
        for batch in batches:
            cells = [_strings(batch.column(column), column, _class_names(features.get(column))) for column in wanted]
            for values in zip(*cells, strict=True):
                yield Record(number, values)
                number += 1
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name}: cannot be read after row {number - 1}; the file is damaged, make it again") from error


def _class_names(feature: Any) -> list[str] | None:
    """The names in the datasets library's description of a column: a ClassLabel, or a list of them."""
    while isinstance(feature, list | dict):
        if isinstance(feature, list):
            feature = feature[0] if feature else None
        elif feature.get("_type") == "ClassLabel":
            return feature.get("names")
        else:
            feature = feature.get("feature")
    return None


def _strings(column: pa.Array | pa.ChunkedArray, name: str, class_names: list[str] | None) -> list[Any]:
    """A column as strings, None where it is null or NaN; a column of lists as lists of strings."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        flat = iter(_strings(array.flatten(), name, class_names))
        sizes = array.value_lengths().to_pylist()
        return [None if size is None else [next(flat) for _ in range(size)] for size in sizes]
    if class_names is not None and pa.types.is_integer(kind):
        # -1 is how test sets without labels are published.
        return [class_names[i] if i is not None and 0 <= i < len(class_names) else None for i in array.to_pylist()]
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise DataError(f"column {name!r} holds {kind}; it must hold strings (or lists of them for several labels)")
    strings = array.cast(pa.string()).to_pylist()
    return [None if value == "nan" else value for value in strings] if pa.types.is_floating(kind) else strings
