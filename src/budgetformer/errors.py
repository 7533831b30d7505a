"""Errors a user can act on: one line that says what, where and what to do, and the command line's exit code."""


class BudgetFormerError(Exception):
    """Something failed at run time. Exit code 1."""

    exit_code = 1


class UsageError(BudgetFormerError, ValueError):
    """An argument or a setting is wrong. Exit code 2."""

    exit_code = 2


class DataError(BudgetFormerError, ValueError):
    """A data file cannot be used as it is. Exit code 3."""

    exit_code = 3


class ModelFolderError(BudgetFormerError, ValueError):
    """A model folder is incomplete, damaged or not to be trusted. Exit code 4."""

    exit_code = 4
