"""Lower bounds of what parses foreign files, and the promises of docs/security.md."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tasks import REPOSITORY

LAST_WITH_FAULTS = {
    "sentencepiece": "0.2.1",  # reads and writes beyond its memory for crafted models
    "filelock": "3.20.2",  # a link in place of a lock file empties the file where it leads
}


@pytest.mark.parametrize("package", LAST_WITH_FAULTS)
def test_versions_with_known_faults_are_not_installed(package: str) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(f'^    "({package}[^"]*)",$', project, re.MULTILINE)
    found = Requirement(line)
    assert not found.specifier.contains(Version(LAST_WITH_FAULTS[package]))
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(f"^{package}==(.*)$", pins, re.MULTILINE)
    assert found.specifier.contains(Version(pin))


def test_every_promise_is_held_by_a_test_that_is_there() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"^- `(test_\w+\.py)::(test_\w+)`$", page, re.MULTILINE)
    texts = {path.name: path.read_text("utf-8") for path in (REPOSITORY / "tests").rglob("*.py")}
    assert len(named) == len(set(named)) == page.count("::")
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in texts[file]] == []
