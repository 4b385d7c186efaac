"""An OSError about a path that the user named is one line; any other keeps its traceback."""

import errno
import os
from pathlib import Path

import pytest
from conftest import Cli
from tasks import write_task

from mtrain import api
from mtrain.cli.main import _is_named


def test_a_path_is_named_if_it_is_in_the_arguments_the_config_or_a_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_task(tmp_path / "task")
    for arguments, path in [
        (["translate", "run"], "run/model.safetensors"),
        (["translate", str(tmp_path / "run")], "run"),
        (["translate", "run", "--output=deep/out"], "deep/out"),
        (["train", str(config)], tmp_path / "task" / "train.src"),
        (["train", "task/config.yaml"], "task/run/metrics.jsonl"),
        (["eval", "task"], tmp_path / "task" / "run"),
        (["demo"], "runs/demo/config.yaml"),
    ]:
        assert _is_named(path, arguments)
    for arguments, path in [
        (["translate", "run"], "ran"),
        (["translate", "run"], "run2/model.safetensors"),
        (["translate", "run"], Path(api.__file__).parent / "ops" / "csrc" / "lost.c"),
        (["train", str(config)], "other/train.src"),
        (["train", "\0", "", "x" * 5000], "other"),
        (["train", str(config)], None),
        (["train", str(config)], 3),
    ]:
        assert not _is_named(path, arguments)


def test_an_os_error_is_one_line_for_a_path_of_the_user_and_a_traceback_for_any_other(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, failing = write_task(tmp_path), [str(tmp_path / "run" / "part")]

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), failing[0])

    monkeypatch.setattr(api, "tokenize", fail)
    outcome = cli("tokenize", config)
    assert (outcome.code, outcome.err) == (2, f"mtrain: {failing[0]}: Permission denied.\n")
    failing[0] = "/somewhere/else"
    with pytest.raises(PermissionError):
        cli("tokenize", config)
