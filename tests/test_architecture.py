"""Hold the package to its ranks, to light imports, and to the rules that keep it readable."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tasks import REPOSITORY, write_task

import mtrain

PACKAGE = Path(mtrain.__file__).parent
_ROW = re.compile(r"^\| (\d+) \| (`.*`) \|$", re.M)
RANKS = {  # as docs/decisions.md has them
    module: int(rank)
    for rank, modules in _ROW.findall((REPOSITORY / "docs" / "decisions.md").read_text("utf-8"))
    for module in modules.strip("`").split("`, `")
}
MODULES = sorted(path.relative_to(PACKAGE).as_posix()[:-3] for path in PACKAGE.rglob("*.py"))
HEAVY = {"torch", "numpy", "datasets", "sentencepiece", "sacrebleu", "matplotlib"}
HEAVY |= {"ctranslate2", "transformers"}
LONGEST_FUNCTION = 60
SCRIPTS = sorted((REPOSITORY / "benchmarks").rglob("*.py"))


def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def own_imports(module: str) -> set[str]:
    """Return the modules of the package that `module` imports, anywhere in its text."""
    found = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            dotted = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "mtrain." * bool(node.level) + (node.module or "")
            base = base.rstrip(".")
            dotted = [f"{base}.{name.name}" for name in node.names]
        else:
            continue
        for name in dotted:
            package, _, rest = name.partition(".")
            if package == "mtrain":
                first = rest.split(".")[0]
                found.add(first if first in RANKS or first in MODULES else "__init__")
    return found


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported_packages(module: str) -> set[str]:
    names = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def loaded_after(code: str) -> set[str]:
    """Run `code` in a fresh Python; return which heavy packages it has loaded."""
    report = f"import sys; sys.stderr.write('loaded ' + ' '.join({HEAVY!r} & set(sys.modules)))"
    wrapped = f"try:\n    {code}\nexcept SystemExit:\n    pass\nfinally:\n    {report}\n"
    result = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.rpartition("loaded")[2].split())


def test_every_module_has_a_rank_and_every_rank_a_module() -> None:
    assert sorted(RANKS) == MODULES


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__init__"])
def test_a_module_imports_only_from_lower_ranks(module: str) -> None:
    assert {name for name in own_imports(module) if RANKS[name] >= RANKS[module]} == set()


def test_imports_inside_functions_and_under_type_checking_are_seen() -> None:
    assert {"api", "config", "demo", "together", "files", "rundir"} <= own_imports("cli")
    assert "checkpoint" in own_imports("training")


def test_the_package_itself_knows_the_interface_alone_and_nothing_when_it_is_imported() -> None:
    """All rooms ask it for the version, so that only what nobody imports back may stand in it."""
    assert own_imports("__init__") <= {"api", "config", "errors", "signals"}
    code = "import sys, typing; before = set(sys.modules); import mtrain; "
    code += "print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mtrain"]


def test_a_config_and_an_error_of_the_interface_load_no_heavy_package() -> None:
    assert loaded_after("import mtrain; mtrain.UserError, mtrain.Config, mtrain.load") == set()


def test_the_data_of_the_lexicon_rank_knows_no_other_room() -> None:
    assert own_imports("lexicon") == own_imports("errors") == set()


@pytest.mark.parametrize("module", MODULES)
def test_no_function_takes_arbitrary_keywords(module: str) -> None:
    assert [node.name for node in functions(module) if node.args.kwarg] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_pickle(module: str) -> None:
    assert not imported_packages(module) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_longer_than_a_screen(module: str) -> None:
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions(module)}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_its_room_is_for(module: str) -> None:
    assert ast.get_docstring(tree(module))


def test_the_probe_for_loaded_packages_finds_them() -> None:
    assert loaded_after("import mtrain.data.batch") == {"torch", "numpy"}


@pytest.mark.parametrize("module", ["api", "cli", "config", "errors", "files", "rundir", "runlog"])
def test_a_light_room_loads_no_heavy_package(module: str) -> None:
    assert loaded_after(f"import mtrain.{module}") == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["plot", "--help"],
        ["doctor", "--help"],
        ["export", "--help"],
        ["train", "absent.yaml"],
    ],
)
def test_help_and_a_config_error_load_no_heavy_package(arguments: list[str]) -> None:
    code = f"import sys; from mtrain.cli.main import main; sys.argv[1:] = {arguments!r}; main()"
    assert loaded_after(code) == set()


def test_a_wrong_key_loads_no_heavy_package(tmp_path: Path) -> None:
    arguments = ["train", str(write_task(tmp_path)), "--set", "model.d_modl=8"]
    code = f"import sys; from mtrain.cli.main import main; sys.argv[1:] = {arguments!r}; main()"
    assert loaded_after(code) == set()


def names_of_mtrain(script: Path) -> Iterator[tuple[ModuleType, str]]:
    """Yield what a script takes from mtrain: a module, and the name that it must have."""
    parsed = ast.parse(script.read_text(encoding="utf-8"))
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mtrain":
            source = importlib.import_module(node.module or "")
            for name in node.names:
                dotted = f"{source.__name__}.{name.name}"
                if source is mtrain and name.name in MODULES:
                    modules[name.asname or name.name] = importlib.import_module(dotted)
                else:
                    yield source, name.name
    for node in ast.walk(parsed):
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and node.value.id in modules:
            yield modules[node.value.id], node.attr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_benchmark_names_only_what_there_is(script: Path) -> None:
    named = names_of_mtrain(script)
    assert {f"{own.__name__}.{name}" for own, name in named if not hasattr(own, name)} == set()


def test_what_a_benchmark_names_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from mtrain import files as own, __version__\nown.nothing()\n")
    assert [(own.__name__, name) for own, name in names_of_mtrain(script)] == [
        ("mtrain", "__version__"),
        ("mtrain.io.atomic", "nothing"),
    ]
