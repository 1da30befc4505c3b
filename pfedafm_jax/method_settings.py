"""Settings that belong to one method; all of them are part of `Config`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PFedAFM:
    """Settings of pFedAFM's own; the last five reproduce what the released code does instead of the paper."""

    mix_learning_rate: float = 1.0
    """Learning rate of the mix vector (the paper's η_α; it tries 0.001, 0.01, 0.1 and 1)."""
    mix_project: bool = True
    """Keep the mix vector in [0, 1] after every step."""
    mix_scalar: bool = False
    """Ablation: one mix weight for all features instead of one for each."""
    mix_fixed: float | None = None
    """Ablation: hold the mix vector at this value instead of training it."""
    training: Literal["iterative", "end_to_end"] = "iterative"
    """Two phases (the paper), or everything at once (its ablation)."""
    mix_weight_decay: float = 0.0
    """Released code: weight decay on the mix vector (1e-3 there)."""
    mix_relay: bool = False
    """Released code: one mix vector handed from client to client instead of one each."""
    leak_momentum: bool = False
    """Released code: momentum of the shared extractor and the mix vector carried from client to client."""
    send_header: bool = False
    """Released code: an untrained header travels with the shared extractor (counted as traffic)."""


@dataclass(frozen=True)
class LGFedAvg:
    """Settings of LG-FedAvg's own."""

    shared_layers: tuple[str, ...] = ("header",)
    """What clients share: header, or layers of the extractor by name (conv1, conv2, fc1, fc2), where all architectures have them in one shape."""


@dataclass(frozen=True)
class FD:
    """Settings of FD's own."""

    gamma: float = 1.0
    """Weight of the distillation term (γ)."""
    outputs: Literal["softmax", "logits"] = "softmax"
    """What clients average for each class: probabilities, or logits, which become probabilities when they are used."""
    temperature: float = 1.0
    """Logits are divided by it before the softmax that makes the targets (τ)."""
    leave_one_out: bool = False
    """A client receives rows without its own part in them (the first paper on FD); a row that is all its own is masked."""
    whole_table: bool = False
    """Count the whole table as received, not only the rows of a client's own classes."""


@dataclass(frozen=True)
class FedProto:
    """Settings of FedProto's own."""

    lambda_mse: float = 1.0
    """Weight of the squared distance to the prototypes, a mean over features (λ)."""
    judged: Literal["header", "prototype"] = "header"
    """What the method is judged by: the client's header or the nearest prototype; both are recorded."""
    whole_table: bool = False
    """Count all prototypes as received, not only those of a client's own classes (always so where they are judged by)."""


@dataclass(frozen=True)
class FML:
    """Settings of FML's own."""

    alpha: float = 0.5
    """Weight of the private model's cross-entropy; 1 - α is that of its distillation."""
    beta: float = 0.5
    """Weight of the shared model's cross-entropy; 1 - β is that of its distillation."""
    kl: Literal["batch_mean", "element_mean"] = "batch_mean"
    """The divergence itself, or divided by the number of classes (PyTorch's default, HtFLlib)."""
    detach_targets: bool = True
    """The teacher's output is a constant; without it each model gets the gradient of both losses (HtFLlib)."""


@dataclass(frozen=True)
class FedKD:
    """Settings of FedKD's own."""

    coding: Literal["update", "weight", "none"] = "update"
    """What is sent as a truncated SVD: updates of the shared model (the paper), its weights (HtFLlib), or nothing."""
    t_start: float = 0.95
    """Share of the squared singular values that coding keeps at the start (T_start)."""
    t_end: float = 0.98
    """The same in the last round (T_end)."""
    kl: Literal["batch_mean", "element_mean"] = "batch_mean"
    """The divergence itself, or divided by the number of classes (the authors' code, HtFLlib)."""
    detach_targets: bool = False
    """The teacher's outputs and representations are constants."""
    detach_denominator: bool = True
    """The cross-entropies that divide the distillation terms are constants; the authors' code trains through them."""
    denominator_floor: float = 1e-2
    """Their sum is taken to be at least this."""
    mentee_learning_rate: float | None = None
    """Learning rate of the shared model; none: that of all networks."""


@dataclass(frozen=True)
class FedAPEN:
    """Settings of FedAPEN's own."""

    lambda_start: float = 0.5
    """Weight of the private model in the ensemble at the start (λ)."""
    lambda_learning_rate: float = 1e-3
    """Learning rate of λ."""
    lambda_epochs: int = 10
    """Epochs over the adaptability set when a client receives a new shared model."""
    adaptability_fraction: float = 0.05
    """Part of a client's training data that λ is learned on and the models are not."""


@dataclass(frozen=True)
class FedRep:
    """Settings of FedRep's own."""

    head_epochs: int = 10
    """Epochs of the header alone, before the local epochs of the extractor."""
