"""The library fits the processor, and the header describes it."""

import ast
import ctypes
import os
import shutil
import stat
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pytest
from conftest import Cli
from fork_server import ForkedProcess
from tasks import write_task

from mtrain.errors import ConfigError
from mtrain.ops import build, native

KNOWN = [one.name for one in build.instruction_sets()]
USABLE = [one.name for one in native.usable_sets()]
NOT_RUN = ("test_native", "test_build", "test_refusals")  # for each instruction set
LIBRARIES = {name: build.library_path(build.LIB_DIR, name) for name in KNOWN}

needs_libraries = pytest.mark.skipif(
    not all(path.exists() for path in LIBRARIES.values()), reason="no C compiler was found"
)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test search for the library again."""
    monkeypatch.delenv("MTRAIN_NATIVE", raising=False)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)


@pytest.fixture
def lib_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the libraries."""
    folder = tmp_path / "package" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(build, "LIB_DIR", folder)
    return folder


def copied(lib_dir: Path) -> Path:
    """Put the library for this processor into the folder."""
    return Path(shutil.copy(LIBRARIES[USABLE[-1]], lib_dir))


@needs_libraries
def test_the_library_for_the_best_supported_instruction_set_is_loaded():
    assert native.compiled()._name == str(LIBRARIES[USABLE[-1]])
    assert native.describe() == f"compiled for {USABLE[-1]}"
    assert native.compiled().dropout_float.argtypes is not None


@needs_libraries
@pytest.mark.parametrize("name", USABLE)
def test_a_processor_with_fewer_features_loads_the_library_for_them(name, monkeypatch):
    (wanted,) = [one for one in build.instruction_sets() if one.name == name]
    monkeypatch.setattr(native, "processor_features", lambda: {"fpu", *wanted.features})
    assert native.describe() == f"compiled for {name}"


@needs_libraries
@pytest.mark.parametrize("name", USABLE)
def test_mtrain_native_selects_the_instruction_set(name, monkeypatch):
    monkeypatch.setenv("MTRAIN_NATIVE", name)
    assert native.describe() == f"compiled for {name}"
    assert native.compiled()._name == str(LIBRARIES[name])


@needs_libraries
def test_an_available_library_is_loaded_if_better_ones_are_missing(lib_dir, monkeypatch):
    shutil.copy(LIBRARIES[KNOWN[0]], lib_dir)
    assert native.describe() == f"compiled for {KNOWN[0]}"


@needs_libraries
def test_the_name_contains_a_different_16_character_hash_for_each_library(monkeypatch):
    names = []
    for name in USABLE:
        monkeypatch.setenv("MTRAIN_NATIVE", name)
        names.append(native.name())
    assert all(name.startswith("compiled ") and len(name) == 25 for name in names)
    assert len(set(names)) == len(USABLE)


def test_an_unknown_instruction_set_is_an_error(monkeypatch):
    monkeypatch.setenv("MTRAIN_NATIVE", "avx3")
    names = ", ".join(KNOWN)
    message = f"`MTRAIN_NATIVE` must be 0, build or one of {names}, but is 'avx3' instead."
    with pytest.raises(ConfigError) as caught:
        native.compiled()
    assert str(caught.value) == message


@pytest.mark.skipif(len(KNOWN) == 1, reason="every processor of this family has it")
def test_an_instruction_set_that_the_processor_lacks_is_an_error(monkeypatch):
    monkeypatch.setattr(native, "processor_features", lambda: {"fpu"})
    monkeypatch.setenv("MTRAIN_NATIVE", KNOWN[-1])
    with pytest.raises(ConfigError) as caught:
        native.compiled()
    assert str(caught.value) == f"`MTRAIN_NATIVE` is {KNOWN[-1]}, which this processor cannot run."


def test_describe_gives_the_reason_when_no_library_is_loaded(lib_dir, monkeypatch):
    monkeypatch.setattr(native.platform, "machine", lambda: "pdp11")
    assert native.describe() == "plain (no library for pdp11 is installed)"
    monkeypatch.setenv("MTRAIN_NATIVE", build.instruction_sets()[0].name)
    (name,) = [one.name for one in build.instruction_sets()]
    assert native.describe() == f"plain (no library for {name} is installed)"
    (lib_dir / f"{name}-0123456789ab.so").write_text("of other sources")
    reason = f"its library was built from other sources; run python {build.__file__}"
    assert native.describe() == f"plain ({reason})"
    monkeypatch.setenv("MTRAIN_NATIVE", "0")
    assert native.describe() == "plain (MTRAIN_NATIVE=0)"
    assert native.name() == "plain"
    assert native.compiled() is None


def test_describe_does_not_take_the_library_of_another_instruction_set_for_an_outdated_one(
    lib_dir, monkeypatch
):
    name = build.instruction_sets()[0].name
    (lib_dir / f"{name}_more-0123456789ab.so").write_text("of another instruction set")
    monkeypatch.setenv("MTRAIN_NATIVE", name)
    assert native.describe() == f"plain (no library for {name} is installed)"


def test_describe_quotes_the_loader_error_of_a_damaged_library(lib_dir):
    path = build.library_path(lib_dir, USABLE[-1])
    path.write_text("this is no library")
    assert native.describe() == f"plain ({path}: file too short)"


def test_a_library_that_lacks_the_functions_is_not_used(lib_dir, monkeypatch):
    path = build.library_path(lib_dir, USABLE[-1])
    path.write_text("a library")
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: SimpleNamespace())
    assert native.compiled() is None
    assert "attention_float" in native.describe()


@needs_libraries
def test_a_library_in_a_folder_that_a_group_may_write_is_loaded(lib_dir):
    """Clusters share such folders, and `native.py` itself would run from there, too."""
    copied(lib_dir).chmod(0o775)
    lib_dir.chmod(0o775)
    assert native.describe() == f"compiled for {USABLE[-1]}"


@pytest.fixture
def fast_build(lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`MTRAIN_NATIVE=build`, without optimisation; returns the folder for temporary files."""
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    flags = ["-O0" if flag == "-O3" else flag for flag in build.COMPILE_FLAGS]
    monkeypatch.setattr(build, "COMPILE_FLAGS", flags)
    monkeypatch.setenv("MTRAIN_NATIVE", "build")
    monkeypatch.setattr(native.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_mtrain_native_build_compiles_a_library_in_a_private_temporary_folder(
    fast_build, monkeypatch, capsys
):
    modes, compiles = [], build.build

    def noted(folder: Path, sets: list[build.InstructionSet]) -> dict[str, str]:
        modes.append(stat.S_IMODE(folder.stat().st_mode))
        return compiles(folder, sets)

    monkeypatch.setattr(build, "build", noted)
    own = native.library()
    assert own.instruction_set == USABLE[-1]
    assert modes == [0o700]
    assert capsys.readouterr().err == f"mtrain: compiling for {USABLE[-1]} (MTRAIN_NATIVE=build)\n"
    x, y = (ctypes.c_float * 100)(*[1.0] * 100), (ctypes.c_float * 100)()
    own.functions.dropout_float(x, y, 100, 2**15, 2.0, 7)
    assert sorted(set(y)) == [0.0, 2.0]
    assert [path.name for path in fast_build.iterdir()] == ["package"], "the folder is gone"


@pytest.mark.parametrize("error", [build.BuildError("error: no C"), OSError(28, "No space left")])
def test_describe_gives_the_reason_of_a_failed_build(error, fast_build, monkeypatch, capsys):
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(build, "build", failing)
    assert native.describe() == f"plain (MTRAIN_NATIVE=build: {error})"


def test_nothing_is_compiled_without_mtrain_native_build(lib_dir, monkeypatch):
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("it was compiled"))
    assert native.compiled() is None


def trained(cli: Cli, tmp_path: Path) -> str:
    """Train twelve updates and return the header's line about the device."""
    outcome = cli("train", write_task(tmp_path / "task"))
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("device ")]
    return line


def test_the_training_header_says_why_kernels_are_not_compiled(cli, lib_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("MTRAIN_NATIVE", "0")
    line = trained(cli, tmp_path)
    assert line == "device   cpu, float32, 1 thread, kernels plain (MTRAIN_NATIVE=0)"


@needs_libraries
def test_the_training_header_names_the_instruction_set_of_the_kernels(cli, tmp_path):
    line = trained(cli, tmp_path)
    assert line == f"device   cpu, float32, 1 thread, kernels compiled for {USABLE[-1]}"
    assert len(line) < 80


def test_an_unknown_instruction_set_ends_training_with_an_error_message(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("MTRAIN_NATIVE", "avx3")
    outcome = cli("train", write_task(tmp_path / "task"))
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("mtrain: `MTRAIN_NATIVE` must be 0, build or ")


@needs_libraries
@pytest.mark.parametrize("name", USABLE[:-1])
def test_each_instruction_set_passes_the_tests_of_the_operations(name):
    """The best one runs in this process; refusals, memory and formulas are the same for all."""
    files = sorted(str(path) for path in Path(__file__).parent.glob("test_*.py"))
    others = [path for path in files if Path(path).stem not in NOT_RUN]
    command = ["pytest", "-qq", "-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    left_out = ("plain", "never_holds", "memory_runs_out", "gradcheck")
    command += ["-k", " and ".join(f"not {word}" for word in left_out), *others]
    environment = os.environ | {"MTRAIN_NATIVE": name}
    with ForkedProcess(run_pytest, command, stdout=PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        assert process.wait() == 0, out
    assert out.startswith(f"compiled for {name}\n")
    assert "skipped" not in out


def test_no_test_of_the_operations_is_left_out_for_other_instruction_sets_by_its_name():
    """`-k "not plain"` leaves out the tests of plain formulas by the name of their way."""
    names = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and path.stem not in NOT_RUN
    }
    assert [name for name in names if name.startswith("test_") and "plain" in name] == []


def run_pytest() -> None:
    native.library.cache_clear()
    print(native.describe(), flush=True)
    sys.exit(pytest.main(sys.argv[1:]))


@needs_libraries
def test_has_fast_matmul_is_true_only_for_the_listed_instruction_sets_and_dtypes(monkeypatch):
    monkeypatch.setattr(native, "processor_has", lambda name: False)
    found = {}
    for name in USABLE:
        monkeypatch.setenv("MTRAIN_NATIVE", name)
        functions = [native.Functions(native.compiled(), dtype) for dtype in ("float", "bf16")]
        found[name] = [one.has_fast_matmul() for one in functions]
    fast = {"sse2": [False, False], "avx2": [True, False], "avx512": [True, False]}
    fast |= {
        "avx512_bf16": [True, True],
        "amx": [True, True],
        "neon": [False, False],
        "neon_bf16": [False, False],
    }
    assert found == {name: fast.get(name, [False, False]) for name in USABLE}


@needs_libraries
def test_torch_multiplies_in_bfloat16_on_a_processor_with_tiles_that_the_library_does_not_use(
    monkeypatch,
):
    monkeypatch.setattr(native, "processor_has", lambda name: name == "amx_tile")
    for name in USABLE:
        monkeypatch.setenv("MTRAIN_NATIVE", name)
        functions = native.Functions(native.compiled(), "bf16")
        assert functions.has_fast_matmul() == (name == "amx")


@pytest.mark.skipif(KNOWN[-1] != "amx", reason="no processor of this family has tiles")
@pytest.mark.parametrize("is_granted", [True, False])
def test_the_library_with_tiles_is_used_only_if_linux_grants_them(is_granted, monkeypatch):
    features = frozenset().union(*(one.features for one in build.instruction_sets()))
    monkeypatch.setattr(native, "processor_features", lambda: features)
    monkeypatch.setattr(native, "request_tiles", lambda: is_granted)
    best = native.usable_sets()[-1].name
    assert best == ("amx" if is_granted else "avx512_bf16")


@pytest.mark.parametrize(("status", "error"), [(1, MemoryError), (2, IndexError)])
def test_a_failure_status_of_a_compiled_function_raises_the_matching_error(status, error):
    library = SimpleNamespace(dropout_float=lambda: status)
    with pytest.raises(error) as caught:
        native.Functions(library, "float").call("dropout", ())
    assert str(caught.value) == ("" if status == 1 else "index out of range in dropout")
