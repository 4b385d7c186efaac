"""The systemd unit and the container file start a command that exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from tasks import REPOSITORY

from mtrain.cli.main import command_line

UNIT = REPOSITORY / "deploy" / "mtrain.service"
CONTAINER = (REPOSITORY / "deploy" / "Containerfile").read_text("utf-8")


def parsed(words: list[str]) -> dict[str, object]:
    program, verb, *arguments = words
    assert Path(program).name == "mtrain"
    group = typer.main.get_command(command_line([verb]))
    return group.commands[verb].make_context(verb, arguments).params  # type: ignore[attr-defined]


def test_the_systemd_unit_starts_an_existing_command_on_localhost() -> None:
    (command,) = re.findall("^ExecStart=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    params = parsed(shlex.split(command))
    assert params["host"] == params["trust_proxy"] == "127.0.0.1"


def test_systemd_analyze_reports_no_fault_in_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "mtrain"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    text = UNIT.read_text("utf-8").replace("/opt/mtrain/bin/mtrain", str(program))
    (tmp_path / "mtrain.service").write_text(text, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "mtrain.service")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert [line for line in result.stderr.splitlines() if "mtrain" in line] == []


def test_the_container_starts_an_existing_command_on_its_exposed_port() -> None:
    (entry,) = re.findall("^ENTRYPOINT (.*)$", CONTAINER, re.MULTILINE)
    params = parsed([*json.loads(entry), "/runs/en-de"])
    assert params["host"] == "0.0.0.0"
    assert params["port"] == int(re.findall(r"^EXPOSE (\d+)$", CONTAINER, re.MULTILINE)[0])
    (check,) = re.findall("^HEALTHCHECK CMD (.*)$", CONTAINER, re.MULTILINE)
    compile(json.loads(check)[-1], "HEALTHCHECK", "exec")
    assert "podman build --format docker " in CONTAINER  # else HEALTHCHECK is ignored
    assert "\nUSER 65534" in CONTAINER
