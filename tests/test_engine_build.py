"""The native library: built whole or not at all, rebuilt when it must be, taken along in wheels. On tiny sources."""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

import budgetformer
from budgetformer.engine import native
from budgetformer.engine.kernels import build as tool
from budgetformer.engine.kernels.build import BuildError, NoCompilerError, build, library_path

ROOT = Path(__file__).parents[1]
X86 = platform.machine().lower() in ("x86_64", "amd64")
COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

# `width` is inline, so every object that uses it has a copy, each compiled for another processor.
HEADER = """
#pragma once
#define JOINED(a, b) a##_##b
#define NAMED(a, b) JOINED(a, b)
#define PUBLIC extern "C" __attribute__((visibility("default")))
__attribute__((noinline)) inline int width() {
#if defined(__AVX512BF16__)
  return 1024;
#elif defined(__AVX512F__)
  return 512;
#elif defined(__AVX2__)
  return 256;
#else
  return 128;
#endif
}
"""
API = """
#include "shared.hpp"
PUBLIC int answer() { return 41; }
PUBLIC int api_width() { return width(); }
PUBLIC int have() {
  int paths = 0;
#ifdef BF_HAVE_PLAIN
  paths += 1;
#endif
#ifdef BF_HAVE_AVX2
  paths += 2;
#endif
#ifdef BF_HAVE_AVX512
  paths += 4;
#endif
#ifdef BF_HAVE_AVX512_BF16
  paths += 8;
#endif
  return paths;
}
"""
PATHS = """
#include "shared.hpp"
PUBLIC int NAMED(ask, BF_PATH)() { return width(); }
PUBLIC int NAMED(level, BF_PATH)() {
#if defined(__AVX512BF16__)
  return 3;
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
  return 2;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  return 1;
#else
  return 0;
#endif
}
"""


def write_sources(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("shared.hpp", HEADER), ("api.cpp", API), ("paths.cpp", PATHS)):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def sources(tmp_path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture(scope="module")
def first_build(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    return build(folder, sources=write_sources(folder / "sources"), echo=lambda line: None)


@pytest.fixture
def made(first_build, tmp_path) -> Path:
    """A library from sources as in `sources`, in the folder `out`; compiled once for all the tests."""
    (tmp_path / "out").mkdir()
    for file in (first_build, first_build.with_suffix(".json")):
        shutil.copy(file, tmp_path / "out")
    return library_path(tmp_path / "out")


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def load(library: Path) -> ctypes.CDLL:
    """The library, from a copy with a name of its own: a process that loads a name twice gets the first again."""
    copy = Path(tempfile.mkdtemp(dir=library.parent.parent)) / library.name
    shutil.copy(library, copy)
    return ctypes.CDLL(str(copy))


def fake(folder: Path, body: str) -> str:
    """A compiler that is a shell script."""
    script = folder / "fake-compiler"
    script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    script.chmod(0o755)
    return str(script)


@needs_compiler
def test_the_library_holds_every_path_with_its_own_flags(tmp_path, sources):
    lines = []
    made = build(tmp_path / "out", sources=sources, echo=lines.append)
    assert made == library_path(tmp_path / "out")
    assert {file.name for file in made.parent.iterdir()} == {made.name, "libbudgetformer.json"}
    library = load(made)
    assert library.answer() == 41
    paths = json.loads(made.with_suffix(".json").read_text(encoding="utf-8"))["paths"]
    assert paths == [name for name in tool.PATHS if hasattr(library, f"level_{name}")]
    # What the API was told is what is there, and each path was compiled with the flags of its row.
    assert library.have() == sum(1 << list(tool.PATHS).index(name) for name in paths)
    assert [library[f"level_{name}"]() for name in paths] == [list(tool.PATHS).index(name) for name in paths]
    assert paths[0] == "plain"
    assert len(paths) == (4 if X86 else 1) or any("without" in line for line in lines)


@needs_compiler
@pytest.mark.skipif(not X86, reason="only x86-64 has more than one path")
def test_what_objects_share_is_compiled_for_any_processor(made):
    assert load(made).api_width() == 128


@needs_compiler
def test_nothing_is_compiled_twice(tmp_path, sources, made):
    first, lines = made.stat(), []
    for file in sources.iterdir():
        os.utime(file)
    assert build(tmp_path / "out", sources=sources, echo=lines.append) == made
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert lines == [f"native library: {made} is up to date"]


def _edit_header(sources, made):
    edit(sources / "shared.hpp", "return 128", "return 127")


def _older_header(sources, made):
    """A file put back from an archive: other contents, an old time."""
    edit(sources / "shared.hpp", "return 128", "return 127")
    os.utime(sources / "shared.hpp", (1, 1))


def _new_file(sources, made):
    (sources / "more.cpp").write_text("int more() { return 7; }\n", encoding="utf-8")


def _gone(sources, made):
    made.unlink()


def _broken_record(sources, made):
    made.with_suffix(".json").write_text("[", encoding="utf-8")


@needs_compiler
@pytest.mark.parametrize("change", [_edit_header, _older_header, _new_file, _gone, _broken_record])
def test_a_change_is_compiled(tmp_path, sources, made, change):
    # Held open, so that the file system cannot give its number to the next one.
    with made.open("rb"):
        before = made.stat().st_ino
        change(sources, made)
        lines = []
        build(tmp_path / "out", sources=sources, echo=lines.append)
        assert made.stat().st_ino != before
    assert any("compiling api.cpp" in line for line in lines)


@needs_compiler
def test_other_flags_are_another_library(tmp_path, sources):
    edit(sources / "api.cpp", "return 41", "return ANSWER")
    for answer in (5, 7):
        made = build(tmp_path / "out", sources=sources, extra_flags=[f"-DANSWER={answer}"], echo=lambda line: None)
        assert load(made).answer() == answer


@needs_compiler
def test_a_compile_error_is_one_line_and_leaves_nothing(tmp_path, sources):
    edit(sources / "paths.cpp", "return width();", "return widht();")
    with pytest.raises(BuildError, match=r"^paths\.cpp does not compile: .*paths\.cpp:3:.*error:.*widht") as caught:
        build(tmp_path / "out", sources=sources, echo=lambda line: None)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, NoCompilerError)
    assert "-DBF_PATH=" in caught.value.output
    assert list((tmp_path / "out").iterdir()) == []


@needs_compiler
def test_a_failed_build_keeps_the_older_library(tmp_path, sources, made):
    before = {file.name: file.read_bytes() for file in made.parent.iterdir()}
    edit(sources / "api.cpp", "return 41", "return 42 +")
    with pytest.raises(BuildError, match=r"^api\.cpp does not compile"):
        build(tmp_path / "out", sources=sources, echo=lambda line: None)
    assert {file.name: file.read_bytes() for file in made.parent.iterdir()} == before
    # Ended in the middle of its writing.
    edit(sources / "api.cpp", "return 42 +", "return 43")
    half = 'case " $* " in *" -shared "*) for last; do :; done; echo half > "$last"; kill -9 $$;; esac'
    compiler = fake(tmp_path, f'{half}\nexec "{COMPILER}" "$@"')
    with pytest.raises(BuildError, match=r"^the objects do not link: .*fake-compiler ended with -9$"):
        build(tmp_path / "out", sources=sources, compiler=compiler, echo=lambda line: None)
    assert {file.name: file.read_bytes() for file in made.parent.iterdir()} == before
    assert load(build(tmp_path / "out", sources=sources, echo=lambda line: None)).answer() == 43


@needs_compiler
def test_a_name_that_nobody_defines_fails_at_build_time(tmp_path, sources):
    edit(sources / "api.cpp", "PUBLIC int answer() {", "int nowhere();\nPUBLIC int answer() { return nowhere();")
    with pytest.raises(BuildError, match=r"^the objects do not link: .*nowhere"):
        build(tmp_path / "out", sources=sources, echo=lambda line: None)
    assert list((tmp_path / "out").iterdir()) == []


@needs_compiler
def test_warnings_of_the_compiler_are_passed_on(tmp_path, sources):
    edit(sources / "api.cpp", "return 41", "int unneeded; return 41")
    lines = []
    build(tmp_path / "out", sources=sources, echo=lines.append)
    assert any("unneeded" in line for line in lines)


@needs_compiler
@pytest.mark.skipif(not X86, reason="only x86-64 has more than one path")
def test_a_path_the_compiler_does_not_know_is_left_out_with_a_note(tmp_path, sources):
    old = 'case " $* " in *" -mavx512bf16 "*) echo "error: unrecognized option" >&2; exit 1;; esac'
    lines = []
    compiler = fake(tmp_path, f'{old}\nexec "{COMPILER}" "$@"')
    made = build(tmp_path / "out", sources=sources, compiler=compiler, echo=lines.append)
    library = load(made)
    assert library.have() == 7
    assert not hasattr(library, "level_avx512_bf16")
    assert [line for line in lines if "without avx512_bf16" in line and "-mavx512bf16" in line] != []
    # The same compiler in a newer release: what it could not do is tried again.
    fake(tmp_path, f'[ "$1" = --version ] && echo newer && exit 0\nexec "{COMPILER}" "$@"')
    build(tmp_path / "out", sources=sources, compiler=compiler, echo=lines.append)
    assert load(made).have() == 15


@needs_compiler
def test_cxx_names_the_compiler_and_may_have_words(tmp_path, sources, monkeypatch):
    monkeypatch.setenv("CXX", fake(tmp_path, f'echo "$*" >> "{tmp_path}/calls"\nexec "{COMPILER}" "$@"') + " -DSAID=1")
    build(tmp_path / "out", sources=sources, echo=lambda line: None)
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert len(calls) >= 4
    assert all(call.startswith("-DSAID=1 ") for call in calls)


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("/nonexistent", r"^no C\+\+ compiler '/nonexistent': correct CXX, or unset it"),
        ("c++ '", r"^CXX=\"c\+\+ '\" cannot be read: No closing quotation"),
        ("{folder}/fake-compiler", r"fake-compiler --version ends with 3: CXX must name a C\+\+ compiler$"),
    ],
)
def test_a_compiler_that_does_not_run(tmp_path, sources, monkeypatch, cxx, message):
    fake(tmp_path, "exit 3")
    monkeypatch.setenv("CXX", cxx.format(folder=tmp_path))
    with pytest.raises(NoCompilerError, match=message):
        build(tmp_path / "out", sources=sources)
    assert not (tmp_path / "out").exists()


def test_a_path_without_a_compiler(tmp_path, sources, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        NoCompilerError, match=r"^no C\+\+ compiler on the PATH \(c\+\+, g\+\+, clang\+\+\): install one"
    ):
        build(tmp_path / "out", sources=sources)


@needs_compiler
def test_without_sources_there_is_no_library(tmp_path, sources):
    (sources / "paths.cpp").unlink()
    with pytest.raises(BuildError, match=r"^no kernel sources in .*sources: paths\.cpp and at least one other"):
        build(tmp_path / "out", sources=sources)


@needs_compiler
def test_a_folder_that_cannot_be_made(tmp_path, sources):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BuildError, match=r"^cannot write the native library to .*file/out: Not a directory"):
        build(tmp_path / "file" / "out", sources=sources)


def test_the_variable_has_four_values():
    assert [tool.asked({tool.VARIABLE: value}) for value in ("", "1", "0", "require")] == [
        "try",
        "try",
        "skip",
        "require",
    ]
    assert tool.asked({}) == "try"
    with pytest.raises(BuildError, match=r"^BUDGETFORMER_BUILD='no': say 0 \(do not compile\), 1 \(try\) or require"):
        tool.asked({tool.VARIABLE: "no"})


def test_the_package_tells_where_its_library_is(monkeypatch):
    monkeypatch.delenv("BUDGETFORMER_LIBRARY", raising=False)
    assert library_path().parent == Path(budgetformer.__file__).parent / "engine" / "_lib"
    assert native.library_path() == library_path()
    assert Path(budgetformer.__file__).parent / "engine" / "kernels" == tool.SOURCES


# The command and the build hook, on a small tree of the same shape.


@pytest.fixture
def project(tmp_path) -> Path:
    root = tmp_path / "project"
    kernels = write_sources(root / "src" / "budgetformer" / "engine" / "kernels")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    shutil.copy(tool.__file__, kernels / "build.py")
    (root / "src" / "budgetformer" / "__init__.py").touch()
    return root


def environ(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != tool.VARIABLE} | more


def command(project: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    file = project / "src/budgetformer/engine/kernels/build.py"
    return subprocess.run(
        [sys.executable, str(file), *arguments], env=environ(**more), capture_output=True, text=True, check=False
    )


def hook(project: Path, call: str, **more: str) -> subprocess.CompletedProcess[str]:
    """What pip asks of the build backend, in a process of its own; `out` beside the project gets the result."""
    (project.parent / "out").mkdir(exist_ok=True)
    code = f"from hatchling import build; print(build.{call}('../out'))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environ(**more), capture_output=True, text=True, check=False
    )


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


LIBRARY = f"budgetformer/engine/_lib/{library_path().name}"
NO_COMPILER = "no C++ compiler '/nonexistent': correct CXX, or unset it to use one from the PATH"


@needs_compiler
def test_the_command_puts_the_library_where_the_package_looks(project):
    done = command(project)
    assert done.returncode == 0, done.stderr
    assert (project / "src" / LIBRARY).is_file()


def test_the_command_without_a_compiler(project):
    for arguments, variable, code in (((), "", 1), (("--as-set",), "", 0), (("--as-set",), "require", 1)):
        done = command(project, *arguments, CXX="/nonexistent", BUDGETFORMER_BUILD=variable)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", f"native library: {NO_COMPILER}\n")
    done = command(project, "--as-set", CXX="/nonexistent", BUDGETFORMER_BUILD="0")
    assert (done.returncode, done.stdout) == (0, "native library: not built, BUDGETFORMER_BUILD=0\n")


@needs_compiler
def test_the_command_never_passes_over_a_compile_error(project):
    (project / "src/budgetformer/engine/kernels/api.cpp").write_text("int answer() { return }\n", encoding="utf-8")
    done = command(project, "--as-set")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("native library: api.cpp does not compile: ")


@needs_compiler
def test_a_wheel_with_the_library_is_for_this_platform(project):
    done = hook(project, "build_wheel")
    assert done.returncode == 0, done.stderr
    [wheel] = (project.parent / "out").iterdir()
    assert wheel.name.split("-", 2)[2].startswith("py3-none-")
    assert not wheel.name.endswith("any.whl")
    names = names_in(wheel)
    assert {name for name in names if "/_lib" in name} == {LIBRARY}
    assert {
        f"budgetformer/engine/kernels/{name}" for name in ("api.cpp", "paths.cpp", "shared.hpp", "build.py")
    } <= names
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(LIBRARY, project.parent)
        assert (
            "Root-Is-Purelib: false" in archive.read(next(name for name in names if name.endswith("/WHEEL"))).decode()
        )
    assert load(project.parent / LIBRARY).answer() == 41


@pytest.mark.parametrize("more", [{"CXX": "/nonexistent"}, {"BUDGETFORMER_BUILD": "0"}])
def test_a_wheel_without_the_library_is_for_all(project, more):
    # An older library in the tree is not what this wheel was made from.
    (project / "src" / LIBRARY).parent.mkdir()
    (project / "src" / LIBRARY).write_bytes(b"old")
    done = hook(project, "build_wheel", **more)
    assert done.returncode == 0, done.stderr
    [wheel] = (project.parent / "out").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [name for name in names_in(wheel) if "/_lib" in name] == []
    said = [line for line in (done.stdout + done.stderr).splitlines() if "budgetformer: " in line]
    warning = f"budgetformer: the engine will run on torch, without its native kernels: {NO_COMPILER}"
    assert said == ([warning] if "CXX" in more else [])


def test_a_library_that_is_required_or_a_wrong_word(project):
    done = hook(project, "build_wheel", CXX="/nonexistent", BUDGETFORMER_BUILD="require")
    assert (done.returncode, done.stdout + done.stderr) == (1, f"budgetformer: {NO_COMPILER}\n")
    done = hook(project, "build_wheel", BUDGETFORMER_BUILD="yes")
    assert done.returncode == 1
    assert (done.stdout + done.stderr).startswith("budgetformer: BUDGETFORMER_BUILD='yes': say 0")


@needs_compiler
def test_an_editable_install_has_the_library_in_the_tree(project):
    done = hook(project, "build_editable")
    assert done.returncode == 0, done.stderr
    assert load(project / "src" / LIBRARY).answer() == 41
    [wheel] = (project.parent / "out").iterdir()
    assert [name for name in names_in(wheel) if "/_lib" in name] == []


def test_an_editable_install_without_a_compiler_leaves_no_older_library(project):
    (project / "src" / LIBRARY).parent.mkdir()
    (project / "src" / LIBRARY).write_bytes(b"old")
    done = hook(project, "build_editable", CXX="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert not (project / "src" / LIBRARY).exists()


@needs_compiler
def test_a_source_archive_has_the_sources_and_no_library(project):
    assert command(project).returncode == 0
    done = hook(project, "build_sdist")
    assert done.returncode == 0, done.stderr
    [archive] = (project.parent / "out").iterdir()
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    kernels = "src/budgetformer/engine/kernels"
    assert {
        "hatch_build.py",
        *(f"{kernels}/{name}" for name in ("api.cpp", "paths.cpp", "shared.hpp", "build.py")),
    } <= names
    assert [name for name in names if "/_lib" in name] == []
