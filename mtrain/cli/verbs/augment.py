"""The verb `mtrain augment`."""

from __future__ import annotations

from mtrain import api
from mtrain.cli import console, options
from mtrain.cli.ranks import joined_process_group


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
    sampling_options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options.require("--sample", {} if sample else sampling_options)
    from mtrain.augmentation import new_config
    from mtrain.augmentation.options import AugmentOptions
    from mtrain.decode.options import Sampling

    augment_options = AugmentOptions(
        beam,
        length_alpha,
        n_best,
        Sampling(**options.given(sampling_options)) if sample else None,
        seed,
        batch_tokens,
        score,
        keep_best,
        agree_with,
        weight,
        tag,
        until,
    )
    settings = api.load_config(config, set_ or [])
    with joined_process_group("the same command goes on from there.") as process_group:
        report = api.augment(
            settings,
            using,
            output,
            augment_options,
            back=back or [],
            forward=forward or [],
            again=again,
            write_config=write_config,
            device=device,
            precision=precision,
            process_group=process_group,
        )
        if process_group.is_first:
            console.put(new_config.as_text(report.config), None)
