"""The verb `mtrain init`."""

from __future__ import annotations

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
    from mtrain.autoconfig import write_config
    from mtrain.corpus.reader import size_of
    from mtrain.errors import ConfigError
    from mtrain.run.logger import Stderr

    if (src is None) != (tgt is None):
        raise ConfigError("`--src` must stand beside `--tgt`, but one of them stands alone.")
    files = {"valid": valid, "test": test, "train": (src, tgt) if src and tgt else None}
    request = write_config.parse_request(
        (src_lang, tgt_lang),
        {key: pair for key, pair in files.items() if pair},
        set_ or [],
        budget,
        device,
        output,
        run,
    )
    with console.reading(size_of(request.data.train) or None) as bar:

        def turn_to(what: str) -> None:
            bar.bar_format = "{desc}"
            bar.set_description_str(what)

        lines = write_config.init(request, Stderr(), bar.update, turn_to)
    console.put(lines, None)
