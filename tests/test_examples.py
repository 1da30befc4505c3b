"""Examples in docstrings are run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["models", "costs", "compare"])
def test_examples_in_docstrings(name):
    failures, tried = doctest.testmod(importlib.import_module(f"pfedafm_jax.{name}"))
    assert tried and not failures
