"""Shortlists of the vocabulary: how they are learned, kept and used."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli
from safetensors import safe_open
from safetensors.torch import save_file

from mtrain import api
from mtrain.data.arrow_shards import ShardSet
from mtrain.decode import shortlist
from mtrain.decode import translator as translator_module
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.decode.pipeline import translate_lines
from mtrain.errors import ConfigError, RunError
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_group import ProcessGroup

EOS = 2
LINES = ["ba ce di fo", "gu", "di ba", "ce ce fo gu ba di", "ba gu"]


def cycles(num_pairs: int) -> list[tuple[list[int], list[int]]]:
    """Pairs in which source token 5 + n stands for target token 50 + n, and 40 in every target."""
    return [
        ([5 + n % 20, 5 + 7 * n % 20, EOS], [40, 50 + 7 * n % 20, 50 + n % 20])
        for n in range(num_pairs)
    ]


def test_the_shortlist_of_a_source_token_has_its_translation_but_no_token_of_every_target(
    monkeypatch,
):
    monkeypatch.setattr(shortlist, "NUM_LIKELY", 2)
    monkeypatch.setattr(shortlist, "NUM_FREQUENT", 1)
    monkeypatch.setattr(shortlist, "_BLOCK_PAIRS", 7)  # counts of blocks are added up
    found = shortlist.learn(cycles(500), 30, 80, [EOS])
    for n in range(20):
        assert 50 + n in found.likely_SK[5 + n]
        assert 40 not in found.likely_SK[5 + n]  # it occurs with every source
    assert (found.likely_SK[25:] == -1).all()
    assert np.flatnonzero(found.is_always_V).tolist() == [EOS, 40]


def test_the_shortlist_of_a_source_is_sorted_and_excludes_forbidden_tokens(monkeypatch):
    monkeypatch.setattr(shortlist, "NUM_FREQUENT", 1)
    found = shortlist.learn(cycles(500), 30, 80, [EOS])
    tokens = found.tokens([7, 9, 9, EOS], [54])
    assert tokens.tolist() == sorted({*tokens.tolist()})
    assert {EOS, 40, 52} <= {*tokens.tolist()} <= {EOS, *range(40, 80)} - {54}
    assert found.tokens([29], []).tolist() == [EOS, 40]
    shared = replace(found, is_shared=True)
    assert shared.tokens([29], []).tolist() == [EOS, 29, 40]  # it can be copied


def test_the_pairs_of_a_long_text_are_sampled_at_even_intervals(trained: RunDir, monkeypatch):
    tokenizer = translator_module.load(trained).tokenizer
    shards = ShardSet(trained.data_dir, tokenizer)
    whole = [list(src) for src, _ in shortlist._sampled_pairs(shards)]
    monkeypatch.setattr(shortlist, "_MAX_PAIRS", len(whole) // 3)
    some = [list(src) for src, _ in shortlist._sampled_pairs(shards)]
    assert some == whole[:: -(-len(whole) // (len(whole) // 3))]


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(trained.path, tmp_path / "run", ignore=shutil.ignore_patterns("shortlist*"))
    return RunDir(tmp_path / "run")


def load(run: RunDir, name: str | None = "fast", beam: int = 4) -> translator_module.Translator:
    options = DecodingOptions.from_config(run.config)
    return translator_module.load(run, replace(options, beam=beam, shortlist=name))


def test_a_shortlist_is_learned_once_and_kept_in_the_run_folder(run: RunDir):
    first = load(run)
    path = run.path / "shortlist.safetensors"
    written = path.stat().st_mtime_ns
    assert path.stat().st_mode == run.config_path.stat().st_mode  # others may read it
    shutil.rmtree(run.data_dir)
    second = load(run)
    assert path.stat().st_mtime_ns == written
    assert first.shortlist is not None
    assert second.shortlist is not None
    assert (first.shortlist.likely_SK == second.shortlist.likely_SK).all()
    assert (first.shortlist.is_always_V == second.shortlist.is_always_V).all()


def test_another_rank_waits_for_the_first_which_learns_the_shortlist(run: RunDir):
    path, times = run.path / "shortlist.safetensors", list[int]()

    class SecondRank(ProcessGroup):
        rank = 1

        def barrier(self) -> None:
            assert not path.exists()
            load(run)
            times.append(path.stat().st_mtime_ns)

    options = replace(DecodingOptions.from_config(run.config), beam=4, shortlist="fast")
    loading = LoadOptions(process_group=SecondRank())
    assert translator_module.load(run, options, loading).shortlist is not None
    assert times == [path.stat().st_mtime_ns]


def test_a_model_that_was_loaded_without_a_shortlist_refuses_the_option(run: RunDir):
    loaded = load(run, name=None)
    with pytest.raises(ConfigError, match="`shortlist` must be None for a model that was loaded"):
        loaded.with_options(replace(loaded.options, shortlist="fast"))


def test_a_missing_training_text_or_a_damaged_shortlist_file_is_an_error(run: RunDir):
    shutil.rmtree(run.data_dir)
    with pytest.raises(RunError, match=r"must have the training text in data/ to learn a shortl"):
        load(run)
    (run.path / "shortlist.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RunError, match=r"shortlist.safetensors: must be a file of safetensors"):
        load(run)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("likely", lambda likely: likely.float()),
        ("likely", lambda likely: likely[:, 0]),
        ("likely", lambda likely: likely + len(likely)),
        ("likely", lambda likely: likely - 1),
        ("always", lambda always: always.long()),
        ("always", lambda always: always[:, None]),
    ],
)
def test_a_shortlist_file_with_invalid_tensors_is_an_error(run: RunDir, name, change):
    assert load(run).shortlist is not None
    path = run.path / "shortlist.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in ("likely", "always")}
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path, metadata)
    with pytest.raises(RunError, match="must have ids of target tokens, but has others"):
        load(run)


def test_a_shortlist_of_another_tokenizer_is_learned_again(run: RunDir, monkeypatch):
    tokenizer = load(run).tokenizer
    monkeypatch.setattr(shortlist, "NUM_LIKELY", 3)
    assert shortlist.load(run, tokenizer).likely_SK.shape[1] > 3  # the stored shortlist
    monkeypatch.setattr(type(tokenizer), "fingerprint", lambda self: "another")
    assert shortlist.load(run, tokenizer).likely_SK.shape[1] == 3


def test_a_shortlist_changes_at_most_one_translation_and_lines_do_not_affect_each_other(
    run: RunDir,
):
    short = load(run)
    found = translate_lines(short, LINES)
    assert found == [translate_lines(short, [line])[0] for line in LINES]
    same = zip(found, translate_lines(load(run, None), LINES), strict=True)
    assert sum(a == b for a, b in same) >= len(LINES) - 1


def test_a_search_with_a_shortlist_generates_only_its_tokens_except_for_a_prefix(
    run: RunDir, monkeypatch
):
    monkeypatch.setattr(shortlist, "NUM_LIKELY", 1)
    monkeypatch.setattr(shortlist, "NUM_FREQUENT", 1)
    short = load(run)
    assert short.shortlist is not None
    source = short.tokenizer.encode_src(LINES[:1])[0]
    never = [short.tokenizer.tgt.pad, short.tokenizer.tgt.bos]
    ranked = {*short.shortlist.tokens(source, never).tolist()}
    others = sorted({*range(5, len(short.tokenizer.tgt))} - ranked)[:2]
    plain = translator_module.EncodedSource(source)
    (best,), (begun,) = short.search([plain, replace(plain, prefix=tuple(others))])
    assert {*best.ids} <= ranked
    assert begun.ids[:2] == others
    assert {*begun.ids[2:]} <= ranked
    assert begun.log_prob != -np.inf


def test_a_forced_token_of_the_shortlist_has_the_same_probability_as_one_that_is_found(
    run: RunDir, monkeypatch
):
    monkeypatch.setattr(shortlist, "NUM_LIKELY", 1)
    monkeypatch.setattr(shortlist, "NUM_FREQUENT", 1)
    short = load(run)
    source = translator_module.EncodedSource(short.tokenizer.encode_src(LINES[:1])[0])
    ((best, *_),) = short.search([source])
    forcing = short.with_options(replace(short.options, max_extra_tokens=0))
    for end in range(1, len(best.ids) + 1):  # eos is forced where the length limit is reached
        begun = replace(source, prefix=tuple(best.ids[:end]))
        ((forced, *_),) = forcing.search([begun])
        assert forced.ids == best.ids
        assert forced.log_probs == pytest.approx(best.log_probs, abs=1e-4)


def test_greedy_search_ignores_the_shortlist(run: RunDir):
    greedy = [translate_lines(load(run, name, beam=1), LINES) for name in ("fast", None)]
    assert greedy[0] == greedy[1]


def test_a_shortlist_is_refused_where_it_has_no_effect(run: RunDir, trained: RunDir):
    with pytest.raises(ConfigError, match=r"^`shortlist` must be fast or None, but is 'slow'"):
        DecodingOptions(shortlist="slow")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^`shortlist` must be None with `sampling`"):
        DecodingOptions(shortlist="fast", sampling=Sampling())
    options = replace(DecodingOptions.from_config(run.config), shortlist="fast")
    with pytest.raises(ConfigError, match=r"^`shortlist` must have one run on a CPU, but 2 are"):
        translator_module.load([run, trained], options)
    with pytest.raises(ConfigError, match=r"^`shortlist` has no effect with `engine='ctranslate2'"):
        api.load(run.path, shortlist="fast", engine="ctranslate2")


def test_the_command_line_refuses_a_shortlist_with_sampling(cli: Cli, run: RunDir):
    outcome = cli("translate", run.path, "--sample", "--shortlist", "fast", stdin=b"ba\n")
    assert outcome.code == 2
    assert outcome.err == "mtrain: `--shortlist` has no effect with `--sample`; leave it out.\n"


@pytest.mark.parametrize("verb", ["translate", "eval"])
def test_the_command_line_refuses_a_shortlist_with_greedy_search(cli: Cli, run: RunDir, verb: str):
    outcome = cli(verb, run.path, "--shortlist", "fast", "--beam", "1", stdin=b"ba\n")
    assert (outcome.code, outcome.err) == (
        2,
        "mtrain: `--shortlist` has no effect with a beam of 1, which ranks all tokens; leave it "
        "out.\n",
    )


@pytest.mark.parametrize("option", [[], ["--compare"]])
def test_eval_with_a_shortlist_refuses_a_greedy_run_before_any_run_is_loaded(
    cli: Cli, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
):
    shutil.copytree(run.path, tmp_path / "greedy")
    path = tmp_path / "greedy" / "config.yaml"
    text = path.read_text("utf-8")
    assert "beam: 2" in text
    path.write_text(text.replace("beam: 2", "beam: 1"), encoding="utf-8")
    monkeypatch.setattr(translator_module, "load", None)
    outcome = cli("eval", run.path, *option, path.parent, "--shortlist", "fast")
    assert outcome.code == 2
    assert outcome.err.startswith("mtrain: `--shortlist` has no effect with a beam of 1")


def test_the_command_line_accepts_a_shortlist_and_the_eval_report_mentions_it(
    cli: Cli, run: RunDir
):
    arguments = [run.path, "--resamples", "0", "--metrics", "bleu", "--shortlist", "fast"]
    outcome = cli("eval", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.lines[2:] == ["  translated with `--shortlist fast`"]
    model = api.load(run.path, shortlist="fast", beam=4)
    text = "".join(f"{line}\n" for line in LINES).encode()
    outcome = cli("translate", run.path, "--shortlist", "fast", "--beam", "4", stdin=text)
    assert outcome.lines == model.translate(LINES)
