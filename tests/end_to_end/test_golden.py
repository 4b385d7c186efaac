"""Stored run folders still translate, score, and continue training as when they were made."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from make_golden import EXPECTED, GOLDEN, LINES, files_of, outputs
from tasks import REPOSITORY, train

from mtrain.run import checkpoint
from mtrain.run.run_dir import RunDir

FOLDERS = sorted(path.parent for path in GOLDEN.glob(f"*/{EXPECTED}"))
MAX_BYTES = 200_000
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def expected(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / EXPECTED).read_text(encoding="utf-8")))


def steps(run: RunDir) -> list[int]:
    return list(checkpoint.steps(run.checkpoints_dir))


def test_the_current_checkpoint_format_has_a_golden_run() -> None:
    headers = [checkpoint._read_header(folder / "model.safetensors") for folder in FOLDERS]
    assert checkpoint.FORMAT in {header.format for header in headers}


@each_folder
def test_a_golden_run_has_all_its_files_and_is_small(folder: Path) -> None:
    """A file that git ignores would be missing in a clone of the repository."""
    assert files_of(folder) == expected(folder)["files"]
    assert sum(path.stat().st_size for path in folder.rglob("*")) < MAX_BYTES


@each_folder
def test_a_golden_run_still_gives_its_stored_translations_and_scores(folder: Path) -> None:
    found, stored = outputs(RunDir(folder)), expected(folder)
    for key, values in found.items():
        is_text = isinstance(values[0], str)
        assert values == (stored[key] if is_text else pytest.approx(stored[key], abs=1e-4)), key
    assert set(stored) == {*found, "files"}


@each_folder
def test_the_stored_translations_of_a_golden_run_are_varied_and_have_a_bleu_above_20(
    folder: Path,
) -> None:
    stored = expected(folder)
    assert stored["beam"][:2] == LINES[:2]
    assert len(set(stored["beam"])) > 4
    assert stored["eval_scores"][0] > 20


@each_folder
def test_training_resumes_from_the_checkpoint_of_a_golden_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    (last,) = steps(run)
    target = f"training.max_steps={last + 2}"
    train(run.config_path, target, run=str(run.path))
    assert f"resuming from {run.checkpoints_dir / f'step-{last:08}'}" in capsys.readouterr().err
    assert max(steps(run)) == last + 2
    assert checkpoint.load_progress(run.checkpoints_dir / f"step-{last + 2:08}").epoch > 0
    origin = checkpoint.load_final_weights_info(run.model_path)
    assert origin is not None
    assert origin.bleu > 20


@each_folder
def test_the_doctor_reports_no_damage_in_a_golden_run(cli: Cli, folder: Path) -> None:
    outcome = cli("doctor", folder, "--no-replay")
    assert outcome.code == 0, outcome.lines


def test_golden_runs_stay_out_of_the_wheel() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '[tool.hatch.build.targets.wheel]\npackages = ["mtrain"]\n' in text
    assert not GOLDEN.is_relative_to(REPOSITORY / "mtrain")
