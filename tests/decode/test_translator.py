"""Batches translate like single lines, order is kept, and scores can be recomputed."""

import math
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from builders import SRC_LINES, TGT_LINES, endless_model, model_config, randomise, vocabularies
from tasks import WORDS, copy_task, train, write_task

from mtrain.config.sections import TokenizerConfig
from mtrain.decode import translator as translator_module
from mtrain.decode.beam import NUM_GROUPS, length_penalty
from mtrain.decode.options import DecodingOptions, Sampling
from mtrain.decode.pipeline import translate_lines
from mtrain.decode.shared_search import SearchCall, SearchLimits, SharedSearch, _Worker
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.errors import ConfigError, RunError
from mtrain.model.transformer import DecoderLayer
from mtrain.ops import native
from mtrain.ops.packed_weights import Precision
from mtrain.run import checkpoint, load_model
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.runtime import device
from mtrain.tokenizer import sentencepiece
from mtrain.tokenizer.sentencepiece import Tokenizer

SAY_FAULTS = """
import resource, sys
from pathlib import Path
from mtrain.decode import translator
from mtrain.run.load_model import LoadOptions
from mtrain.run.run_dir import RunDir
from mtrain.runtime.process_settings import own_process

def faults() -> int:
    bytes([1]) * (64 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes([1]) * (64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

run, before = RunDir(Path(sys.argv[1])), faults()
translator.load(run, loading=LoadOptions("cpu"))
between = faults()
own_process()
translator.load(run, loading=LoadOptions("cpu"))
print(before, between, faults())
"""
LINES = [
    *(pair.src for pair in copy_task(24, 9)),
    "",
    "ba",
    "   ",
    " ".join(WORDS),
    "Unseen letters, too!",
    "é \N{SNOWMAN}",
]


@pytest.fixture(scope="module")
def translator(trained: RunDir) -> Translator:
    return translator_module.load(trained, loading=LoadOptions("cpu"))


def with_options(translator: Translator, **changes: object) -> Translator:
    options = replace(translator.options, **changes)  # type: ignore[arg-type]
    return Translator(translator.ensemble.models, translator.tokenizer, options, translator.device)


def sources(translator: Translator, lines: Sequence[str] = LINES) -> list[EncodedSource]:
    given = [line for line in lines if line.strip()]
    encoded = zip(translator.tokenizer.encode_src(given), given, strict=True)
    return [
        EncodedSource(ids, seed=number, text=text) for number, (ids, text) in enumerate(encoded)
    ]


def test_a_model_is_loaded_without_drawing_initial_weights(trained: RunDir) -> None:
    before = torch.get_rng_state()
    translator_module.load(trained, loading=LoadOptions("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_a_batch_of_many_equals_many_batches_of_one(translator: Translator, beam: int) -> None:
    searching = with_options(translator, beam=beam)
    together = translate_lines(searching, LINES)
    assert together == [translate_lines(searching, [line])[0] for line in LINES]
    assert sum(a == b for a, b in zip(together[:24], LINES[:24], strict=True)) >= 20


def test_ctrl_c_ends_a_search_of_several_threads_at_their_next_step(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, submit, taken, calls = translator.ensemble.step, SharedSearch.submit, [], []

    def remembered(self: SharedSearch, call: SearchCall, *rest: object) -> object:
        calls.append(call)
        return submit(self, call, *rest)

    def interrupted(*arguments: object) -> object:
        is_first = not taken
        taken.append(threading.current_thread().name)
        if is_first:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        deadline_s = time.monotonic() + 60
        while not calls[0].is_cancelled and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return step(*arguments)

    monkeypatch.setattr(SharedSearch, "submit", remembered)
    monkeypatch.setattr(translator.ensemble, "step", interrupted)
    torch.set_num_threads(2)
    long = [replace(source, prefix=(5,) * 100) for source in sources(translator)]
    with pytest.raises(KeyboardInterrupt):
        translator.search(long)
    end_of_search_threads()
    assert threading.main_thread().name not in taken
    assert len(taken) == len(set(taken)) in (1, 2)  # no thread took another step


def end_of_search_threads() -> None:
    """Wait until no thread decodes."""
    for thread in threading.enumerate():
        if thread.name.startswith("search-"):
            thread.join(60)
            assert not thread.is_alive()


def test_ctrl_c_while_the_threads_of_a_search_start_ends_those_that_have_started(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, submitted = _Worker.submit, []

    def interrupted(self: _Worker, call: SearchCall, groups: list) -> None:
        submitted.append(call)
        if len(submitted) == 2:
            raise KeyboardInterrupt
        submit(self, call, groups)

    monkeypatch.setattr(_Worker, "submit", interrupted)
    torch.set_num_threads(2)
    with pytest.raises(KeyboardInterrupt):
        translator.search(sources(translator))
    assert submitted[0].is_cancelled
    end_of_search_threads()
    monkeypatch.undo()
    assert translate_lines(translator, LINES)


def test_a_search_on_a_gpu_uses_one_thread(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads would take turns, each with only a part of what fits on the GPU at once."""
    counts: list[int] = []
    submit = SharedSearch.submit

    def counted(self: SharedSearch, call: SearchCall, groups_of: list) -> object:
        counts.append(len(groups_of))
        return submit(self, call, groups_of)

    monkeypatch.setattr(SharedSearch, "submit", counted)
    torch.set_num_threads(3)
    for name in ("cpu", "cuda"):
        parts = (translator.tokenizer, translator.options, torch.device(name))
        assert Translator([translator.model], *parts).search([]) == []
    assert counts == [3, 1]


@pytest.mark.parametrize("budget", [1, 20, 60])
def test_batch_tokens_does_not_change_the_translations(translator: Translator, budget: int) -> None:
    small = with_options(translator, batch_tokens=budget)
    assert translate_lines(small, LINES) == translate_lines(translator, LINES)


@pytest.mark.parametrize(("budget", "beam"), [(1, 1), (160, 1), (160, 4), (4000, 2)])
def test_groups_are_sorted_by_length_and_fill_their_share_of_batch_tokens(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, budget: int, beam: int
) -> None:
    shapes: list[list[int]] = []
    start = Translator._start

    def spy(self: Translator, group: list[EncodedSource]) -> object:
        shapes.append([len(source.ids) for source in group])
        return start(self, group)

    monkeypatch.setattr(Translator, "_start", spy)
    plain = with_options(translator, batch_tokens=budget, beam=beam, retry_flagged=False)
    translate_lines(plain, LINES)
    assert sum(map(len, shapes)) == len(LINES) - 2
    for lengths in shapes:
        assert lengths == sorted(lengths, reverse=True)
        assert len(lengths) == 1 or len(lengths) * lengths[0] * beam * NUM_GROUPS <= budget
    for lengths, after in pairwise(shapes):
        assert lengths[-1] >= after[0]
        assert (len(lengths) + 1) * lengths[0] * beam * NUM_GROUPS > budget


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_number_of_threads_does_not_change_the_translations(
    translator: Translator, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    alone = translate_lines(translator, LINES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    assert translate_lines(translator, LINES) == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beam", [1, 4])
def test_searched_log_probs_equal_those_of_scoring_the_same_target(
    translator: Translator, beam: int, dtype: torch.dtype
) -> None:
    options = replace(translator.options, beam=beam, length_alpha=0.8, num_best=beam)
    models = [deepcopy(model).to(dtype) for model in translator.ensemble.models]
    device, tokenizer = translator.device, translator.tokenizer
    searching = Translator(models, tokenizer, options, device)
    # a token's is as exact as float32 logits: within 2e-5 for an unlikely token
    of_pieces, of_sums, of_scores = (2e-5, 3e-5, 1e-5) if dtype == torch.float32 else [1e-11] * 3
    own = sources(translator)
    found = searching.search(own)
    for rank in range(beam):
        ranked = [
            (source, best[rank])
            for source, best in zip(own, found, strict=True)
            if rank < len(best)
        ]
        given = searching.score(
            [source for source, _ in ranked], [hypothesis.ids for _, hypothesis in ranked]
        )
        for log_probs, (_, hypothesis) in zip(given, ranked, strict=True):
            assert log_probs == pytest.approx(hypothesis.log_probs, abs=of_pieces)
            assert sum(log_probs) == pytest.approx(hypothesis.log_prob, abs=of_sums)
            penalty = length_penalty(len(log_probs), 0.8)
            assert sum(log_probs) / penalty == pytest.approx(hypothesis.score, abs=of_scores)


def test_scores_on_several_threads_are_computed_with_packed_weights_and_those_of_one_thread(
    translator: Translator, calls: list[str]
) -> None:
    small = with_options(translator, batch_tokens=128)  # several batches
    targets = [best[0].ids for best in small.search(sources(small))]
    torch.set_num_threads(1)
    alone = small.score(sources(small), targets)
    first = {*calls, "packed_topk"}
    calls.clear()
    torch.set_num_threads(3)
    assert small.score(sources(small), targets) == alone
    assert {*calls} <= first
    assert {"attention", "packed_linear", "packed_topk"} <= {*calls}


def test_scoring_on_several_threads_ends_as_its_limits_say(translator: Translator) -> None:
    torch.set_num_threads(3)
    cancelled = threading.Event()
    cancelled.set()
    for limits, error in (
        (SearchLimits(deadline_s=time.monotonic()), TimeoutError),
        (SearchLimits(cancel=cancelled), CancelledError),
    ):
        limited = translator.with_options(translator.options, limits)
        with pytest.raises(error):
            limited.score(sources(translator), [[5, 6, 7]] * len(sources(translator)))


def test_a_sample_depends_on_its_seed_and_not_on_the_other_lines(translator: Translator) -> None:
    drawing = with_options(
        translator, batch_tokens=40, num_best=2, sampling=Sampling(temperature=3.0)
    )
    own = sources(translator)
    together = drawing.search(own)
    assert together == [drawing.search([source])[0] for source in own]
    assert together == drawing.search(own)
    assert sum(first.ids != second.ids for first, second in together) > len(own) // 2
    other = drawing.search([EncodedSource(source.ids, seed=source.seed + 1000) for source in own])
    assert sum(a != b for a, b in zip(together, other, strict=True)) > len(own) // 2


def test_a_translation_begins_with_its_whole_prefix(translator: Translator) -> None:
    (src,) = translator.tokenizer.encode_src(["ba ce di"])
    (prefix,) = translator.tokenizer.tgt.encode(["gu ha je ki lo mu na pe ri so tu"])
    for forced in (prefix[:2], prefix * 3):
        ((best,),) = translator.search([EncodedSource(src, tuple(forced))])
        assert best.ids[: len(forced)] == forced
        (given,) = translator.score([EncodedSource(src)], [best.ids])
        assert given == pytest.approx(best.log_probs, abs=1e-5)


def test_attention_goes_to_the_word_that_is_copied(translator: Translator) -> None:
    own = sources(translator, ["ba ce di fo gu", "tu so ri"])
    targets = [best[0].ids for best in translator.search(own)]
    for source, target, weights_TS in zip(
        own, targets, translator.attend(own, targets), strict=True
    ):
        assert target == source.ids[:-1]
        assert weights_TS.shape == (len(target) + 1, len(source.ids))
        assert weights_TS.sum(1).tolist() == pytest.approx([1.0] * (len(target) + 1))
        assert weights_TS[:-1, :-1].argmax(1).tolist() == list(range(len(target)))


def test_translations_keep_the_order_of_lines_of_different_lengths(translator: Translator) -> None:
    backwards = translate_lines(translator, LINES[::-1])
    assert backwards[::-1] == translate_lines(translator, LINES)


def test_blank_lines_give_empty_translations(translator: Translator) -> None:
    lines = ["", " ", "\t", "\u3000", "\u2028", "\x0b\x0c"]
    assert translate_lines(translator, lines) == [""] * len(lines)


def test_an_empty_list_of_lines_gives_an_empty_list(translator: Translator) -> None:
    assert translate_lines(translator, []) == []


def untrained(**settings: object) -> Translator:
    """A translator with an untrained model, which depends on the source line."""
    torch.manual_seed(1)
    model = load_model.build_model(model_config(**settings), vocabularies()).double()
    randomise(model, seed=1)
    with torch.no_grad():
        for layer in [*model.encoder, *model.decoder]:
            for weight in layer.parameters():
                weight *= 3
            if isinstance(layer, DecoderLayer):
                layer.cross_attention.output.weight *= (
                    30  # otherwise the source has hardly any effect
                )
    decoding = DecodingOptions(beam=2, max_extra_tokens=3)
    return Translator([model], vocabularies(), decoding, torch.device("cpu"))


def test_each_line_gets_its_own_translation_in_any_batch_and_order() -> None:
    translator, lines = untrained(), ["", *TGT_LINES[:6], "a", " ", *SRC_LINES[:6]]
    alone = [translate_lines(translator, [line])[0] for line in lines]
    assert len(set(alone)) > 8
    assert translate_lines(translator, lines) == alone
    assert translate_lines(translator, lines[::-1]) == alone[::-1]


def test_a_translation_without_eos_ends_max_extra_tokens_after_the_length_of_its_source(
    trained: RunDir, translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def decode(self: sentencepiece.Vocabulary, ids: Sequence[Sequence[int]]) -> list[str]:
        decoded.extend(len(row) for row in ids)
        return [""] * len(ids)

    monkeypatch.setattr(sentencepiece.Vocabulary, "decode", decode)
    model = endless_model(trained.config.model, translator.tokenizer)
    lines = ["ba", "ba ce di fo gu"]
    lengths = sorted(len(ids) for ids in translator.tokenizer.src.encode(lines))
    for beam, extra in ((1, 0), (1, 7), (3, 4)):
        decoded.clear()
        options = replace(translator.options, beam=beam, max_extra_tokens=extra)
        limited = Translator([model], translator.tokenizer, options, translator.device)
        translate_lines(limited, lines)
        assert sorted(decoded) == [length + extra for length in lengths]


def test_a_greedy_translation_is_the_argmax_at_every_position(translator: Translator) -> None:
    """Recompute it with full forward passes, without a cache or a search."""
    model, vocabulary = translator.model.eval(), translator.tokenizer
    line = "ba ce di fo"
    (src,) = vocabulary.encode_src([line])
    src_BS = torch.tensor([src])
    keep_BS = torch.ones_like(src_BS, dtype=torch.bool)
    written = [vocabulary.tgt.bos]
    with torch.inference_mode():
        while written[-1] != vocabulary.tgt.eos:
            states_BTD = model(src_BS, keep_BS, torch.tensor([written]))
            written.append(int(model.output(states_BTD[0, -1]).argmax()))
    greedy = with_options(translator, beam=1)
    assert translate_lines(greedy, [line]) == vocabulary.tgt.decode([written[1:-1]])


def test_a_model_in_training_mode_translates_without_dropout(
    trained: RunDir, translator: Translator
) -> None:
    config = trained.config.model.model_copy(update={"dropout": 0.5})
    model = load_model.build_model(config, translator.tokenizer)
    load_model.set_weights(model, dict(translator.model.named_parameters()), trained.model_path)
    model.train()
    same = Translator([model], translator.tokenizer, translator.options, translator.device)
    assert translate_lines(same, LINES) == translate_lines(translator, LINES)


def test_weights_with_a_wrong_shape_or_a_missing_tensor_are_refused(
    trained: RunDir, translator: Translator
) -> None:
    weights = dict(translator.model.named_parameters())
    name = "src_embedding.weight"
    shape = tuple(weights[name].shape)
    wrong = {**weights, name: weights[name][:-1]}
    lacking = {key: value for key, value in weights.items() if key != name}
    for tensors, found in ((wrong, (shape[0] - 1, shape[1])), (lacking, "missing")):
        with pytest.raises(RunError) as error:
            load_model.set_weights(translator.model, tensors, trained.model_path)
        assert str(error.value) == (
            f"{trained.model_path}: `{name}` must have the shape {shape} that config.yaml asks "
            f"for, but is {found} instead; restore the run's own config.yaml."
        )


def test_weights_of_a_model_with_more_layers_are_refused(
    trained: RunDir, translator: Translator
) -> None:
    weights = dict(translator.model.named_parameters())
    name = "decoder.1.residual_1.norm.weight"
    with pytest.raises(RunError) as error:
        load_model.set_weights(
            translator.model, {**weights, name: torch.ones(2)}, trained.model_path
        )
    assert str(error.value) == (
        f"{trained.model_path}: must hold the weights of the model that config.yaml asks for, but "
        f"also holds `{name}`; restore the run's own config.yaml."
    )


def test_pick_device_finds_cpu_or_cuda_and_refuses_unknown_names() -> None:
    assert translator_module.pick_device("cpu").type == "cpu"
    assert translator_module.pick_device("auto").type == (
        "cuda" if torch.cuda.is_available() else "cpu"
    )
    for name in ("tpu", "cpu:x", "cpu:1", "mps", "", "meta"):
        with pytest.raises(
            ConfigError, match=r"^`device` must be auto, cpu, cuda or cuda:N, but is"
        ):
            translator_module.pick_device(name)


@pytest.mark.parametrize(
    ("num_gpus", "what"),
    [
        (0, "no CUDA GPU was found here; use cpu or auto."),
        (2, "this machine has 2 CUDA GPUs, from cuda:0 on."),
    ],
)
def test_a_missing_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, what: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError) as error:
        translator_module.pick_device("cuda:99")
    assert str(error.value) == f"`device` is 'cuda:99', but {what}"


@pytest.mark.parametrize(("name", "shown"), [("auto", "cuda"), ("cuda:0", "cuda:0")])
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    """As when other processes take all of its memory."""

    def zeros(size: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nFor debugging consider passing ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ConfigError) as error:
        translator_module.pick_device(name)
    assert str(error.value) == (
        f"`device` is {shown!r}, but this GPU cannot be used: CUDA error: out of memory; use cpu "
        "or another GPU."
    )


@pytest.fixture(scope="module")
def twin(trained: RunDir, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same run with other weights: noise is added to every tensor."""
    path = tmp_path_factory.mktemp("twin") / "run"
    shutil.copytree(trained.path, path)
    weights = checkpoint.load_model(trained.model_path, fingerprint(trained))
    rng = torch.Generator().manual_seed(1)
    noisy = {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=rng)
        for name, tensor in weights.items()
    }
    checkpoint.save_model(path / "model.safetensors", noisy, fingerprint(trained))
    return RunDir(path)


def fingerprint(run: RunDir) -> str:
    return sentencepiece.load(run.tokenizer_dir).fingerprint()


def test_an_ensemble_gives_the_mean_of_the_probabilities(trained: RunDir, twin: RunDir) -> None:
    cpu = LoadOptions("cpu")
    both = translator_module.load([trained, twin], loading=cpu)
    own = sources(both)
    targets = [best[0].ids for best in both.search(own)]
    alone = [
        translator_module.load(run, loading=cpu).score(own, targets) for run in (trained, twin)
    ]
    assert alone[0] != alone[1]
    for together, first, second in zip(both.score(own, targets), *alone, strict=True):
        means = [
            torch.tensor([a, b]).exp().mean().log().item()
            for a, b in zip(first, second, strict=True)
        ]
        assert together == pytest.approx(means, abs=1e-4)


def test_models_of_an_ensemble_may_have_different_source_vocabularies(tmp_path: Path) -> None:
    """Each model gets the lines segmented by its own source vocabulary."""
    apart = ["tokenizer.shared=false", "model.tie_embeddings=decoder", "training.max_steps=4"]
    first = train(write_task(tmp_path), *apart, run=str(tmp_path / "first"))
    second = RunDir(tmp_path / "second")
    shutil.copytree(first.tokenizer_dir, second.tokenizer_dir)
    finer = "tokenizer.vocab_size=281"
    other = train(tmp_path / "config.yaml", *apart, finer, run=str(tmp_path / "other"))
    shutil.copy(other.tokenizer_dir / "src.model", second.tokenizer_dir)
    own_size = "tokenizer.vocab_size=null"
    train(tmp_path / "config.yaml", *apart, own_size, "seed=2", run=str(second.path))
    together = translator_module.load([first, second], loading=LoadOptions("cpu"))
    alone = [translator_module.load(run, loading=LoadOptions("cpu")) for run in (first, second)]
    own = [sources(one) for one in alone]
    assert [source.ids for source in own[0]] != [source.ids for source in own[1]]
    found = together.search(own[0])
    targets = [best[0].ids for best in found]
    scores = [one.score(read, targets) for one, read in zip(alone, own, strict=True)]
    assert scores[0] != scores[1]
    for best, given, *parts in zip(found, together.score(own[0], targets), *scores, strict=True):
        means = [math.log((math.exp(a) + math.exp(b)) / 2) for a, b in zip(*parts, strict=True)]
        assert given == pytest.approx(means, abs=1e-5)
        assert best[0].log_probs == pytest.approx(given, abs=1e-5)
    weights = zip(together.attend(own[0], targets), alone[0].attend(own[0], targets), strict=True)
    assert all(torch.allclose(ours, its, atol=1e-6) for ours, its in weights)


def test_characters_unknown_to_one_model_of_an_ensemble_are_kept_for_the_others() -> None:
    """A character without a piece in one source vocabulary is encoded as it is by the others."""
    config = TokenizerConfig(vocab_size=120, byte_fallback=False, shared=False)
    tgt = vocabularies().tgt
    models, readers = [], []
    for number, line in enumerate(["plain", "a snowman \N{SNOWMAN}"]):
        pairs = [(text, text) for text in (*SRC_LINES, line)]
        readers.append(sentencepiece.train(config, pairs, len(pairs), seed=1).src)
        models.append(load_model.build_model(model_config(), Tokenizer(readers[-1], tgt)).double())
        randomise(models[-1], seed=number)
    decoding = DecodingOptions(beam=1, max_extra_tokens=3)
    line, found = "a \N{SNOWMAN} man", []
    for first, second in ((0, 1), (1, 0)):
        together = Translator(
            [models[first], models[second]],
            Tokenizer(readers[first], tgt),
            decoding,
            torch.device("cpu"),
            src_vocabularies=[readers[first], readers[second]],
        )
        found.append(together.score(sources(together, [line]), [[5, 6, 7]])[0])
        translate_lines(together, [line])
    assert found[0] == pytest.approx(found[1], abs=1e-9)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_search_without_scores_finds_the_same_targets(translator: Translator, beam: int) -> None:
    searching = with_options(translator, beam=beam, retry_flagged=False)
    own = sources(translator)
    unscored = with_options(searching, with_scores=False)
    scored, found = searching.search(own), unscored.search(own)
    assert [best[0].ids for best in found] == [best[0].ids for best in scored]
    assert math.isnan(found[0][0].score) == (beam == 1)
    found_texts = searching.tokenizer.tgt.decode([best[0].ids for best in found])
    assert [text for text in translate_lines(searching, LINES) if text] == [
        *filter(None, found_texts)
    ]


def test_an_ensemble_of_different_target_vocabularies_is_refused(
    trained: RunDir, tmp_path: Path
) -> None:
    other = train(write_task(tmp_path), "training.max_steps=1", "tokenizer.vocab_size=283")
    with pytest.raises(RunError) as error:
        translator_module.load([trained, other], loading=LoadOptions("cpu"))
    assert str(error.value) == (
        f"{other.path}: must have the target vocabulary of the other runs to decode with them, "
        "but has its own; train it with a copy of their tokenizer folder."
    )


def test_loading_a_step_loads_the_weights_of_its_checkpoint(trained: RunDir) -> None:
    step, path = max(checkpoint.steps(trained.checkpoints_dir).items())
    weights = checkpoint.load_model(path / "model.safetensors", fingerprint(trained))
    model = translator_module.load(trained, loading=LoadOptions("cpu", step=step)).model
    assert all(torch.equal(own, weights[name]) for name, own in model.named_parameters())
    with pytest.raises(RunError, match=r"must have a checkpoint of step 7, but has those of "):
        translator_module.load(trained, loading=LoadOptions("cpu", step=7))


def test_the_error_about_a_missing_step_writes_steps_as_the_option_takes_them(
    trained: RunDir, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(trained.path, run.path)
    shutil.rmtree(run.checkpoints_dir)
    refused = f"{run.path}: must have a checkpoint of step 9000, but has "
    for steps, said in (([], "none instead."), ([1500, 2000], "those of 1500, 2000 instead.")):
        for step in steps:
            (run.checkpoints_dir / f"step-{step:08}").mkdir(parents=True)
        with pytest.raises(RunError) as error:
            translator_module.load(run, loading=LoadOptions("cpu", step=9000))
        assert str(error.value) == refused + said


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is asked of glibc")
def test_only_a_process_of_mtrains_own_keeps_freed_memory_for_reuse(
    trained: RunDir,
) -> None:
    """Otherwise the pages of each large block are requested from the system again."""
    done = subprocess.run(
        [sys.executable, "-c", SAY_FAULTS, str(trained.path)], capture_output=True, check=True
    )
    before, between, after = map(int, done.stdout.split())
    assert between > 0.9 * before
    assert before > 4 * after


@pytest.mark.parametrize(
    "changes",
    [
        {"beam": 1},
        {"beam": 5, "num_best": 3},
        {"beam": 2, "no_repeat_ngram": 2},
        {"num_best": 2, "sampling": Sampling(top_k=5)},
    ],
)
def test_packed_weights_give_the_same_translations_as_unpacked_weights(
    trained: RunDir, changes: dict[str, object]
) -> None:
    """For greedy, beam and sampling search; prefixes need log-probabilities of given tokens."""
    laid_out = translator_module.load(trained, loading=LoadOptions("cpu"))
    plain = load_model.build_model(trained.config.model, laid_out.tokenizer)
    plain.load_state_dict(laid_out.model.state_dict())
    given = sources(laid_out)
    given[:5] = [replace(source, prefix=(7, 9)) for source in given[:5]]
    other = Translator([plain], laid_out.tokenizer, laid_out.options, laid_out.device)
    found, expected = (with_options(own, **changes).search(given) for own in (laid_out, other))
    assert [[own.ids for own in best] for best in found] == [
        [own.ids for own in best] for best in expected
    ]
    for best, others in zip(found, expected, strict=True):
        for own, other in zip(best, others, strict=True):
            assert own.log_probs == pytest.approx(other.log_probs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("is_own", [True, False])
def test_loading_disables_cudnn_attention_only_in_a_process_of_mtrains_own(
    trained: RunDir, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_own_process", lambda: is_own)
    torch.backends.cuda.enable_cudnn_sdp(True)
    translator_module.load(trained, loading=LoadOptions("cpu"))
    assert torch.backends.cuda.cudnn_sdp_enabled() != is_own


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_bfloat16_and_int8_weights_translate_nearly_like_float32(
    trained: RunDir,
    translator: Translator,
    precision: Precision,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        monkeypatch.setattr(native, "compiled", lambda: None)
    rounded = translator_module.load(trained, loading=LoadOptions("cpu", precision=precision))
    assert rounded.model.output._packed is not None
    assert rounded.model.output._packed.precision == precision
    assert rounded.model.cache_dtype is torch.bfloat16
    found = translate_lines(rounded, LINES)
    assert found == [translate_lines(rounded, [line])[0] for line in LINES]
    same = zip(found, translate_lines(translator, LINES), strict=True)
    assert sum(a == b for a, b in same) >= len(LINES) - 3
    ids_BS = torch.tensor([translator.tokenizer.src.encode(LINES[:1])[0]])
    models = (translator.model, rounded.model)
    with torch.no_grad():
        exact, near = (model.encode(ids_BS, torch.ones_like(ids_BS).bool()) for model in models)
    assert 0 < (exact - near).abs().max() < 0.2  # a lower precision of the same model


def test_int8_weights_on_a_device_other_than_a_cpu_are_an_error(
    trained: RunDir, translator: Translator
) -> None:
    loading = LoadOptions(precision="int8")
    with pytest.raises(
        ConfigError, match=r"^`precision` int8 must be on a CPU, but the device is meta instead"
    ):
        load_model.load_model(trained, translator.tokenizer, loading, torch.device("meta"))


def test_nan_weights_are_an_error(trained: RunDir, translator: Translator) -> None:
    model = load_model.build_model(trained.config.model, translator.tokenizer)
    with torch.no_grad():
        model.output.weight.fill_(torch.nan)
    broken = Translator([model], translator.tokenizer, translator.options, translator.device)
    with pytest.raises(
        RunError, match=r"^the model must give finite numbers, but does not: its training"
    ):
        translate_lines(broken, LINES)
