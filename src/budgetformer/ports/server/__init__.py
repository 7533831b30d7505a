"""A model folder behind HTTP, and a page that shows what a text activates.

One process speaks HTTP and waits; another holds the engine and computes, and is started again when it dies.
"""

from importlib.util import find_spec

from budgetformer.errors import UsageError

for _name in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
    if find_spec(_name) is None:
        raise UsageError(f"serve: {_name} is not installed; pip install 'budgetformer[server]'")
