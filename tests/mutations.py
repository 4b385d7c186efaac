"""Break one thing at a time in a copy of the package, and see that a test notices.

    python tests/mutations.py [NAME...]

Each mutation replaces a text that stands exactly once in its file, so that none can silently do
nothing. The tests that guard the file are run in the copy; before any mutation, they must pass
there. The exit code is 1 if a mutation survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from mtrain.ops import native

REPOSITORY = Path(__file__).parent.parent
COPIED = ["mtrain", "tests", "configs", "data/demo", "docs", "pyproject.toml", "README.md"]
TIMEOUT_S = 900  # far more than the slowest tests need on a busy machine


class Mutation(NamedTuple):
    """A text of a file, its replacement, and the tests that must fail with it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


class Outcome(NamedTuple):
    """What pytest said: its exit code, and the first test that failed, if one did."""

    code: int
    first_failure: str


def model(name: str, old: str, new: str) -> Mutation:
    return Mutation(
        name, "mtrain/model/transformer.py", old, new, "tests/model/test_transformer.py"
    )


def state(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "mtrain/model/kv_cache.py", old, new, "tests/model/test_transformer.py")


def search(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "mtrain/decode/beam.py", old, new, "tests/decode/test_beam.py")


def products(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "mtrain/ops/linear.py", old, new, "tests/ops/test_linear.py")


def packed(name: str, old: str, new: str, tests: str = "packed_weights") -> Mutation:
    return Mutation(name, "mtrain/ops/packed_weights.py", old, new, f"tests/ops/test_{tests}.py")


def top_k(name: str, old: str, new: str, tests: str = "topk") -> Mutation:
    return Mutation(name, "mtrain/ops/topk.py", old, new, f"tests/ops/test_{tests}.py")


def sampling(name: str, old: str, new: str) -> Mutation:
    return Mutation(name, "mtrain/decode/sampling.py", old, new, "tests/decode/test_beam.py")


def compiled(file: str, name: str, old: str, new: str, tests: str) -> Mutation:
    return Mutation(name, f"mtrain/ops/csrc/{file}.c", old, new, f"tests/ops/test_{tests}.py")


def train(name: str, old: str, new: str, wanted: str) -> Mutation:
    return Mutation(
        name, "mtrain/training/trainer.py", old, new, f"tests/training/test_trainer.py -k {wanted}"
    )


def data_parallel(name: str, old: str, new: str, tests: str) -> Mutation:
    file = "tests/training/test_distributed.py"
    return Mutation(name, "mtrain/training/data_parallel.py", old, new, f"{file} -k {tests}")


def manager(name: str, old: str, new: str, tests: str) -> Mutation:
    file = "tests/training/test_trainer.py"
    return Mutation(name, "mtrain/training/checkpoint_manager.py", old, new, f"{file} -k {tests}")


def config(file: str, name: str, old: str, new: str) -> Mutation:
    return Mutation(name, f"mtrain/config/{file}.py", old, new, "tests/config/test_config_file.py")


def metrics(name: str, old: str, new: str) -> Mutation:
    return Mutation(
        name, "mtrain/evaluation/metrics.py", old, new, "tests/evaluation/test_metrics.py"
    )


def export(file: str, name: str, old: str, new: str, test: str = "export") -> Mutation:
    path = f"tests/exporters/test_{test}.py"
    return Mutation(name, f"mtrain/exporters/{file}.py", old, new, path)


def onnx(file: str, name: str, old: str, new: str, tests: str) -> Mutation:
    return export(file, name, old, new)._replace(tests=f"tests/exporters/test_onnx{tests}")


MODEL = [
    model(
        "causal mask flipped",
        "near_keep(length, self.config.attention_window, x_BTD.device).tril()",
        "near_keep(length, self.config.attention_window, x_BTD.device).triu()",
    ),
    model(
        "no padding mask in the encoder",
        "        keep = src_keep_BS[:, None, None, :]\n",
        "        keep = torch.ones_like(src_keep_BS)[:, None, None, :]\n",
    ),
    state(
        "no padding mask in cross-attention",
        "np.where(keep_BS, keep_BS.cumsum().reshape(keep_BS.shape) - 1, -1)",
        "keep_BS.cumsum().reshape(keep_BS.shape) - 1",
    ),
    model(
        "cross-attention masks the wrong side",
        "        src_keep_B11S = src_keep_BS[:, None, None, :]\n",
        "        src_keep_B11S = src_keep_BS[:, None, :, None]\n",
    ),
    model(
        "keys of cross-attention from the target",
        "        source = self.cross_attention.keys_values(memory_BSD)\n",
        "        source = self.cross_attention.keys_values(x_BTD[:, : memory_BSD.shape[1]])\n",
    ),
    model(
        "maps divided by hid_dim ** 1/2",
        "/ math.sqrt(q_BHTK.shape[-1])",
        "/ (q_BHTK.shape[-1] ** 1 / 2)",
    ),
    model(
        "embeddings not times sqrt(d_model)",
        "table(ids) * math.sqrt(self.config.d_model)",
        "table(ids)",
    ),
    model(
        "cached positions one too far",
        "torch.from_numpy(cache.length_N)",
        "torch.from_numpy(cache.length_N + 1)",
    ),
    state(
        "cached positions do not advance",
        "        self.length_N = self.length_N + 1\n",
        "",
    ),
    Mutation(
        "sources without their tag",
        "mtrain/data/encode.py",
        "[prefix + ids for ids in src_ids] if prefix else src_ids",
        "src_ids",
        "tests/training/test_synthetic.py -k before_each_source",
    ),
    Mutation(
        "sampled sources without their tag",
        "mtrain/data/loader.py",
        "np.array([*prefix, *ids, eos], dtype=np.int32)",
        "np.array([*ids, eos], dtype=np.int32)",
        "tests/training/test_synthetic.py -k before_each_source",
    ),
    Mutation(
        "a corpus is used beyond `until`",
        "mtrain/data/loader.py",
        "if entry.until is None or entry.until in self.ends[phase:]:",
        "if True:",
        "tests/training/test_synthetic.py -k share_of_the_budget",
    ),
    Mutation(
        "the tokenizer learns from synthetic pairs",
        "mtrain/data/prepare.py",
        "    is_kept &= is_real\n",
        "",
        "tests/training/test_synthetic.py -k does_not_learn",
    ),
    Mutation(
        "a search may generate a tag token",
        "mtrain/tokenizer/sentencepiece.py",
        "[self.pad, self.bos, *self.tags.values()]",
        "[self.pad, self.bos]",
        "tests/training/test_synthetic.py -k decoding_never_generates",
    ),
    Mutation(
        "synthetic pairs keep held-out text",
        "mtrain/augmentation/pair_rules.py",
        "            is_held |= ",
        "            _ = ",
        "tests/augmentation/test_augment.py -k held_out_set",
    ),
    Mutation(
        "an interrupted augmentation restarts from the beginning",
        "mtrain/augmentation/augment.py",
        "        first = num_done * PART_LINES\n",
        "        first = 0\n",
        "tests/augmentation/test_augment.py -k interrupted",
    ),
    model(
        "sinusoids count from 1",
        "torch.arange(length, dtype=torch.float64",
        "torch.arange(1, length + 1, dtype=torch.float64",
    ),
    model(
        "sine and cosine swapped",
        "[angle_TI.sin(), angle_TI.cos()], -1",
        "[angle_TI.cos(), angle_TI.sin()], -1",
    ),
    model(
        "sines and cosines in halves",
        "torch.stack([angle_TI.sin(), angle_TI.cos()], -1).flatten(1)",
        "torch.cat([angle_TI.sin(), angle_TI.cos()], -1)",
    ),
    model(
        "learned positions wrap around",
        "position.clamp(max=self.table.num_embeddings - 1)",
        "position % self.table.num_embeddings",
    ),
    model(
        "both sides share learned positions",
        "self.tgt_embedding, self.tgt_positions, tgt_in_BT, token_keep_BT)",
        "self.tgt_embedding, self.src_positions, tgt_in_BT, token_keep_BT)",
    ),
    model(
        "source embedding untied",
        "            self.src_embedding.weight = self.tgt_embedding.weight\n",
        "            pass\n",
    ),
    model(
        "output untied",
        "            self.output.weight = self.tgt_embedding.weight\n",
        "            pass\n",
    ),
    model(
        "norm before the residual sum",
        "add_norm(x, sublayer(x), self.dropout, self.norm)",
        "x + self.norm(self.dropout(sublayer(x)))",
    ),
    model(
        "pre-norm normalises the residual, too",
        "x + self.dropout(sublayer(self.norm(x)))",
        "self.norm(x) + self.dropout(sublayer(self.norm(x)))",
    ),
    model(
        "pre-norm without a final norm",
        "self.decoder_norm = LayerNorm(d_model) if pre_norm else nn.Identity()",
        "self.decoder_norm = nn.Identity()",
    ),
    model(
        "eps of LayerNorm 1e-6",
        "LayerNorm(config.d_model, eps=1e-5)",
        "LayerNorm(config.d_model, eps=1e-6)",
    ),
    model(
        "ReLU and GELU swapped",
        "nn.ReLU() if config.activation",
        "nn.GELU() if config.activation",
    ),
    model(
        "heads merged in the wrong order",
        "x_BHTK.transpose(1, 2).flatten(2)",
        "x_BHTK.reshape(x_BHTK.shape[0], x_BHTK.shape[2], -1)",
    ),
    model(
        "window one too narrow",
        "keep_TT.tril(window).triu(-window)",
        "keep_TT.tril(window - 1).triu(1 - window)",
    ),
    model(
        "cached window one too narrow",
        "slots_NT[:, -self.window - 1 :]",
        "slots_NT[:, -self.window :]",
    ),
    state(
        "cached past not reordered",
        "self.slots_NT.take(rows_N, 0)",
        "self.slots_NT.take(rows_N * 0, 0)",
    ),
    state(
        "sources are not reordered with their hypotheses",
        "self.src_slots_NS.take(rows_N, 0)",
        "self.src_slots_NS.take(np.sort(rows_N), 0)",
    ),
    state(
        "enlarging the cache discards its content",
        "    larger_RX[: len(layer_RX)] = layer_RX\n",
        "    larger_RX[:] = 0\n",
    ),
    state(
        "two steps write to the same cache slots",
        "self._free_R = slots_R[count:]",
        "self._free_R = slots_R[count // 2 :]",
    ),
    state(
        "admitted sentences attend to the cache of others",
        "padded(old_NT, len(old_NT) + len(other.length_N), longest)",
        "np.maximum(padded(old_NT, len(old_NT) + len(other.length_N), longest), 0)",
    ),
    state(
        "admitted sentences start at the position of others",
        "np.concatenate([self.length_N, other.length_N])",
        "np.concatenate([self.length_N, other.length_N + longest])",
    ),
    state(
        "admitted sentences attend to the sources of others",
        "np.append(slots_R, -1)[new_NS]",
        "new_NS",
    ),
    model(
        "all sources are read up to the length of the first",
        "slice(first, row), max(widths[first:row])",
        "slice(first, row), widths[first]",
    ),
    model(
        "sources of different lengths are read together",
        "if is_large and widths[row] != widths[row - 1]:",
        "if is_large and widths[row] != widths[0]:",
    ),
    state(
        "cache slots that other rows share are overwritten",
        "        is_free_R[in_use] = False  # index -1, the last, is padding\n",
        "",
    ),
    state(
        "freed cache slots are never reused",
        "        if num_needed > 3 * num_slots // 4:\n",
        "        if True:\n",
    ),
    model(
        "no dropout on embeddings",
        "self.dropout(x + encoding(position, stop, x.dtype))",
        "x + encoding(position, stop, x.dtype)",
    ),
    model(
        "attention dropout at another rate",
        "        self.source_keys_values = Linear(config.d_model, 2 * config.d_model)\n"
        "        self.output = Linear(config.d_model, config.d_model)\n"
        "        self.dropout = Dropout(config.attention_dropout)\n",
        "        self.source_keys_values = Linear(config.d_model, 2 * config.d_model)\n"
        "        self.output = Linear(config.d_model, config.d_model)\n"
        "        self.dropout = Dropout(config.dropout)\n",
    ),
    model(
        "dropout before the activation",
        "self.outer(self.dropout(self.activation(self.inner(x_BTD))))",
        "self.outer(self.activation(self.dropout(self.inner(x_BTD))))",
    ),
    model(
        "no dropout after a ReLU",
        'config.activation == "relu" and config.activation_dropout == 0',
        'config.activation == "relu"',
    ),
    model(
        "residual branches are initialised at full scale",
        "gain = self.config.branch_gain",
        "gain = 1.0",
    ),
]

KERNELS = [  # kept apart: these are rewritten for speed now and then, and their texts with them
    Mutation(
        "scores divided by hid_dim ** 1/2",
        "mtrain/ops/attention.py",
        "torch.matmul(q.to(dtype) * q.shape[-1] ** -0.5, ",
        "torch.matmul(q.to(dtype) / (q.shape[-1] ** 1 / 2), ",
        "tests/model/test_transformer.py",
    ),
    Mutation(
        "compiled scores by hid_dim ** 1/2",
        "mtrain/ops/attention.py",
        "shape.scale = q.shape[-1] ** -0.5",
        "shape.scale = 1 / (q.shape[-1] ** 1 / 2)",
        "tests/model/test_transformer.py",
    ),
    Mutation(
        "label smoothing over the other tokens only",
        "mtrain/training/loss.py",
        "states_ND, weight_VD, targets_N, smoothing, formula\n",
        "states_ND, weight_VD, targets_N, smoothing * len(weight_VD) / (len(weight_VD) - 1)\n",
        "tests/training/test_loss.py",
    ),
    Mutation(
        "padding counts although the number of tokens is known",
        "mtrain/training/loss.py",
        "argsort(descending=True, stable=True)",
        "argsort(descending=False, stable=True)",
        "tests/training/test_loss.py",
    ),
    Mutation(
        "an update with gradients that are not finite is applied",
        "mtrain/training/trainer.py",
        "optimizer.found_inf = (~is_finite).float()",
        "optimizer.found_inf = (is_finite & ~is_finite).float()",
        "tests/training/test_device_loop.py",
    ),
    Mutation(
        "a log line does not wait for the updates that it counts",
        "mtrain/training/trainer.py",
        "        if is_due:\n            self._read_results()\n",
        "        if is_due:\n            self._read_results(self.max_pending)\n",
        "tests/training/test_device_loop.py",
    ),
    Mutation(
        "each update synchronises with its device",
        "mtrain/training/trainer.py",
        "        self._read_results(self.max_pending)\n",
        "        self._read_results()\n",
        "tests/training/test_device_loop.py",
    ),
    Mutation(
        "dropout does not scale up the rest",
        "mtrain/ops/dropout.py",
        "DropoutMask(cut, _LEVELS / (_LEVELS - cut), _next_seed(self))",
        "DropoutMask(cut, 1.0, _next_seed(self))",
        "tests/ops/test_attention.py",
    ),
    packed(
        "weights are packed row by row",
        "groups.view(-1, width, groups.shape[1]).transpose(1, 2).contiguous()",
        "groups.view(-1, groups.shape[1], width).contiguous()",
    ),
    products(
        "a packed linear layer has no bias",
        "(packed.map_with(bias),)",
        "(packed.map_with(None),)",
    ),
    packed(
        "the error bound ignores the rounding of weights",
        "(own_MK - rounded_MK).norm(dim=1) + length_M",
        "0.0 * length_M + length_M",
    ),
    packed(
        "NaN weights are rounded",
        'if precision != "float32" and not own_MK.isfinite().all():',
        "if False:",
    ),
    packed(
        "rows that are not finite become finite",
        "zero = torch.where(most.isfinite(), 0.0, torch.nan)",
        "zero = torch.where(most.isfinite(), 0.0, 0.0)",
    ),
    packed(
        "a shortlist has the scales of the first rows",
        "tiles, *(each[rows_R] for each in self._padded)",
        "tiles, *(each[: len(rows_R)].contiguous() for each in self._padded)",
        "beam_search",
    ),
    compiled(
        "int8",
        "int8 values are truncated instead of rounded",
        "float rounded = rintf(x[i] * inverse)",
        "float rounded = truncf(x[i] * inverse)",
        "packed_weights",
    ),
    compiled(
        "int8",
        "the reported rounding error is zero",
        "*error = sqrtf(changed)",
        "*error = 0.0f * sqrtf(changed)",
        "topk",
    ),
    compiled(
        "int8",
        "a row with a NaN is rounded to zeros",
        "float scale = is_zero ? zero :",
        "float scale = is_zero ? 0.0f :",
        "packed_weights",
    ),
    compiled(
        "beam_search",
        "indices into a shortlist are used as token ids",
        "ids[i] = ranked->ids[ids[i]];",
        "ids[i] = ids[i];",
        "beam_search",
    ),
    compiled(
        "attention",
        "a bfloat16 cache is read without its lowest bit",
        "return (vec_float)(widen(numbers) << 16);",
        "return (vec_float)(widen(numbers) >> 1 << 17);",
        "attention",
    ),
    compiled(
        "stacks",
        "keys and values are truncated to bfloat16 instead of rounded",
        "if (in_bf16) round_floats(from, (bf16 *)cache + row * width, width);",
        "if (in_bf16) for (int64_t i = 0; i < width; i++) "
        "((bf16 *)cache)[row * width + i] = (bf16)(float_to_bits(from[i]) >> 16);",
        "stacks",
    ),
    compiled(
        "attention",
        "four heads use the maximum score of the first slots",
        "tops[i] = GREATER(own[i], tops[i]);",
        "tops[i] = first ? tops[i] : own[i];",
        "attention",
    ),
    products(
        "gradients pass a ReLU at zeros",
        "outer.forward_compiled(hidden, input_is_relu=True)",
        "outer.forward_compiled(hidden)",
    ),
    products(
        "packed weights skip the ReLU",
        "inner.forward_compiled(x, apply_relu=True)",
        "inner.forward_compiled(x)",
    ),
    Mutation(
        "gradients of parts are assumed to be in order",
        "mtrain/ops/attention.py",
        "if views == [(layout, start + i * width) for i in range(len(grads))]:",
        "if [layout] * len(grads) == [view[0] for view in views]:",
        "tests/ops/test_attention.py",
    ),
    top_k(
        "tokens outside a shortlist are ranked",
        "own_NV[:, ids_C] = whole_NV[:, ids_C]",
        "own_NV[:] = whole_NV",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "of equal scores the later token is chosen",
        "best->log_prob[at - 1] < log_prob",
        "best->log_prob[at - 1] <= log_prob",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "a search keeps the slots of ended hypotheses",
        "                    num_places[sentence]--;\n",
        "",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "a search continues although no hypothesis can win",
        "if (is->beam > 1 && !(bound > best[is->num_best - 1])) open = kept;",
        "if (0) open = kept;",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "a compiled call continues after a sentence has ended",
        "rows && !has_ended; done++",
        "rows; done++",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "a search ignores the length limit",
        "must_leave |= max_lengths[row[SENTENCE]] <= row[LENGTH];",
        "",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "a search with an attention window attends to all positions",
        "at.past_window = min_of(past + 1, is->window)",
        "at.past_window = past + 1",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "eos does not count in the length of a search",
        "log_prob / penalties[length];",
        "log_prob / penalties[length - 1];",
        "beam_search",
    ),
    compiled(
        "beam_search",
        "a search accepts logits that are not finite",
        "if (result != OPS_OK || !are_finite) break;",
        "if (result != OPS_OK) break;",
        "beam_search",
    ),
    compiled(
        "stacks",
        "a position may be written beyond the cache",
        "if ((uint64_t)slot >= (uint64_t)at->past_rows) return OPS_BAD_INDEX;",
        "if (slot < 0) return OPS_BAD_INDEX;",
        "stacks",
    ),
    compiled(
        "stacks",
        "sources may be written beyond their pool",
        "if (slots[n] >= to->pool_rows) return OPS_BAD_INDEX;",
        ";",
        "stacks",
    ),
    compiled(
        "stacks",
        "padding is written to the keys and values of a source",
        "if (slots[n] < 0) continue;\n        if (count",
        "if (count",
        "stacks",
    ),
    compiled(
        "stacks",
        "positions of the second source continue those of the first",
        "min_of(n % at->s, ",
        "min_of(n, ",
        "stacks",
    ),
    Mutation(
        "outdated packed weights of source keys and values are used",
        "mtrain/ops/stacks.py",
        "self._linear_maps += maps",
        "pass",
        "tests/ops/test_stacks.py",
    ),
    compiled(
        "stacks",
        "self-attention reads the first positions instead of the window",
        "past_slots + at->past_count - at->past_window",
        "past_slots",
        "stacks",
    ),
    compiled(
        "stacks",
        "with an odd number of norms the result stays in the other buffer",
        "if (result == OPS_OK && from != states) memcpy",
        "if (0) memcpy",
        "stacks",
    ),
    Mutation(
        "a norm that changes between two searches is ignored",
        "mtrain/ops/stacks.py",
        "[norm.eps for norm in self._norms]",
        "[]",
        "tests/ops/test_stacks.py",
    ),
    compiled(
        "decode_linear",
        "a sparse product takes every value that is not 0 for 1",
        "sums[v] += same * own;",
        "sums[v] += own;",
        "linear",
    ),
    compiled(
        "decode_linear",
        "sparse rows are multiplied by the first panels alone",
        "packed + column * k, k, num)",
        "packed, k, num)",
        "linear",
    ),
    compiled(
        "decode_linear",
        "the argmax in bfloat16 is not verified",
        "#define MARGIN(b) (1.001f *",
        "#define MARGIN(b) (0.0f *",
        "topk",
    ),
    compiled(
        "decode_linear",
        "the first candidate of the argmax is chosen",
        "if (exact > best) best = exact, found = i;",
        "if (found < 0) best = exact, found = i;",
        "topk",
    ),
    compiled(
        "decode_linear",
        "the argmax may be a forbidden token",
        "row[never[i]] = -INFINITY;",
        "row[never[i]] += 0.0f;",
        "topk",
    ),
    search(
        "a search without scores returns scores",
        "has_scores=not options.argmax_only",
        "has_scores=True",
    ),
    Mutation(
        "a beam search computes no scores",
        "mtrain/decode/options.py",
        "return self.beam == 1 and not self.with_scores",
        "return not self.with_scores",
        "tests/decode/test_beam.py",
    ),
    top_k(
        "logits of the first rows are used for all rows",
        "self.projection(self.states_ND[rows])",
        "self.projection(self.states_ND)[: len(self.states_ND[rows])]",
    ),
    compiled(
        "cross_entropy",
        "the target's exponential stays in the product",
        "in->powers_across[(piece + own) * STRIDE + first + c] = 0;",
        ";",
        "cross_entropy",
    ),
    compiled(
        "cross_entropy",
        "the exponential of the target's neighbour is removed",
        "group[own % K_GROUP] = 0;",
        "group[(own + 1) % K_GROUP] = 0;",
        "cross_entropy",
    ),
    compiled(
        "cross_entropy",
        "exponentials overflow",
        "while (shift_more(&of, rows));",
        "while (0);",
        "cross_entropy",
    ),
    compiled(
        "cross_entropy",
        "the gradient of the weights lacks the smoothing term",
        "is_first ? in->even_x : NULL",
        "NULL",
        "cross_entropy",
    ),
    compiled(
        "attention",
        "heads of an odd width lack their last element",
        "if (i < k) add_products(sums, rows, i, 1, others);",
        "",
        "attention",
    ),
    compiled(
        "attention",
        "the last value of an odd number of keys is left out",
        "pack_columns(vs_down, head(v, vt, b, h), at->s, vt[2], at->k, wide);",
        "pack_columns(vs_down, head(v, vt, b, h), at->s / 2 * 2, vt[2], at->k, wide);",
        "attention",
    ),
    compiled(
        "attention",
        "the last two weights of a sentence count as one",
        "            if (i + 1 < n) memcpy(&below, scores + (i + 1) * width + w, sizeof below);",
        "            if (i + 2 < n) memcpy(&below, scores + (i + 1) * width + w, sizeof below);",
        "attention",
    ),
]

SEARCH = [
    search(
        "beam skips the reorder",
        "self.state.reorder(rows_N)\n        self.num_open = len(self.rows",
        "self.num_open = len(self.rows",
    ),
    search(
        "a sentence has one hypothesis too many",
        "np.arange(width) < self.sentences.num_places_B[:, None]",
        "np.arange(width) <= self.sentences.num_places_B[:, None]",
    ),
    search(
        "candidates continue the wrong row",
        "row_of_cell_R[parent_N]",
        "row_of_cell_R[cell_N // width * width]",
    ),
    search(
        "beam search continues after eos",
        "            is_open_N &= self._can_win(grown, is_open_N)\n",
        "            is_open_N[:] = True\n",
    ),
    search(
        "finished hypotheses are replaced by open ones",
        "num_places_B=sentences.num_places_B - num_ended_B",
        "num_places_B=sentences.num_places_B",
    ),
    search(
        "beam search stops at the first finished hypothesis",
        "        np.maximum.at(bound_B, grown.sentence_N, bound_N)\n",
        "        np.maximum.at(bound_B, grown.sentence_N, bound_N)\n"
        "        bound_B[np.isfinite(self.sentences.best_BM[:, -1])] = -np.inf\n",
    ),
    search(
        "beam search stops when one of n targets is certain",
        "bound_B > self.sentences.best_BM[:, -1]",
        "bound_B > self.sentences.best_BM[:, 0]",
    ),
    search(
        "beam search ignores the scores of earlier positions",
        "np.concatenate([sentences.best_BM, score_R.reshape(-1, width)], 1)",
        "score_R.reshape(-1, width)",
    ),
    search(
        "early stop is ignored",
        "        if self.options.early_stop:\n",
        "        if False:\n",
    ),
    search(
        "early stop ignores the next token",
        "            length_N = grown.length_N\n",
        "            length_N = grown.length_N - 1\n",
    ),
    search(
        "no length penalty",
        "score_N = ended.log_prob_N / self.penalty_T[ended.length_N]",
        "score_N = ended.log_prob_N",
    ),
    search(
        "eos not counted in the length",
        "self.penalty_T[ended.length_N]",
        "self.penalty_T[ended.length_N - 1]",
    ),
    search(
        "padding may be generated",
        "Candidates.read(top_tokens(logits_NV, constraints.never, count))",
        "Candidates.read(top_tokens(logits_NV, [], count))",
    ),
    search(
        "a prefix is cut at the length limit",
        "(self.length_N < num_forced) & (forced_N >= 0)",
        "(self.length_N < num_forced) & (forced_N >= 0) & ~is_full_N",
    ),
    search(
        "admitted sentences continue at the position of others",
        "written_NT=np.full(shape, -1)",
        "written_NT=np.full(shape, 0)",
    ),
    search(
        "admitted sentences have the beam of others",
        "(first + new_B) * width]",
        "new_B * width]",
    ),
    search(
        "indices are not renumbered when sentences leave",
        "self.rows._replace(sentence_N=local_N).join(",
        "self.rows.join(",
    ),
    search(
        "groups are admitted only when all others have ended",
        "return num_places <= (NUM_GROUPS - 1) * num_new * self.options.beam",
        "return False",
    ),
    search(
        "groups are admitted without a limit",
        "return num_places <= (NUM_GROUPS - 1) * num_new * self.options.beam",
        "return True",
    ),
    search(
        "prefix tokens have log-probability 0",
        "= log_probs_LV[np.arange(len(only_L)), only_L]",
        "= 0.0",
    ),
    search(
        "the last ngram may be repeated",
        "    if length < n:\n",
        "    if length <= n:\n",
    ),
    sampling(
        "samples have the tempered log-probabilities",
        "logits_NV.double().log_softmax(-1)",
        "(logits_NV.double() / settings.temperature).log_softmax(-1)",
    ),
    sampling(
        "temperature is multiplied instead of divided",
        "allowed_NV.double() / settings.temperature",
        "allowed_NV.double() * settings.temperature",
    ),
    sampling(
        "top_p excludes the token that reaches it",
        "sorted_NV.cumsum(-1) - sorted_NV >= settings.top_p",
        "sorted_NV.cumsum(-1) >= settings.top_p",
    ),
    sampling(
        "one random number draws all tokens",
        "uniform_NT[:, rows.written_NT.shape[1], None]",
        "uniform_NT[:, :1]",
    ),
    sampling(
        "random numbers are not reordered with their samples",
        "        rows, uniform_NT = rows.take(open_N), uniform_NT[open_N]\n",
        "        rows = rows.take(open_N)\n",
    ),
    Mutation(
        "the divergence has no gradient in the first pass",
        "mtrain/ops/consistency.py",
        "log_ratio.sub_(divergence_N1).mul_(divergence_weight)",
        "log_ratio.sub_(divergence_N1).mul_(0)",
        "tests/ops/test_consistency.py",
    ),
    Mutation(
        "the divergence is added without its weight",
        "mtrain/ops/consistency.py",
        "cross_entropy + divergence_weight * divergence_N1.sum()",
        "cross_entropy + divergence_N1.sum()",
        "tests/ops/test_consistency.py",
    ),
    Mutation(
        "the cutoff applies to the first pass, too",
        "mtrain/training/loss.py",
        "torch.ones_like(ids, dtype=torch.bool),",
        "dropout.random_keep(ids.shape, config.cutoff, ids.device),",
        "tests/training/test_loss.py",
    ),
    Mutation(
        "the result of a second search is used although it is no better",
        "mtrain/decode/pipeline.py",
        "        if best and not _repeats(sources[row], best)\n",
        "        if best\n",
        "tests/decode/test_pipeline.py",
    ),
    Mutation(
        "an interrupted translation keeps decoding",
        "mtrain/decode/pipeline.py",
        "                    block.pending.cancel()",
        "                    pass",
        "tests/decode/test_pipeline.py -k while_lines_are_yielded",
    ),
    Mutation(
        "an error discards the finished lines before it",
        "mtrain/decode/pipeline.py",
        "                except DataError as caught:",
        "                except ZeroDivisionError as caught:",
        "tests/decode/test_pipeline.py -k before_an_error",
    ),
    Mutation(
        "training imports the compiler",
        "mtrain/training/optimizer.py",
        "    step = torch.no_grad()(inspect.unwrap(AdamW.step))\n",
        "",
        "tests/training/test_optimizer.py",
    ),
    Mutation(
        "reranking without the reverse model",
        "mtrain/decode/rerank.py",
        "candidate.score + weight * reverse_score",
        "candidate.score",
        "tests/decode/test_rerank.py",
    ),
    Mutation(
        "reranked candidates that repeat themselves win",
        "mtrain/decode/pipeline.py",
        "sorted(ranked, key=partial(_flaws, part))",
        "ranked",
        "tests/decode/test_rerank.py",
    ),
    Mutation(
        "an empty candidate wins over ones that repeat themselves",
        "mtrain/decode/pipeline.py",
        "    return not target, is_loop(part.source.ids[:-1], target)\n",
        "    return False, is_loop(part.source.ids[:-1], target)\n",
        "tests/decode/test_rerank.py -k empty_ones_last",
    ),
    Mutation(
        "a loop behind an empty hypothesis is not searched again",
        "mtrain/decode/pipeline.py",
        "next((hypothesis.ids for hypothesis in best if hypothesis.ids), [])",
        "best[0].ids",
        "tests/decode/test_rerank.py -k except_empty_ones",
    ),
    Mutation(
        "copies of a candidate do not count",
        "mtrain/decode/mbr.py",
        "weights.get(candidate.text, 0.0) + weight",
        "weight",
        "tests/decode/test_mbr.py",
    ),
    Mutation(
        "ensembles mean logits",
        "mtrain/decode/translator.py",
        "torch.stack([model_logits.log_softmax(-1) for model_logits in logits])",
        "torch.stack([model_logits for model_logits in logits])",
        "tests/decode/test_ensemble.py",
    ),
    Mutation(
        "only one model of an ensemble is reordered",
        "mtrain/decode/translator.py",
        "        for state in self.states:\n            state.reorder(rows_N)\n",
        "        self.states[0].reorder(rows_N)\n",
        "tests/decode/test_ensemble.py",
    ),
    Mutation(
        "only one model of an ensemble admits new sentences",
        "mtrain/decode/translator.py",
        "zip(self.states, other.states, strict=True):\n            state.admit(new)\n",
        "zip(self.states[:1], other.states[:1], strict=True):\n            state.admit(new)\n",
        "tests/decode/test_ensemble.py",
    ),
]

TRAINING = [
    Mutation(
        "loss divided per micro-batch",
        "mtrain/training/gradients.py",
        "sums.loss / task.num_tokens,",
        "sums.loss / sums.num_tokens,",
        "tests/training/test_trainer.py -k divided_by_the_tokens",
    ),
    train(
        "gradients not cleared",
        "            optimizer.step()\n            optimizer.zero_grad(set_to_none=True)\n",
        "            optimizer.step()\n",
        "resumed_training_equals",
    ),
    train(
        "resumes at the first batch",
        "Position(progress.epoch, progress.batch)",
        "Position(progress.epoch, 0)",
        "resumed_training_equals",
    ),
    Mutation(
        "resumes without Adam's moments",
        "mtrain/training/training_state.py",
        '        self._restore_optimizer(optimizer, path / "optimizer.safetensors")\n',
        "",
        "tests/training/test_trainer.py -k resumed_training_equals",
    ),
    Mutation(
        "resumes without the random state",
        "mtrain/training/training_state.py",
        "            set_random_state(optimizer)\n",
        "            pass\n",
        "tests/training/test_trainer.py -k resumed_training_equals",
    ),
    train(
        "the worse of average and best is kept",
        "        if progress.quality(best) <= progress.quality_of(scores.loss, scores.bleu):\n",
        "        if progress.quality(best) > progress.quality_of(scores.loss, scores.bleu):\n",
        "final_weights",
    ),
    Mutation(
        "the learning rate is that of the previous update",
        "mtrain/training/trainer.py",
        "self.config.model.d_model, step, self._budget_spent())",
        "self.config.model.d_model, max(step - 1, 1), self._budget_spent())",
        "tests/training/test_schedule.py",
    ),
    Mutation(
        "gradients never clipped",
        "mtrain/training/trainer.py",
        "        if limit:\n",
        "        if False:\n",
        "tests/training/test_schedule.py",
    ),
    Mutation(
        "weight decay by default",
        "mtrain/training/training_state.py",
        "weight_decay=config.weight_decay,",
        "weight_decay=0.01,",
        "tests/training/test_schedule.py",
    ),
    Mutation(
        "warmup to the power of -1",
        "mtrain/training/schedule.py",
        "step * warmup_steps**-1.5",
        "step * warmup_steps**-1.0",
        "tests/training/test_schedule.py",
    ),
    Mutation(
        "averages weigh the last most",
        "mtrain/run/checkpoint.py",
        "total = tensor if total is None else total + tensor",
        "total = tensor * len(self._paths)",
        "tests/run/test_checkpoint.py",
    ),
]

TEXT = [
    Mutation(
        "tgt_in contains the token to predict",
        "mtrain/data/batch.py",
        "F.pad(tokens_BT, (1, 0), value=bos)",
        "F.pad(tokens_BT, (0, 1), value=bos)",
        "tests/data/test_batch.py",
    ),
    Mutation(
        "one padding position is kept",
        "mtrain/data/batch.py",
        "np.arange(max(lengths)) < np.array(lengths)[:, None]",
        "np.arange(max(lengths)) <= np.array(lengths)[:, None]",
        "tests/data/test_batch.py",
    ),
    Mutation(
        "every epoch in the same order",
        "mtrain/data/loader.py",
        "if number else [self._seed, epoch]",
        "if number else [self._seed]",
        "tests/data/test_loader.py",
    ),
    Mutation(
        "all windows of an epoch in the same order",
        "mtrain/data/loader.py",
        "[self._seed, epoch, number] if number",
        "[self._seed, epoch] if number",
        "tests/data/test_arrow_shards.py",
    ),
    Mutation(
        "a corpus of a mixture restarts in each epoch",
        "mtrain/data/mixture.py",
        "first = epoch * count + self._until(count, window)",
        "first = self._until(count, window)",
        "tests/data/test_mixture.py",
    ),
    Mutation(
        "a table is not checked against its index",
        "mtrain/data/arrow_shards.py",
        "if shard[1:] != (len(table), num_src, num_tgt):",
        "if False:",
        "tests/data/test_arrow_shards.py",
    ),
    Mutation(
        "finished parts of another text are reused",
        "mtrain/data/prepare.py",
        "marks == marks | revisions and not changed_files(_file_marks(marks))",
        "marks == marks | revisions and bool(marks)",
        "tests/data/test_encode.py",
    ),
    Mutation(
        "dropped pairs are encoded",
        "mtrain/data/encode.py",
        "np.array([reason is None for reason in reasons])",
        "np.array([True for reason in reasons])",
        "tests/data/test_encode.py",
    ),
    Mutation(
        "budget looks at sources alone",
        "mtrain/data/batch.py",
        "longer = np.maximum(src_lengths, tgt_lengths)",
        "longer = src_lengths",
        "tests/data/test_loader.py",
    ),
    Mutation(
        "sources without eos",
        "mtrain/tokenizer/sentencepiece.py",
        "[[*ids, self.src.eos] for ids in self.src.encode(lines)]",
        "self.src.encode(lines)",
        "tests/tokenizer/test_sentencepiece.py",
    ),
    Mutation(
        "lines end at U+2028 too",
        "mtrain/io/lines.py",
        "enumerate(raw_lines(stream), start=1)",
        "enumerate((part for line in raw_lines(stream) "
        "for part in line.split(b'\\xe2\\x80\\xa8')), start=1)",
        "tests/io/test_lines_and_atomic.py",
    ),
    Mutation(
        "translations in the order of length",
        "mtrain/decode/translator.py",
        "return [best[row] for row in range(num_sources)]",
        "return list(best.values())",
        "tests/decode/test_translator.py -k own_translation",
    ),
    Mutation(
        "the warning comes one token too late",
        "mtrain/decode/pipeline.py",
        "if learned is not None and length > learned:",
        "if learned is not None and length > learned + 1:",
        "tests/decode/test_pipeline.py -k learned_positions",
    ),
]

INIT = [
    Mutation(
        "pairs that share a translation with a held-out pair stay",
        "mtrain/autoconfig/split.py",
        "    is_excluded = np.isin(groups, groups[drawn]) | np.isin(others, others[drawn])",
        "    is_excluded = np.isin(groups, groups[drawn])",
        "tests/autoconfig/test_split.py",
    ),
    Mutation(
        "groups that repeat most are held out first",
        "mtrain/autoconfig/split.py",
        'np.argsort(costs[shuffled], kind="stable")',
        'np.argsort(-costs[shuffled], kind="stable")',
        "tests/autoconfig/test_split.py",
    ),
    Mutation(
        "a set may share translations with another",
        "mtrain/autoconfig/split.py",
        "            used.update(translations)\n",
        "",
        "tests/autoconfig/test_split.py",
    ),
    Mutation(
        "a short warmup reaches the full rate",
        "mtrain/autoconfig/presets.py",
        "min(batch_factor * length_factor, warmup_factor)",
        "batch_factor * length_factor",
        "tests/autoconfig/test_presets.py",
    ),
    Mutation(
        "singular values of Muon begin above 1",
        "mtrain/training/optimizer.py",
        "_MARGIN = 1.02  #",
        "_MARGIN = 1.0  #",
        "tests/training/test_muon.py",
    ),
    Mutation(
        "Muon makes two iterations",
        "mtrain/training/optimizer.py",
        "    (2.6613, -1.9772, 0.4526),\n",
        "",
        "tests/training/test_muon.py",
    ),
    Mutation(
        "the rate of Muon is the same for all lengths",
        "mtrain/autoconfig/presets.py",
        "min(batch_factor * length_factor, warmup_factor)",
        "min(batch_factor, warmup_factor)",
        "tests/autoconfig/test_presets.py",
    ),
    Mutation(
        "pairs of given sets count in the plan",
        "mtrain/autoconfig/write_config.py",
        "        is_kept &= ~has_reason\n",
        "",
        "tests/autoconfig/test_write_config.py",
    ),
]

AUDIT = [
    Mutation(
        "an offset need not fit better than unrelated lines",
        "mtrain/audit/misalignment.py",
        "- np.maximum(aligned, 0.0), window.first)",
        "- aligned, window.first)",
        "tests/audit/test_misalignment.py",
    ),
    Mutation(
        "a shift begins where its sum began to rise, even with lost lines",
        "mtrain/audit/misalignment.py",
        "first = max(self._start + min(self._offset, 0), 0)",
        "first = self._start",
        "tests/audit/test_misalignment.py",
    ),
    Mutation(
        "windows have no neighbours",
        "mtrain/audit/misalignment.py",
        "after = np.concatenate([following.tgt, edge])[:MAX_OFFSET]",
        "after = edge",
        "tests/audit/test_misalignment.py",
    ),
    Mutation(
        "a rise of the sum across windows is ignored",
        "mtrain/audit/misalignment.py",
        "for pair, nats in enumerate(evidence.tolist(), first):",
        "self._height = 0.0\n        for pair, nats in enumerate(evidence.tolist(), first):",
        "tests/audit/test_misalignment.py",
    ),
    Mutation(
        "the tokenizer of the language overrides `--tokenize`",
        "mtrain/evaluation/metrics.py",
        'if self.tokenize is not None or "bleu" not in self.metrics:',
        'if "bleu" not in self.metrics:',
        "tests/evaluation/test_metrics.py -k language",
    ),
    Mutation(
        "validation uses one tokenizer for every language",
        "mtrain/training/trainer.py",
        "bleu(hypotheses, self.valid.lines.tgt, self.config.data.tgt_lang)",
        'bleu(hypotheses, self.valid.lines.tgt, "en")',
        "tests/training/test_trainer.py -k characters",
    ),
    Mutation(
        "init accepts a header that not all files have",
        "mtrain/autoconfig/write_config.py",
        "has_header = all(headers.values())",
        "has_header = any(headers.values())",
        "tests/autoconfig/test_write_config.py -k table",
    ),
    Mutation(
        "a Chinese sentence ends only before a space",
        "mtrain/decode/formats.py",
        "if text and part.text and not _CJK_END.search(text, max(len(text) - _MAX_END, 0)):",
        "if text and part.text:",
        "tests/decode/test_formats_and_flags.py",
    ),
    Mutation(
        "repeated pairs are compared by source only",
        "mtrain/audit/duplicates.py",
        "is_new_pair = is_new_src | differs_from_previous(tgt)",
        "is_new_pair = is_new_src",
        "tests/audit/test_duplicates.py",
    ),
    Mutation(
        "blank lines leak",
        "mtrain/audit/duplicates.py",
        "& (hashes != 0)",
        "& (hashes == hashes)",
        "tests/audit/test_duplicates.py",
    ),
    Mutation(
        "the last leak is called the first",
        "mtrain/audit/duplicates.py",
        "np.flatnonzero(is_hit)[::-1]",
        "np.flatnonzero(is_hit)",
        "tests/audit/test_duplicates.py",
    ),
    Mutation(
        "keys keep case",
        "mtrain/audit/features.py",
        "_scrambled(folded(block.codes[places]).astype(np.uint64)",
        "_scrambled(block.codes[places].astype(np.uint64)",
        "tests/audit/test_features.py",
    ),
    Mutation(
        "keys ignore the order of letters",
        "mtrain/audit/features.py",
        "_sums(values * _POWERS[np.arange(len(places)) - firsts[block.lines[places]]], firsts)",
        "_sums(values * _POWERS[0], firsts)",
        "tests/audit/test_features.py",
    ),
    Mutation(
        "sides count as swapped by one side alone",
        "mtrain/audit/rules.py",
        "by_words = (like_tgt > _SIDE_NATS) & (like_src > _SIDE_NATS)",
        "by_words = like_tgt > _SIDE_NATS",
        "tests/audit/test_rules.py",
    ),
    Mutation(
        "validation text is not searched in the training text",
        "mtrain/audit/scan.py",
        "scans if name in (VALID, TRAIN)",
        "scans[:-1] if name in (VALID, TRAIN)",
        "tests/audit/test_audit.py -k planted_defect",
    ),
    Mutation(
        "an audit stops where the shorter file ends",
        "mtrain/corpus/reader.py",
        "            if src is not None and tgt is not None:  # the longer file is only counted",
        "            if src is None or tgt is None:\n                break\n            else:",
        "tests/corpus/test_reader.py",
    ),
    Mutation(
        "a header counts as a pair",
        "mtrain/corpus/formats.py",
        "islice(raw_lines(stream), int(corpus.header is True), None)",
        "islice(raw_lines(stream), None)",
        "tests/corpus/test_formats.py -k header",
    ),
    Mutation(
        "a split whose copies are dropped is no warning",
        "mtrain/audit/audit.py",
        "if _SPLIT_LEAK_SHARE * len(leak.times) < num_found < np.count_nonzero(scan.exact.pair):",
        "if len(leak.times) < num_found < np.count_nonzero(scan.exact.pair):",
        "tests/audit/test_audit.py -k split_that_leaks",
    ),
    Mutation(
        "a side beside another one leaks only if its pair does not",
        "mtrain/audit/audit.py",
        "times = of_side[0] - pair[0]",
        "times = of_side[0] * (pair[0] == 0)",
        "tests/audit/test_audit.py -k source_leaks",
    ),
    Mutation(
        "the page begins with its first findings, whatever they cost",
        "mtrain/audit/report.py",
        "return -self.severity, -self.share if self.list_file else 0.0",
        "return -self.severity, 0.0",
        "tests/audit/test_audit.py -k summary",
    ),
    Mutation(
        "notes fail a strict check",
        "mtrain/cli/verbs/check.py",
        "if errors or (strict and warnings):",
        "if errors or (strict and report.findings):",
        "tests/audit/test_audit.py -k strict",
    ),
]

DATA_PARALLEL = [
    data_parallel(
        "the exchange is taken for a sum over the ranks",
        "update.num_tokens / (scale * size)",
        "update.num_tokens / scale",
        "gradient_of_an_update_equals",
    ),
    data_parallel(
        "filler batches of a rank count",
        "math.inf if micro_batch.is_dummy else num_tokens",
        "num_tokens",
        "gradient_of_an_update_equals",
    ),
    data_parallel(
        "all ranks drop the same elements",
        ".tolist()[rank::size]",
        ".tolist()[: len(update.micro_batches)]",
        "training_on_several_ranks_equals_one_process",
    ),
    data_parallel(
        "a rank ignores that another one is out of memory",
        "self.process_group.all_reduce_min(self.oom_size)",
        "self.oom_size",
        "one_rank_out_of_memory",
    ),
    data_parallel(
        "gradients are always exchanged in float32",
        "torch.bfloat16 if exchange",
        "torch.float32 if exchange",
        "exchanged_in_bfloat16",
    ),
    data_parallel(
        "gradients are always exchanged in bfloat16",
        'if exchange == "bfloat16" else None',
        "if exchange else None",
        "gradient_of_an_update_equals",
    ),
]

CHECKPOINTS = [
    manager(
        "the first checkpoints are kept instead of the last",
        "regular[-self.config.keep_last :]",
        "regular[: self.config.keep_last]",
        "checkpoints_are_kept",
    ),
    manager(
        "the best checkpoints are not kept",
        "best[: self.config.keep_best]",
        "best[:0]",
        "checkpoints_are_kept",
    ),
    manager(
        "nothing is saved between validations",
        "return (every is not None and step % every == 0) or str(step)",
        "return str(step)",
        "saved_between_validations",
    ),
    manager(
        "the last are averaged when the best are asked for",
        'self.config.average_of == "last"',
        "self.config.average_of",
        "average_can_be_of_the_best",
    ),
    manager(
        "the checkpoint of a stop replaces a regular one",
        "regular = [step for step in saved if self.is_due(step, progress)]",
        "regular = [*saved]",
        "stop_between_checkpoint_steps",
    ),
    manager(
        "damaged checkpoints are averaged",
        "                checkpoint.check(path)\n",
        "",
        "damaged_checkpoint_is_left_out",
    ),
    Mutation(
        "checkpoints of another model are accepted",
        "mtrain/data/prepare.py",
        "if value != getattr(old.model, key) and",
        "if value is None and",
        "tests/training/test_trainer.py -k changed_model_config_is_refused",
    ),
    manager(
        "final weights of fewer steps count as those of more",
        "info.last_step == step",
        "info.last_step > 0",
        "raised_max_steps_does_not_leave",
    ),
]

CONFIG = [
    config("config_file", "a repeated key is accepted", "if key in seen:", "if False:"),
    config("config_file", "YAML tags are accepted", "if tag is not None:", "if False:"),
    config(
        "config_file", "integers of any size are accepted", "abs(value) >= 2**64", "value == ''"
    ),
    config("config_file", "the text no is read as false", '(":bool", ":int",', '(":int",'),
    config("config_file", "1:30 is read as a number", '":int", ":float",', '":float",'),
    config(
        "config_file",
        "a wrong value is named before an unknown key",
        '!= "extra_forbidden")',
        '== "extra_forbidden")',
    ),
    config(
        "config_file",
        "the run folder of the file overrides that of the command line",
        "    if run_dir is not None:\n",
        '    if run_dir is not None and "run_dir" not in changed:\n',
    ),
    config("corpora", "unknown keys are accepted", 'extra="forbid"', 'extra="ignore"'),
    config("corpora", "text is accepted as a number", "strict=True", "strict=False"),
    config("corpora", "infinity is accepted", "allow_inf_nan=False", "allow_inf_nan=True"),
    config(
        "corpora",
        "sources may have fewer files than targets",
        "len(self.src) != len(self.tgt)",
        "len(self.src) > len(self.tgt)",
    ),
    Mutation(
        "columns count from 0",
        "mtrain/config/corpora.py",
        "== 2 <= 1 + min(columns)",
        "== 2",
        "tests/corpus/test_formats.py -k an_invalid_corpus_section",
    ),
]

EVALUATION = [
    metrics(
        "chrF++ counts single words alone",
        'word_order = 2 if name == "chrf++"',
        "word_order = 1 if name",
    ),
    metrics("BLEU is case-sensitive with --lowercase", "BLEU(options.lowercase,", "BLEU(False,"),
    metrics(
        "chrF is case-sensitive with --lowercase", "lowercase=options.lowercase", "lowercase=False"
    ),
    metrics("COMET is shown as if it were a percentage", "{4 if metric", "{2 if metric"),
    metrics(
        "an interval is shown at half its width",
        "signature, mean, half_width, verbose)",
        "signature, mean, (half_width or 0.0) / 2, verbose)",
    ),
    metrics(
        "the score is the mean of the resampled test sets",
        "float(result.score), signature",
        "float(mean or result.score), signature",
    ),
    metrics(
        "any number of resamples is accepted",
        "if self.num_resamples and not _LEAST_RESAMPLES <= self.num_resamples <=",
        "if self.num_resamples and not 0 <= self.num_resamples <=",
    ),
]

EXPORTS = [
    export(
        "exporter",
        "sines and cosines stay interleaved in an export",
        "[*range(0, d_model, 2), *range(1, d_model, 2)]",
        "[*range(d_model)]",
    ),
    export(
        "huggingface",
        "embeddings are not scaled",
        '"scale_embedding": True',
        '"scale_embedding": False',
    ),
    export(
        "huggingface",
        "transformers may generate padding",
        '"suppress_tokens": tgt.never_generated',
        '"suppress_tokens": tgt.never_generated[1:]',
    ),
    export(
        "huggingface",
        "the text </s> is encoded as eos",
        '"split_special_tokens": True',
        '"split_special_tokens": False',
    ),
    export(
        "ctranslate2",
        "embeddings are exported unscaled",
        "scale_embeddings = True",
        "scale_embeddings = False",
    ),
    export(
        "ctranslate2",
        "the eps of the norms is the library's",
        "layer_norm_epsilon = 1e-5",
        "layer_norm_epsilon = 1e-3",
    ),
    export(
        "ctranslate2",
        "CTranslate2 has too few positions",
        "_fill(spec, model, longest(config, MIN_POSITIONS), ",
        "_fill(spec, model, longest(config, 0) - config.decoding.max_extra_tokens, ",
    ),
    export(
        "huggingface",
        "transformers has too few positions",
        "limit, sizes = longest(config, MIN_POSITIONS), model.config",
        "limit, sizes = longest(config, 0) - config.decoding.max_extra_tokens, model.config",
    ),
    export(
        "ctranslate2",
        "padding and bos are not excluded in an export",
        "bias[masked_ids] = MASKED_BIAS",
        "bias[masked_ids] = 0",
    ),
    export(
        "ctranslate2",
        "the final norms are not exported",
        "norms.insert(1, layer.attention.layer_norm)",
        "norms.insert(0, layer.attention.layer_norm)",
    ),
    export(
        "ctranslate2",
        "a shortlist is scored without it",
        "use_vmap=self._use_vmap",
        "use_vmap=False",
    ),
    export("parity", "NaN compares as equal", 'else float("inf")', "else 0.0"),
    export("parity", "the nearest reference is compared", "worst = max(range", "worst = min(range"),
    export(
        "parity",
        "scores of beams are not compared",
        "not self.beam_diff <= self.beam_tolerance",
        "self.beam_diff != self.beam_diff",
    ),
    export(
        "export",
        "a copy that differs is kept",
        "if request.quantization is None else",
        "if False else",
    ),
    export(
        "export",
        "an export of other weights is used again",
        "stored.weights != sha256_if_readable(run.model_path)",
        "stored.weights == 0",
    ),
    export(
        "marian",
        "targets begin with zeros instead of bos",
        'state[f"{name}output.bias"] += added_D',
        "pass",
        "marian",
    ),
    export(
        "marian",
        "Marian is compared at the wavelengths of the paper",
        "(d_model / 2 - 1)",
        "(d_model / 2)",
        "marian",
    ),
    export(
        "marian",
        "Marian may generate padding",
        "bias[0, tgt.never_generated]",
        "bias[0, tgt.never_generated[1:]]",
        "marian",
    ),
    export(
        "argos",
        "a package has its files at the top level",
        'f"{top}/{file.relative_to',
        'f"{file.relative_to',
        "argos",
    ),
    export(
        "parity",
        "text of the library's own call is not compared",
        "and self.own_call.same is not None",
        "and False",
        "argos",
    ),
    onnx(
        "onnx_graphs",
        "the graph of the decoder sees later targets",
        "keep = behind >= 0",
        "keep = behind == behind",
        ".py -k every_variant",
    ),
    onnx(
        "onnx_graphs",
        "positions restart after a cache",
        "position_T = torch.arange(num_new) + num_past",
        "position_T = torch.arange(num_new) + 0 * num_past",
        ".py -k every_variant",
    ),
    onnx(
        "onnx_graphs",
        "the graph of the decoder attends to padding",
        "src_keep = encoder_attention_mask[:, None, None, :] != 0",
        "src_keep = encoder_attention_mask[:, None, None, :] >= 0",
        ".py -k every_variant",
    ),
    onnx(
        "onnx_graphs",
        "the window of the graph of the decoder is one shorter",
        "behind <= config.attention_window",
        "behind < config.attention_window",
        ".py -k every_variant",
    ),
    onnx(
        "onnx_graphs",
        "each step projects the whole source",
        "encoder_hidden_states[:, cache[2].shape[2] :]",
        "encoder_hidden_states",
        ".py -k one_decoder",
    ),
    onnx(
        "onnx_graphs",
        "two products of 8 bits overflow in 16",
        "_MAX_INT8 = 63",
        "_MAX_INT8 = 127",
        ".py -k int8_weights_are_near",
    ),
    onnx(
        "onnx_graphs",
        "a matrix that is tied is stored twice",
        "do_constant_folding=False",
        "do_constant_folding=True",
        ".py -k int8_weights_are_near",
    ),
    onnx(
        "onnx",
        "transformers.js may generate padding",
        '"suppress_tokens": tgt.never_generated',
        '"suppress_tokens": tgt.never_generated[1:]',
        ".py -k files_and_settings_that_transformers_js_reads",
    ),
    onnx(
        "onnx",
        "the limit for transformers.js leaves no room for bos",
        "decoding.max_extra_tokens + 2",
        "decoding.max_extra_tokens + 1",
        ".py -k files_and_settings_that_transformers_js_reads",
    ),
    onnx(
        "tokenizer_json",
        "BPE merges are applied in reverse order of rank",
        "key=lambda piece: -scores[piece]",
        "key=lambda piece: scores[piece]",
        ".py -k thousands",
    ),
    onnx(
        "tokenizer_json",
        "the name of a special piece in a text is encoded as that piece",
        "vocab.append((_SPACE + piece, unlikely))",
        "vocab.append((piece, unlikely))",
        ".py -k special_pieces_in_a_text",
    ),
    onnx(
        "tokenizer_json",
        "the name of a tag in a text is encoded as that tag",
        "special.union(vocabulary.byte_pieces, vocabulary.tags.values())",
        "special.union(vocabulary.byte_pieces)",
        ".py -k special_pieces_in_a_text",
    ),
    onnx(
        "onnx_page",
        "a page with another model is the same version",
        "for name in files))",
        "for name in names))",
        "_page.py -k another_version",
    ),
]

INTERFACE = " ".join(
    f"tests/serve/test_interface.py::test_{name}"
    for name in (
        "a_pair_without_its_own_run_is_translated_through_a_pivot_that_is_named",
        "blank_text_has_no_alternatives",
        "an_unescaped_form_is_read_as_utf_8",
        "a_client_over_its_rate_limit_gets_429_with_retry_after",
    )
)
HTML = "tests/serve/test_html_text.py"
SERVE = [
    Mutation(
        "a pivot language is not reported",
        "mtrain/serve/translation.py",
        "pivot = models[0].config.data.tgt_lang if len(models) > 1 else None",
        "pivot = None",
        INTERFACE,
    ),
    Mutation(
        "an alternative may repeat the translation",
        "mtrain/serve/translation.py",
        "if text not in texts:",
        "if True:",
        INTERFACE,
    ),
    Mutation(
        "a form is read as Latin-1",
        "mtrain/serve/fields.py",
        '.decode("utf-8", "replace")',
        '.decode("latin-1")',
        INTERFACE,
    ),
    Mutation(
        "clients have no rate limit",
        "mtrain/serve/rate_limit.py",
        "is_allowed = tokens >= 1",
        "is_allowed = True",
        INTERFACE,
    ),
    Mutation(
        "request bodies have no size limit",
        "mtrain/serve/middleware.py",
        "if num_bytes > limit:",
        "if num_bytes < 0:",
        "tests/serve/test_hostile_requests.py -k too_large",
    ),
    Mutation(
        "code in a page is translated",
        "mtrain/serve/html_text.py",
        "if not is_end and name in _RAW:",
        "if is_end and name in _RAW:",
        HTML,
    ),
    Mutation(
        "text marked translate='no' is translated",
        "mtrain/serve/html_text.py",
        "return token.name in _UNTRANSLATED or _is_marked(token.raw)",
        "return token.name in _UNTRANSLATED",
        HTML,
    ),
    Mutation(
        "an unsupported prefix is ignored",
        "mtrain/serve/fields.py",
        "if request.prefixes is not None and not translations.has_prefixes:",
        "if request.prefixes is None and not translations.has_prefixes:",
        "tests/serve/test_server.py -k ctranslate2",
    ),
]

MUTATIONS = [
    *MODEL,
    *KERNELS,
    *SEARCH,
    *TRAINING,
    *DATA_PARALLEL,
    *CHECKPOINTS,
    *CONFIG,
    *TEXT,
    *AUDIT,
    *INIT,
    *EVALUATION,
    *EXPORTS,
    *SERVE,
]


def mutated(mutation: Mutation, text: str) -> str:
    """Return the text of the file with the mutation in it."""
    count = text.count(mutation.old)
    assert count == 1, (
        f"{mutation.name}: its text stands {count} times in {mutation.file}, not once"
    )
    assert mutation.new != mutation.old, f"{mutation.name}: changes nothing"
    return text.replace(mutation.old, mutation.new)


def copy_to(directory: Path) -> None:
    """Copy what the tests need."""
    for name in COPIED:
        source, target = REPOSITORY / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def run(directory: Path, tests: str) -> Outcome:
    """Run tests in the copy, up to the first that fails."""
    flags = ["-x", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",  # a stale cache would hide a mutation of the same size
    }
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests.split()],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = re.search(r"^FAILED (\S+)", result.stdout, flags=re.MULTILINE)
    return Outcome(result.returncode, found[1] if found else "")


def check_copy(directory: Path, mutations: list[Mutation]) -> None:
    """Stop unless the copy is what is imported there, and passes the tests as it is."""
    where = subprocess.run(
        [sys.executable, "-c", "import mtrain; print(mtrain.__file__)"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(directory), where.stdout
    for tests in dict.fromkeys(mutation.tests for mutation in mutations):
        print(f"without any mutation: pytest {tests}", file=sys.stderr, flush=True)
        outcome = run(directory, tests)
        if outcome.code != 0:
            sys.exit(f"without any mutation, `pytest {tests}` fails: {outcome.first_failure}")


def compile_in(directory: Path) -> None:
    """Compile the C of the copy for the instruction set in use; older libraries stay."""
    code = f"import build; build.update(names=[{native.library().instruction_set!r}])"
    ops_dir = directory / "mtrain" / "ops"
    subprocess.run([sys.executable, "-c", code], cwd=ops_dir, check=True)


def judge(directory: Path, mutation: Mutation) -> str:
    """Return the first test that notices the mutation, or nothing."""
    path = directory / mutation.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutation, whole), encoding="utf-8")
    try:
        if path.suffix == ".c":
            compile_in(directory)
        outcome = run(directory, mutation.tests)
        return outcome.first_failure or (f"pytest ends with {outcome.code}" * (outcome.code != 0))
    except subprocess.TimeoutExpired:
        print(f"{mutation.name}: the tests take longer than {TIMEOUT_S} s", file=sys.stderr)
        return ""
    finally:
        path.write_text(whole, encoding="utf-8")


def main(names: list[str]) -> int:
    """Print a table of the named mutations, or of all; return the exit code."""
    if unknown := set(names) - {mutation.name for mutation in MUTATIONS}:
        print(f"no such mutation: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        copy_to(directory)
        check_copy(directory, chosen)
        print("| mutation | file | first test that fails |\n| --- | --- | --- |")
        for mutation in chosen:
            noticed = judge(directory, mutation)
            survivors += not noticed
            shown = f"`{noticed.removeprefix('tests/')}`" if noticed else "**none: it survives**"
            print(f"| {mutation.name} | `{Path(mutation.file).name}` | {shown} |", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} are noticed", file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
