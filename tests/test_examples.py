"""Examples in docstrings are run."""

import doctest
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import pfedafm_jax
from pfedafm_jax import data, methods
from pfedafm_jax.methods import aggregation, pfedafm
from pfedafm_jax.models import architecture

ROOT = Path(__file__).parents[1]
MODULES = [module.name for module in pkgutil.walk_packages(pfedafm_jax.__path__, "pfedafm_jax.")]
# Importing Flower warns.
MODULES = [name for name in MODULES if not name.endswith((".deploy.flower", ".flower_apps"))]
if importlib.util.find_spec("cryptography") is None:  # of the extra flower
    MODULES.remove("pfedafm_jax.deploy.certs")
SHOWN = [
    pfedafm_jax.Config, pfedafm_jax.Config.load, pfedafm_jax.updated, pfedafm_jax.with_preset,
    data.make_partition, data.Partition.class_counts, data.dataset_from_arrays, data.token_ids,
    architecture.describe, architecture.register_extractor, methods.register_method,
    pfedafm.mix_features, aggregation.average, aggregation.weigh,
]  # fmt: skip


def test_examples_in_docstrings(registered):
    tried = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert not [name for name, result in tried.items() if result.failed]
    assert sum(result.attempted for result in tried.values()) > 30


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.__qualname__)
def test_what_users_call_has_an_example(shown):
    assert ">>>" in (inspect.getdoc(shown) or "")


def test_documents_name_tests_and_files_that_exist():
    for page in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")):
        text = page.read_text()
        for file, name in re.findall(r"`([\w/]+\.py)::(test_\w+)`", text):
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), (page.name, name)
        for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
            assert (page.parent / link).exists(), (page.name, link)
