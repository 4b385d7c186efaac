"""The verb `mtrain init`."""

from __future__ import annotations

from mtrain import api
from mtrain.cli import console, options


def init(
    src_lang: options.SrcLangOption,
    tgt_lang: options.TgtLangOption,
    src: options.SrcOption = None,
    tgt: options.TgtOption = None,
    set_: options.SetCorpusOption = None,
    budget: options.BudgetOption = "30m",
    device: options.DeviceOption = "auto",
    valid: options.HeldOutOption = None,
    test: options.HeldOutOption = None,
    output: options.NewConfigOption = None,
    run: options.NewRunOption = None,
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
