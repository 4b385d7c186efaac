"""The verb `mtrain check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain import api
from mtrain.cli import console, options
from mtrain.errors import DataError
from mtrain.run.run_dir import RunDir


def check(
    config: options.ConfigArgument,
    set_: options.SetOption = None,
    run: options.RunOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
) -> None:
    """Audit the corpora before training; train nothing.

    Lists every line that it finds in RUN/check. Exits with 2 on errors.

    Example: mtrain check configs/demo.yaml --strict
    """
    settings = api.load_config(config, set_ or [], run)
    from mtrain.audit.audit import num_bytes
    from mtrain.audit.report import as_json, as_text
    from mtrain.audit.rules import Severity
    from mtrain.io.text_width import count

    check_dir = RunDir(Path(settings.run_dir)).check_dir
    with console.reading(2 * num_bytes(settings)) as bar:
        report = api.check(settings, advance=bar.update)
    console.put(as_json(report) if json else as_text(report, check_dir), None)
    errors, warnings = report.count(Severity.ERROR), report.count(Severity.WARNING)
    if errors or (strict and warnings):
        problems = [(errors, "error"), (warnings, "warning")] if strict else [(errors, "error")]
        counts = " and ".join(count(number, name) for number, name in problems if number)
        raise DataError(f"{config}: {counts} in the corpora; see {check_dir}.")
