"""The loss equals torch's cross-entropy over the kept tokens."""

import pytest
import torch
import torch.nn.functional as F
from builders import left_keep, model_config, transformer
from torch import Tensor

from mtrain.config.sections import ConsistencyConfig, TrainingConfig
from mtrain.data.batch import Batch
from mtrain.model.transformer import Transformer
from mtrain.ops import dropout
from mtrain.ops.dropout import dropout_seeds
from mtrain.training.loss import LossSum, label_smoothed, loss_of

NUM_PIECES, D_MODEL = 9, 5


def problem(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    keep_BT = left_keep(lengths)
    states_BTD = torch.randn(*keep_BT.shape, D_MODEL, generator=rng, dtype=torch.float64)
    weight_VD = torch.randn(NUM_PIECES, D_MODEL, generator=rng, dtype=torch.float64)
    tgt_out_BT = torch.randint(NUM_PIECES, keep_BT.shape, generator=rng)
    return states_BTD.requires_grad_(), weight_VD.requires_grad_(), tgt_out_BT, keep_BT


def loss_sums(
    states_BTD: Tensor, weight_VD: Tensor, tgt_out_BT: Tensor, keep_BT: Tensor, smoothing: float
) -> LossSum:
    num_tokens = int(keep_BT.sum())
    return label_smoothed(states_BTD, weight_VD, tgt_out_BT, keep_BT, smoothing, num_tokens)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_equals_torch_cross_entropy_summed_over_kept_tokens(smoothing):
    states_BTD, weight_VD, tgt_out_BT, keep_BT = problem([4, 1, 3])
    result = loss_sums(states_BTD, weight_VD, tgt_out_BT, keep_BT, smoothing)
    grads = torch.autograd.grad(result.loss, [states_BTD, weight_VD])

    ignored = -100
    logits = (states_BTD @ weight_VD.T).flatten(0, 1)
    targets = tgt_out_BT.masked_fill(~keep_BT, ignored).flatten()
    settings = {"ignore_index": ignored, "reduction": "sum"}
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing, **settings)
    expected_nll = F.cross_entropy(logits, targets, **settings)
    expected_grads = torch.autograd.grad(expected, [states_BTD, weight_VD])
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.nll, expected_nll)
    torch.testing.assert_close(grads, expected_grads)


def test_label_smoothing_equals_cross_entropy_with_a_smoothed_target_distribution():
    """The smoothing mass is spread evenly over the vocabulary (section 5.4)."""
    smoothing = 0.3
    states_BTD, weight_VD, tgt_out_BT, keep_BT = problem([3, 2])
    result = loss_sums(states_BTD, weight_VD, tgt_out_BT, keep_BT, smoothing)
    grad_states, grad_weight = torch.autograd.grad(result.loss, [states_BTD, weight_VD])

    loss, nll = 0.0, 0.0
    expected_states, expected_weight = torch.zeros_like(states_BTD), torch.zeros_like(weight_VD)
    for row, place in keep_BT.nonzero().tolist():
        state_D = states_BTD[row, place].detach()
        exp_V = torch.exp(weight_VD.detach() @ state_D)
        probs_V = exp_V / exp_V.sum()
        wanted = int(tgt_out_BT[row, place])
        target_V = torch.full((NUM_PIECES,), smoothing / NUM_PIECES, dtype=torch.float64)
        target_V[wanted] += 1 - smoothing
        assert float(target_V.sum()) == pytest.approx(1, rel=1e-12)
        loss -= float((target_V * probs_V.log()).sum())
        nll -= float(probs_V[wanted].log())
        expected_states[row, place] = weight_VD.detach().T @ (probs_V - target_V)
        expected_weight += (probs_V - target_V)[:, None] * state_D
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    assert result.nll.item() == pytest.approx(nll, rel=1e-12)
    torch.testing.assert_close(grad_states, expected_states)
    torch.testing.assert_close(grad_weight, expected_weight)


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_the_smoothed_loss_is_minimal_at_the_smoothed_target_distribution(smoothing):
    """A more confident distribution has a larger loss."""
    target_V = torch.full((NUM_PIECES,), smoothing / NUM_PIECES, dtype=torch.float64)
    target_V[2] += 1 - smoothing
    keep_BT, tgt_out_BT = left_keep([1]), torch.tensor([[2]])
    unit = torch.ones(1, 1, 1, dtype=torch.float64)

    def loss_of(logits_V: Tensor) -> Tensor:
        return loss_sums(unit, logits_V[:, None], tgt_out_BT, keep_BT, smoothing).loss

    best_V = target_V.log().requires_grad_()
    entropy = -float((target_V * target_V.log()).sum())
    assert loss_of(best_V).item() == pytest.approx(entropy, rel=1e-9)
    (grad_V,) = torch.autograd.grad(loss_of(best_V), best_V)
    torch.testing.assert_close(grad_V, torch.zeros_like(grad_V), rtol=0, atol=1e-12)
    surer_V = best_V.detach().clone()
    surer_V[2] += 3
    assert loss_of(surer_V).item() > entropy


def test_the_loss_counts_the_kept_tokens():
    assert loss_sums(*problem([4, 1, 3]), 0.1).num_tokens == 8


def test_padding_tokens_have_no_influence():
    states_BTD, weight_VD, tgt_out_BT, keep_BT = problem([4, 1, 3])
    before = loss_sums(states_BTD, weight_VD, tgt_out_BT, keep_BT, 0.1)
    before.loss.backward()
    assert (states_BTD.grad[~keep_BT] == 0).all()
    assert (states_BTD.grad[keep_BT] != 0).any(-1).all()

    other_states = states_BTD.detach().clone()
    other_states[~keep_BT] = 1e6
    other_targets = torch.where(keep_BT, tgt_out_BT, (tgt_out_BT + 1) % NUM_PIECES)
    after = loss_sums(other_states, weight_VD, other_targets, keep_BT, 0.1)
    assert after.loss.item() == before.loss.item()
    assert after.nll.item() == before.nll.item()


def test_losses_and_gradients_of_two_half_batches_sum_to_those_of_the_batch():
    states_BTD, weight_VD, tgt_out_BT, keep_BT = problem([4, 1, 3, 2])
    whole = loss_sums(states_BTD, weight_VD, tgt_out_BT, keep_BT, 0.1)
    whole_grads = torch.autograd.grad(whole.loss, [states_BTD, weight_VD])
    halves = [
        loss_sums(states_BTD[rows], weight_VD, tgt_out_BT[rows], keep_BT[rows], 0.1)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    half_grads = torch.autograd.grad(halves[0].loss + halves[1].loss, [states_BTD, weight_VD])
    torch.testing.assert_close(halves[0].loss + halves[1].loss, whole.loss)
    torch.testing.assert_close(halves[0].nll + halves[1].nll, whole.nll)
    assert halves[0].num_tokens + halves[1].num_tokens == whole.num_tokens
    torch.testing.assert_close(half_grads, whole_grads)


def test_the_loss_without_smoothing_is_the_nll():
    result = loss_sums(*problem([4, 1, 3]), 0.0)
    assert result.loss.item() == pytest.approx(result.nll.item(), rel=1e-12)


def test_the_loss_under_no_grad_computes_only_one_matrix_product(monkeypatch):
    # two of the three matrix products of the loss are needed only for the gradient
    products = []
    plain_mm = torch.mm

    def counted(*args: Tensor) -> Tensor:
        products.append(args[0].shape)
        return plain_mm(*args)

    monkeypatch.setattr(torch, "mm", counted)
    with torch.no_grad():
        loss_sums(*problem([4, 1, 3]), 0.1)
    assert len(products) == 1


SIMCUT = TrainingConfig(consistency=ConsistencyConfig(weight=3.0, cutoff=0.3))


def a_batch() -> Batch:
    src_BS, src_keep_BS = torch.randint(4, 20, (3, 5)), left_keep([5, 2, 4])
    tgt_BT, tgt_keep_BT = torch.randint(4, 20, (3, 6)), left_keep([6, 3, 1])
    tgt_in_BT = torch.cat([torch.full((3, 1), 2), tgt_BT[:, :-1]], 1)
    return Batch(src_BS, src_keep_BS, tgt_in_BT, tgt_BT, tgt_keep_BT, 10)


def two_passes(
    model: Transformer, batch: Batch, keeps: list[Tensor], weight: float, smoothing: float
) -> Tensor:
    """Compute the loss by its formula: the second pass multiplies embeddings by a mask."""

    def log_probs(masks: list[Tensor]) -> Tensor:
        tables = (model.src_embedding, model.tgt_embedding)
        hooks = [
            table.register_forward_hook(lambda module, ids, out, mask=mask: out * mask[..., None])
            for table, mask in zip(tables, masks, strict=True)
        ]
        logits = model.output(model(batch.src_BS, batch.src_keep_BS, batch.tgt_in_BT))
        for hook in hooks:
            hook.remove()
        return logits.log_softmax(-1)

    log_p, log_q = log_probs([torch.ones_like(keep) for keep in keeps]), log_probs(keeps)
    total = torch.zeros((), dtype=torch.float64)
    for row, place in batch.tgt_keep_BT.nonzero().tolist():
        spread_V = torch.full_like(log_p[row, place], smoothing / log_p.shape[-1])
        spread_V[batch.tgt_out_BT[row, place]] += 1 - smoothing
        total = total - (spread_V * log_p[row, place]).sum()
        ratio_V = log_p[row, place] - log_q[row, place]
        total = total + weight * (log_p[row, place].exp() * ratio_V).sum()
    return total


@pytest.mark.parametrize("tie", ["none", "all"])
def test_consistency_equals_the_kl_divergence_from_a_pass_with_dropped_embeddings(monkeypatch, tie):
    torch.manual_seed(3)
    model, batch = transformer(model_config(tie_embeddings=tie)).train(), a_batch()
    keeps = [torch.rand(ids.shape) > 0.3 for ids in (batch.src_BS, batch.tgt_in_BT)]
    drawn = iter(keeps)
    monkeypatch.setattr(dropout, "random_keep", lambda shape, rate, device: next(drawn))
    result = loss_of(model, batch, SIMCUT)
    expected = two_passes(model, batch, keeps, 3.0, 0.1)
    plain = loss_of(model.eval(), batch, SIMCUT)
    weights = list(model.parameters())
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.nll, plain.nll)
    assert (result.num_tokens, result.loss.item() > plain.loss.item()) == (10, True)
    grads, expected_grads = (torch.autograd.grad(loss, weights) for loss in (result.loss, expected))
    torch.testing.assert_close(grads, expected_grads)


def test_consistency_adds_nothing_in_eval_mode():
    model, batch = transformer(model_config(dropout=0.2)), a_batch()
    plain = TrainingConfig()
    assert loss_of(model, batch, SIMCUT).loss == loss_of(model, batch, plain).loss


def test_consistency_without_cutoff_and_dropout_adds_nothing():
    config, batch = TrainingConfig(consistency=ConsistencyConfig(cutoff=0)), a_batch()
    still, dropping = (transformer(model_config(dropout=rate)).train() for rate in (0.0, 0.2))
    plain = loss_of(still, batch, TrainingConfig()).loss
    torch.testing.assert_close(loss_of(still, batch, config).loss, plain)
    with dropout_seeds(1):
        two = loss_of(dropping, batch, config)
    with dropout_seeds(1):
        again = loss_of(dropping, batch, config)
    with dropout_seeds(1):
        one = loss_of(dropping, batch, TrainingConfig())  # the first of the two passes
    assert two.loss == again.loss
    assert two.loss.item() > one.loss.item()


def test_the_cutoff_mask_follows_from_the_seed_and_has_the_given_rate():
    masks = []
    for seed in (1, 1, 2):
        with dropout_seeds(seed):
            masks.append(dropout.random_keep((100, 200), 0.05, torch.device("cpu")))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert float((~masks[0]).double().mean()) == pytest.approx(0.05, abs=0.008)
    assert dropout.random_keep((100,), 0.0, torch.device("cpu")).all()
