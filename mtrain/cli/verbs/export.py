"""The verb `mtrain export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain import api
from mtrain.cli import console, options
from mtrain.exporters.registry import Library, Quantization


def export(
    run: options.RunArgument,
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="The folder to write, new; a file for argos.", show_default=False
        ),
    ],
    to: Annotated[
        Library,
        typer.Option("--to", help="The library.", show_default=False),
    ],
    quantize: Annotated[
        Quantization | None,
        typer.Option(help="Store fewer bits of each weight; not every library has every type."),
    ] = None,
    check_lines: Annotated[
        int, typer.Option(min=1, metavar="N", help="Compare on N lines of the validation text.")
    ] = 100,
    license_: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="Of the model card, such as cc-by-4.0."),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="With onnx: write a page that translates, too.")
    ] = False,
    shortlist: Annotated[
        bool,
        typer.Option("--shortlist", help="With ctranslate2: write the likely tokens, vmap.txt."),
    ] = False,
) -> None:
    """Write the model for another library, and check it there.

    What it prints is how the copy compares with the model. One that is not quantised and does not
    translate as the model does is an error, and nothing is written.

    Example: mtrain export runs/demo demo-ct2 --to ctranslate2 --quantize int8
    """
    from mtrain.exporters.export import as_text

    report = api.export(
        run,
        directory,
        to,
        quantize=quantize,
        check_lines=check_lines,
        license=license_,
        page=page,
        shortlist=shortlist,
    )
    console.put(as_text(report), None)
