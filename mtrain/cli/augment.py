"""The verb `mtrain augment`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from mtrain import api
from mtrain.cli import console, options
from mtrain.cli.ranks import joined_process_group
from mtrain.errors import ConfigError
from mtrain.run.run_dir import RunDir


def augment(
    config: options.ConfigArgument,
    using: options.UsingOption,
    output: options.CorpusOutputOption,
    back: options.BackOption = None,
    forward: options.ForwardOption = None,
    again: options.AgainOption = False,
    beam: options.BeamOption = None,
    length_alpha: options.AlphaOption = None,
    n_best: options.NBestOption = 1,
    sample: options.SampleOption = False,
    temperature: options.TemperatureOption = None,
    top_k: options.TopKOption = None,
    top_p: options.TopPOption = None,
    seed: options.SeedOption = None,
    score: options.WriteScoresOption = False,
    keep_best: options.KeepBestOption = None,
    agree_with: options.AgreeOption = None,
    write_config: options.WriteConfigOption = None,
    weight: options.WeightOption = None,
    tag: options.TagOption = None,
    until: options.UntilOption = None,
    batch_tokens: options.BatchOption = None,
    device: options.DeviceOption = "auto",
    precision: options.PrecisionOption = "auto",
    set_: options.SetOption = None,
) -> None:
    """Make more training pairs by trained models.

    By back-translation, self-training or diversification; goes on if it was stopped. Prints the
    training text with the new corpus, as a config has it.

    Example: mtrain augment en-de.yaml --back news.de --using runs/de-en -o bt
    """
    mode = _mode(back, forward, again)
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options.refuse("--sample", {"beam": beam, "length_alpha": length_alpha} if sample else {})
    options.require("--sample", {} if sample else drawing | {"seed": seed})
    options.require("--keep-best", {} if keep_best else {"agree_with": agree_with})
    options.refuse("--again", {"agree_with": agree_with} if again else {})
    settings, runs = api.load_config(config, set_ or []), [RunDir(path) for path in using]
    from mtrain.augmentation import augment as augmenting
    from mtrain.augmentation import new_config
    from mtrain.decode.options import Sampling
    from mtrain.run.load_model import LoadOptions
    from mtrain.run.logger import PythonLog

    _check_n_best(n_best, None if sample else [beam or run.config.decoding.beam for run in runs])
    new = new_config.with_corpus(settings, output, weight, tag, until)
    if write_config is not None:
        new_config.check_free(new, write_config)
    decoding: dict[str, Any] = options.given(
        {"beam": beam, "length_alpha": length_alpha, "batch_tokens": batch_tokens, "seed": seed}
    )
    decoding["num_best"] = n_best
    decoding["sampling"] = Sampling(**options.given(drawing)) if sample else None
    texts, judge = [*(back or []), *(forward or [])], RunDir(agree_with) if agree_with else None
    with joined_process_group("the same command goes on from there.") as process_group:
        loading = LoadOptions(device, precision, None, process_group)
        request = augmenting.AugmentRequest(
            mode, texts, again, runs, output, decoding, score, keep_best, judge, loading
        )
        augmenting.augment(request, settings, PythonLog(), console.warn)
        if process_group.is_first:
            if write_config is not None:
                new_config.write(new, write_config)
                PythonLog().say(f"{write_config}: trains in {new.run_dir}")
            console.put(new_config.as_text(new), None)


def _mode(
    back: list[Path] | None, forward: list[Path] | None, again: bool
) -> Literal["back", "forward", "again"]:
    """Return the one that is given."""
    given = {"back": bool(back), "forward": bool(forward), "again": again}
    modes = [f"`--{mode}`" for mode, is_given in given.items() if is_given]
    if len(modes) != 1:
        raise ConfigError(
            f"one of `--back`, `--forward` and `--again` must be given, but "
            f"{' and '.join(modes) + ' are' if modes else 'none is'}."
        )
    return "back" if back else "forward" if forward else "again"


def _check_n_best(n_best: int, widths: list[int] | None) -> None:
    """Refuse more translations than the beam of each run is wide; samples have none."""
    for width in widths or []:
        if n_best > width:
            raise ConfigError(
                f"`--n-best` must be at most the beam ({width}), but is {n_best} instead."
            )
