"""Export a model as a package for Argos Translate and LibreTranslate, and translate with it.

A package is a CTranslate2 model, one SentencePiece model for both sides, and a sentence splitter.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from mtrain.config.language_names import name_of
from mtrain.config.sections import Config
from mtrain.errors import ConfigError, RunError
from mtrain.exporters import ctranslate2
from mtrain.exporters.ctranslate2 import CTranslate2Model
from mtrain.exporters.exporter import Archive, OwnCall, Requirement, agreement, ids_of_pieces
from mtrain.exporters.sentence_splitter import splitter
from mtrain.io.text_width import count
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.sentencepiece import Tokenizer

OTHER_PACKAGES: tuple[str, ...] = ("onnx",)
PACKAGE, TITLE, TAG = "ctranslate2", "Argos Translate and LibreTranslate", "argos-translate"
REQUIREMENTS: tuple[Requirement, ...] = (
    *ctranslate2.REQUIREMENTS,
    Requirement(
        "tokenizer.shared",
        True,
        "Argos Translate, whose packages have one SentencePiece model for both sides",
    ),
)
QUANTIZATIONS = ctranslate2.QUANTIZATIONS
USE = """\
Install the package, which needs no network:

```sh
pip install argostranslate
python -c 'import sys, argostranslate.package as p; p.install_from_path(sys.argv[1])' \\
  {name_in_shell}
argos-translate --from-lang {src_in_shell} --to-lang {tgt_in_shell} {line_in_shell}
```

`argospm install` installs from its public index only, not this file. The desktop application
installs package files, too; unpacking the file, a ZIP, into
`~/.local/share/argos-translate/packages` does the same. In Python:

```python
import argostranslate.package
import argostranslate.translate

argostranslate.package.install_from_path({name!r})
lines = [{line!r}]
print([argostranslate.translate.translate(line, {src!r}, {tgt!r}) for line in lines])
```

LibreTranslate reads the packages of that folder when it starts:

```sh
pip install libretranslate
libretranslate --load-only {src_in_shell},{tgt_in_shell}
```

Where there is one package only, it downloads others first. Without network it tries to for minutes,
unless it finds an empty list of them:

```sh
echo '[]' > ~/.local/share/argos-translate/index.json
```
"""
NOTES = """\
- Argos Translate searches with a beam of 4, divides a score by length^0.2, and ends an output after
  256 tokens. It copies the source's piece for `<unk>`.
- It computes in the type that is fastest on the machine, 8-bit integers on most, whatever the type
  of the stored weights.
- Every underscore of a translation becomes a space.
- It splits a line into sentences, translates each by itself and joins them. The splitter in the
  package follows one rule: a sentence ends after `.`, `!` or `?` that a space and a capital follow,
  but not after a full stop whose word has less than three letters.
- LibreTranslate changes a translation once more: it ends with the source's punctuation mark, or
  with none, and has its case: all small, all capitals, or that of the first letter. A source whose
  only letters are small, such as "2 dogs.", makes all letters small.
"""
# of every exported package: LibreTranslate replaces a package by the one of the public index for
# the same languages, if that has a higher version
_VERSION = "100.0"
_SENTENCEPIECE_FILE = "sentencepiece.model"
_SEARCH = {  # as argostranslate.translate.apply_packaged_translation calls CTranslate2
    "replace_unknowns": True,
    "max_batch_size": 32,
    "batch_type": "tokens",
    "beam_size": 4,
    "length_penalty": 0.2,
}


MIN_POSITIONS = ctranslate2.MIN_POSITIONS


def write(
    model: Transformer,
    tokenizer: Tokenizer,
    config: Config,
    directory: Path,
    quantization: str | None,
) -> None:
    """Write the files of a package into `directory`.

    Raises:
        ConfigError: if the code of a language has a slash.
    """
    for key, code in (("src_lang", config.data.src_lang), ("tgt_lang", config.data.tgt_lang)):
        if "/" in code:
            raise ConfigError(
                f"`data.{key}` must have no slash for Argos Translate, whose packages have the "
                f"code in names of files, but is {code!r} instead."
            )
    src, tgt = config.data.src_lang.lower(), config.data.tgt_lang.lower()
    metadata = {
        "package_version": _VERSION,
        "argos_version": "1.9.0",
        "from_code": src,
        "from_name": name_of(src),
        "to_code": tgt,
        "to_name": name_of(tgt),
    }
    (directory / "metadata.json").write_text(json.dumps(metadata, indent=2), encoding="utf-8")
    (directory / "model").mkdir()
    ctranslate2.write_model(model, tokenizer, config, directory / "model", quantization)
    (directory / _SENTENCEPIECE_FILE).write_bytes(tokenizer.src.model)
    (directory / "minisbd").mkdir()
    graph = splitter(set("".join(ids_of_pieces(tokenizer.src))), src)
    (directory / "minisbd" / f"{src}.onnx").write_bytes(graph)


def pack(directory: Path, path: Path) -> None:
    """Pack a folder as a ZIP with one top folder, whose name no package of the public index has."""
    metadata = json.loads((directory / "metadata.json").read_text("utf-8"))
    top = f"translate-{metadata['from_code']}_{metadata['to_code']}-mtrain"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(directory.rglob("*")):
            archive.write(file, f"{top}/{file.relative_to(directory).as_posix()}")


ARCHIVE: Archive | None = Archive(".argosmodel", pack)


class ArgosModel(CTranslate2Model):
    """The model of a package, loaded by CTranslate2; `own_call` runs Argos Translate."""

    def __init__(self, directory: Path) -> None:
        path = directory / _SENTENCEPIECE_FILE
        super().__init__(directory / "model", path, path)
        self._directory = directory

    def own_call(self, lines: Sequence[str]) -> OwnCall:
        """Compare Argos Translate with CTranslate2, which translates the same sentences.

        Raises:
            RunError: if Argos Translate cannot install the package or translate with it.
        """
        if find_spec("argostranslate") is None:
            return OwnCall(
                "Argos Translate",
                None,
                ("without argostranslate, which pip install 'mtrain[argos]' adds",),
            )
        import ctranslate2

        translated = self.translate(lines)
        translator = ctranslate2.Translator(str(self._directory / "model"), compute_type="auto")
        expected, num_split, num_underscores = list[str](), 0, 0
        for _, sentences in translated:
            tokens = [self.src.pieces(sentence) for sentence in sentences]
            results = translator.translate_batch(tokens, **_SEARCH)
            text = self.tgt.text_of([piece for result in results for piece in result.hypotheses[0]])
            num_split += len(tokens) > 1
            num_underscores += "_" in text
            expected.append(text.replace("\u2581", " ").replace("_", " ").removeprefix(" "))
        notes = [f"it computes in {translator.compute_type}"]
        if num_split:
            notes.append(f"it has split {count(num_split, 'line')} into sentences")
        if num_underscores:
            lines_changed = count(num_underscores, "line")
            notes.append(f"it has replaced underscores by spaces in {lines_changed}")
        pairs = zip(expected, translated, strict=True)
        version = importlib.metadata.version("argostranslate")
        return OwnCall(
            f"argostranslate {version}",
            agreement(text == translation for text, (translation, _) in pairs),
            tuple(notes),
        )

    def translate(self, lines: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Install the package into an empty folder, and translate lines with Argos Translate.

        Returns:
            the translation of each line, and the sentences that the line was split into.

        Raises:
            RunError: if Argos Translate cannot install the package or translate with it.
        """
        with TemporaryDirectory(dir=self._directory.parent) as home:
            package = Path(home) / "package.argosmodel"
            pack(self._directory, package)
            folders = {f"XDG_{name}_HOME": home for name in ("DATA", "CONFIG", "CACHE")}
            folders |= {"HOME": home, "ARGOS_PACKAGES_DIR": f"{home}/packages"}
            completed = subprocess.run(
                [sys.executable, "-P", "-c", f"{inspect.getsource(_main)}\n_main()", str(package)],
                input=json.dumps(lines),
                capture_output=True,
                text=True,
                env={**os.environ, **folders},
            )
        if completed.returncode:
            last = completed.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RunError(f"argostranslate cannot translate with the package: {last[0]}")
        return [(text, sentences) for text, sentences in json.loads(completed.stdout)]


load = ArgosModel  # the `load` of the `Exporter` protocol


def _main() -> None:
    """Install the package that the command line names; translate stdin, a JSON list of lines.

    Runs in a separate process, because Argos Translate reads the paths of its folders from the
    environment when it is imported. It imports nothing of mtrain, which need not be installed.
    """
    import json
    import sys

    import argostranslate.package
    import argostranslate.translate

    argostranslate.package.install_from_path(sys.argv[1])
    (package,) = argostranslate.package.get_installed_packages()
    sentence_splitter = argostranslate.translate.MiniSBDSentencizer(package)
    translated = []
    for line in json.load(sys.stdin):
        text = argostranslate.translate.translate(line, package.from_code, package.to_code)
        translated.append((text, sentence_splitter.split_sentences(line)))
    json.dump(translated, sys.stdout)
