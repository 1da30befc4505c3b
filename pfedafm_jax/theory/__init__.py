"""What the paper proves about convergence, measured in a real run: `docs/theory.md` says exactly what and how."""

from pfedafm_jax.theory.estimators import bound, gradient_pass, smoothness, squared_distance
from pfedafm_jax.theory.measure import study
from pfedafm_jax.theory.present import figure, markdown

__all__ = ["bound", "figure", "gradient_pass", "markdown", "smoothness", "squared_distance", "study"]
