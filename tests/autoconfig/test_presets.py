import pytest

from mtrain.autoconfig import presets
from mtrain.autoconfig.presets import PRESETS, MeasuredPreset
from mtrain.config.sections import Config


def tried(index=0, num_parameters=1_000_000, tokens_per_s=10_000):
    return MeasuredPreset(PRESETS[index], num_parameters, tokens_per_s)


def test_sizes_rise_in_weights_and_in_what_they_ask_of_a_corpus():
    widths = [(size.model.d_model, size.model.d_ff) for size in PRESETS]
    assert widths == sorted(widths)
    assert [size.min_pairs for size in PRESETS] == sorted(size.min_pairs for size in PRESETS)
    assert PRESETS[0].min_pairs == 0


def test_a_larger_corpus_has_no_smaller_vocabulary():
    found = [presets.vocabulary_size(10**power) for power in range(2, 9)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1000, 32_000)


def test_the_largest_size_that_fits_the_budget_is_chosen():
    rows = [tried(0, 1_000_000, 10_000), tried(1, 4_000_000, 5000), tried(2, 30_000_000, 1000)]
    assert presets.choose(rows, 600).preset.name == "tiny"
    assert presets.choose(rows, 4000).preset.name == "small"
    assert presets.choose(rows, 150_000).preset.name == "medium"


def test_the_smallest_size_is_chosen_if_none_fits():
    assert presets.choose([tried(0), tried(1)], 1).preset.name == "tiny"


def test_a_budget_of_more_time_gives_more_updates_and_more_dropout():
    short, longer, longest = (presets.plan_training(tried(), 60 * n, 500_000) for n in (5, 20, 200))
    assert short.num_updates < longer.num_updates < longest.num_updates
    assert (short.dropout, longer.dropout, longest.dropout) == (0.1, 0.2, 0.3)


def test_updates_and_epochs_are_those_that_the_rate_is_good_for():
    found = presets.plan_training(tried(tokens_per_s=4096), 100, 40_960)
    assert (found.num_updates, found.num_epochs) == (100, 10)
    assert found.log_every == 5
    assert presets.plan_training(tried(3, tokens_per_s=4096), 600, 40_960).num_updates == 100
    assert presets.plan_training(tried(tokens_per_s=4096), 100, 1024).num_updates == 400


@pytest.mark.parametrize("budget_s", [0.001, 1, 60, 3600, 10**8])
def test_the_averaged_checkpoints_lie_within_the_training_and_the_config_is_valid(budget_s):
    found = presets.plan_training(tried(), budget_s, 500_000)
    assert found.save_every * presets.NUM_AVERAGED <= max(
        0.35 * found.num_updates, presets.NUM_AVERAGED
    )
    tree = {
        "run_dir": "run",
        "data": {"src_lang": "en", "tgt_lang": "de"}
        | {name: {"src": ["a"], "tgt": ["b"]} for name in ("train", "valid")},
        "training": {
            "max_minutes": budget_s / 60,
            "warmup_steps": found.warmup_steps,
            "save_every": found.save_every,
            "keep_last": presets.NUM_AVERAGED,
            "average": presets.NUM_AVERAGED,
            "validate_every": found.validate_every,
        },
    }
    assert Config.model_validate(tree).training.warmup_steps == found.warmup_steps
