"""The core imports no port and no transformers: asked of the source, and of a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import budgetformer

HOME = Path(budgetformer.__file__).parent
CORE = (
    *("config", "errors", "schedule", "estimators", "router", "reference"),
    *("skipping", "attention", "encoder", "losses", "flops"),
)
ALLOWED = {"torch", "jaxtyping", "numpy"}
WITHOUT_TORCH = ("config", "errors", "schedule", "flops")
# What the engine stands on; torch and the core's modules in torch are there for its path on torch alone.
ENGINE = ("config", "errors", "flops", "folder", "tokens", "outputs")
ON_TORCH = ("encoder", "router", "schedule")


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports inside the package are absolute"
            names = {alias.name for alias in node.names}
            found |= (
                {f"budgetformer.{name}" for name in names} if node.module == "budgetformer" else {node.module or ""}
            )
    return found


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_the_core_alone(name):
    for module in imports(HOME / f"{name}.py"):
        top, _, rest = module.partition(".")
        if top == "budgetformer":
            assert rest in CORE, f"{name}.py imports {module}, which is no part of the core"
        else:
            assert top in sys.stdlib_module_names or top in ALLOWED, f"{name}.py imports {module}"


@pytest.mark.parametrize("path", sorted((HOME / "engine").rglob("*.py")), ids=lambda path: path.name)
def test_the_engine_imports_neither_training_nor_transformers(path):
    on_torch = path.name == "torch_path.py"
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "budgetformer":
            # Types alone may be named in the lazy __init__; all else is the engine's own, or below it.
            known = rest.split(".")[0] == "engine" or rest in ENGINE or (on_torch and rest in ON_TORCH)
            assert known, f"{path.name} imports {module}"
        else:
            # The exact binomial test, where a sample is judged; answering needs none of it.
            statistics = {"scipy"} if path.name == "calibrating.py" else set()
            allowed = {"numpy", "tokenizers"} | ({"torch"} if on_torch else set()) | statistics
            assert top in sys.stdlib_module_names or top in allowed, f"{path.name} imports {module}"


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_not_know_the_engine(name):
    assert not any("engine" in module for module in imports(HOME / f"{name}.py"))


def test_the_reader_of_imports_sees_both_forms(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "from budgetformer import hf\nfrom budgetformer.training.job import x\ndef f():\n    import transformers\n"
    )
    assert imports(file) == {"budgetformer.hf", "budgetformer.training.job", "transformers"}


def test_a_fresh_interpreter_loads_the_core_without_transformers():
    lines = [f"import budgetformer.{name}" for name in CORE]
    lines += [
        "import sys",
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('transformers', 'accelerate')))",
    ]
    lines += ["print(sorted(m for m in sys.modules if m.startswith('budgetformer.')))"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    heavy, ours = done.stdout.splitlines()
    assert heavy == "[]"
    assert ours == str(sorted(f"budgetformer.{name}" for name in CORE))


def test_configuration_and_schedule_load_without_torch():
    code = "import sys\n" + "\n".join(f"import budgetformer.{name}" for name in WITHOUT_TORCH)
    code += "\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
