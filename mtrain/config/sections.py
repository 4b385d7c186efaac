"""The sections of the config, and all defaults.

Does not import torch, so that config errors are reported without delay.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from mtrain.config.corpora import (
    Corpus,
    FilePath,
    Int32,
    Section,
    SyntheticCorpus,
    TrainText,
    corpora_of,
)

Tree = dict[str, Any]
MAX_BEAM = 1000
MAX_EXTRA_TOKENS = 100_000
DEFAULT_VOCAB_SIZE = 8000
# Valid names in `data.clean`: rules of the audit, applied in the order of `RULES`.
CLEAN = (
    "blank-side",
    "held-out-pair",
    "held-out",
    "copied",
    "repeated-pair",
    "repeated-source",
    "length-ratio",
    "strange-script",
    "swapped",
    "no-words",
    "mojibake",
)


_SHORT = reprlib.Repr()  # bounded also for recursive and repeated lists
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, 10, 10
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100


def format_value(value: object) -> str:
    """Format a value for an error message: as in YAML, at most 60 characters."""
    is_word = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_word else _SHORT.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class DataConfig(Section):
    """The corpora and their languages; `clean` names the rules that drop pairs."""

    src_lang: str = Field(min_length=1)
    tgt_lang: str = Field(min_length=1)
    train: TrainText
    temperature: float | None = Field(default=None, ge=1)
    valid: Corpus
    tests: dict[str, Corpus] = Field(default={})
    max_tokens: Int32 = Field(default=256, ge=2)
    clean: list[Annotated[str, WithJsonSchema({"enum": list(CLEAN)})]] = Field(
        default=["blank-side", "held-out-pair"]
    )

    @field_validator("clean")
    @classmethod
    def _know_what_to_clean(cls, names: list[str]) -> list[str]:
        for name in names:
            if name == "max-tokens":
                raise ValueError(
                    "need not name 'max-tokens': pairs over `data.max_tokens` are always dropped"
                )
            if name not in CLEAN:
                near = ", ".join(difflib.get_close_matches(name, CLEAN, n=3, cutoff=0.0))
                raise ValueError(
                    f"must name rules, but has {format_value(name)} instead; the nearest are {near}"
                )
        return names

    @model_validator(mode="after")
    def _check_corpora(self) -> DataConfig:
        corpora = corpora_of(self.train)
        num_weighted = sum(named.corpus.weight is not None for named in corpora)
        if 0 < num_weighted < len(corpora):
            raise ValueError(
                "must give a `weight` to each corpus of `train` or to none, but gives one to "
                f"{num_weighted} of {len(corpora)} instead"
            )
        if self.temperature is not None and (num_weighted or not isinstance(self.train, list)):
            why = "its corpora have weights" if num_weighted else "`train` is one corpus"
            raise ValueError(
                f"must leave `temperature` out where {why}, but it is {self.temperature} instead"
            )
        if all(named.corpus.until is not None for named in corpora):
            raise ValueError(
                "must have a corpus of `train` without `until`, for the end of the training, but "
                "all have one instead"
            )
        tests = {f"tests.{name}": corpus for name, corpus in self.tests.items()}
        for key, corpus in {"valid": self.valid, **tests}.items():
            if isinstance(corpus, SyntheticCorpus):
                raise ValueError(
                    f"must have real pairs in `{key}`, but has a synthetic corpus instead; `jsonl` "
                    "with its files takes them nevertheless"
                )
        for name in self.tests:
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
                raise ValueError(
                    "must name its test sets with letters, digits, '_', '-' and '.', "
                    f"but has {name!r} instead"
                )
        return self


class TokenizerConfig(Section):
    """SentencePiece settings; `sampling_alpha` above 0 samples segmentations while training.

    Without `vocab_size`, it is DEFAULT_VOCAB_SIZE, or the nearest size that the text allows.
    """

    kind: Literal["unigram", "bpe"] = "unigram"
    vocab_size: Int32 | None = Field(default=None, ge=8)
    shared: bool = True
    character_coverage: float = Field(default=1.0, ge=0.98, le=1)  # SentencePiece's bounds
    byte_fallback: bool = True
    sampling_alpha: float = Field(default=0.0, ge=0, le=1)
    max_training_lines: Int32 = Field(default=500_000, ge=1)


class ModelConfig(Section):
    """Sizes and variants of the Transformer."""

    d_model: int = Field(default=128, ge=2, le=2**16)
    num_heads: Int32 = Field(default=4, ge=1)
    d_ff: Int32 = Field(default=256, ge=1)
    num_encoder_layers: int = Field(default=4, ge=1, le=1000)
    num_decoder_layers: int = Field(default=4, ge=1, le=1000)
    dropout: float = Field(default=0.3, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    activation_dropout: float = Field(default=0.0, ge=0, lt=1)
    norm: Literal["post", "pre"] = "post"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: Int32 | None = Field(default=None, ge=2)
    attention_window: Int32 | None = Field(default=None, ge=1)
    activation: Literal["relu", "gelu"] = "relu"
    tie_embeddings: Literal["all", "decoder", "none"] = "all"
    branch_gain: float = Field(default=0.05, gt=0, le=100)

    @model_validator(mode="after")
    def _fit_the_sizes(self) -> ModelConfig:
        if self.d_model % self.num_heads:
            raise ValueError(
                f"must have a `d_model` that is divisible by `num_heads`, but {self.d_model} is "
                f"not divisible by {self.num_heads}"
            )
        if self.positions == "learned" and self.max_positions is None:
            raise ValueError(
                "must say with `max_positions` how many positions are learned, but it is null "
                "instead"
            )
        if self.positions == "sinusoidal" and self.max_positions is not None:
            raise ValueError(
                "must leave `max_positions` null unless `positions` is 'learned', but it is "
                f"{self.max_positions} instead"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"must have an even `d_model` for sinusoidal positions, but has {self.d_model} "
                "instead"
            )
        return self


class ConsistencyConfig(Section):
    """SimCut (Gao et al. 2022): weight of its KL divergence, share of token embeddings zeroed."""

    weight: float = Field(default=3.0, gt=0)
    cutoff: float = Field(default=0.05, ge=0, lt=1)


OptimizerName = Literal["adam", "muon"]


class TrainingConfig(Section):
    """The budget, batches, loss and optimizer, and when to log, validate and save checkpoints."""

    max_steps: Int32 | None = Field(default=8000, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    batch_tokens: Int32 = Field(default=4096, ge=1)
    accumulate: Int32 = Field(default=1, ge=1)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    exchange: Literal["float32", "bfloat16"] = "float32"
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    consistency: ConsistencyConfig | None = None
    optimizer: OptimizerName = "adam"
    schedule: Literal["inverse_sqrt", "noam", "linear", "cosine"] = "inverse_sqrt"
    lr: float = Field(default=0.005, gt=0)
    warmup_steps: Int32 = Field(default=2000, ge=0)
    betas: list[float] = Field(default=[0.9, 0.98], min_length=2, max_length=2)
    eps: float = Field(default=1e-9, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, ge=0)
    init_from: FilePath | None = Field(default=None, min_length=1)
    replay: float = Field(default=0.0, ge=0, lt=1)
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool = True
    log_every: Int32 = Field(default=50, ge=1)
    validate_every: Int32 = Field(default=500, ge=1)
    num_examples: Int32 = Field(default=1, ge=0)
    save_every: Int32 | None = Field(default=None, ge=1)
    patience: Int32 = Field(default=10, ge=1)
    keep_last: Int32 = Field(default=5, ge=1)
    keep_best: Int32 = Field(default=1, ge=1)
    average: Int32 = Field(default=5, ge=1)
    average_of: Literal["last", "best"] = "last"

    @model_validator(mode="after")
    def _bound_the_training(self) -> TrainingConfig:
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("must have max_steps or max_minutes, but both are null instead")
        if self.replay and self.init_from is None:
            raise ValueError(
                f"must name the run to replay in `init_from`, but it is null and `replay` is "
                f"{self.replay}"
            )
        kept = self.keep_last if self.average_of == "last" else self.keep_best
        if self.average > kept:
            raise ValueError(
                f"must keep the {self.average} checkpoints that it averages, but "
                f"keep_{self.average_of} is {kept} instead"
            )
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise ValueError(
                "must have `parallel: ddp` for Muon, which needs whole matrices on each rank, but "
                "`parallel` is 'fsdp' instead"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"must have betas in [0, 1), but has {self.betas} instead")
        return self


class DecodingConfig(Section):
    """Defaults of the search for translations."""

    beam: int = Field(default=5, ge=1, le=MAX_BEAM)
    length_alpha: float = Field(default=0.6, ge=0, le=10)
    max_extra_tokens: int = Field(default=50, ge=0, le=MAX_EXTRA_TOKENS)
    batch_tokens: Int32 = Field(default=8192, ge=1)
    no_repeat_ngram: Int32 = Field(default=0, ge=0)
    retry_flagged: bool = True
    mbr: Literal["chrf", "bleu"] | None = None
    early_stop: bool = False

    @model_validator(mode="after")
    def _have_candidates(self) -> DecodingConfig:
        if self.mbr is not None and self.beam == 1:
            raise ValueError("must have a `beam` of at least 2 for `mbr`, but has 1 instead")
        return self


class Config(Section):
    """All settings of a run."""

    run_dir: FilePath = Field(min_length=1)
    seed: int = Field(default=1, ge=0, lt=2**63)
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()

    @model_validator(mode="after")
    def _fit_the_sections(self) -> Config:
        corpora = [named.corpus for named in corpora_of(self.data.train)]
        is_synthetic = all(isinstance(corpus, SyntheticCorpus) for corpus in corpora)
        if is_synthetic and self.training.init_from is None:
            raise ValueError(
                "`data.train` must have real pairs for the tokenizer, but all are synthetic "
                "instead; `jsonl` with their files takes them nevertheless"
            )
        if self.model.tie_embeddings == "all" and not self.tokenizer.shared:
            raise ValueError(
                "`model.tie_embeddings` must be 'decoder' or 'none' when `tokenizer.shared` is "
                "false, but is 'all' instead"
            )
        if self.model.max_positions is not None and self.model.max_positions < self.data.max_tokens:
            raise ValueError(
                f"`model.max_positions` must be >= `data.max_tokens` ({self.data.max_tokens}), "
                f"but is {self.model.max_positions} instead"
            )
        if self.training.batch_tokens < self.data.max_tokens:
            raise ValueError(
                f"`training.batch_tokens` must be >= `data.max_tokens` ({self.data.max_tokens}), "
                f"but is {self.training.batch_tokens} instead"
            )
        return self
