"""What a visit costs a client, against figures worked out from the tables of the paper."""

import numpy as np
import pytest
from small import real

from pfedafm_jax.models.architecture import describe

# Floats of a visit that has seen 2 of 10 classes, and 10 of 100.
FLOATS = {
    "standalone": (0, 0),
    "lg_fedavg": (5_010, 50_100),
    "fd": (20, 1_000),
    "fedproto": (1_000, 5_000),
    **dict.fromkeys(("fml", "fedkd", "fedapen"), (670_058, 715_148)),
    **dict.fromkeys(("pfedafm", "fedper", "fedrep"), (665_048, 665_048)),
}


@pytest.mark.parametrize("method", FLOATS)
def test_floats_of_a_visit(method):
    for classes, seen, floats in zip((10, 100), (2, 10), FLOATS[method], strict=True):
        for architecture in ("cnn1", "cnn5"):
            cost = real(method, classes).cost(describe(architecture, classes), 400.0, seen)
            assert (cost.floats_up, cost.floats_down) == (floats, floats)


def test_floats_of_whole_tables_and_other_shared_layers():
    for method, own, classes, floats in (
        ("fd", {"whole_table": True}, 10, 100),
        ("fd", {"whole_table": True}, 100, 10_000),
        ("fedproto", {"whole_table": True}, 10, 5_000),
        ("fedproto", {"evaluated_by": "prototype"}, 10, 5_000),
        ("lg_fedavg", {"shared_layers": ("fc2", "header")}, 10, 1_005_510),
        ("lg_fedavg", {"shared_layers": ("fc2", "header")}, 100, 1_050_600),
        ("lg_fedavg", {"shared_layers": ("conv1", "conv2")}, 10, 14_048),
    ):
        made = real(method, classes, **{method: own})
        assert made.cost(describe("cnn1", classes), 400.0, 2).floats_down == floats


def test_flops_of_a_visit():
    f, g, n, epochs = 4_826_000, 2_876_000, 400.0, 10
    macs = {
        **dict.fromkeys(("standalone", "lg_fedavg"), 3 * f * n * epochs),
        **dict.fromkeys(("fd", "fedproto"), (3 * epochs + 1) * f * n),
        **dict.fromkeys(("fml", "fedkd"), 3 * (f + g) * n * epochs),
        "fedapen": 3 * (f + g) * (n - 20) * epochs + (f + g) * 20 * 10,
        "pfedafm": (3 * f + 4 * g) * n * epochs,
        "fedper": 3 * g * n * epochs,
        "fedrep": 3 * g * n * epochs + (g - 5_000 + 3 * 5_000) * n * 10,
    }
    for method, expected in macs.items():
        cost = real(method, 10).cost(describe("cnn1", 10), n, 2)
        np.testing.assert_allclose(cost.flops, 2 * expected, rtol=1e-3)
