"""Named sets of settings."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "authors_code": {
        "protocol": "authors",
        "aggregation": "last",
        "batch_size": 512,
        "local_epochs": 10,
        "rounds": 500,
        "learning_rate": 0.01,
        "flip": True,
        "erase": True,
        "crop": True,
        "pfedafm": {
            "mix_learning_rate": 0.01,
            "mix_weight_decay": 1e-3,
            "mix_relay": True,
            "leak_momentum": True,
            "send_header": True,
        },
    },
    # What papers, their code and HtFLlib do in a method's own part where they differ from the defaults here. Optimizer,
    # batches and epochs stay those of the run, the same for all methods.
    "lg_fedavg_authors": {
        "method": "lg_fedavg",
        "aggregation": "uniform",
        "lg_fedavg": {"shared_layers": ("conv1", "conv2")},  # needs architectures with one shape of both
    },
    "fd_htfllib": {"method": "fd", "aggregation": "uniform", "fd": {"outputs": "logits"}},
    "fedproto_authors": {"method": "fedproto", "aggregation": "uniform", "fedproto": {"lambda_mse": 0.1}},
    "fedproto_htfllib": {
        "method": "fedproto",
        "aggregation": "uniform",
        "fedproto": {"lambda_mse": 10.0, "judged": "prototype"},
    },
    "fml_authors": {"method": "fml", "aggregation": "uniform", "fml": {"alpha": 0.5, "beta": 0.5}},
    "fml_htfllib": {  # as its scripts call it; its defaults, alpha = beta = 1, switch distillation off
        "method": "fml",
        "aggregation": "uniform",
        "clip_norm": 10.0,
        "fml": {"alpha": 0.5, "beta": 0.5, "kl": "element_mean", "detach_targets": False},
    },
    "fedkd_authors": {
        "method": "fedkd",
        "aggregation": "uniform",
        "fedkd": {"kl": "element_mean", "detach_denominator": False, "denominator_floor": 0.0},
    },
    "fedkd_htfllib": {
        "method": "fedkd",
        "aggregation": "uniform",
        "clip_norm": 10.0,
        "fedkd": {"coding": "weight", "kl": "element_mean", "detach_denominator": False, "denominator_floor": 0.0},
    },
    "fedkd_uncoded": {"method": "fedkd", "fedkd": {"coding": "none"}},
    "fedapen_authors": {"method": "fedapen", "aggregation": "uniform"},
}
"""Named sets of settings, laid over a configuration: `--preset authors_code` is the released pFedAFM code."""
