"""`python -m budgetformer`."""

import sys

from budgetformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
