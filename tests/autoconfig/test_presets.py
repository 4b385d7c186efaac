import pytest

from mtrain.autoconfig import presets
from mtrain.autoconfig.presets import PRESETS, MeasuredPreset, Overhead
from mtrain.config.sections import Config


def tried(index=0, num_parameters=1_000_000, tokens_per_s=10_000, tokens_per_batch=4096):
    sizes = num_parameters, tokens_per_s, tokens_per_batch
    return MeasuredPreset(PRESETS[index], 4096, *sizes, 1.0)


def plan(measured, budget_s, num_tokens, *overhead):
    return presets.plan_training(measured, budget_s, num_tokens, Overhead(*(overhead or (0,) * 5)))


def test_presets_are_sorted_by_width_and_by_minimum_number_of_pairs():
    widths = [(size.model.d_model, size.model.d_ff) for size in PRESETS]
    assert widths == sorted(widths)
    assert [size.min_pairs for size in PRESETS] == sorted(size.min_pairs for size in PRESETS)
    assert PRESETS[0].min_pairs == 0


def test_the_vocabulary_size_rises_with_the_corpus_from_2000_to_32000():
    found = [presets.vocabulary_size(10**power) for power in range(2, 9)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (2000, 32_000)


def test_the_largest_preset_that_fits_the_budget_is_chosen():
    rows = [tried(0, 1_000_000, 10_000), tried(1, 4_000_000, 5000), tried(2, 30_000_000, 1000)]
    assert presets.choose(rows, 600).preset.name == "tiny"
    assert presets.choose(rows, 4000).preset.name == "small"
    assert presets.choose(rows, 150_000).preset.name == "medium"


def test_the_smallest_preset_is_chosen_if_none_fits():
    assert presets.choose([tried(0), tried(1)], 1).preset.name == "tiny"


def test_a_longer_budget_gives_more_updates_and_more_dropout():
    short, longer, longest = (plan(tried(), 60 * n, 500_000) for n in (5, 20, 200))
    assert short.num_updates < longer.num_updates < longest.num_updates
    assert (short.dropout, longer.dropout, longest.dropout) == (0.1, 0.2, 0.3)


def test_the_consistency_loss_is_used_for_pairs_read_200_times_in_full_batches():
    some, many = (plan(tried(), 60 * n, 50_000) for n in (15, 30))
    assert some.num_reads < 200 <= many.num_reads
    assert not presets.gains_by_consistency(some, 4096)
    assert presets.gains_by_consistency(many, 4096)
    assert not presets.gains_by_consistency(many, 2048)


def test_copies_of_a_pair_count_as_more_reads_and_raise_the_dropout():
    once = plan(tried(), 300, 500_000)
    copied = presets.plan_training(tried(), 300, 500_000, Overhead(*(0,) * 5), 10.0)
    assert copied.num_reads == 10 * once.num_epochs == 10 * copied.num_epochs
    assert (once.dropout, copied.dropout) == (0.1, 0.2)


def test_updates_and_epochs_follow_from_the_measured_speed_and_the_budget():
    found = plan(tried(tokens_per_s=4096), 100, 36_864)
    assert (found.num_updates, found.num_epochs) == (90, 10)
    assert found.log_every == 4
    assert plan(tried(3, tokens_per_s=4096), 600, 40_960).num_updates == 90
    assert plan(tried(tokens_per_s=4096, tokens_per_batch=1024), 100, 1024).num_updates == 360


def test_batches_shrink_if_the_budget_allows_few_updates():
    sizes = [presets.batch_tokens(tried(), 60 * minutes) for minutes in (0.1, 2, 5, 10, 20, 600)]
    assert sizes == [512, 512, 1024, 2048, 4096, 4096]
    assert presets.batch_tokens(tried(3), 60 * 30) == 1024, "an update is of six batches"


@pytest.mark.parametrize("preset", range(len(PRESETS)))
@pytest.mark.parametrize("minutes", [0.1, 1, 2, 5, 10, 20, 60, 1000])
def test_the_learning_rate_its_warmup_slope_and_the_warmup_steps_are_bounded(preset, minutes):
    measured = tried(preset)
    batch_tokens = presets.batch_tokens(measured, 60 * minutes)
    found = plan(measured._replace(batch_tokens=batch_tokens), 60 * minutes, 500_000)
    highest = PRESETS[preset].lr
    full_lr_warmup = {"adam": 1250, "muon": 300}[PRESETS[preset].optimizer]
    assert found.lr / found.warmup_steps <= 1.0001 * highest / full_lr_warmup
    assert found.lr <= highest
    assert found.warmup_steps <= max(1, found.num_updates / 4)


def test_a_long_training_reaches_the_learning_rate_of_the_preset():
    assert plan(tried(2), 60 * 60, 500_000).lr == PRESETS[2].lr
    of_two_thousand = plan(tried(tokens_per_s=4096), 2000 / 0.9, 500_000)
    assert (of_two_thousand.num_updates, of_two_thousand.lr) == (2000, PRESETS[0].lr)


def test_the_learning_rate_of_muon_falls_with_the_fourth_root_of_the_updates():
    of_two, of_eight, of_thirty_two = (
        plan(tried(tokens_per_s=4096), 1000 * n / 0.9, 500_000) for n in (2, 8, 32)
    )
    assert (of_eight.num_updates, of_thirty_two.num_updates) == (8000, 32_000)
    assert of_eight.lr == pytest.approx(of_two.lr / 2**0.5)
    assert of_thirty_two.lr == pytest.approx(of_two.lr / 2)


def test_overheads_are_subtracted_from_the_training_time_up_to_half_of_the_budget():
    assert (
        plan(tried(), 600, 500_000, 3, 10, 20, 40, 50).training_s == 600 - 2 * 3 - 10 - 2 * 20 - 50
    )
    assert plan(tried(), 600, 500_000, 3, 10, 20, 40, 500).training_s == 300, "at most half of it"


@pytest.mark.parametrize("longest_s", [0, 0.5, 3, 20, 59, 61, 1000])
def test_at_most_ten_validations_take_at_most_a_tenth_of_the_training_time(longest_s):
    found = plan(tried(), 600, 500_000, 0, 0, 0, longest_s, 0)
    before_the_end = (found.num_updates - 1) // found.validate_every
    assert before_the_end <= 10
    assert before_the_end * longest_s <= 60


@pytest.mark.parametrize("budget_s", [0.001, 1, 60, 3600, 10**8])
def test_averaged_checkpoints_span_about_a_tenth_of_the_updates_and_the_config_is_valid(budget_s):
    found = plan(tried(), budget_s, 500_000)
    assert found.save_every * presets.NUM_AVERAGED <= max(0.11 * found.num_updates, 50)
    tree = {
        "run_dir": "run",
        "data": {"src_lang": "en", "tgt_lang": "de"}
        | {name: {"src": ["a"], "tgt": ["b"]} for name in ("train", "valid")},
        "training": {
            "max_minutes": budget_s / 60,
            "lr": found.lr,
            "warmup_steps": found.warmup_steps,
            "save_every": found.save_every,
            "keep_last": presets.NUM_AVERAGED,
            "average": presets.NUM_AVERAGED,
            "validate_every": found.validate_every,
        },
    }
    assert Config.model_validate(tree).training.warmup_steps == found.warmup_steps
