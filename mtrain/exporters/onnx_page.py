"""The web page of an ONNX export: it translates in the browser; any static server can serve it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mtrain.config.language_names import name_of
from mtrain.config.sections import Config

LIBRARY_COMMAND = """\
npm install --prefix library/npm --ignore-scripts @huggingface/transformers@4.3.1
cp library/npm/node_modules/@huggingface/transformers/dist/transformers.min.js library
cp library/npm/node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.mjs library
cp library/npm/node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm library
rm -r library/npm"""
LIBRARY_FILES = (
    "transformers.min.js",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
)
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "onnx/encoder_model_quantized.onnx",
    "onnx/decoder_model_merged_quantized.onnx",
)
_WORKER = "service-worker.js"


def write(config: Config, directory: Path) -> None:
    """Write the page into the folder of an export; it loads the 8-bit graphs there."""
    src_lang, tgt_lang = config.data.src_lang, config.data.tgt_lang
    settings = {
        "source": src_lang,
        "target": tgt_lang,
        "languages": f"{name_of(src_lang)} to {name_of(tgt_lang)}",
        "maxTokens": config.data.max_tokens,
        "maxExtraTokens": config.decoding.max_extra_tokens,
        "bytes": sum((directory / name).stat().st_size for name in _MODEL_FILES[-2:]),
        "command": LIBRARY_COMMAND,
    }
    (directory / "page.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    sources = Path(__file__).with_name("page_files")
    names = sorted({path.name for path in sources.iterdir()} - {_WORKER})
    for name in names:
        (directory / name).write_bytes((sources / name).read_bytes())
    files = [*names, "page.json", *_MODEL_FILES]
    digest = hashlib.sha256(b"".join((directory / name).read_bytes() for name in files))
    files += ["./", *(f"library/{name}" for name in LIBRARY_FILES)]
    constants = (
        f"const VERSION = {json.dumps(digest.hexdigest()[:16])};\n"
        f"const FILES = {json.dumps(files, indent=2)};\n"
    )
    worker = constants + (sources / _WORKER).read_text("utf-8")
    (directory / _WORKER).write_text(worker, encoding="utf-8")
