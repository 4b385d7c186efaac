"""The verb `mtrain init`."""

from __future__ import annotations

from pathlib import Path

from mtrain.cli import console, options


def init(
    src: options.SrcOption,
    tgt: options.TgtOption,
    src_lang: options.SrcLangOption,
    tgt_lang: options.TgtLangOption,
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
    from mtrain.autoconfig.write_config import Files
    from mtrain.run.logger import Stderr

    name = f"{src_lang}-{tgt_lang}"
    wanted = write_config.InitRequest(
        Files(src, tgt),
        src_lang,
        tgt_lang,
        write_config.parse_budget(budget),
        device,
        output or Path(f"{name}.yaml"),
        run or f"runs/{name}",
        Files(*valid) if valid else None,
        Files(*test) if test else None,
    )
    is_plain = src.is_file() and tgt.is_file() and ".gz" not in (src.suffix, tgt.suffix)
    with console.reading(src.stat().st_size + tgt.stat().st_size if is_plain else None) as bar:

        def turn_to(what: str) -> None:
            bar.bar_format = "{desc}"
            bar.set_description_str(what)

        lines = write_config.init(wanted, Stderr(), bar.update, turn_to)
    console.put(lines, None)
