"""Build hook: compile the engine's kernels when the package is built or installed; without a compiler, go on.

BUDGETFORMER_BUILD=0 compiles nothing, BUDGETFORMER_BUILD=require fails where there would be no library.
"""

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

ENGINE = Path("src") / "budgetformer" / "engine"


class KernelsHook(BuildHookInterface):
    """For wheels and editable installs: the library is made in the source tree, and wheels take it along."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark a wheel with a library inside as one for this platform and any Python 3."""
        tool = _load_build(Path(self.root) / ENGINE / "kernels" / "build.py")
        folder = Path(self.root) / ENGINE / "_lib"
        wish = "require"
        try:
            wish = tool.asked()
            if wish == "skip":
                return
            library = tool.build(folder, echo=self.app.display_info)
        except tool.BuildError as error:
            if wish == "require":
                self.app.abort(f"budgetformer: {error}")
            if version == "editable":  # one from older sources would be loaded all the same
                tool.library_path(folder).unlink(missing_ok=True)
            self.app.display_warning(f"budgetformer: the engine will run on torch, without its native kernels: {error}")
            return
        if version != "editable":  # an editable install finds it in the source tree
            build_data["force_include"][str(library)] = f"budgetformer/engine/_lib/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"


def _load_build(path: Path) -> Any:
    """The module in `path`, by its path: the package itself cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("budgetformer_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform() -> str:
    """This machine's own tag: a manylinux one would promise that the library runs with older C libraries too."""
    names = (tag.platform for tag in sys_tags())
    return next(name for name in names if not name.startswith(("manylinux", "musllinux")))
