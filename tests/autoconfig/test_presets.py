import pytest

from mtrain.autoconfig import presets
from mtrain.autoconfig.presets import PRESETS, MeasuredPreset, Overhead
from mtrain.config.sections import Config


def tried(index=0, num_parameters=1_000_000, tokens_per_s=10_000, batch_tokens=4096):
    return MeasuredPreset(PRESETS[index], batch_tokens, num_parameters, tokens_per_s, 1.0)


def plan(measured, budget_s, num_tokens, *overhead):
    return presets.plan_training(measured, budget_s, num_tokens, Overhead(*(overhead or (0,) * 5)))


def test_sizes_rise_in_weights_and_in_what_they_ask_of_a_corpus():
    widths = [(size.model.d_model, size.model.d_ff) for size in PRESETS]
    assert widths == sorted(widths)
    assert [size.min_pairs for size in PRESETS] == sorted(size.min_pairs for size in PRESETS)
    assert PRESETS[0].min_pairs == 0


def test_a_larger_corpus_has_no_smaller_vocabulary():
    found = [presets.vocabulary_size(10**power) for power in range(2, 9)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (2000, 32_000)


def test_the_largest_size_that_fits_the_budget_is_chosen():
    rows = [tried(0, 1_000_000, 10_000), tried(1, 4_000_000, 5000), tried(2, 30_000_000, 1000)]
    assert presets.choose(rows, 600).preset.name == "tiny"
    assert presets.choose(rows, 4000).preset.name == "small"
    assert presets.choose(rows, 150_000).preset.name == "medium"


def test_the_smallest_size_is_chosen_if_none_fits():
    assert presets.choose([tried(0), tried(1)], 1).preset.name == "tiny"


def test_a_budget_of_more_time_gives_more_updates_and_more_dropout():
    short, longer, longest = (plan(tried(), 60 * n, 500_000) for n in (5, 20, 200))
    assert short.num_updates < longer.num_updates < longest.num_updates
    assert (short.dropout, longer.dropout, longest.dropout) == (0.1, 0.2, 0.3)


def test_a_consistency_loss_is_for_pairs_that_are_read_often_in_full_batches():
    some, many = (plan(tried(), 60 * n, 50_000) for n in (15, 30))
    assert some.num_reads < 200 <= many.num_reads
    assert not presets.gains_by_consistency(some, 4096)
    assert presets.gains_by_consistency(many, 4096)
    assert not presets.gains_by_consistency(many, 2048)
    slower = tried(tokens_per_s=4000)._replace(consistency=presets.CONSISTENCY)
    assert (many.consistency, plan(slower, 1200, 50_000).consistency) == (None, presets.CONSISTENCY)


def test_copies_of_a_pair_count_as_reading_it_more_often():
    once = plan(tried(), 300, 500_000)
    copied = presets.plan_training(tried(), 300, 500_000, Overhead(*(0,) * 5), 10.0)
    assert copied.num_reads == 10 * once.num_epochs == 10 * copied.num_epochs
    assert (once.dropout, copied.dropout) == (0.1, 0.2)


def test_updates_and_epochs_are_those_that_the_speed_is_good_for():
    found = plan(tried(tokens_per_s=4096), 100, 36_864)
    assert (found.num_updates, found.num_epochs) == (90, 10)
    assert found.log_every == 4
    assert plan(tried(3, tokens_per_s=4096), 600, 40_960).num_updates == 90
    assert plan(tried(tokens_per_s=4096), 100, 1024).num_updates == 360


def test_batches_are_small_where_the_budget_has_few_updates():
    sizes = [presets.batch_tokens(tried(), 60 * minutes) for minutes in (0.1, 2, 5, 10, 20, 600)]
    assert sizes == [512, 512, 1024, 2048, 4096, 4096]
    assert presets.batch_tokens(tried(3), 60 * 30) == 1024, "an update is of six batches"


@pytest.mark.parametrize("preset", range(len(PRESETS)))
@pytest.mark.parametrize("minutes", [0.1, 1, 2, 5, 10, 20, 60, 1000])
def test_the_rate_rises_no_faster_than_a_short_training_bears(preset, minutes):
    measured = tried(preset)
    batch_tokens = presets.batch_tokens(measured, 60 * minutes)
    found = plan(measured._replace(batch_tokens=batch_tokens), 60 * minutes, 500_000)
    highest = PRESETS[preset].lr
    full_lr_warmup = {"adam": 1250, "muon": 300}[PRESETS[preset].optimizer]
    assert found.lr / found.warmup_steps <= 1.0001 * highest / full_lr_warmup
    assert found.lr <= highest
    assert found.warmup_steps <= max(1, found.num_updates / 4)


def test_a_long_training_reaches_the_full_rate():
    assert plan(tried(2), 60 * 60, 500_000).lr == PRESETS[2].lr
    of_two_thousand = plan(tried(tokens_per_s=4096), 2000 / 0.9, 500_000)
    assert (of_two_thousand.num_updates, of_two_thousand.lr) == (2000, PRESETS[0].lr)


def test_the_rate_of_muon_falls_with_the_number_of_updates():
    of_two, of_eight, of_thirty_two = (
        plan(tried(tokens_per_s=4096), 1000 * n / 0.9, 500_000) for n in (2, 8, 32)
    )
    assert (of_eight.num_updates, of_thirty_two.num_updates) == (8000, 32_000)
    assert of_eight.lr == pytest.approx(of_two.lr / 2**0.5)
    assert of_thirty_two.lr == pytest.approx(of_two.lr / 2)


def test_the_budget_pays_for_all_that_the_training_takes_besides_its_updates():
    assert (
        plan(tried(), 600, 500_000, 3, 10, 20, 40, 50).training_s == 600 - 2 * 3 - 10 - 2 * 20 - 50
    )
    assert plan(tried(), 600, 500_000, 3, 10, 20, 40, 500).training_s == 300, "at most half of it"


@pytest.mark.parametrize("longest_s", [0, 0.5, 3, 20, 59, 61, 1000])
def test_validations_take_a_tenth_of_the_training_at_most(longest_s):
    found = plan(tried(), 600, 500_000, 0, 0, 0, longest_s, 0)
    before_the_end = (found.num_updates - 1) // found.validate_every
    assert before_the_end <= 10
    assert before_the_end * longest_s <= 60


@pytest.mark.parametrize("budget_s", [0.001, 1, 60, 3600, 10**8])
def test_the_averaged_checkpoints_lie_within_the_training_and_the_config_is_valid(budget_s):
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
