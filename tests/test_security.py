"""Lower version bounds of packages with known faults, and the tests that docs/security.md cites."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tasks import REPOSITORY

LAST_WITH_FAULTS = {
    "sentencepiece": "0.2.1",  # out-of-bounds reads and writes for crafted models
    "filelock": "3.20.2",  # a symbolic link in place of a lock file truncates its target
}


@pytest.mark.parametrize("package", LAST_WITH_FAULTS)
def test_version_bounds_exclude_known_faults_and_admit_the_pinned_version(package: str) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(f'^    "({package}[^"]*)",$', project, re.MULTILINE)
    found = Requirement(line)
    assert not found.specifier.contains(Version(LAST_WITH_FAULTS[package]))
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(f"^{package}==(.*)$", pins, re.MULTILINE)
    assert found.specifier.contains(Version(pin))


def test_every_test_that_security_md_cites_exists() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"^- `(test_\w+\.py)::(test_\w+)`$", page, re.MULTILINE)
    texts = {path.name: path.read_text("utf-8") for path in (REPOSITORY / "tests").rglob("*.py")}
    assert len(named) == len(set(named)) == page.count("::")
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in texts[file]] == []
