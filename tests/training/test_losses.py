"""Losses by hand, and the three mutual-learning losses against PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfedafm_jax.methods.fedapen import ensemble, ensemble_loss
from pfedafm_jax.methods.fedkd import FedKD, distillation_loss
from pfedafm_jax.methods.fml import FML, mutual_loss
from pfedafm_jax.training.batches import ClientData, LocalTraining
from pfedafm_jax.training.losses import (
    class_means,
    class_weights,
    kl_divergence,
    soft_cross_entropy,
    squared_distance,
)

ONE = jnp.ones(1)
TRAINING = LocalTraining(4, 4, 1, 0.01, 0.9, 1e-3, 50.0, mean=(0.0,), std=(1.0,))


def test_kl_of_two_classes_by_hand():
    half, quarter = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    expected = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    np.testing.assert_allclose(kl_divergence(half, quarter, ONE), expected, rtol=1e-6)
    np.testing.assert_allclose(kl_divergence(half, half, ONE), 0.0, atol=1e-7)


@pytest.mark.parametrize("classes", [10, 100])
def test_element_mean_is_weaker_by_the_number_of_classes(classes):
    target, logits = jax.random.normal(jax.random.key(0), (2, 3, classes))
    batch_mean = kl_divergence(target, logits, jnp.ones(3), "batch_mean")
    np.testing.assert_allclose(
        kl_divergence(target, logits, jnp.ones(3), "element_mean") * classes, batch_mean, rtol=1e-6
    )


def test_padding_takes_no_part_in_a_divergence():
    target, logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    padded = kl_divergence(target, logits, jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(
        padded, kl_divergence(target[:2], logits[:2], jnp.ones(2)), rtol=1e-6
    )
    assert kl_divergence(target, logits, jnp.zeros(3)) == 0


def test_probability_targets_keep_the_distillation_of_fd_bounded():
    # With raw logits as the target, a student with logits (s, 0, 0) is paid -7 s for growing.
    raw, student = jnp.array([[5.0, -3.0, -4.0]]), jnp.array([[1.0, 0.0, 0.0]])
    scaled = student * jnp.array([[1.0], [5.0], [20.0], [50.0]])
    np.testing.assert_allclose(soft_cross_entropy(scaled, raw), [-8.1, -35, -140, -350], rtol=0.01)
    assert np.min(soft_cross_entropy(scaled, jax.nn.softmax(raw))) >= 0


def test_distances_are_means_over_features_and_ensembles_are_of_logits():
    apart = squared_distance(jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.zeros((2, 2)))
    np.testing.assert_allclose(apart, [2.5, 0.0])
    np.testing.assert_allclose(ensemble(0.25, jnp.array([[4.0]]), jnp.array([[8.0]])), [[7.0]])


def client_data(labels, num_train, longest) -> ClientData:
    images = np.zeros((len(labels), 1, 1, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(len(labels)) * 51  # 0, 0.2, 0.4, … after scaling
    train = np.zeros(longest, np.int32)
    train[:num_train] = np.arange(num_train)
    rows = jnp.array(train), jnp.int32(num_train)
    return ClientData(jnp.array(images), jnp.array(labels, jnp.int32), *rows, *rows)


def test_class_means_leave_out_padding_absent_classes_and_empty_slots():
    def pixel(images):
        return images.reshape(-1, 1)

    data = client_data([0, 2, 0, 0, 2, 1], num_train=5, longest=7)
    means, counts = class_means(TRAINING, pixel, data, 4)
    np.testing.assert_allclose(counts, [3, 0, 2, 0])
    np.testing.assert_allclose(means[:, 0], [(0 + 0.4 + 0.6) / 3, 0, (0.2 + 0.8) / 2, 0], rtol=1e-6)
    means, counts = class_means(TRAINING, pixel, client_data([0, 1], 0, 2), 3)
    assert not np.any(means) and not np.any(counts)


@pytest.mark.parametrize(
    ("aggregation", "weight", "expected"),
    [("samples", 5.0, [3, 0, 2]), ("uniform", 1.0, [1, 0, 1]), ("samples", 0.0, [0, 0, 0])],
)
def test_class_weights(aggregation, weight, expected):
    found = class_weights(aggregation, jnp.array([3.0, 0.0, 2.0]), jnp.float32(weight))
    np.testing.assert_array_equal(found, expected)


rng = np.random.default_rng(1)
PRIVATE, SHARED = rng.normal(size=(2, 6, 4)).astype(np.float32) * 2
FEATURES_F, FEATURES_G = rng.normal(size=(2, 6, 5)).astype(np.float32)
LABELS = np.array([0, 3, 1, 2, 2, 0], np.int32)


def compare(ours, theirs, arrays) -> None:
    """Equal values, and equal gradients with respect to each of the arrays."""
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    value = theirs(torch, torch.tensor(LABELS, dtype=torch.long), *tensors)
    value.backward()
    labels, weights = jnp.array(LABELS), jnp.ones(len(LABELS))
    got, gradients = jax.value_and_grad(lambda a: ours(labels, weights, *a))(
        [jnp.array(array) for array in arrays]
    )
    np.testing.assert_allclose(got, value.item(), rtol=1e-5)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-6)


def torch_kl(torch, target, logits, own=None):
    f = torch.nn.functional
    reduction = "mean" if own and own.kl == "element_mean" else "batchmean"
    target = target.detach() if own is None or own.detach_targets else target
    return f.kl_div(f.log_softmax(logits, -1), f.softmax(target, -1), reduction=reduction)


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize(
    "own",
    [
        FML.Settings(),
        FML.Settings(alpha=0.3, beta=0.9),
        FML.Settings(kl="element_mean", detach_targets=False),
    ],
)
def test_fml_loss_and_gradients_equal_pytorch(own):
    def theirs(torch, labels, private, shared):
        ce = torch.nn.functional.cross_entropy
        kl_f, kl_g = torch_kl(torch, shared, private, own), torch_kl(torch, private, shared, own)
        loss_f = own.alpha * ce(private, labels) + (1 - own.alpha) * kl_f
        return loss_f + own.beta * ce(shared, labels) + (1 - own.beta) * kl_g

    def ours(labels, weights, f, g):
        return mutual_loss(own, f, g, labels, weights)

    compare(ours, theirs, [PRIVATE, SHARED])


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize(
    "own",
    [
        FedKD.Settings(),
        FedKD.Settings(detach_targets=True, denominator_floor=7.0),
        FedKD.Settings(kl="element_mean", detach_denominator=False, denominator_floor=0.0),
    ],
)
def test_fedkd_loss_and_gradients_equal_pytorch(own):
    def theirs(torch, labels, private, shared, features_f, features_g):
        f = torch.nn.functional
        still = [t.detach() if own.detach_targets else t for t in (features_f, features_g)]
        ce = f.cross_entropy(private, labels) + f.cross_entropy(shared, labels)
        c = torch.clamp(ce, min=own.denominator_floor)
        c = c.detach() if own.detach_denominator else c
        kl = torch_kl(torch, shared, private, own) + torch_kl(torch, private, shared, own)
        return ce + (kl + f.mse_loss(features_f, still[1]) + f.mse_loss(still[0], features_g)) / c

    def ours(labels, weights, private, shared, features_f, features_g):
        return distillation_loss(own, (private, features_f), (shared, features_g), labels, weights)

    compare(ours, theirs, [PRIVATE, SHARED, FEATURES_F, FEATURES_G])


@pytest.mark.parametrize("weight", [0.0, 0.35, 1.0])
def test_fedapen_loss_and_gradients_equal_pytorch(weight):
    def theirs(torch, labels, private, shared):
        ce = torch.nn.functional.cross_entropy
        loss_f = ce(private, labels) + torch_kl(torch, shared, private)
        loss_f = loss_f + ce(weight * private + (1 - weight) * shared.detach(), labels)
        loss_g = ce(shared, labels) + torch_kl(torch, private, shared)
        return loss_f + loss_g + ce(weight * private.detach() + (1 - weight) * shared, labels)

    def ours(labels, weights, f, g):
        return ensemble_loss(jnp.float32(weight), f, g, labels, weights)

    compare(ours, theirs, [PRIVATE, SHARED])


def test_an_empty_batch_has_no_loss_and_no_gradient():
    labels, none = jnp.array(LABELS), jnp.zeros(len(LABELS))
    faithful = FedKD.Settings(detach_denominator=False, denominator_floor=0.0)
    for loss in (
        lambda f, g: mutual_loss(FML.Settings(), f, g, labels, none),
        lambda f, g: distillation_loss(faithful, (f, f), (g, g), labels, none),
        lambda f, g: ensemble_loss(jnp.float32(0.5), f, g, labels, none),
    ):
        both = jnp.array(PRIVATE), jnp.array(SHARED)
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(*both)
        assert value == 0 and not any(np.any(gradient) for gradient in gradients)
