"""The audit reports planted defects at their lines, and nothing in clean text."""

import gzip
import json
import os
import re
import shutil
import sys
import tracemalloc
import unicodedata
from pathlib import Path
from subprocess import PIPE
from types import FrameType
from typing import Any

import defects
import pytest
from conftest import Cli, all_shown, open_terminal
from defects import (
    PLANTERS,
    SHIFT_PAIRS,
    Planted,
    found_lines,
    plant,
    write_pairs,
    write_planted,
)
from fork_server import MtrainProcess
from tasks import REPOSITORY, Pair, copy_task, tiny_tree, write, write_config, write_corpus

from mtrain.audit import audit as auditing
from mtrain.audit import duplicates, scan
from mtrain.audit.audit import audit
from mtrain.config import config_file
from mtrain.corpus import dropped, reader
from mtrain.io.lines import ignore
from mtrain.run.run_dir import RunDir

PACKAGE = str(REPOSITORY / "mtrain") + os.sep
NUM_PAIRS, NUM_HELD_OUT, TIMES = 4000, 60, 4
LISTS = [f"train.{name}" for name in PLANTERS]
LEAKS = [f"tests.held_out.{kind}-in-train" for kind in ("pair", "source", "target")]
LEAKS += ["valid.pair-in-train", "tests.held_out.pair-in-valid"]
LEAKS += [f"{name}.held-out{pair}" for name in ("train", "valid") for pair in ("", "-pair")]


def demo_pairs(split: str, count: int) -> list[Pair]:
    sides = [
        (REPOSITORY / "data" / "demo" / f"{split}.{side}").read_text("utf-8").split("\n")
        for side in ("en", "de")
    ]
    return [Pair(*lines) for lines in zip(*sides, strict=True)][:count]


def clean(num_pairs: int = NUM_PAIRS) -> Planted:
    half = NUM_HELD_OUT // 2
    return Planted(
        demo_pairs("train", num_pairs), demo_pairs("valid", half), demo_pairs("test", 30)
    )


def shown(cli: Cli, *arguments: str | Path) -> dict[str, Any]:
    """Run a check; return its JSON."""
    tree: dict[str, Any] = json.loads(cli("check", *arguments, "--json").out)
    return tree


def by_name(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{found['corpus']}.{found['name']}": found for found in tree["findings"]}


def num_columns(line: str) -> int:
    """Count the columns of a terminal; Chinese characters take two."""
    return len(line) + sum(unicodedata.east_asian_width(character) == "W" for character in line)


@pytest.fixture(scope="module")
def planted() -> Planted:
    held_out = [*demo_pairs("valid", NUM_HELD_OUT // 2), *demo_pairs("test", NUM_HELD_OUT // 2)]
    return plant(demo_pairs("train", NUM_PAIRS), held_out, seed=3, times=TIMES)


@pytest.fixture(scope="module")
def lists(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    directory = tmp_path_factory.mktemp("planted")
    config = config_file.load(write_planted(directory, planted))
    audit(config, None, directory, lambda num_bytes: None)
    return found_lines(directory)


@pytest.mark.parametrize("name", LISTS + LEAKS)
def test_a_planted_defect_is_listed_at_exactly_its_lines(
    planted: Planted, lists: dict[str, list[int]], name: str
) -> None:
    found = [line for line in lists[name] if line not in planted.moved]
    assert sorted(planted.lines[name]) == found


def test_no_list_is_written_for_a_defect_that_was_not_planted(
    planted: Planted, lists: dict[str, list[int]]
) -> None:
    outside = {
        name: lines
        for name, lines in lists.items()
        if name not in planted.lines and not set(lines) <= set(planted.moved)
    }
    assert outside == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_shift_is_reported_with_its_offset_and_its_first_line_within_3_lines(
    tmp_path: Path, seed: int
) -> None:
    text = clean()
    defects._plant_shift(text, 1000 + 700 * seed)
    (found,) = _shifts(text, tmp_path)
    example = found.examples[0]
    assert abs(example["line"] - min(text.lines["train.shift"])) <= 3
    assert abs(example["last"]["line"] - example["line"] - SHIFT_PAIRS) <= 6
    assert example["offset"] == -1


def test_a_stretch_that_ends_in_a_later_file_is_reported_with_that_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    src, tgt = map(list, zip(*demo_pairs("train", NUM_PAIRS), strict=True))
    pairs = [Pair(*lines) for lines in zip(src, tgt[:1500] + tgt[1501:] + tgt[:1], strict=True)]
    files = write_pairs(Path(), "a", pairs[:2000]), write_pairs(Path(), "b", pairs[2000:])
    train = {side: [file for named in files for file in named[side]] for side in ("src", "tgt")}
    valid = write_pairs(Path(), "valid", demo_pairs("valid", 30))
    data = {"src_lang": "en", "tgt_lang": "de", "train": train, "valid": valid}
    config = write_config(tmp_path / "config.yaml", {"run_dir": "run", "data": data})
    found = re.search(
        r"a.src:15\d\d to b.src:(\d+): targets 1 line earlier", cli("check", config).out.decode()
    )
    assert found and int(found[1]) >= 1990


def _shifts(text: Planted, directory: Path) -> list[auditing.AuditFinding]:
    config = config_file.load(write_planted(directory, text))
    report = audit(config, None, directory, lambda num_bytes: None)
    return [finding for finding in report.findings if finding.name == "shift"]


def test_a_lost_line_is_an_error_and_its_position_is_reported_within_3_lines(
    cli: Cli, tmp_path: Path
) -> None:
    config = write_planted(tmp_path, clean())
    lines = (tmp_path / "train.tgt").read_text("utf-8").split("\n")[:-1]
    write(tmp_path / "train.tgt", lines[:1500] + lines[1501:])
    outcome = cli("check", config, "--json")
    assert outcome.code == 2
    found = by_name(json.loads(outcome.out))
    assert found["train.unequal-lines"]["severity"] == "error"
    assert found["train.unequal-lines"]["examples"] == [
        {"file": str(tmp_path / "train.src"), "problem": "4,000 lines"},
        {"file": str(tmp_path / "train.tgt"), "problem": "3,999 lines"},
    ]
    assert abs(found["train.shift"]["examples"][0]["line"] - 1501) <= 3
    assert found["train.shift"]["examples"][0]["last"]["line"] >= 3990


def test_a_missing_file_is_reported_as_unreadable_and_not_as_unequal_line_counts(
    cli: Cli, tmp_path: Path
) -> None:
    config = write_planted(tmp_path, clean())
    (tmp_path / "train.tgt").unlink()
    outcome = cli("check", config, "--json")
    assert outcome.code == 2
    found = by_name(json.loads(outcome.out))
    assert "No such file" in found["train.unreadable"]["examples"][0]["problem"]
    assert "train.unequal-lines" not in found


def test_nothing_is_found_in_clean_text(cli: Cli, tmp_path: Path) -> None:
    config = write_planted(tmp_path, clean())
    outcome = cli("check", config, "--strict")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.lines[-2] == "0 errors, 0 warnings, 0 notes"
    assert [path.name for path in (tmp_path / "run" / "check").iterdir()] == ["report.json"]


def test_warnings_fail_only_a_strict_check(cli: Cli, tmp_path: Path, planted: Planted) -> None:
    text = clean()
    text.train[7] = Pair(text.train[7].src, "")
    config = write_planted(tmp_path, text)
    outcome = cli("check", config)
    assert (outcome.code, outcome.err) == (0, "")
    outcome = cli("check", config, "--strict")
    directory = tmp_path / "run" / "check"
    assert (outcome.code, outcome.err) == (
        2,
        f"mtrain: {config}: 1 warning in the corpora; see {directory}.\n",
    )
    text.train[7] = text.train[8]
    outcome = cli("check", write_planted(tmp_path, text), "--strict")
    assert (outcome.code, outcome.lines[-2]) == (0, "0 errors, 0 warnings, 1 note")


def test_text_that_cannot_be_decoded_is_an_error_with_line_and_byte(
    cli: Cli, tmp_path: Path
) -> None:
    text = clean(500)
    text.train[7] = Pair("a\udcffb", "c")
    outcome = cli("check", write_planted(tmp_path, text))
    assert outcome.code == 2
    directory = tmp_path / "run" / "check"
    assert outcome.err.endswith(f": 1 error in the corpora; see {directory}.\n")
    assert outcome.lines[0] == (
        "error    train: lines that are not UTF-8: 1 (0.2%); training refuses them"
    )
    page = "".join(outcome.out.decode().split())
    assert f"Thefirstisin{tmp_path / 'train.src'},line8,byte0xffatbyte2." in page


def test_every_unreadable_file_is_reported_with_its_problem(cli: Cli, tmp_path: Path) -> None:
    config = write_planted(tmp_path, clean(500))
    (tmp_path / "train.src").unlink()
    raw = gzip.compress((tmp_path / "valid.src").read_bytes())
    tree = config_file.load(config).model_dump()
    (tmp_path / "valid.src.gz").write_bytes(raw[: len(raw) // 2])
    tree["data"]["valid"]["src"] = [str(tmp_path / "valid.src.gz")]
    outcome = cli("check", write_config(config, tree), "--json")
    assert outcome.code == 2
    found = by_name(json.loads(outcome.out))
    (missing,), (damaged,) = (
        found[f"{name}.unreadable"]["examples"] for name in ("train", "valid")
    )
    assert missing == {"file": str(tmp_path / "train.src"), "problem": "No such file or directory"}
    assert "gzip data is cut off or damaged" in damaged["problem"]
    assert "train.empty" not in found
    tree["data"]["train"]["src"] *= 3
    tree["data"]["train"]["tgt"] *= 3
    lines = cli("check", write_config(config, tree)).lines
    at = lines.index(
        "error    train: files that cannot be read: 3 (50.0%); training refuses them", 3
    )
    page = "".join(line.strip() for line in lines[at + 1 : lines.index("", at)])
    missed = f"{tmp_path / 'train.src'}: No such file or directory"
    assert page.replace(" ", "").startswith((2 * missed + "and 1 more file").replace(" ", ""))


def test_an_empty_corpus_of_a_mixture_is_an_error(cli: Cli, tmp_path: Path) -> None:
    config = write_planted(tmp_path, clean(500))
    tree = config_file.load(config).model_dump()
    empty = write_corpus(tmp_path, "empty", [])
    tree["data"]["train"] = [tree["data"]["train"], empty]
    outcome = cli("check", write_config(config, tree), "--json")
    assert outcome.code == 2
    found = by_name(json.loads(outcome.out))["train.empty"]
    assert found["severity"] == "error"
    assert [example["file"] for example in found["examples"]] == empty["src"] + empty["tgt"]


def test_a_byte_order_mark_and_crlf_are_notes_but_mixed_line_ends_are_a_warning(
    cli: Cli, tmp_path: Path
) -> None:
    config = write_planted(tmp_path, clean(500))
    src, tgt = tmp_path / "train.src", tmp_path / "valid.tgt"
    src.write_bytes(b"\xef\xbb\xbf" + src.read_bytes().replace(b"\n", b"\r\n"))
    tgt.write_bytes(tgt.read_bytes().replace(b"\n", b"\r\n", 1))
    found = by_name(shown(cli, config))
    assert {name: finding["severity"] for name, finding in found.items()} == {
        "train.byte-order-mark": "note",
        "train.line-ends": "note",
        "valid.mixed-line-ends": "warning",
    }


def test_an_unterminated_last_line_does_not_count_as_mixed_line_ends(
    cli: Cli, tmp_path: Path
) -> None:
    config = write_planted(tmp_path, clean(500))
    for name in ("train.src", "train.tgt"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    found = by_name(shown(cli, config))
    assert {name: finding["severity"] for name, finding in found.items()} == {
        "train.line-ends": "note"
    }
    (src, _) = found["train.line-ends"]["examples"]
    assert src["problem"] == "CR LF at 499 of 500 lines"


def test_a_repeated_pair_is_found_across_gzip_and_plain_files_as_in_one_plain_file(
    cli: Cli, tmp_path: Path
) -> None:
    text = clean(600)
    text.train[450] = text.train[20]
    plain = by_name(shown(cli, write_planted(tmp_path, text)))["train.repeated-pair"]
    config = tmp_path / "config.yaml"
    tree = config_file.load(config).model_dump()
    for side in ("src", "tgt"):
        lines = (tmp_path / f"train.{side}").read_bytes().split(b"\n")
        (tmp_path / f"one.{side}.gz").write_bytes(gzip.compress(b"\n".join(lines[:400]) + b"\n"))
        (tmp_path / f"two.{side}").write_bytes(b"\n".join(lines[400:]))
        names = [str(tmp_path / f"one.{side}.gz"), str(tmp_path / f"two.{side}")]
        tree["data"]["train"][side] = names
    parted = by_name(shown(cli, write_config(config, tree)))["train.repeated-pair"]
    assert plain["count"] == parted["count"] == 1
    (entry,) = parted["examples"]
    assert (entry["src_file"], entry["line"]) == (str(tmp_path / "two.src"), 51)
    assert entry["first"] == {"file": str(tmp_path / "one.src.gz"), "line": 21}


def test_the_report_fits_80_columns_without_escapes_and_the_lists_hold_the_full_lines(
    cli: Cli, tmp_path: Path, planted: Planted
) -> None:
    folder = tmp_path / ("deep" * 20)
    text = Planted(list(planted.train), planted.valid, planted.test)
    text.train[5] = Pair("寿司" * 80, "\x1b[31m" + "е" * 300)
    outcome = cli("check", write_planted(folder, text))
    *page, last = outcome.lines
    assert max(num_columns(line) for line in page) <= 80
    assert last == f"lists of every line: {folder / 'run' / 'check'}"
    assert "\x1b" not in outcome.out.decode()
    path = folder / "run" / "check" / "train.control.jsonl"
    entries = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    assert {
        "src_file": str(folder / "train.src"),
        "tgt_file": str(folder / "train.tgt"),
        "line": 6,
        "side": "tgt",
        "src": "寿司" * 80,
        "tgt": "\x1b[31m" + "е" * 300,
    } in entries


@pytest.mark.parametrize(
    ("names", "other", "severities"),
    [
        ([], "to the letter", ("warning", "warning")),
        (["held-out-pair"], "to the letter", ("note", "note")),
        (["held-out-pair"], "by its words", ("note", "warning")),
        (["held-out"], "by its words", ("note", "note")),
    ],
)
def test_a_leak_is_a_note_if_training_drops_the_pairs_and_a_warning_otherwise(
    cli: Cli, tmp_path: Path, names: list[str], other: str, severities: tuple[str, str]
) -> None:
    text = clean(600)
    text.train[20], text.train[40] = text.valid[0], text.test[0]
    if other == "by its words":
        text.train[40] = Pair(text.test[0].src.upper(), text.test[0].tgt.upper())
    config = write_planted(tmp_path, text)
    tree = config_file.load(config).model_dump()
    tree["data"]["clean"] = names
    found = by_name(shown(cli, write_config(config, tree)))
    leaks = [found["valid.pair-in-train"], found["tests.held_out.pair-in-train"]]
    assert tuple(leak["severity"] for leak in leaks) == severities
    for leak in leaks:
        is_note = leak["severity"] == "note"
        assert leak["advice"].startswith("Nothing to do") == is_note


def test_a_split_that_leaks_is_the_first_line_of_the_report(cli: Cli, tmp_path: Path) -> None:
    text = clean(600)
    text.train += text.test[:28] + [text.train[8]] * 500
    text.train[3] = Pair("", "leer")
    outcome = cli("check", write_planted(tmp_path, text))
    assert outcome.lines[:4] == [
        "warning  tests.held_out: pairs found in train: 28 (93.3%); training drops them",
        "warning  train: duplicate pairs: 500 (44.3%); training keeps them",
        "warning  train: pairs with one blank side: 1 (<0.1%); training drops them",
        "",
    ]
    page = " ".join(outcome.out.decode().split())
    assert "Scores are sound, but training loses every copy; hold out other pairs." in page
    assert "To drop them: `data.clean: [blank-side, held-out-pair, repeated-pair]`." in page
    assert (
        "corpora train: 1,128 pairs; training drops 29 (blank-side 1, held-out-pair 28) and keeps "
        "1,099, less what exceeds `data.max_tokens`"
    ) in page


def test_a_report_without_a_list_names_its_json(cli: Cli, tmp_path: Path) -> None:
    *page, last = cli("check", write_planted(tmp_path, clean(600))).lines
    assert page[-1] == "0 errors, 0 warnings, 0 notes"
    assert last == f"report: {tmp_path / 'run' / 'check' / 'report.json'}"
    assert [path.name for path in (tmp_path / "run" / "check").iterdir()] == ["report.json"]


def test_held_out_sets_drawn_from_the_training_files_give_no_warning(
    cli: Cli, tmp_path: Path
) -> None:
    text = clean(600)
    text.test[4] = Pair("", "")
    text.train += [*text.test, *text.valid, text.valid[0]]
    outcome = cli("check", write_planted(tmp_path, text))
    assert outcome.lines[:2] == ["no errors and no warnings", ""]


def test_a_training_pair_found_in_the_test_set_is_not_listed_again_for_its_sides(
    cli: Cli, tmp_path: Path
) -> None:
    text = clean(600)
    text.train[9], text.train[11] = text.test[3], Pair(text.test[4].src, text.train[11].tgt)
    config = write_planted(tmp_path, text)
    found = by_name(shown(cli, config))
    lines = {
        name: [entry["line"] for entry in found[f"train.{name}"]["examples"]]
        for name in ("held-out-pair", "held-out")
    }
    assert lines == {"held-out-pair": [10], "held-out": [12]}
    assert found["train.held-out-pair"]["training"] == "drops them"
    assert found["train.held-out"]["training"] == "keeps them"
    tree = config_file.load(config).model_dump()
    tree["data"]["clean"] = ["held-out"]
    page = " ".join(cli("check", write_config(config, tree)).out.decode().split())
    assert "training drops 2 (held-out 1, held-out-pair 1) and keeps 598" in page


def test_a_test_source_leaks_if_training_has_it_with_another_target(
    cli: Cli, tmp_path: Path
) -> None:
    text = clean(600)
    text.train += [*text.test, *text.valid]
    text.train += [Pair(pair.src, f"Ja, {pair.tgt}") for pair in text.test[:10]]
    config = write_planted(tmp_path, text)
    outcome = cli("check", config)
    assert outcome.lines[:2] == [
        "warning  tests.held_out: sources found in train: 10 (33.3%); training keeps them",
        "",
    ]
    page = " ".join(outcome.out.decode().split())
    assert (
        "A model that was trained on them scores too high. To drop the 70 pairs of train that "
        "share a side with held-out text: `data.clean: [blank-side, held-out-pair, held-out]`."
    ) in page
    leak = by_name(json.loads((tmp_path / "run" / "check" / "report.json").read_text("utf-8")))
    entry = leak["tests.held_out.source-in-train"]["examples"][0]
    assert (entry["times"], entry["exact_times"], entry["first"]["line"]) == (1, 1, 661)
    text.train = text.train[540:]
    page = " ".join(cli("check", write_planted(tmp_path, text)).out.decode().split())
    assert "70 of 130 pairs share a side with held-out text: too many to drop." in page


def test_a_leaked_side_is_first_found_in_the_training_file_of_that_side(
    cli: Cli, tmp_path: Path
) -> None:
    text = clean(600)
    text.train += [Pair(text.test[3].src, "Ja."), Pair("Yes.", text.test[3].tgt)]
    config = write_planted(tmp_path, text)
    leaks, train = by_name(shown(cli, config)), config_file.load(config).data.train
    for kind, files, line in (("source", train.src, 601), ("target", train.tgt, 602)):
        (entry,) = leaks[f"tests.held_out.{kind}-in-train"]["examples"]
        assert entry["first"] == {"file": files[0], "line": line}


def test_a_leaked_side_of_an_exchanged_pair_is_first_found_in_the_file_of_the_other_side(
    tmp_path: Path,
) -> None:
    text = clean(300)
    leaked = text.valid[3]
    text.train[7] = Pair("Wie anders!", leaked.src)
    tree = config_file.load(write_planted(tmp_path, text)).model_dump()
    train = tree["data"]["train"]
    tree["data"]["train"] = [train, {"src": train["tgt"], "tgt": train["src"]}]
    config = config_file.load(write_config(tmp_path / "config.yaml", tree))
    report = auditing.audit(config, None, tmp_path, lambda num_bytes: None)
    (finding,) = [found for found in report.findings if found.name == "source-in-train"]
    (entry,) = finding.examples
    first = {"file": train["tgt"][0], "line": 8, "corpus": "data.train[0]"}
    assert (entry["src"], entry["first"]) == (leaked.src, first)


def test_copies_of_test_pairs_that_training_keeps_are_counted(cli: Cli, tmp_path: Path) -> None:
    text = clean(600)
    shouted = Pair(text.test[2].src.upper(), text.test[2].tgt.upper())
    text.train += [*text.test[:20], shouted]
    config = write_planted(tmp_path, text)
    leak = by_name(shown(cli, config))["tests.held_out.pair-in-train"]
    assert (leak["count"], leak["severity"], leak["training"]) == (20, "warning", "keeps 1")
    assert (leak["examples"][0]["times"], leak["examples"][0]["exact_times"]) == (1, 1)
    entries = (tmp_path / "run" / "check" / "tests.held_out.pair-in-train.jsonl").read_text("utf-8")
    assert '"times": 2, "exact_times": 1}' in entries.splitlines()[2]


def test_the_summary_shows_the_five_most_serious_findings_and_counts_the_remaining_ones(
    cli: Cli, tmp_path: Path, planted: Planted
) -> None:
    outcome = cli("check", write_planted(tmp_path, planted))
    end = outcome.lines.index("")
    assert end == 6
    tree = json.loads((tmp_path / "run" / "check" / "report.json").read_text("utf-8"))
    order = ["error", "warning", "note"]
    costs = [
        (
            order.index(found["severity"]),
            -found["count"] / found["total"] if found["list_file"] else 0,
        )
        for found in tree["findings"]
    ]
    assert costs == sorted(costs)
    num_serious = sum(found["severity"] != "note" for found in tree["findings"])
    assert outcome.lines[5] == f"         and {num_serious - 5} more"
    for row, found in zip(outcome.lines[:5], tree["findings"], strict=False):
        assert row.startswith(f"{found['severity']:<9}{found['corpus']}: {found['what']}: ")


def test_the_work_grows_linearly_with_the_number_of_files_with_findings(tmp_path: Path) -> None:
    def num_lines_run(num_files: int) -> int:
        directory = tmp_path / str(num_files)
        config = write_planted(directory, clean(60))
        tree = config_file.load(config).model_dump()
        pairs = [Pair("", "leer"), *[Pair("again", "wieder")] * 2, *demo_pairs("train", 2)]
        files = [defects.write_pairs(directory, f"part{n}", pairs) for n in range(num_files)]
        tree["data"]["train"] = {
            side: [path for named in files for path in named[side]] for side in ("src", "tgt")
        }
        changed = config_file.load(write_config(config, tree))
        count = 0

        def trace_line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace_line

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            return trace_line if frame.f_code.co_filename.startswith(PACKAGE) else None

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            audit(changed, None, directory, ignore)
        finally:
            sys.settrace(previous)
        return count

    num_lines_run(1)  # fills the cache of character kinds
    fewest, more, most = (num_lines_run(num_files) for num_files in (60, 90, 120))
    assert most - more == pytest.approx(more - fewest, rel=0.05)


def test_findings_within_held_out_text_never_say_that_training_drops_the_pairs(
    cli: Cli, tmp_path: Path
) -> None:
    text = clean(600)
    text.valid[1], text.valid[3] = text.test[1], Pair(text.test[2].src, text.valid[3].tgt)
    text.valid[5], text.valid[7] = Pair("", ""), Pair("", text.valid[7].tgt)
    text.train[9] = text.valid[9]
    found = by_name(shown(cli, write_planted(tmp_path, text)))
    advice = {name: found[f"valid.{name}"]["advice"] for name in ("held-out", "held-out-pair")}
    assert set(advice.values()) == {found["tests.held_out.pair-in-valid"]["advice"]}
    assert {"valid.blank-side", "valid.blank-pair"} <= found.keys()
    for name, finding in found.items():
        if not name.startswith("train."):
            assert (finding["training"] == "") != finding["name"].endswith("-train")
            assert "drop" not in finding["advice"] or finding["name"].endswith("-train")
    assert found["train.held-out-pair"]["training"] == "drops them"


def test_the_json_report_agrees_with_the_list_files(
    cli: Cli, tmp_path: Path, planted: Planted
) -> None:
    config = write_planted(tmp_path, planted)
    found = by_name(shown(cli, config))
    files = found_lines(tmp_path / "run" / "check")
    report = (tmp_path / "run" / "check" / "report.json").read_text("utf-8")
    assert by_name(json.loads(report)) == found
    assert {name for name, finding in found.items() if finding["list_file"]} == files.keys()
    for name, lines in files.items():
        if not name.endswith("shift"):
            assert found[name]["count"] == len(lines)
            assert [entry["line"] for entry in found[name]["examples"]] == lines[:2]


def test_an_interrupted_check_keeps_the_lists_of_the_previous_check(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Planted
) -> None:
    config = write_planted(tmp_path, planted)
    cli("check", config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run" / "check").iterdir()}

    def broken(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(auditing, "_mixture", broken)
    assert cli("check", config).code == 130
    after = {path.name: path.read_bytes() for path in (tmp_path / "run" / "check").iterdir()}
    assert before == after
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["check"]


def test_a_folder_with_files_but_no_report_json_is_not_replaced(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_planted(tmp_path, clean(50))
    directory = tmp_path / "run" / "check"
    directory.mkdir(parents=True)
    assert cli("check", config).code == 0, "an empty folder holds nothing to lose"
    assert cli("check", config).code == 0
    (directory / "report.json").rename(directory / "notes.txt")
    kept = (directory / "notes.txt").read_bytes()
    monkeypatch.setattr(auditing, "audit", lambda *_: pytest.fail("it is refused before the work"))
    outcome = cli("check", config)
    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err == (
        f"mtrain: {directory}: cannot be replaced: it holds files, but no report.json; move it "
        "away.\n"
    )
    assert [path.read_bytes() for path in directory.iterdir()] == [kept]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["check"]


def test_a_run_folder_that_holds_only_a_check_can_be_trained_in(cli: Cli, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", tiny_tree(tmp_path))
    assert cli("check", config).code == 0
    outcome = cli("train", config)
    assert outcome.code == 0, outcome.err
    assert cli("check", config).code == 0
    assert RunDir(tmp_path / "run").model_path.is_file()


def test_the_check_counts_the_tag_of_a_corpus_among_its_tokens_as_training_does(
    cli: Cli, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path)
    tagged = write_corpus(tmp_path, "tagged", [Pair("ba " * count, "ba") for count in range(1, 9)])
    tree["data"]["train"] = [tree["data"]["train"], {**tagged, "tag": "x"}]
    tree["data"]["max_tokens"] = 8
    config = write_config(tmp_path / "config.yaml", tree)
    assert cli("tokenize", config).code == 0
    counts = dropped.read_counts(RunDir(tmp_path / "run").data_dir)
    assert shown(cli, config)["corpora"][0]["num_dropped"] == counts
    assert counts["max-tokens"] > 0


def test_with_a_tokenizer_the_check_also_reports_long_pairs_and_unknown_pieces(
    cli: Cli, tmp_path: Path
) -> None:
    tree = tiny_tree(tmp_path, copy_task, 300)
    tree["tokenizer"] |= {"byte_fallback": False, "vocab_size": 40}
    config = write_config(tmp_path / "config.yaml", tree)
    assert "train.max-tokens" not in by_name(shown(cli, config))
    assert cli("tokenize", config).code == 0
    pairs = copy_task(300, 1)
    words = " ".join(["ba"] * 40)
    pairs[10] = Pair(words, words)
    defects.write_pairs(tmp_path, "train", pairs)
    defects.write_pairs(tmp_path, "valid", [*copy_task(11, 2), Pair("ba ж", "ba")])
    report = shown(cli, config)
    found = by_name(report)
    assert [entry["line"] for entry in found["train.max-tokens"]["examples"]] == [11]
    assert found["train.max-tokens"]["severity"] == "note"
    assert [entry["line"] for entry in found["valid.unknown-piece"]["examples"]] == [12]
    assert found["valid.unknown-piece"]["severity"] == "warning"
    train, valid, _ = report["corpora"]
    assert (train["num_pairs"], train["num_dropped"]) == (300, {"max-tokens": 1})
    assert valid["coverage"][0]["unknown_share"] > 0 == valid["coverage"][1]["unknown_share"]
    page = cli("check", config).out.decode()
    assert "\ncorpora  train: 300 pairs; training drops 1 (max-tokens 1) and keeps 299\n" in page
    note = "In scripts without spaces, each letter counts as a word."
    assert note not in page
    defects.write_pairs(tmp_path, "train", [Pair("日本日本", "ba")] * 300)
    assert note in cli("check", config).lines


def test_memory_grows_by_less_than_sixteen_bytes_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that hold many pairs are made small first, so that growth is visible."""
    monkeypatch.setattr(reader, "BLOCK_PAIRS", 256)
    monkeypatch.setattr(scan, "_WINDOW_PAIRS", 256)
    monkeypatch.setattr(duplicates, "_PASS_PAIRS", 512)
    peaks = []
    for num_pairs in (2000, 2000, 10_000):  # the first one fills the cache of character kinds
        directory = tmp_path / str(num_pairs)
        config = config_file.load(write_planted(directory, clean(num_pairs)))
        tracemalloc.start()
        audit(config, None, directory, lambda num_bytes: None)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        shutil.rmtree(directory)
    assert peaks[2] - peaks[1] < 16 * 8_000


def test_the_reported_progress_sums_to_twice_the_bytes_of_the_corpora(tmp_path: Path) -> None:
    config = config_file.load(write_planted(tmp_path, clean(5000)))
    told = []
    audit(config, None, tmp_path, told.append)
    assert sum(told) == 2 * auditing.num_bytes(config)
    assert len(told) > 10


def test_on_a_terminal_a_progress_bar_shows_the_percentage_read(tmp_path: Path) -> None:
    config = write_planted(tmp_path, clean(500))
    master, terminal = open_terminal()
    with MtrainProcess("check", config, stdout=PIPE, stderr=terminal) as process:
        os.close(terminal)
        shown = all_shown(master)
        page = process.stdout.read() if process.stdout else b""
        assert process.wait() == 0
    os.close(master)
    assert re.search(r"reading: +\d+%", shown.decode())
    assert page.decode().startswith("no errors and no warnings\n\ncorpora  train: 500 pairs")
