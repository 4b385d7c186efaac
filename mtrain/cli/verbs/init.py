"""The verb `mtrain init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtrain import api
from mtrain.cli import console, options

_HeldOutOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="SRC TGT", help="Two files of your own, instead of held-out pairs."),
]


def init(
    src_lang: Annotated[
        str, typer.Option(metavar="XX", help="The language of the source.", show_default=False)
    ],
    tgt_lang: Annotated[
        str, typer.Option(metavar="YY", help="That of the translation.", show_default=False)
    ],
    src: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The source text.", show_default=False)
    ] = None,
    tgt: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Its translation, by line.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="data.train, data.valid or data.tests in any form of a config; repeatable.",
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Of training and tests: 90s, 30m, 1h30m.")
    ] = "30m",
    device: options.DeviceOption = "auto",
    valid: _HeldOutOption = None,
    test: _HeldOutOption = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="CONFIG", help="To write; XX-YY.yaml if absent."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="DIR", help="Its run_dir; runs/XX-YY if absent.")
    ] = None,
) -> None:
    """Write a config that fits a corpus, a machine and a budget.

    Tries a few updates of models of several sizes, and chooses. Without --valid and --test, pairs
    of the corpus are held out, and written beside the config.

    Example: mtrain init --src a.en --tgt a.de --src-lang en --tgt-lang de --budget 20m
    """
    num_bytes = sum(path.stat().st_size for path in (src, tgt) if path and path.is_file())
    with console.reading(num_bytes or None) as bar:

        def show_status(text: str) -> None:
            bar.bar_format = "{desc}"
            bar.set_description_str(text)

        report = api.init(
            src_lang,
            tgt_lang,
            src=src,
            tgt=tgt,
            overrides=set_ or [],
            budget=budget,
            valid=valid,
            test=test,
            device=device,
            output=output,
            run_dir=run,
            advance=bar.update,
            set_status=show_status,
        )
    console.put(report.lines, None)
