"""The compiled functions are built once and kept; where that fails, training still works."""

import functools
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import Cli
from tasks import write_task

from mtrain.ops import native

FLAGS = tuple(flag for flag in native._FLAGS if flag != "-O3")  # compiled sooner
SAY_LIBRARY = f"""  # load the library, and run one of its functions
import ctypes
from mtrain.ops import native
native._FLAGS = {FLAGS!r}
library = native.compiled()
x, y = (ctypes.c_float * 100)(*[1.0] * 100), (ctypes.c_float * 100)()
library.dropout_float(x, y, 100, 2**15, 2.0, 7)
print(library._name, sorted(set(y)))
"""

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in native._COMPILERS), reason="no C compiler is installed"
)
needs_vectors = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the compiler knows no -mavx512f"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with a library in it. Tests only read it."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FLAGS", FLAGS)
        assert native._load(cache / "mtrain") is not None
    return cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for a library that has not been asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MTRAIN_NATIVE", raising=False)
    monkeypatch.setattr(native, "_FLAGS", FLAGS)
    monkeypatch.setattr(native, "compiled", functools.cache(native.compiled.__wrapped__))
    return tmp_path / "cache"


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if not path.is_dir())


def environment(**changes: str | Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "MTRAIN_NATIVE"}
    return kept | {name: str(value) for name, value in changes.items()}


def say_library(**changes: str | Path) -> list[str]:
    """Return what a process of its own says: the library's file, and what dropout makes of ones."""
    done = subprocess.run(
        [sys.executable, "-c", SAY_LIBRARY],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split(maxsplit=1)


def forbidden(*_: object) -> bool:
    pytest.fail("nothing is to be compiled or loaded")


@needs_compiler
def test_the_library_is_compiled_into_the_cache_folder(cache, monkeypatch):
    library = native.compiled()
    (name,) = files(cache)
    assert library is not None
    assert library._name == str(cache / "mtrain" / name)
    assert library.dropout_float.argtypes is not None
    assert [path.name for path in (cache / "mtrain").iterdir()] == [name], "nothing else is left"


@needs_compiler
def test_a_second_call_compiles_nothing(cache, built, monkeypatch):
    monkeypatch.setattr(native, "_compile", forbidden)
    monkeypatch.setenv("XDG_CACHE_HOME", str(built))
    assert native.compiled() is not None


@needs_compiler
def test_a_second_process_takes_the_file_of_the_first(built, tmp_path):
    before = [(path, path.stat().st_mtime_ns) for path in built.rglob("*.so")]
    no_tools = tmp_path / "bin"
    no_tools.mkdir()
    found = say_library(XDG_CACHE_HOME=built, PATH=no_tools)
    assert found == [str(before[0][0]), "[0.0, 2.0]\n"]
    assert [(path, path.stat().st_mtime_ns) for path in built.rglob("*.so")] == before


@needs_compiler
def test_the_library_is_asked_for_once_in_a_process(monkeypatch):
    first = native.compiled()
    monkeypatch.setattr(native, "_load", forbidden)
    assert native.compiled() is first


def test_another_source_or_processor_gets_a_library_of_its_own(tmp_path, monkeypatch):
    first = native._fingerprint()
    assert native._fingerprint() == first
    for place, source in enumerate(native._SOURCES):
        other = tmp_path / source.name
        other.write_bytes(source.read_bytes() + b"\n")
        sources = [*native._SOURCES]
        sources[place] = other
        with monkeypatch.context() as patch:
            patch.setattr(native, "_SOURCES", sources)
            assert native._fingerprint() != first
    with monkeypatch.context() as patch:
        patch.setattr(native, "_FLAGS", ("-O2",))
        assert native._fingerprint() != first
    monkeypatch.setattr(native.platform, "machine", lambda: "pdp11")
    assert native._fingerprint() != first


@pytest.mark.parametrize("name", ["flags\t\t", "Features\t"])
def test_a_processor_that_can_do_more_gets_a_library_of_its_own(monkeypatch, name):
    found = []
    for features in ("fp asimd", "fp asimd sve", "fp asimd"):
        text = f"processor\t: 0\nBogoMIPS\t: {len(found)}\n{name}: {features}\n"
        monkeypatch.setattr(native.Path, "read_text", lambda path, text=text, **_: text)
        found.append(native._fingerprint())
    assert found[0] == found[2] != found[1]


@needs_compiler
@pytest.mark.parametrize("kept_bytes", [0, 100, 4096, -1])
def test_a_file_that_was_cut_off_is_not_loaded_but_made_again(
    cache, built, monkeypatch, kept_bytes
):
    """To load it would end the process with a bus error."""
    (whole,) = built.rglob("*.so")
    damaged = cache / "mtrain" / whole.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(whole.read_bytes()[:kept_bytes])

    def copied(compiler: str, flags: tuple[str, ...], output: Path) -> bool:
        shutil.copy(whole, output)
        return True

    monkeypatch.setattr(native, "_compile", copied)
    library = native.compiled()
    assert library is not None
    assert library._name == str(damaged)
    assert damaged.read_bytes() == whole.read_bytes()


def test_a_file_of_another_making_is_left_alone(cache, monkeypatch):
    folder = cache / "mtrain"
    folder.mkdir(parents=True)
    (folder / "kernels-0123456789abcdef-0123456789abcdef.so").write_bytes(b"of another source")
    monkeypatch.setattr(native, "_compile", lambda *_: False)
    assert native.compiled() is None
    assert files(cache) == ["kernels-0123456789abcdef-0123456789abcdef.so"]


@needs_compiler
def test_a_cache_that_cannot_be_written_gives_way_to_a_folder_that_goes_with_the_process(tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    name, out = say_library(XDG_CACHE_HOME=tmp_path / "cache", TMPDIR=temporary)
    assert Path(name).parent.parent == temporary
    assert Path(name).parent.name.startswith("mtrain-")
    assert out == "[0.0, 2.0]\n"
    assert list(temporary.iterdir()) == []
    assert (tmp_path / "cache").read_text() == "a file, where a folder should be"


@needs_compiler
def test_a_full_cache_gives_way_to_a_folder_of_the_process(cache, built, monkeypatch, tmp_path):
    (whole,) = built.rglob("*.so")

    def compiles(compiler: str, flags: tuple[str, ...], output: Path) -> bool:
        if output.is_relative_to(cache):
            return False  # as a compiler ends that finds no space on the device
        shutil.copy(whole, output)
        return True

    monkeypatch.setattr(native, "_compile", compiles)
    monkeypatch.setattr(native, "_process_dir", lambda: tmp_path / "own")
    library = native.compiled()
    assert library is not None
    assert library._name == str(tmp_path / "own" / whole.name)


def test_without_a_compiler_no_second_folder_is_tried(cache, monkeypatch):
    monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(native, "_process_dir", forbidden)
    assert native.compiled() is None


def test_a_compiler_keeps_its_own_files_beside_the_library(tmp_path, monkeypatch):
    """The folder for temporary files may be full, though the cache has room."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    monkeypatch.setenv("KEPT", "as it is")
    compiler, output = tmp_path / "compiler", tmp_path / "cache" / "kernels.so"
    output.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\necho "$TMPDIR $KEPT" > {output}\n', encoding="utf-8")
    compiler.chmod(0o755)
    assert native._compile(str(compiler), (), output)
    assert output.read_text("utf-8") == f"{output.parent} as it is\n"


@needs_compiler
def test_a_user_without_a_home_gets_the_library_too(cache, built, monkeypatch, tmp_path):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native.Path, "home", homeless)
    monkeypatch.setattr(native, "_process_dir", lambda: built / "mtrain")
    assert native.compiled() is not None


def test_without_any_folder_there_is_no_library(cache, monkeypatch):
    cache.write_text("a file, where a folder should be")

    def full(**_: str) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(native.tempfile, "mkdtemp", full)
    assert native.compiled() is None


@needs_compiler
def test_a_library_that_cannot_be_loaded_from_the_cache_is_loaded_from_elsewhere(
    cache, built, monkeypatch, tmp_path
):
    """A folder may be mounted so that nothing in it can be run."""
    shutil.copytree(built, cache)
    load = native.ctypes.CDLL

    def refused(name: str) -> native.ctypes.CDLL:
        if name.startswith(str(cache)):
            raise OSError("failed to map segment from shared object")
        return load(name)

    own = tmp_path / "own"
    shutil.copytree(built / "mtrain", own)
    monkeypatch.setattr(native.ctypes, "CDLL", refused)
    monkeypatch.setattr(native, "_process_dir", lambda: own)
    library = native.compiled()
    assert library is not None
    assert library._name.startswith(str(own))


@needs_compiler
def test_those_who_compile_at_once_do_not_disturb_each_other(cache, monkeypatch):
    """Each compiles beside the others; the last one's file stays, and it is whole."""
    together, compiles = threading.Barrier(2), native._compile

    def at_once(compiler: str, flags: tuple[str, ...], output: Path) -> bool:
        together.wait(timeout=120)
        done = compiles(compiler, flags, output)
        together.wait(timeout=120)
        return done

    monkeypatch.setattr(native, "_compile", at_once)
    found = []
    threads = [threading.Thread(target=lambda: found.append(native.compiled())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert None not in found
    monkeypatch.setattr(native, "_compile", forbidden)
    native.compiled.cache_clear()
    assert native.compiled() is not None


@needs_compiler
def test_two_processes_that_compile_at_once_both_get_the_library(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAY_LIBRARY],
            env=environment(XDG_CACHE_HOME=tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for out, err in said:
        assert out.startswith(str(tmp_path / "mtrain"))
        assert out.endswith(" [0.0, 2.0]\n")
        assert err == ""
    assert all(name.endswith(".so") for name in files(tmp_path))


@needs_compiler
def test_a_compiler_that_refuses_the_flags_of_the_machine_is_asked_without_them(cache, monkeypatch):
    asked, compiles = [], native._compile

    def picky(compiler: str, flags: tuple[str, ...], output: Path) -> bool:
        asked.append((compiler, flags))
        return not flags and compiles(compiler, flags, output)

    monkeypatch.setattr(native, "_compile", picky)
    assert native.compiled() is not None
    assert asked == [(native._COMPILERS[0], flags) for flags in native._MACHINE_FLAGS]


def test_a_source_that_does_not_compile_gives_no_library(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_SOURCES", [tmp_path / "kernels.c"])
    (tmp_path / "kernels.c").write_text("this is no C")
    assert native.compiled() is None
    assert files(cache) == []


def test_a_compiler_that_never_ends_gives_no_library(cache, monkeypatch):
    def endless(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 120)

    monkeypatch.setattr(native.subprocess, "run", endless)
    assert native.compiled() is None


def test_the_environment_can_ask_for_the_plain_formulas(cache, monkeypatch):
    monkeypatch.setattr(native, "_load", forbidden)
    monkeypatch.setenv("MTRAIN_NATIVE", "0")
    assert not native.is_enabled()
    assert native.compiled() is None
    monkeypatch.setenv("MTRAIN_NATIVE", "1")
    assert native.is_enabled()


def trained(cli: Cli, tmp_path: Path) -> str:
    """Train twelve updates and return what the header says of the device."""
    outcome = cli("train", write_task(tmp_path / "task"))
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("device ")]
    assert len(line) < 80
    return line


def test_without_a_compiler_training_works_and_the_header_says_so(
    cli: Cli, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))
    line = trained(cli, tmp_path)
    assert line == "device   cpu, float32, 1 thread, kernels plain (no C compiler was found)"


def test_with_the_plain_formulas_asked_for_the_header_misses_no_compiler(
    cli: Cli, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTRAIN_NATIVE", "0")
    line = trained(cli, tmp_path)
    assert line == "device   cpu, float32, 1 thread, kernels plain (MTRAIN_NATIVE=0)"


@needs_compiler
def test_with_a_compiler_the_header_says_that_the_kernels_are_compiled(
    cli: Cli, cache: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(built))
    assert trained(cli, tmp_path) == "device   cpu, float32, 1 thread, kernels compiled"


def test_the_sources_are_part_of_the_package():
    assert {source.parent for source in native._SOURCES} == {
        Path(native.__file__).with_name("csrc")
    }
    assert all(source.is_file() for source in native._SOURCES)


@needs_compiler
@pytest.mark.parametrize(
    "machine_flags",
    [
        *native._MACHINE_FLAGS,
        pytest.param(("-mavx512f",), marks=needs_vectors),
    ],
    ids=str,
)
def test_the_sources_compile_without_a_warning(machine_flags):
    compiler = next(name for name in native._COMPILERS if shutil.which(name))
    strict = ["-O0", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    command = [compiler, *native._FLAGS, *machine_flags, *strict, *map(str, native._SOURCES)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@needs_compiler
def test_without_the_flags_of_the_machine_there_are_no_products(cache, monkeypatch):
    monkeypatch.setattr(native, "_MACHINE_FLAGS", ((),))
    assert not any(
        native.Functions(native.compiled(), dtype_name).has_fast_matmul()
        for dtype_name in ("bf16", "float")
    )
