"""Synthetic pairs: translate text part by part, drop what looks wrong, write a corpus folder.

Parts are written one by one into a folder beside the output, with their counts last. All ranks run
the same code and share the decoding; rank 0 writes.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtrain import __version__
from mtrain.audit.features import Flags
from mtrain.augmentation.options import AugmentOptions, Mode
from mtrain.augmentation.pair_rules import Candidate, PairRules
from mtrain.augmentation.text import find_repeats, mono_rows, real_text
from mtrain.config import config_file
from mtrain.config.corpora import KEYS_OF_A_MIXTURE, Corpus, bidirectional_corpora, expand_home
from mtrain.config.sections import Config, DataConfig
from mtrain.corpus import dropped, length_stats, synthetic
from mtrain.corpus.dropped import DroppedPair
from mtrain.corpus.formats import OFFLINE, paths_of, revision_of
from mtrain.corpus.length_stats import CorpusStats
from mtrain.corpus.reader import Pair, read_pairs
from mtrain.decode import translator as translating
from mtrain.decode.options import DecodingOptions
from mtrain.decode.pipeline import BLOCK_LINES, LineTranslator, Warn
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.errors import ConfigError, DataError, RunError, UserError
from mtrain.io.atomic import (
    only_process,
    sha256,
    sweep,
    whole_dir,
    whole_file,
    writable_dir,
    write_lines,
)
from mtrain.io.lines import ignore, read_lines
from mtrain.io.text_width import count
from mtrain.run.load_model import LoadOptions
from mtrain.run.logger import Console, resumable
from mtrain.run.run_dir import RunDir
from mtrain.runtime.device import pick_device

PART_LINES = 8 * BLOCK_LINES  # of the text, the unit of resuming, and the lines of a shard
_DIGITS = 4  # decimal places of the log-probabilities that are written
_OF_TEXT = {"blank", "not-utf8"}  # reasons that do not depend on the translations
_PAIRS, _DROPPED, _COUNTS = ".jsonl.gz", ".dropped.gz", ".json"  # the files of a part
Tree = dict[str, Any]
_Lost = tuple[int, str]  # a row, and the reason why its pair is dropped


@dataclass(frozen=True)
class AugmentRequest:
    """The texts, models and options of an augmentation.

    Raises:
        ConfigError: if `output` has no name, or a path is not UTF-8, as the record of the corpus
            folder is.
    """

    # `back` translates targets into sources, `forward` sources into targets, `again` in the
    # direction of each model
    mode: Mode
    texts: Sequence[Path]  # the files of monolingual text; none for `again`
    with_training_text: bool  # whether the real training text is translated, before `texts`
    runs: Sequence[RunDir]  # the models; an ensemble, but for `again` each translates by itself
    output: Path  # the corpus folder
    options: AugmentOptions  # how pairs are translated and filtered
    loading: LoadOptions = LoadOptions()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.output.name:
            raise ConfigError(f"`--output` must name a new folder, but is {self.output} instead.")
        runs = [run.path for run in (*self.runs, *([self.judge] if self.judge else []))]
        config_file.check_utf8([*self.texts, *runs, self.output])

    @cached_property
    def judge(self) -> RunDir | None:
        """The run of the reverse direction whose scores decide which pairs are kept."""
        agree_with = self.options.agree_with
        return None if agree_with is None else RunDir(Path(expand_home(agree_with)))

    @property
    def groups(self) -> list[list[RunDir]]:
        """The runs of each ensemble; the decoding options of its first run apply."""
        return [[run] for run in self.runs] if self.mode == "again" else [[*self.runs]]


class _Engine(NamedTuple):
    """A model or an ensemble, and the side of the text that it translates."""

    translator: Translator
    stats: CorpusStats | None
    is_back: bool  # from targets to sources


class _Text(NamedTuple):
    """A function that reads all rows, and flags of the sides that repeat those of earlier rows."""

    read: Callable[[], Iterator[Pair]]
    is_src_repeated: Flags
    is_tgt_repeated: Flags

    @property
    def num_rows(self) -> int:
        return len(self.is_src_repeated)


class _Translated(NamedTuple):
    """A part of the text, and its translations by one model or ensemble."""

    rows: list[Pair]
    lines: list[str]  # the side that is translated; "" for skipped lines
    candidates: list[Candidate]
    lost: list[_Lost]  # the lines that are not translated


class _Part(NamedTuple):
    """The counts of a finished part."""

    num_rows: int
    num_pairs: int
    dropped: dict[str, int]


def augment(request: AugmentRequest, config: Config, console: Console, warn: Warn) -> Tree:
    """Write or resume a corpus folder, unless it is done; return its record. All ranks call it.

    `config` is that of the training that the pairs are for. On rank 0, `console` shows progress
    and `warn` is called with problems of the text.

    Raises:
        ConfigError: if the device cannot be used.
        RunError: if a run has another direction, the folder was written with other settings or by
            another program, or another process is writing it.
        DataError: if a text cannot be read, or no pair is left.
    """
    process_group, output = request.loading.process_group, request.output
    directions = _check_directions(request, config.data)
    for group in request.groups:
        _options(request, group[0])  # raises before the text is read
    real = real_text(config.data.train)
    work_dir = output.with_name(f".{output.name}.augmenting")
    if (output / synthetic.RECORD_FILE).is_file():
        record = synthetic.read_record(output)
        version = {"mtrain": record["settings"].get("mtrain")}  # another version may have made it
        _check_same(record["settings"], _settings(request, config, real) | version, output)
        if process_group.is_first:
            _remove_unfinished(work_dir, output)
            console.say(f"{output}: made already, {count(record['num_pairs'], 'pair')}")
        return record
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise RunError(
            f"{output}: exists, but `mtrain augment` did not write it; choose another folder."
        )
    pick_device(process_group.device_name(request.loading.device))  # raises before text is read
    with writable_dir(work_dir), _working(work_dir, output, process_group.is_first, console):
        process_group.barrier()
        scratch = work_dir / f"rank-{process_group.rank}"
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        with writable_dir(scratch):
            pair_rules = PairRules(config.data, real, scratch)
            text = _read_text(request, real, scratch, warn if process_group.is_first else ignore)
        shutil.rmtree(scratch)
        # Not in `_settings`: the hub is not needed once the output is there.
        settings = _settings(request, config, real)
        for corpus in [*real, config.data.valid, *config.data.tests.values()]:
            settings |= {f"revision of {name}": sha for name, sha in revision_of(corpus).items()}
        num_done = _begin(work_dir, settings) if process_group.is_first else 0
        num_done = int(process_group.broadcast_float(num_done))
        number = num_done
        first = num_done * PART_LINES
        if num_done and process_group.is_first:
            console.say(f"{output}: goes on after {min(first, text.num_rows):,} lines")
        engines = [*map(partial(_load_engine, request), request.groups, directions)]
        judge = _load_judge(request)
        with ExitStack() as stack:
            translated = [
                stack.enter_context(closing(_translate(engine, text, first))) for engine in engines
            ]
            for parts in zip(*translated, strict=True):
                pairs, lost = _judge(parts, pair_rules)
                if judge is not None:
                    pairs, lost = _score(judge, pairs, lost, directions[0])
                if process_group.is_first:
                    rows = parts[0].rows
                    _write_part(work_dir, number, rows, pairs, lost, request)
                    num_rows = number * PART_LINES + len(rows)
                    console.say(f"{output}: {num_rows:,} of {count(text.num_rows, 'line')}")
                number += 1
        if process_group.is_first:
            sweep(output)
            with whole_dir(output) as directory:
                record = _collect(work_dir, number, request, settings, directory)
            shutil.rmtree(work_dir)
            console.say(f"dropped: {dropped.format_counts(record['dropped'])}")
            console.say(f"{output}: {count(record['num_pairs'], 'pair')}")
    process_group.barrier()
    return synthetic.read_record(output)


def _remove_unfinished(work_dir: Path, output: Path) -> None:
    """Remove the working folder of a process that was killed after it wrote the output."""
    if work_dir.is_dir():
        with _alone(work_dir, output):
            shutil.rmtree(work_dir)
    sweep(output)


@contextmanager
def _working(work_dir: Path, output: Path, is_first: bool, console: Console) -> Iterator[None]:
    """Hold the lock on the first rank; delete the folder on an error before the first part."""
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(resumable(console, output))
            stack.enter_context(_alone(work_dir, output))
        try:
            yield
        except UserError:
            if is_first and not _part_path(work_dir, 0, _COUNTS).is_file():
                shutil.rmtree(work_dir, ignore_errors=True)
            raise


def _alone(work_dir: Path, output: Path) -> AbstractContextManager[None]:
    return only_process(
        work_dir / ".lock",
        f"{output}: another process is writing it; wait until it ends, or choose another folder.",
    )


def _check_directions(request: AugmentRequest, data: DataConfig) -> list[bool]:
    """Return for each model whether it translates from targets to sources.

    Raises:
        RunError: if the directions of a run do not fit the mode or the text, or it is not trained.
    """
    forward, back = (data.src_lang, data.tgt_lang), (data.tgt_lang, data.src_lang)
    allowed = {"forward": [forward], "back": [back], "again": [forward, back]}[request.mode]
    directions = [run.check_direction(allowed, f"for `--{request.mode}`") for run in request.runs]
    if request.judge is not None:
        other = [forward if request.mode == "back" else back]
        request.judge.check_direction(other, "for `--agree-with`")
    if request.with_training_text and bidirectional_corpora(data.train):
        for run in request.runs:
            if len(run.directions) == 1:
                raise RunError(
                    f"{run.path}: must translate in both directions, as `data.train` has text in "
                    f"both, but translates {' to '.join(run.directions[0])} alone instead; "
                    "to use this run, leave the reversed corpus out of `data.train`."
                )
    for run in [*request.runs, *([request.judge] if request.judge else [])]:
        run.check_trained()
    return [request.mode == "back" or direction != forward for direction in directions]


def _settings(request: AugmentRequest, config: Config, real: list[Corpus]) -> Tree:
    """Return the settings and checksums that determine the output."""
    training_text = _checksums(path for corpus in real for path in paths_of(corpus))
    held_out = [config.data.valid, *config.data.tests.values()]
    runs = [*request.runs, *([request.judge] if request.judge else [])]
    decoding = [asdict(_options(request, group[0])) for group in request.groups]
    for options in decoding:
        del options["batch_tokens"]  # changes memory and speed, not the output
    return {
        "mtrain": __version__,
        "mode": request.mode,
        "languages": [config.data.src_lang, config.data.tgt_lang],
        "texts": (training_text if request.with_training_text else {}) | _checksums(request.texts),
        "files": [str(path) for path in request.texts],  # in order
        "training_text": training_text,  # the rules that drop pairs depend on it
        "corpora": [
            corpus.model_dump(mode="json", exclude={*KEYS_OF_A_MIXTURE})
            for corpus in [*real, *held_out]
        ],
        "max_tokens": config.data.max_tokens,
        "held_out": _checksums(path for corpus in held_out for path in paths_of(corpus)),
        "models": [{"run": str(run.path), "weights": _checksum(run.model_path)} for run in runs],
        "agreement": request.judge is not None,
        "decoding": decoding,
        "precision": request.loading.products,
        "scores": request.options.score,
        "keep_best": request.options.keep_best,
        "part_lines": PART_LINES,
    }


def _checksums(paths: Iterable[str | Path]) -> dict[str, str]:
    return {str(path): _checksum(Path(path)) for path in paths}


def _checksum(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from None


def _options(request: AugmentRequest, run: RunDir) -> DecodingOptions:
    options = DecodingOptions.from_config(run.config)
    return replace(options, with_scores=request.options.needs_scores, **request.options.decoding)


def _check_same(old: Tree, new: Tree, output: Path) -> None:
    """Refuse to continue or to reuse a folder that was made with other settings.

    Settings that an older version did not record, or that are unknown offline, are not compared.
    """
    new = json.loads(json.dumps(new))
    known = [key for key in new if OFFLINE not in (new[key], old.get(key, OFFLINE))]
    differing = [f"`{key}`" for key in known if old[key] != new[key]]
    if differing:
        raise RunError(
            f"{output}: was made with other settings ({', '.join(differing)}); choose another "
            "folder, or delete it."
        )


def _begin(work_dir: Path, settings: Tree) -> int:
    """Return the number of done parts; compare the settings with theirs, or write the settings."""
    path = work_dir / "settings.json"
    sweep(path)
    sweep(work_dir / "part-", is_prefix=True)
    number = 0
    while _part_path(work_dir, number, _COUNTS).is_file():
        number += 1
    if number and path.is_file():
        _check_same(json.loads(path.read_text("utf-8")), settings, work_dir)
    else:
        with whole_file(path) as beside:
            beside.write_text(json.dumps(settings), encoding="utf-8")
    return number


def _part_path(work_dir: Path, number: int, suffix: str) -> Path:
    return work_dir / f"part-{number:05d}{suffix}"


def _read_text(request: AugmentRequest, real: list[Corpus], directory: Path, warn: Warn) -> _Text:
    """Read the whole text once to find repeated lines; return it.

    Raises:
        DataError: if it cannot be read, or has no line.
    """

    def read(warn: Warn) -> Iterator[Pair]:
        if request.with_training_text:
            yield from read_pairs(real)
        yield from mono_rows(request.texts, request.mode == "back", warn)

    text = _Text(lambda: read(ignore), *find_repeats(read(warn), directory))
    if not text.num_rows:
        if request.with_training_text:
            raise DataError("`data.train` must have at least one pair of real text, but has none.")
        raise DataError(f"{request.texts[0]}: must have at least one line, but is empty.")
    return text


def _load_engine(request: AugmentRequest, runs: Sequence[RunDir], is_back: bool) -> _Engine:
    translator = translating.load(runs, _options(request, runs[0]), request.loading)
    return _Engine(translator, length_stats.load(runs[0].data_dir), is_back)


def _load_judge(request: AugmentRequest) -> Translator | None:
    """Load the run of --agree-with, which scores and does not search."""
    if request.judge is None:
        return None
    options = DecodingOptions.from_config(request.judge.config)
    batch_tokens = request.options.batch_tokens or options.batch_tokens
    return translating.load(
        request.judge, replace(options, batch_tokens=batch_tokens), request.loading
    )


def _translate(engine: _Engine, text: _Text, first: int) -> Generator[_Translated, None, None]:
    """Yield the parts of the text, from row `first` on, with their translations."""
    parts = _parts(engine, text, first)
    started = deque[_Translated]()  # parts in translation; `itertools.tee` would buffer up to 57

    def blocks() -> Iterator[list[str]]:  # read by the first rank only
        for part in parts:
            started.append(part)
            for start in range(0, len(part.lines), BLOCK_LINES):
                yield part.lines[start : start + BLOCK_LINES]

    line_translator = LineTranslator(engine.translator, engine.stats, num_before=first)
    with closing(line_translator.translate(blocks())) as translated:
        for first_line in translated:
            part = started.popleft() if started else next(parts)
            following = islice(translated, len(part.rows) - 1)
            for row, line in enumerate(chain([first_line], following)):
                for best in line.best if part.lines[row] else []:
                    sides = (best.text, line.src) if engine.is_back else (line.src, best.text)
                    candidate = Candidate(*sides, row, best.flags, best.log_prob, best.score)
                    part.candidates.append(candidate)
            yield part


def _parts(engine: _Engine, text: _Text, first: int) -> Iterator[_Translated]:
    """Yield parts with the lines to translate, and the reason of each skipped line."""
    repeated = text.is_tgt_repeated if engine.is_back else text.is_src_repeated
    rows = islice(text.read(), first, None)
    while block := list(islice(rows, PART_LINES)):
        lines = [row.tgt if engine.is_back else row.src for row in block]
        is_repeat = repeated[first : first + len(block)].tolist()
        reasons = [*map(_early_reason, lines, is_repeat)]
        lines = [
            line if reason is None else "" for line, reason in zip(lines, reasons, strict=True)
        ]
        lost = [(row, reason) for row, reason in enumerate(reasons) if reason is not None]
        yield _Translated(block, lines, [], lost)
        first += len(block)


def _judge(
    parts: Sequence[_Translated], pair_rules: PairRules
) -> tuple[list[Candidate], list[_Lost]]:
    """Return the pairs that are kept, by row, and the row and the reason of each dropped one.

    `parts` are the same part of the text, as each engine translated it.
    """
    lost = [entry for part in parts for entry in part.lost]
    candidates = [candidate for part in parts for candidate in part.candidates]
    candidates.sort(key=lambda candidate: candidate.row)  # stable: by model, then by rank
    reasons = pair_rules.reasons(candidates, [(row.src, row.tgt) for row in parts[0].rows])
    judged = list(zip(candidates, reasons, strict=True))
    lost += [(candidate.row, reason) for candidate, reason in judged if reason is not None]
    return [candidate for candidate, reason in judged if reason is None], sorted(lost)


def _early_reason(line: str, is_repeat: bool) -> str | None:
    """Return why a line is not translated; None if it is."""
    if not line.strip():
        return "blank"
    if "\ufffd" in line:
        return "not-utf8"
    return "repeated" if is_repeat else None


def _score(
    judge: Translator, pairs: list[Candidate], lost: list[_Lost], is_back: bool
) -> tuple[list[Candidate], list[_Lost]]:
    """Set each pair's `agreement`: the judge's mean log-probability per token of its real side.

    Pairs with a side of more tokens, eos included, than the training of the judge had are lost.
    """
    limit = judge.options.max_input_tokens
    texts = [(pair.src, pair.tgt) if is_back else (pair.tgt, pair.src) for pair in pairs]
    sources = judge.tokenizer.encode_src([text for text, _ in texts])
    targets = judge.tokenizer.tgt.encode([text for _, text in texts])
    kept, encoded, lost = [], [], list(lost)
    for pair, (text, _), src, tgt in zip(pairs, texts, sources, targets, strict=True):
        if limit is not None and max(len(src), len(tgt) + 1) > limit:
            lost.append((pair.row, "max-tokens"))
        else:
            kept.append(pair)
            encoded.append((EncodedSource(src, text=text), tgt))
    log_probs = judge.score([src for src, _ in encoded], [tgt for _, tgt in encoded])
    means = [sum(row) / len(row) for row in log_probs]
    kept = [pair._replace(agreement=mean) for pair, mean in zip(kept, means, strict=True)]
    return kept, sorted(lost)


def _write_part(
    work_dir: Path,
    number: int,
    block: Sequence[Pair],
    pairs: Sequence[Candidate],
    lost: Sequence[_Lost],
    request: AugmentRequest,
) -> None:
    entries = (_entry(block[pair.row], pair, request) for pair in pairs)
    _write_entries(_part_path(work_dir, number, _PAIRS), entries)
    with (
        whole_file(_part_path(work_dir, number, _DROPPED)) as path,
        dropped.open_writer(path) as writer,
    ):
        for row, reason in lost:
            writer.add(DroppedPair(block[row].src_file, block[row].line, reason))
    with whole_file(_part_path(work_dir, number, _COUNTS)) as path:
        part = _Part(len(block), len(pairs), dict(writer.counts))
        path.write_text(json.dumps(part._asdict()), encoding="utf-8")


def _entry(row: Pair, pair: Candidate, request: AugmentRequest) -> Tree:
    entry: Tree = {"src": pair.src, "tgt": pair.tgt, "file": row.src_file, "line": row.line}
    if request.options.needs_scores:
        entry["log_prob"] = round(pair.log_prob, _DIGITS)
        entry["score"] = round(pair.score, _DIGITS)
    if pair.agreement is not None:
        entry["agreement"] = round(pair.agreement, _DIGITS)
    return entry


def _write_entries(path: Path, entries: Iterable[Tree]) -> None:
    """Write JSON lines, gzipped as the name says; the same entries result in the same bytes."""
    write_lines(path, map(json.JSONEncoder(ensure_ascii=False).encode, entries))


def _read_entries(path: Path) -> Iterator[Tree]:
    return map(json.loads, read_lines(path))


def _collect(
    work_dir: Path, num_parts: int, request: AugmentRequest, settings: Tree, directory: Path
) -> Tree:
    """Write the shards, the list of dropped pairs and the record; return the record.

    Raises:
        DataError: if no pair is left.
    """
    parts = [
        _Part(**json.loads(_part_path(work_dir, number, _COUNTS).read_text("utf-8")))
        for number in range(num_parts)
    ]
    counts = sum((Counter(part.dropped) for part in parts), Counter[str]())
    if not any(part.num_pairs for part in parts):
        shutil.rmtree(work_dir)
        remedy = (
            "the text" if counts.keys() <= _OF_TEXT else "the text or the run that translates it"
        )
        key = "data.train" if request.with_training_text else f"--{request.mode}"
        raise dropped.none_left(key, counts, remedy)
    key = "score" if request.judge is None else "agreement"
    limit = _limit(work_dir, parts, key, request.options.keep_best)
    lists, shards = [], dict[str, Tree]()
    for number in range(num_parts):
        path = directory / f"pairs-{len(shards):05d}.jsonl.gz"
        lists.append(_part_path(work_dir, number, _DROPPED))
        num_kept = parts[number].num_pairs
        if limit is None:
            shutil.copyfile(_part_path(work_dir, number, _PAIRS), path)
        else:
            lists.append(_part_path(work_dir, number, f".low{_DROPPED}"))
            num_low = _keep(_part_path(work_dir, number, _PAIRS), key, limit, path, lists[-1])
            counts["low-score"] += num_low
            num_kept -= num_low
        if num_kept:
            shards[path.name] = {"num_pairs": num_kept, "sha256": sha256(path)}
        else:
            path.unlink()
    dropped.join(lists, +counts, directory)
    record = {
        "settings": settings,
        "num_lines": sum(part.num_rows for part in parts),
        "num_pairs": sum(shard["num_pairs"] for shard in shards.values()),
        "dropped": dict(sorted((+counts).items())),
        "shards": shards,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (directory / synthetic.RECORD_FILE).write_text(text + "\n", encoding="utf-8")
    return record


def _limit(
    work_dir: Path, parts: Sequence[_Part], key: str, keep_best: float | None
) -> float | None:
    """Return the least score of the best share of all pairs; None to keep all."""
    total = sum(part.num_pairs for part in parts)
    num_kept = total if keep_best is None else max(1, round(keep_best * total))
    if num_kept == total:
        return None
    paths = [_part_path(work_dir, number, _PAIRS) for number in range(len(parts))]
    entries = chain.from_iterable(map(_read_entries, paths))
    scores = np.fromiter((entry[key] for entry in entries), np.float64, total)
    scores.partition(total - num_kept)
    return float(scores[total - num_kept])


def _keep(pairs_path: Path, key: str, limit: float, kept_path: Path, dropped_path: Path) -> int:
    """Write the pairs of a part with `key` >= `limit`; list the others, return their number."""
    with dropped.open_writer(dropped_path) as writer:

        def kept() -> Iterator[Tree]:
            for entry in _read_entries(pairs_path):
                if entry[key] >= limit:
                    yield entry
                else:
                    writer.add(DroppedPair(entry["file"], entry["line"], "low-score"))

        _write_entries(kept_path, kept())
    return writer.counts["low-score"]
