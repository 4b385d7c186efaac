"""A process of a benchmark that stays loaded, and answers requests in JSON, a line each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


class Worker:
    """A Python script with arguments, in a process of its own.

    Attributes:
        loaded: what it prints first, once it is loaded.
    """

    def __init__(self, script: str, arguments: Sequence[object]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, request: object) -> Any:
        """Send a request; return the answer."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
