"""The list of mutations stays valid: each has text that occurs once in its file."""

import ast
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import mutations
import pytest
from mutations import MUTATIONS, REPOSITORY, Mutation

from mtrain.ops import build


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutations_text_occurs_once_in_its_file_and_its_change_keeps_valid_code(
    mutation: Mutation, tmp_path: Path, meanings: dict[str, str]
) -> None:
    text = (REPOSITORY / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    changed = mutations.mutated(mutation, text)
    file = tmp_path / mutation.file
    if mutation.file not in meanings:
        meanings[mutation.file] = meaning(file, text)
    assert meaning(file, changed) != meanings[mutation.file]


@pytest.fixture(scope="module")
def meanings() -> dict[str, str]:
    """Return the meanings of the files without a mutation that tests have needed so far."""
    return {}


def meaning(file: Path, text: str) -> str:
    """Return the syntax tree or preprocessed C of a file; an error if it is malformed."""
    return ast.dump(ast.parse(text)) if file.suffix == ".py" else preprocessed(file, text)


def preprocessed(file: Path, text: str) -> str:
    try:
        compiler = build.find_compiler()
    except build.BuildError:
        pytest.skip("no C compiler is installed")
    file.parent.mkdir(parents=True, exist_ok=True)
    for header in build.HEADERS:
        shutil.copy(header, file.parent)
    file.write_text(text, encoding="utf-8")
    command = [*compiler, *build.COMPILE_FLAGS, str(file)]
    for stage in (["-fsyntax-only"], ["-E", "-P"]):
        done = subprocess.run([*command, *stage], capture_output=True, text=True, check=True)
    return done.stdout


def test_mutations_have_unique_names_and_test_files_that_exist() -> None:
    counts = Counter(mutation.name for mutation in MUTATIONS)
    assert [name for name, count in counts.items() if count > 1] == []
    for mutation in MUTATIONS:
        words = [word.partition("::")[0] for word in mutation.tests.split()]
        files = [word for word in words if word.endswith(".py")]
        assert files and all((REPOSITORY / file).is_file() for file in files)


def test_mutated_text_that_occurs_zero_or_two_times_is_refused() -> None:
    lost = Mutation("lost", "a.py", "x = 1", "x = 2", "tests")
    with pytest.raises(AssertionError, match="stands 0 times"):
        mutations.mutated(lost, "y = 1\n")
    with pytest.raises(AssertionError, match="stands 2 times"):
        mutations.mutated(lost, "x = 1\nx = 1\n")


def test_an_unknown_mutation_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["flip everything"]) == 2
    assert "flip everything" in capsys.readouterr().err
