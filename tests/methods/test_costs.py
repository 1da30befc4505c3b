"""What a visit costs a client, against figures worked out from the tables of the paper."""

import numpy as np
import pytest
from small import real

from pfedafm_jax.models import describe


@pytest.mark.parametrize("architecture", ["cnn1", "cnn3", "cnn5"])
@pytest.mark.parametrize(
    ("method", "up10", "up100"),
    [
        ("standalone", 0, 0),
        ("lg_fedavg", 5_010, 50_100),
        ("fd", 20, 1_000),
        ("fedproto", 1_000, 5_000),
        ("fml", 670_058, 715_148),
        ("fedkd", 670_058, 715_148),
        ("fedapen", 670_058, 715_148),
        ("pfedafm", 665_048, 665_048),
        ("fedper", 665_048, 665_048),
        ("fedrep", 665_048, 665_048),
    ],
)
def test_floats_of_a_visit(method, architecture, up10, up100):
    for classes, seen, floats in [(10, 2, up10), (100, 10, up100)]:
        cost = real(method, classes).cost(describe(architecture, classes), 400.0, seen)
        assert (cost.floats_up, cost.floats_down) == (floats, floats)


def test_floats_of_whole_tables_and_other_shared_layers():
    cnn1 = {classes: describe("cnn1", classes) for classes in (10, 100)}
    for method, table in [("fd", {10: 100, 100: 10_000}), ("fedproto", {10: 5_000, 100: 50_000})]:
        for classes, floats in table.items():
            whole = real(method, classes, **{method: {"whole_table": True}})
            assert whole.cost(cnn1[classes], 400.0, 2).floats_down == floats
    by_prototype = real("fedproto", 10, fedproto={"judged": "prototype"})
    assert by_prototype.cost(cnn1[10], 400.0, 2).floats_down == 5_000
    for layers, floats in [
        (("fc2", "header"), {10: 1_005_510, 100: 1_050_600}),
        (("conv1", "conv2"), {10: 14_048}),
    ]:
        for classes, expected in floats.items():
            method = real("lg_fedavg", classes, lg_fedavg={"shared_layers": layers})
            assert method.cost(cnn1[classes], 400.0, 2).floats_up == expected


def test_flops_of_a_visit():
    f, g, n, epochs = 4_826_000, 2_876_000, 400.0, 10
    macs = {
        "standalone": 3 * f * n * epochs,
        "lg_fedavg": 3 * f * n * epochs,
        "fd": (3 * epochs + 1) * f * n,
        "fedproto": (3 * epochs + 1) * f * n,
        "fml": 3 * (f + g) * n * epochs,
        "fedkd": 3 * (f + g) * n * epochs,
        "fedapen": 3 * (f + g) * (n - 20) * epochs + (f + g) * 20 * 10,
        "pfedafm": (3 * f + 4 * g) * n * epochs,
        "fedper": 3 * g * n * epochs,
        "fedrep": 3 * g * n * epochs + (g - 5_000 + 3 * 5_000) * n * 10,
    }
    for method, expected in macs.items():
        cost = real(method, 10).cost(describe("cnn1", 10), n, 2)
        np.testing.assert_allclose(cost.flops, 2 * expected, rtol=1e-3)
