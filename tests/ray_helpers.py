"""Workers that take their time or die, for the tests of many machines; a module, so that Ray's workers have it too."""

import os
import time

from budgetformer.cli.many import FileWorker
from budgetformer.errors import UsageError


class Slow(FileWorker):
    """Says which file it begins, and takes its time over it, so that it can be killed in between."""

    def _answer(self, source, target):
        with open(os.environ["STARTED"], "a") as file:
            file.write(f"{os.getpid()} {source}\n")
        time.sleep(0.7)
        return super()._answer(source, target)


class Deadly(FileWorker):
    """Dies of one file."""

    def _answer(self, source, target):
        if source.endswith("deadly.parquet"):
            os._exit(9)
        return super()._answer(source, target)


class Unable(FileWorker):
    """Cannot start."""

    def __init__(self, settings):
        raise UsageError("all machines must do the same")
