"""The list of mutations cannot rot: each still has a text of its own to replace."""

import ast
from collections import Counter

import mutations
import pytest
from mutations import MUTATIONS, REPOSITORY, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutations_text_stands_exactly_once_in_its_file_and_leaves_it_python(
    mutation: Mutation,
) -> None:
    text = (REPOSITORY / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    changed = mutations.mutated(mutation, text)
    assert changed != text
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_mutations_have_names_of_their_own_and_tests_that_exist() -> None:
    counts = Counter(mutation.name for mutation in MUTATIONS)
    assert [name for name, count in counts.items() if count > 1] == []
    for mutation in MUTATIONS:
        words = [word.partition("::")[0] for word in mutation.tests.split()]
        files = [word for word in words if word.endswith(".py")]
        assert files and all((REPOSITORY / file).is_file() for file in files)


def test_a_text_that_is_not_there_or_there_twice_is_refused() -> None:
    lost = Mutation("lost", "a.py", "x = 1", "x = 2", "tests")
    with pytest.raises(AssertionError, match="stands 0 times"):
        mutations.mutated(lost, "y = 1\n")
    with pytest.raises(AssertionError, match="stands 2 times"):
        mutations.mutated(lost, "x = 1\nx = 1\n")


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["flip everything"]) == 2
    assert "flip everything" in capsys.readouterr().err
