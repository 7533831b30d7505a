"""The command line: one-line errors, documented exit codes, results on stdout and notes on stderr."""

from budgetformer.cli.app import main

__all__ = ["main"]
