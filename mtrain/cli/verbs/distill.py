"""The verb `mtrain distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain import api
from mtrain.augmentation.options import Student
from mtrain.cli import console, options
from mtrain.cli.ranks import exit_when_stopped


def distill(
    config: options.ConfigArgument,
    teacher: Annotated[
        list[Path],
        typer.Option(
            metavar="RUN", help="A trained run; several are an ensemble.", show_default=False
        ),
    ],
    student: Annotated[
        Student,
        typer.Option(
            help="Encoder and decoder layers, as wide as the teacher; deep-shallow is 6-1."
        ),
    ] = "deep-shallow",
    mono: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="More text in the source language; repeatable."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The student's run folder; RUN_DIR-STUDENT if absent."),
    ] = None,
    beam: options.BeamOption = None,
    device: options.DeviceOption = "auto",
    set_: options.SetOption = None,
) -> None:
    """Train a smaller model on what larger ones translate.

    The teacher translates the sources of the training text, the student learns from these pairs and
    from the real ones, and a table compares the two. Goes on if it was stopped.

    Example: mtrain distill en-de.yaml --teacher runs/en-de --student 6-1
    """
    settings = api.load_config(config, set_ or [])
    run_dir = run or api.student_dir(settings, student)
    with exit_when_stopped(run_dir):
        report = api.distill(
            settings,
            teacher,
            student=student,
            mono=mono or [],
            run_dir=run_dir,
            beam=beam,
            device=device,
            has_bar=True,
        )
    from mtrain.augmentation.distill import as_text

    console.put(as_text(report), None)
