"""An OSError about a path that cannot be used is one line; any other keeps its traceback."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from tasks import write_task

from mtrain import api


def test_an_os_error_is_one_line_for_an_unusable_path_and_a_traceback_for_any_other(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "lr=0.1" / "run"
    config = write_task(tmp_path)
    failing: list[Any] = [errno.EACCES, str(run / "part")]

    def fail(*_: object) -> None:
        number, path = failing
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(api, "tokenize", fail)
    numbers = [errno.EACCES, errno.ENOENT, errno.ENOSPC, errno.EEXIST, errno.ENOTEMPTY, errno.EBUSY]
    numbers += [errno.EIO, errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT]
    for failing[0] in numbers:
        outcome = cli("tokenize", config, "--run", run)
        assert outcome.code == 2
        assert outcome.err == f"mtrain: {failing[1]}: {os.strerror(failing[0])}.\n"
    for failing[:] in ([errno.EINVAL, str(run)], [errno.ENOENT, None], [errno.EACCES, 3]):
        with pytest.raises(OSError, match="Errno"):
            cli("tokenize", config)
