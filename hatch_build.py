"""Compile the C of `mtrain/ops` into the wheel, or into the tree of an editable install.

Without a C compiler the wheel is pure, and mtrain uses its plain formulas.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE_DIR = "mtrain/ops"


class NativeBuildHook(BuildHookInterface):
    """The build hook of the wheel."""

    _temporary_dir: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile a library for each instruction set, and tag the wheel with the platform."""
        spec = importlib.util.spec_from_file_location(
            "mtrain_ops_build", Path(self.root) / _PACKAGE_DIR / "build.py"
        )
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        directory = build.LIB_DIR
        if version != "editable":
            self._temporary_dir = tempfile.mkdtemp(prefix="mtrain-build-")
            directory = Path(self._temporary_dir)
        try:
            failed = build.update(directory)
        except build.BuildError as error:
            self.app.display_warning(f"{error}: mtrain will use its plain formulas, and be slower")
            return
        for name, reason in failed.items():
            self.app.display_warning(f"nothing is compiled for {name}: {reason}")
        if version != "editable":
            for path in directory.glob("*.so"):
                build_data["force_include"][str(path)] = f"{_PACKAGE_DIR}/lib/{path.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete what was compiled into a temporary folder."""
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
