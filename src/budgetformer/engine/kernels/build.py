"""Compile the engine's kernels into one shared library with a C interface. Needs a C++17 compiler, nothing else.

Standard library only and no import of ours: the build hook loads this file by its path, before the package is there.

Everything but `paths.cpp` is compiled once, for any processor of the kind; `paths.cpp` is compiled once per row of
`PATHS`, and the library picks one of them at run time by what the processor can do.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess  # a compiler is a program # nosec B404
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent
LIBRARY_FOLDER = SOURCES.parent / "_lib"
SANITIZED_FOLDER = SOURCES.parent / "_lib_sanitized"
VARIABLE = "BUDGETFORMER_BUILD"

COMMON = (
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall"),
    # Sums may be contracted to fused multiply-adds, but never reordered: NaN and infinity keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma"),
    "-mprefer-vector-width=512",
    "-Wno-uninitialized",  # gcc warns of its own header (its bug 105593)
)
# Name -> flags, from what every processor can do to what few can.
PATHS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
}
SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined")
JOBS = 2  # compilers at once: each takes hundreds of megabytes

Echo = Callable[[str], None]


class BuildError(Exception):
    """There is no new library; one line says why. `output` is all that the compiler said, "" if it was not asked."""

    def __init__(self, message: str, output: str = ""):
        super().__init__(message)
        self.output = output


class NoCompilerError(BuildError):
    """Nothing here can compile C++ for us: the package works without the library, only slower."""


def library_path(folder: str | os.PathLike[str] = LIBRARY_FOLDER) -> Path:
    """Where `build(folder)` puts the library, whether or not it is there; by default, where the package looks."""
    return Path(folder) / f"libbudgetformer.{'dylib' if sys.platform == 'darwin' else 'so'}"


def asked(environ: Mapping[str, str] = os.environ) -> str:
    """What the variable BUDGETFORMER_BUILD says: "try" (unset, "" or "1"), "skip" ("0") or "require".

    Raises:
        BuildError: it says something else.
    """
    value = environ.get(VARIABLE, "")
    meaning = {"": "try", "1": "try", "0": "skip", "require": "require"}.get(value)
    if meaning is None:
        raise BuildError(f"{VARIABLE}={value!r}: say 0 (do not compile), 1 (try) or require (fail without a library)")
    return meaning


def build(
    output_dir: str | os.PathLike[str],
    *,
    sources: str | os.PathLike[str] = SOURCES,
    compiler: str | None = None,
    extra_flags: Sequence[str] = (),
    echo: Echo = print,
) -> Path:
    """Compile `sources` and put the library into `output_dir`; nothing is done where it is there and up to date.

    Up to date means: made from files of the same contents by the same compiler with the same flags, as the small JSON
    file beside the library tells. (Contents, not times: an unpacked or copied file can be newer and look older.)
    The library appears whole or not at all, and a failed build leaves an older one as it was.

    Args:
        output_dir: Folder of the library; made where it is missing.
        sources: Folder with `paths.cpp`, at least one other `.cpp`, and their `.hpp`.
        compiler: What $CXX would say; without it $CXX itself, else the first of c++, g++, clang++ on the PATH.
        extra_flags: Come last in every command, the linking one too.
        echo: Is told what is done, skipped and warned of, line by line.

    Raises:
        NoCompilerError: no compiler was found, or the one that was named does not run.
        BuildError: the sources are not there, do not compile or do not link, or the folder cannot be written.
    """
    sources, library = Path(sources), library_path(output_dir)
    if sys.platform == "win32":
        raise NoCompilerError("the native kernels are compiled on Linux and macOS; here the engine runs on torch")
    words, version = _compiler(compiler)
    request = {
        "compiler": words,
        "version": version,
        "common": list(COMMON),
        "paths": {name: list(flags) for name, flags in _paths_here().items()},
        "link": _link_flags(extra_flags),
        "extra": list(extra_flags),
        "sources": _digests(sources),
    }
    record = library.with_suffix(".json")
    if library.is_file() and _recorded(record) == request:
        echo(f"native library: {library} is up to date")
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, since only a rename within one file system is all or nothing.
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as folder:
            made, paths = _make(request, sources, Path(folder), echo)
            note = Path(folder) / record.name
            note.write_text(json.dumps({"request": request, "paths": paths}, indent=1) + "\n", encoding="utf-8")
            # The library first: if only one of them gets there, the two disagree, and the next build starts anew.
            made.replace(library)
            note.replace(record)
    except OSError as error:
        raise BuildError(f"cannot write the native library to {library.parent}: {error.strerror or error}") from error
    echo(f"native library: {library} ({', '.join(paths)})")
    return library


def _make(request: dict[str, Any], sources: Path, folder: Path, echo: Echo) -> tuple[Path, list[str]]:
    """Compile and link in `folder`: the library's file there, and the names of the paths in it."""
    compiler, extra = request["compiler"], request["extra"]
    paths = {}
    for name, flags in request["paths"].items():
        if not flags or _knows(compiler, flags):
            paths[name] = flags
        else:
            echo(f"native library: without {name}, {compiler[0]} does not know its flags ({' '.join(flags)})")
    have = [f"-DBF_HAVE_{name.upper()}" for name in paths]
    # Objects for any processor come first. Of an inline function that several objects hold, the linker keeps the first,
    # and a copy with AVX-512 in it would end the process on a processor without.
    jobs = [(source, have, source.stem) for source in sorted(sources.glob("*.cpp")) if source.name != "paths.cpp"]
    jobs += [(sources / "paths.cpp", [*flags, f"-DBF_PATH={name}"], f"paths-{name}") for name, flags in paths.items()]

    def compile_one(job: tuple[Path, list[str], str]) -> str:
        source, flags, name = job
        made = str(folder / f"{name}.o")
        command = [*compiler, *request["common"], *flags, *extra, "-c", str(source), "-o", made]
        echo(f"native library: compiling {source.name}{f' ({name[6:]})' if name.startswith('paths-') else ''}")
        _run(command, f"{source.name} does not compile", echo)
        return made

    with ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(compile_one, jobs))  # the first failure cancels what has not begun
    made = folder / library_path(folder).name
    _run([*compiler, *request["link"], *objects, *extra, "-o", str(made)], "the objects do not link", echo)
    return made, list(paths)


def _compiler(named: str | None) -> tuple[list[str], str]:
    """The compiler's words (CXX may be "ccache g++"), the first a full path, and the line that tells its version."""
    said = (named or os.environ.get("CXX", "")).strip()
    if said:
        try:
            words = shlex.split(said)
        except ValueError as error:
            raise NoCompilerError(f"CXX={said!r} cannot be read: {error}") from error
        program = shutil.which(words[0])
        if program is None:
            raise NoCompilerError(f"no C++ compiler {words[0]!r}: correct CXX, or unset it to use one from the PATH")
    else:
        program = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        if program is None:
            raise NoCompilerError("no C++ compiler on the PATH (c++, g++, clang++): install one, or name it in CXX")
        words = [program]
    words = [program, *words[1:]]
    try:
        done = _call([*words, "--version"])
    except OSError as error:
        raise NoCompilerError(f"the C++ compiler {program} does not run: {error.strerror or error}") from error
    if done.returncode:
        raise NoCompilerError(f"{program} --version ends with {done.returncode}: CXX must name a C++ compiler")
    return words, done.stdout.partition("\n")[0]


def _paths_here() -> dict[str, tuple[str, ...]]:
    """The rows of PATHS that make sense on this machine."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {name: flags for name, flags in PATHS.items() if x86 or not flags}


def _link_flags(extra_flags: Sequence[str]) -> list[str]:
    flags = ["-shared", "-pthread"]
    # A name that nobody defines should fail here, not in the user's process. clang leaves the sanitizer's own open.
    if sys.platform.startswith("linux") and not any(flag.startswith("-fsanitize") for flag in extra_flags):
        flags.append("-Wl,--no-undefined")
    return flags


def _digests(sources: Path) -> dict[str, str]:
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.hpp")])
    names = [file.name for file in files if file.suffix == ".cpp"]
    if "paths.cpp" not in names or len(names) < 2:
        raise BuildError(f"no kernel sources in {sources}: paths.cpp and at least one other .cpp belong there")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _recorded(record: Path) -> Any:
    """What the library beside `record` was made from; None where that cannot be read."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))["request"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _knows(compiler: list[str], flags: Sequence[str]) -> bool:
    return _call([*compiler, *flags, "-x", "c++", "-fsyntax-only", "-"]).returncode == 0


def _run(command: list[str], what: str, echo: Echo) -> None:
    """Run the compiler; BuildError says `what` failed and the first line that tells why. Warnings are passed on."""
    done = _call(command)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        # The cause, not what follows from it; a linker says no "error:" on the line that names the missing symbol.
        causes = [line for line in lines if "error:" in line or "undefined reference" in line] or lines
        cause = causes[0] if causes else f"{command[0]} ended with {done.returncode}"
        raise BuildError(f"{what}: {cause}", f"{shlex.join(command)}\n{done.stderr}")
    if done.stderr.strip():
        echo(done.stderr.rstrip())


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    # In English, so that the line with "error:" can be found.
    environ = {**os.environ, "LC_ALL": "C"}
    # No shell reads it, and compiler and flags are those of whoever builds.
    return subprocess.run(  # nosec B603
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when the library is there, or when --as-set allows to do without it; else 1."""
    parser = argparse.ArgumentParser(prog="python -m budgetformer.engine.kernels.build", description=__doc__)
    parser.add_argument("--sanitize", action="store_true", help="check memory while it runs; into a folder of its own")
    parser.add_argument(
        "--as-set", action="store_true", help=f"do as {VARIABLE} says, by default without a compiler too"
    )
    options = parser.parse_args(arguments)
    wish = "require"
    try:
        if options.as_set:
            wish = asked()
        if wish == "skip":
            print(f"native library: not built, {VARIABLE}=0")
        elif options.sanitize:
            library = build(SANITIZED_FOLDER, extra_flags=SANITIZE)
            # Python itself is not instrumented, so the sanitizer has to be there before it; its own leaks are no news.
            print("to use it, set LD_PRELOAD=$(c++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0")
            print(f"and BUDGETFORMER_LIBRARY={library}")
        else:
            build(LIBRARY_FOLDER)
    except BuildError as error:
        print(f"{error.output}native library: {error}", file=sys.stderr)
        # Sources that do not compile are never what was wanted; a machine without a compiler may be.
        return 0 if wish == "try" and isinstance(error, NoCompilerError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
