"""The import order of the folders, light imports, and limits on the size of modules."""

import ast
import functools
import graphlib
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tasks import REPOSITORY, write_task

import mtrain

PACKAGE = Path(mtrain.__file__).parent
# Each folder, or module of `mtrain/` itself, imports only from those before it.
ORDER = [
    "errors",
    "io",
    "config",
    "runtime",
    "ops",
    "tokenizer",
    "corpus",
    "audit",
    "model",
    "run",
    "data",
    "decode",
    "evaluation",
    "training",
    "exporters",
    "plots",
    "autoconfig",
    "augmentation",
    "doctor",
    "demo",
    "api",
    "serve",
    "cli",
    "__main__",
]
MODULES = sorted(path.relative_to(PACKAGE).as_posix()[:-3] for path in PACKAGE.rglob("*.py"))
FOLDERS = sorted({module.rpartition("/")[0] for module in MODULES if "/" in module})
HEAVY = {"torch", "numpy", "datasets", "sentencepiece", "sacrebleu", "matplotlib"}
HEAVY |= {"ctranslate2", "transformers", "starlette", "uvicorn", "py3langid"}
LONGEST_FUNCTION = 80
MOST_MODULES = 15
SCRIPTS = sorted((REPOSITORY / "benchmarks").rglob("*.py"))


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def folder(module: str) -> str:
    return module.split("/")[0]


@functools.cache
def imported_modules(module: str) -> set[str]:
    """Return the modules of the package that `module` imports, anywhere in its text."""
    imported = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            dotted = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            dotted = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        for name in dotted:
            package, *parts = name.split(".")
            if package == "mtrain":
                paths = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
                candidates = [known for path in paths for known in (path, f"{path}/__init__")]
                imported.add(next((name for name in candidates if name in MODULES), "__init__"))
    return imported


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def class_names(module: str) -> Iterator[str]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")


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


def test_every_folder_and_module_is_in_the_import_order() -> None:
    assert {folder(module) for module in MODULES} - {"__init__"} == set(ORDER)


def test_a_folder_imports_only_from_folders_before_it() -> None:
    assert [
        (module, name)
        for module in MODULES
        if module != "__init__"
        for name in imported_modules(module)
        if name != "__init__" and ORDER.index(folder(name)) > ORDER.index(folder(module))
    ] == []


def test_the_modules_of_a_folder_import_each_other_without_a_cycle() -> None:
    graph = {
        module: {name for name in imported_modules(module) if folder(name) == folder(module)}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_only_four_modules_are_outside_the_folders() -> None:
    outside = {module for module in MODULES if "/" not in module}
    assert outside == {"__init__", "__main__", "api", "errors"}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_few_modules_and_only_a_long_docstring_in_its_init(name: str) -> None:
    assert len(list((PACKAGE / name).glob("*.py"))) <= MOST_MODULES
    docstring = ast.get_docstring(tree(f"{name}/__init__")) or ""
    assert len(docstring.splitlines()) > 1
    assert tree(f"{name}/__init__").body[1:] == []


def test_no_class_name_is_used_twice() -> None:
    names = Counter(name for module in MODULES for name in class_names(module))
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_imports_inside_functions_and_under_type_checking_are_found() -> None:
    assert {"run/run_dir", "decode/translator"} <= imported_modules("cli/verbs/translate")
    assert "run/checkpoint" in imported_modules("training/trainer")


def test_importing_mtrain_loads_no_submodule_and_its_init_imports_only_the_interface() -> None:
    """Every module may import the package itself, for its version."""
    assert {folder(name) for name in imported_modules("__init__")} <= {
        "api",
        "augmentation",
        "config",
        "decode",  # the types of options and results
        "evaluation",  # likewise
        "errors",
        "runtime",
    }
    code = "import sys, typing; before = set(sys.modules); import mtrain; "
    code += "print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mtrain"]


def test_accessing_user_error_config_and_load_imports_no_heavy_package() -> None:
    assert loaded_after("import mtrain; mtrain.UserError, mtrain.Config, mtrain.load") == set()


def test_no_function_takes_arbitrary_keywords() -> None:
    assert [
        (module, node.name) for module in MODULES for node in functions(module) if node.args.kwarg
    ] == []


def test_no_module_imports_pickle() -> None:
    refused = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert [module for module in MODULES if imported_packages(module) & refused] == []


def test_no_function_is_longer_than_80_lines() -> None:
    assert [
        (module, node.name, length)
        for module in MODULES
        for node in functions(module)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    ] == []


def test_every_module_has_a_docstring() -> None:
    assert [module for module in MODULES if not ast.get_docstring(tree(module))] == []


def test_the_check_for_loaded_packages_finds_torch_and_numpy() -> None:
    assert loaded_after("import mtrain.model.transformer") == {"torch", "numpy"}


LIGHT = ["api", "errors", "cli.main", "config.config_file", "io.atomic", "io.lines", "run.run_dir"]


def test_a_light_module_loads_no_heavy_package() -> None:
    modules = (f"mtrain.{name}" for name in [*LIGHT, "run.logger"])
    assert loaded_after(f"import {', '.join(modules)}") == set()


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


def test_an_unknown_config_key_loads_no_heavy_package(tmp_path: Path) -> None:
    arguments = ["train", str(write_task(tmp_path)), "--set", "model.d_modl=8"]
    code = f"import sys; from mtrain.cli.main import main; sys.argv[1:] = {arguments!r}; main()"
    assert loaded_after(code) == set()


def test_tokenizing_loads_no_torch(tmp_path: Path) -> None:
    arguments = ["tokenize", str(write_task(tmp_path))]
    code = f"import sys; from mtrain.cli.main import main; sys.argv[1:] = {arguments!r}; main()"
    assert loaded_after(code) == {"numpy", "sentencepiece"}
    assert (tmp_path / "run/data/shards.json").is_file()


def names_of_mtrain(script: Path) -> Iterator[tuple[ModuleType, str]]:
    """Yield each name of mtrain that a script uses, with the module that must define it."""
    parsed = ast.parse(script.read_text(encoding="utf-8"))
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mtrain":
            source = importlib.import_module(node.module or "")
            for name in node.names:
                path = f"{source.__name__}.{name.name}".removeprefix("mtrain.").replace(".", "/")
                if path in MODULES:
                    dotted = f"{source.__name__}.{name.name}"
                    modules[name.asname or name.name] = importlib.import_module(dotted)
                else:
                    yield source, name.name
    for node in ast.walk(parsed):
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and node.value.id in modules:
            yield modules[node.value.id], node.attr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_benchmark_uses_only_names_that_exist_in_mtrain(script: Path) -> None:
    named = names_of_mtrain(script)
    assert {f"{own.__name__}.{name}" for own, name in named if not hasattr(own, name)} == set()


def test_the_names_that_a_script_uses_from_mtrain_are_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mtrain import __version__\nfrom mtrain.io import atomic as own\nown.nothing()\n"
    )
    assert [(own.__name__, name) for own, name in names_of_mtrain(script)] == [
        ("mtrain", "__version__"),
        ("mtrain.io.atomic", "nothing"),
    ]


def test_no_two_test_files_have_the_same_name() -> None:
    """Pytest imports them by their name alone."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("*.py"))
    assert [name for name, count in names.items() if count > 1] == []
