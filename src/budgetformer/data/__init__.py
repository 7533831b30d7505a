"""Data: any source as rows of strings, labels by name, and a ledger of what could not be used."""

from budgetformer.data.labels import check_labels, label_names, match_labels
from budgetformer.data.rows import BadRow, Rows, has_labels, iter_rows, load_split, read_rows, split_names, write_ledger

__all__ = [
    "BadRow",
    "Rows",
    "check_labels",
    "has_labels",
    "iter_rows",
    "label_names",
    "load_split",
    "match_labels",
    "read_rows",
    "split_names",
    "write_ledger",
]
