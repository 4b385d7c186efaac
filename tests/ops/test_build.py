"""The C code compiles for every instruction set, and a failed build reports its reason."""

import importlib.util
import itertools
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tasks import REPOSITORY

from mtrain.ops import build

SETS = {one.name: one for one in build.instruction_sets()}


def script(path: Path, text: str) -> str:
    """Write an executable shell script, and return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def raises(message: str) -> pytest.RaisesExc[build.BuildError]:
    return pytest.raises(build.BuildError, match=f"^{re.escape(message)}$")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake compiler that writes its arguments, and fails if one of them contains "refused"."""
    text = """case "$*" in *refused*) echo "a note"; echo "error: refused" >&2; exit 4;; esac
for word in "$@"; do output=$word; [ "$last" = -o ] && echo "$*" > "$word"; last=$word; done"""
    path = tmp_path / "compiler"
    monkeypatch.setenv("CC", f"{script(path, text)} --first")
    return path


@pytest.mark.parametrize("command", ["gcc", "clang"])
@pytest.mark.parametrize("elem", build.ELEM_FLAGS)
@pytest.mark.parametrize("name", SETS)
def test_the_c_sources_compile_unoptimised_without_a_warning(command, elem, name, tmp_path):
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    flags = [*build.COMPILE_FLAGS, *build.ELEM_FLAGS[elem], *SETS[name].flags]
    strict = [command, *flags, "-O0", "-Wall", "-Wextra", "-Werror"]
    (csrc,) = {source.parent for source in build.SOURCES}
    (tmp_path / "first.h").write_text(f'#include "{csrc}/vec.h"\n', encoding="utf-8")
    commands = [  # what vec.h includes takes half of the time, unless it is compiled once for all
        [*strict, "-x", "c-header", "first.h", "-o", "first.h.gch"],
        [*strict, "-include", "first.h", "-c", *build.SOURCES],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, cwd=tmp_path, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_each_instruction_set_needs_all_features_of_the_previous_one_and_more():
    features = [set(one.features) for one in build.instruction_sets()]
    assert features[0] == set()
    assert all(one < other for one, other in itertools.pairwise(features))


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("x86_64", ["sse2", "avx2", "avx512", "avx512_bf16", "amx"]),
        ("AMD64", ["sse2", "avx2", "avx512", "avx512_bf16", "amx"]),
        ("aarch64", ["neon", "neon_bf16"]),
        ("arm64", ["neon", "neon_bf16"]),
        ("riscv64", ["generic"]),
    ],
)
def test_each_machine_type_has_its_list_of_instruction_sets(machine, names, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert [one.name for one in build.instruction_sets()] == names


def test_a_changed_source_or_compile_flag_changes_the_library_name(tmp_path, monkeypatch):
    first = build.library_path(tmp_path, "avx2")
    assert first == build.library_path(tmp_path, "avx2")
    for place, source in enumerate(build.SOURCES):
        other = tmp_path / source.name
        other.write_bytes(source.read_bytes() + b"\n")
        with monkeypatch.context() as patch:
            sources = [*build.SOURCES[:place], other, *build.SOURCES[place + 1 :]]
            patch.setattr(build, "SOURCES", sources)
            assert build.library_path(tmp_path, "avx2") != first
    monkeypatch.setattr(build, "COMPILE_FLAGS", ("-O2",))
    assert build.library_path(tmp_path, "avx2") != first


def test_each_source_is_compiled_for_each_dtype_and_the_objects_are_linked(compiler, tmp_path):
    (one,) = [one for one in build.instruction_sets() if not one.features]
    assert build.build(tmp_path / "lib", [one]) == {}
    (path,) = (tmp_path / "lib").iterdir()
    assert path == build.library_path(tmp_path / "lib", one.name)
    words = path.read_text("utf-8").split()
    assert words[:2] == ["--first", "-shared"]
    objects = [Path(word).name for word in words if word.endswith(".o")]
    assert objects == [
        f"{source.stem}-{elem}-{one.name}.o"
        for source in build.SOURCES
        for elem in ("float", "bf16")
    ]


def test_an_instruction_set_that_the_compiler_refuses_is_left_out(compiler, tmp_path):
    sets = [build.InstructionSet("known", (), ()), build.InstructionSet("new", ("-refused",), ())]
    assert build.build(tmp_path / "lib", sets) == {"new": "error: refused"}
    assert [path.name.partition("-")[0] for path in (tmp_path / "lib").iterdir()] == ["known"]


def test_the_build_error_quotes_a_compiler_that_rejects_every_instruction_set(compiler, tmp_path):
    with raises("error: refused"):
        build.build(tmp_path / "lib", [build.InstructionSet("new", ("-refused",), ())])
    assert list((tmp_path / "lib").iterdir()) == []


def test_a_compiler_that_fails_without_output_is_reported_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", script(tmp_path / "compiler", "exit 7"))
    with raises("the C compiler ended with exit code 7"):
        build.build(tmp_path / "lib", build.instruction_sets())


def test_a_missing_compiler_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with raises("no-such-compiler: No such file or directory"):
        build.build(tmp_path / "lib", build.instruction_sets())


def test_find_compiler_raises_an_error_when_there_is_no_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises("no C compiler was found"):
        build.find_compiler()


def test_a_command_in_cc_that_is_not_well_formed_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "gcc '")
    with raises('CC must be a command, but is "gcc \'": No closing quotation'):
        build.build(tmp_path / "lib", build.instruction_sets())


def test_a_folder_that_cannot_be_written_is_named_in_the_error(compiler, tmp_path):
    (tmp_path / "lib").write_text("a file")
    with raises(f"[Errno 17] File exists: '{tmp_path / 'lib'}'"):
        build.update(tmp_path / "lib")


@pytest.mark.parametrize(("num_cores", "most"), [(3, 3), (100, 8)])
def test_as_many_compilers_run_at_once_as_this_process_has_cores_and_at_most_eight(
    num_cores, most, compiler, tmp_path, monkeypatch
):
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(build.os, "cpu_count", lambda: 200)
    counts, start, running = [], subprocess.Popen, []

    def noted(*arguments: object, **settings: object) -> subprocess.Popen[bytes]:
        running[:] = [process for process in running if process.returncode is None]
        running.append(start(*arguments, **settings))
        counts.append(len(running))
        return running[-1]

    monkeypatch.setattr(build.subprocess, "Popen", noted)
    build.build(tmp_path / "lib", build.instruction_sets())
    assert max(counts) == most


def test_a_compiler_that_times_out_is_killed_with_its_child_processes(tmp_path, monkeypatch):
    started = tmp_path / "started"
    text = f"sleep 1000 & echo $! > {started}.part; mv {started}.part {started}; wait"
    monkeypatch.setenv("CC", script(tmp_path / "compiler", text))
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(build.time, "monotonic", lambda: 1e9 if started.exists() else 0.0)
    with raises("the C compiler took too long"):
        build.build(tmp_path / "lib", build.instruction_sets())
    assert is_dead(int(started.read_text()))
    assert list((tmp_path / "lib").iterdir()) == []


def is_dead(pid: int) -> bool:
    """Wait until a process that was killed is gone, or a zombie that is not yet reaped."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_the_temporary_files_of_the_compiler_are_placed_beside_the_library(tmp_path, monkeypatch):
    """The folder for temporary files may be full, though there is room for the library."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    text = f'echo "$TMPDIR" > {tmp_path}/said; exit 1'
    monkeypatch.setenv("CC", script(tmp_path / "compiler", text))
    with pytest.raises(build.BuildError):
        build.build(tmp_path / "lib", build.instruction_sets())
    assert (tmp_path / "said").read_text().startswith(str(tmp_path / "lib" / "build-"))


def test_only_missing_libraries_are_built(compiler, tmp_path, monkeypatch):
    assert build.update(tmp_path / "lib", names=[build.instruction_sets()[0].name]) == {}
    (first,) = (tmp_path / "lib").iterdir()
    before = first.stat().st_mtime_ns
    assert build.update(tmp_path / "lib") == {}
    assert len(list((tmp_path / "lib").iterdir())) == len(build.instruction_sets())
    assert first.stat().st_mtime_ns == before
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.update(tmp_path / "lib") == {}


def test_the_build_command_deletes_the_libraries_of_other_source_versions(
    compiler, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(build, "LIB_DIR", tmp_path)
    monkeypatch.setattr(build.update, "__defaults__", (tmp_path, ()))
    monkeypatch.setattr(sys, "argv", ["build.py"])
    (tmp_path / "avx2-0123456789ab.so").write_text("of other sources")
    assert build.main() == 0
    names = {build.library_path(tmp_path, one.name) for one in build.instruction_sets()}
    assert set(tmp_path.glob("*.so")) == names
    assert capsys.readouterr().err == ""


def test_the_build_command_refuses_names_of_unknown_instruction_sets(monkeypatch, capsys):
    monkeypatch.setattr(build, "update", lambda **_: pytest.fail("it was compiled"))
    monkeypatch.setattr(sys, "argv", ["build.py", "avx3", next(iter(SETS))])
    assert build.main() == 2
    assert capsys.readouterr().err == (
        f"instruction sets must be some of {', '.join(SETS)}, but are avx3 instead.\n"
    )


def test_the_build_command_prints_why_nothing_was_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build.update, "__defaults__", (tmp_path / "lib", ()))
    monkeypatch.setattr(sys, "argv", ["build.py"])
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.main() == 1
    said = capsys.readouterr().err
    assert said == "nothing was compiled: no-such-compiler: No such file or directory\n"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> object:
    """The build hook of the wheel, without hatchling; its `said` holds the warnings."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hook = module.NativeBuildHook()
    hook.said = []
    hook.root = str(REPOSITORY)
    hook.app = SimpleNamespace(display_warning=hook.said.append)
    return hook


def test_the_wheel_contains_each_library_and_has_a_platform_tag(hook, compiler):
    data = {"force_include": {}}
    hook.initialize("standard", data)
    inside = data["force_include"]
    names = [Path(name).name.partition("-")[0] for name in inside.values()]
    assert sorted(names) == sorted(SETS)
    assert {Path(name).parent.as_posix() for name in inside.values()} == {"mtrain/ops/lib"}
    assert all(Path(path).is_file() for path in inside)
    assert data["tag"].startswith("py3-none-")
    assert data["tag"] != "py3-none-any"
    assert data["pure_python"] is False
    hook.finalize("standard", data, "a.whl")
    assert not any(Path(path).exists() for path in inside)
    assert hook.said == []


def test_without_a_compiler_the_wheel_is_pure_python_and_the_build_warns_with_the_reason(
    hook, monkeypatch
):
    monkeypatch.setenv("CC", "no-such-compiler")
    data = {"force_include": {}}
    hook.initialize("standard", data)
    hook.finalize("standard", data, "a.whl")
    assert data == {"force_include": {}}
    assert hook.said == [
        "no-such-compiler: No such file or directory: "
        "mtrain will use its plain formulas, and be slower"
    ]
