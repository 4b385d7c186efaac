"""Lower version bounds of packages with known faults, and the tests that the pages cite."""

import ast
import re
from pathlib import Path

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


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_a_page_cites_exists() -> None:
    known = {path.name: functions_of(path) for path in (REPOSITORY / "tests").rglob("test_*.py")}
    counts = {}
    for path in (REPOSITORY / "docs").glob("*.md"):
        page = path.read_text(encoding="utf-8")
        cited = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
        assert len(cited) == page.count("::test_"), path.name
        assert [one for one in cited if one[1] not in known.get(one[0], set())] == [], path.name
        counts[path.stem] = len(cited)
    assert counts["model"] > 20 and counts["reliability"] > 15 and counts["security"] > 15
