"""Linear maps, the loss over a vocabulary and the likeliest of it: all that multiplies by weights,
each equal to a plain formula of PyTorch.

They know tensors and nothing of the model. Products run in the type of the states, and sums of
gradients stay in the type of the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrain.errors import ConfigError
from mtrain.ops.native import Functions, functions_for, processor_has

_ROUND_ROWS = 128  # short products have a multiple of this many rows
_CHUNK_TOKENS = 512  # tokens whose logits the loss holds at once
Formula = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]


class Linear(nn.Linear):
    """`nn.Linear` in the type of its input, whatever the type of its weights."""

    _panels: Tensor | None = None
    _laid_out = (0, 0)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input @ weight.T + bias` in the type of `input`."""
        if torch.is_grad_enabled():  # to lay out weights pays for many rows, and decoding has few
            functions = self.functions_for(input)
            result = None if functions is None else self.forward_compiled(input, functions)
        else:
            result = self.forward_laid_out(input)
        return self._forward_plain(input) if result is None else result

    def _forward_plain(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        if input.device.type != "cpu":
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return F.linear(input, self.weight.to(input.dtype), bias)
        result: Tensor = _ShortLinear.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias
        )
        return result

    def functions_for(self, x: Tensor) -> Functions | None:
        """Return the compiled functions, if they multiply such states by these weights."""
        functions = _compiled_products(x, self.weight)
        if functions is None or self.out_features % functions.numbers_of_a_word():
            return None
        return functions

    def forward_compiled(
        self, x: Tensor, functions: Functions, rectifies: bool = False, is_rectified: bool = False
    ) -> Tensor:
        """Return `x @ weight.T + bias`, or the greater of this and 0 if this `rectifies`.

        The gradients of zeros are stopped where they are read, by a map whose `x` `is_rectified`.
        """
        result: Tensor = _CompiledLinear.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, functions, rectifies, is_rectified
        )
        return result

    def forward_laid_out(
        self, input: Tensor, rectifies: bool = False, is_rectified: bool = False
    ) -> Tensor | None:
        """Return the same as `forward_compiled`, if weights are laid out for such an input.

        What `is_rectified` is mostly zeros, once a model has learned: they are skipped. That map
        does not rectify in turn.
        """
        panels = self._panels_for(input)
        functions = None if panels is None else functions_for(input)
        if functions is None:
            return None
        x = input.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        tensors, sizes = (x, panels, self.bias, out), _sizes(x, self.weight)
        if is_rectified:
            functions.call("project_sparse", tensors, *sizes)
        else:
            functions.call("project", tensors, *sizes, rectifies)
        return out

    def lay_out(self) -> None:
        """Lay out a copy of the weights as compiled functions read them, until they change.

        Nothing else changes; where no gradient is wanted, one thread multiplies faster by far.
        """
        functions = functions_for(self.weight, is_training=True)
        if functions is None or functions.store != "float":
            return
        self._panels = _in_panels(self.weight.detach(), functions)
        self._laid_out = self._state()

    def _panels_for(self, x: Tensor) -> Tensor | None:
        """Return the weights as they were laid out, if they are still the same."""
        panels = self._panels
        if panels is None or panels.dtype != x.dtype or self._laid_out != self._state():
            return None
        return panels

    def _state(self) -> tuple[int, int]:
        """Return what is another once the weights change."""
        weight = self.weight
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def rectified(x: Tensor, inner: Linear, outer: Linear) -> Tensor:
    """Return outer(max(0, inner(x)))."""
    if torch.is_grad_enabled():
        functions = None if outer.functions_for(x) is None else inner.functions_for(x)
        if functions is not None:
            hidden = inner.forward_compiled(x, functions, rectifies=True)
            return outer.forward_compiled(hidden, functions, is_rectified=True)
    else:
        laid_out = inner.forward_laid_out(x, rectifies=True)
        result = None if laid_out is None else outer.forward_laid_out(laid_out, is_rectified=True)
        if result is not None:
            return result
    plain: Tensor = outer(F.relu(inner(x)))
    return plain


class _CompiledLinear(torch.autograd.Function):
    """A linear map with weights in float32, in one call each way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        functions: Functions,
        rectifies: bool,
        is_rectified: bool,
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out = x.new_empty((*x.shape[:-1], len(weight)))
        functions.call("linear", (x, weight, bias, out), *_sizes(x, weight), rectifies)
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.functions = bias is not None, functions
        ctx.is_rectified = is_rectified
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        grad_bias = weight.new_empty(len(weight)) if ctx.has_bias else None
        tensors = (grad.contiguous(), x, weight, grad_x, grad_weight, grad_bias)
        ctx.functions.call("linear_grad", tensors, *_sizes(x, weight), ctx.is_rectified)
        return grad_x, grad_weight, grad_bias, None, None, None


class _ShortLinear(torch.autograd.Function):
    """A linear map in the type of its input; the gradients of its weights are as long as they.

    For a CPU, whose library wants its rows filled up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows, short_weight = _fill_rows(flat), weight.to(x.dtype)
        ctx.save_for_backward(rows, short_weight)
        ctx.bias_dtype, ctx.weight_dtype = bias.dtype if bias is not None else None, weight.dtype
        out = F.linear(rows, short_weight, None if bias is None else bias.to(x.dtype))
        return out[: len(flat)].view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, short_weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        filled = _fill_rows(flat)
        grad_x = torch.mm(filled, short_weight)[: len(flat)].view(*grad.shape[:-1], rows.shape[1])
        grad_weight = torch.mm(filled.t(), rows).to(ctx.weight_dtype)
        grad_bias = None if ctx.bias_dtype is None else flat.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def _compiled_products(x: Tensor, weight: Tensor) -> Functions | None:
    """Return the compiled functions, if they multiply these tensors, and faster than PyTorch."""
    functions = functions_for(x, is_training=True)
    if functions is None or not functions.multiply() or weight.dtype != torch.float32:
        return None
    if x.dtype == torch.bfloat16 and processor_has("amx_tile"):
        return None
    return None if x.shape[-1] % functions.numbers_of_a_word() else functions


def _in_panels(words_MK: Tensor, functions: Functions) -> Tensor:
    """Return rows of words as compiled functions read them: those of a panel side by side."""
    width = functions.panel_width()
    filled = F.pad(words_MK, (0, 0, 0, -len(words_MK) % width))
    return filled.view(-1, width, words_MK.shape[1]).transpose(1, 2).contiguous()


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return the rows of `x`, and how wide each is before and after."""
    return x.numel() // x.shape[-1], x.shape[-1], len(weight)


class Projection(Linear):
    """A linear map onto a vocabulary, of which the likeliest pieces may be all that is wanted.

    Attributes:
        cross_entropy: the formula of the loss of its logits.
    """

    _rounded: _Rounded | None = None

    def __init__(self, num_features: int, num_pieces: int) -> None:
        super().__init__(num_features, num_pieces, bias=False)
        self.cross_entropy: Formula = plain_cross_entropy

    def lay_out(self) -> None:
        """Lay out a copy of the weights, and one in bfloat16 where that multiplies faster."""
        super().lay_out()
        short = self.weight.detach().bfloat16()
        functions = functions_for(short, is_training=True)
        self._rounded = None
        if functions is None or not functions.multiply() or self.in_features % 2:
            return
        margins_V = self.weight.detach().norm(dim=1) * _rounding(self.in_features)
        if margins_V.isfinite().all():
            panels = _in_panels(short.view(torch.int32), functions)
            self._rounded = _Rounded(panels, margins_V)

    def logits(self, states_ND: Tensor) -> Logits:
        """Return logits [N, V] in the type of the weights; `Projected` if those are laid out."""
        panels = self._panels_for(states_ND)
        if panels is None:
            logits_NV: Tensor = self(states_ND).to(self.weight.dtype)
            return logits_NV
        return Projected(states_ND.contiguous(), self, panels, self._rounded)


class _Rounded(NamedTuple):
    """Weights in bfloat16, as compiled functions read them.

    Attributes:
        panels: the weights.
        margins_V: how far the product of such a row and a state in bfloat16 may be from the exact
            one, for a state of length 1.
    """

    panels: Tensor
    margins_V: Tensor


def _rounding(num_features: int) -> float:
    """Return how far a sum of rounded products may be from the exact one, as a share.

    The share is of the product of both lengths. A number in bfloat16 is at most 2^-8 of itself
    away from what was rounded, and each sum in float 2^-24; a little is added for the lengths.
    """
    return 1.001 * (2**-7 + 2**-16 + (num_features + 2) * 2**-23)


@dataclass(frozen=True)
class Projected:
    """Logits [N, V] that are multiplied out where they are asked for: `logits[rows]`."""

    states_ND: Tensor
    projection: Projection
    panels: Tensor
    rounded: _Rounded | None

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return the logits of some rows."""
        logits: Tensor = self.projection(self.states_ND[rows])
        return logits


Logits = Tensor | Projected


class TopPieces(NamedTuple):
    """The best pieces of each row, best first, and their log-probabilities."""

    ids_NC: Tensor
    log_prob_NC: Tensor


def top_pieces(logits_NV: Logits, never: list[int], count: int) -> TopPieces:
    """Return the `count` likeliest pieces of each row, apart from those that are never written.

    The log-probabilities are over the whole vocabulary, those never written too.
    """
    inputs: tuple[Tensor, ...]
    if isinstance(logits_NV, Projected):
        name, inputs = "project_top_pieces", (logits_NV.states_ND, logits_NV.panels)
        sizes = (*logits_NV.states_ND.shape, logits_NV.projection.out_features)
    else:
        name, inputs, sizes = "top_pieces", (logits_NV.contiguous(),), logits_NV.shape
    count = min(count, sizes[-1] - len(never))
    functions = functions_for(inputs[0]) if count else None  # compiled, they look at the best
    if functions is not None:
        banned = torch.tensor(never, dtype=torch.int64)
        ids_NC = banned.new_empty((sizes[0], count))
        log_prob_NC = torch.empty((sizes[0], count))
        tensors = (*inputs, banned, ids_NC, log_prob_NC)
        functions.call(name, tensors, *sizes, len(never), count)
        return TopPieces(ids_NC, log_prob_NC)
    logits_NV = logits_NV[:]
    log_total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    allowed_NV = logits_NV.clone()
    for index in never:  # a list of them would be copied to a GPU, which waits
        allowed_NV[:, index] = -torch.inf
    top_NC, ids_NC = allowed_NV.topk(count, dim=-1)
    return TopPieces(ids_NC, top_NC - log_total_N1)


def likeliest(logits_NV: Logits, never: list[int]) -> Tensor:
    """Return the likeliest piece [N, 1] of each row, apart from those that are never written.

    It is -1 where there is none, as the logits are no numbers.
    """
    if isinstance(logits_NV, Projected) and logits_NV.rounded is not None:
        states_ND, weight_VD = logits_NV.states_ND, logits_NV.projection.weight
        functions = functions_for(states_ND)
        if functions is not None and weight_VD.is_contiguous():
            banned = torch.tensor(never, dtype=torch.int64)
            ids_N1 = banned.new_empty((len(states_ND), 1))
            tensors = (states_ND, weight_VD, *logits_NV.rounded, banned, ids_N1)
            functions.call("project_likeliest", tensors, *_sizes(states_ND, weight_VD), len(never))
            return ids_N1
    top = top_pieces(logits_NV, never, 1)
    return torch.where(top.log_prob_NC.isfinite(), top.ids_NC, -1)


def lay_out(model: nn.Module) -> None:
    """Lay out the weights of a model's linear maps for decoding; a copy of them."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.lay_out()


def quantize_int8(model: nn.Module) -> None:
    """Keep 8 bits of each weight of a model's linear maps, and of what they read; CPU only.

    Each output of a map has a scale, and each row that it reads: no row depends on another.

    Raises:
        ConfigError: if torchao, which does it, is not installed.
    """
    logging.disable(logging.WARNING)  # the library warns of what it lacks for GPUs
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError:
        raise ConfigError(
            "`--quantize int8` must have torchao: pip install 'mtrain[int8]' adds it."
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    quantize_(
        model, Int8DynamicActivationInt8WeightConfig(), lambda module, _: isinstance(module, Linear)
    )


def _fill_rows(rows: Tensor) -> Tensor:
    """Fill rows up with zeros to a multiple of `_ROUND_ROWS`.

    A CPU's library compiles a short product anew for each number of rows, and batches have many.
    """
    missing = -len(rows) % _ROUND_ROWS
    if not missing or rows.device.type != "cpu":
        return rows
    filled = rows.new_empty((len(rows) + missing, rows.shape[1]))
    filled[: len(rows)] = rows
    filled[len(rows) :] = 0
    return filled


class ProjectedCrossEntropy(torch.autograd.Function):
    """Output projection and label-smoothed cross-entropy, a chunk of tokens at a time.

    The gradient is made in the forward pass, so that the logits of a whole batch never exist.
    `apply(states_ND, weight_VD, targets_N, smoothing, formula)` returns (loss, nll), two sums over
    the N tokens in float64; only the first carries a gradient. Products run in the type of the
    states; `formula` may stand for `plain_cross_entropy`.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        smoothing: float,
        formula: Formula | None = None,
    ) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(2, dtype=torch.float64, device=states.device)
        with_grad = any(ctx.needs_input_grad)
        grads = _projected(states, weight, targets, smoothing, with_grad, sums, formula)
        ctx.save_for_backward(*grads)
        loss, nll = sums[0], sums[1]
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        grad_states, grad_weight = ctx.saved_tensors
        factor = grad.to(grad_weight.dtype)  # of no dimension, so that the states keep their type
        return grad_states * factor, grad_weight * factor, None, None, None


def _projected(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    smoothing: float,
    with_grad: bool,
    sums: Tensor,
    formula: Formula | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Add loss and nll to `sums`; return the gradients of states and weight, if they are wanted."""
    functions = _compiled_products(states, weight)
    if functions is not None:
        states, weight = states.contiguous(), weight.contiguous()
        grads = (torch.empty_like(states), torch.empty_like(weight)) if with_grad else (None, None)
        tensors = (states, weight, targets.contiguous(), *grads)
        sizes = _sizes(states, weight)
        functions.call("projected_cross_entropy", tensors, *sizes, smoothing, sums.data_ptr())
        return grads
    rows = _fill_rows(states) if states.dtype == torch.bfloat16 else states
    short_weight = weight.to(states.dtype)
    grad_rows = torch.empty_like(rows) if with_grad else None
    grad_weight = torch.zeros_like(weight) if with_grad else None
    chunk = _CHUNK_TOKENS if states.device.type == "cpu" else 16 * _CHUNK_TOKENS
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        logits = torch.mm(rows[part], short_weight.t())
        wanted = targets[part]
        _cross_entropy(logits[: len(wanted)], wanted, smoothing, with_grad, sums, formula)
        if grad_rows is not None and grad_weight is not None:
            torch.mm(logits, short_weight, out=grad_rows[part])
            grad_weight += torch.mm(logits.t(), rows[part])
    return grad_rows[: len(states)] if grad_rows is not None else None, grad_weight


def _cross_entropy(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    with_grad: bool,
    sums: Tensor,
    formula: Formula | None = None,
) -> None:
    """Turn logits [N, V] into the gradient of their loss, in place; add loss and nll to `sums`."""
    functions = functions_for(logits, is_training=True)
    if functions is not None:
        tensors = (logits, targets.contiguous())
        shape = (*logits.shape, logits.stride(0), smoothing, int(with_grad))
        functions.call("cross_entropy", tensors, *shape, sums.data_ptr())
        return
    added, grad = (formula or plain_cross_entropy)(logits, targets, smoothing, with_grad)
    sums += added
    if grad is not None:
        logits.copy_(grad)


def plain_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: float, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sums (loss, nll) over N rows of logits [N, V], and the gradient of the loss."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wanted = targets[:, None]
    log_probs = wide.log_softmax(-1)
    nll = -log_probs.gather(-1, wanted).sum()
    uniform = -log_probs.mean(-1).sum()
    sums = torch.stack([(1 - smoothing) * nll + smoothing * uniform, nll])
    if not with_grad:
        return sums, None
    grad = log_probs.exp_().sub_(smoothing / logits.shape[1])
    is_wanted = torch.arange(logits.shape[1], device=logits.device) == wanted
    return sums, grad.add_(is_wanted, alpha=smoothing - 1).to(logits.dtype)
