"""Rounds as plain loops over clients: slow, obvious, and what the engine is tested against.

`algorithm1` is the paper's Algorithm 1 written out; `plain` calls the functions of any method, one
client after another; `released` is what the released code does instead. It is not for tests alone:
it runs `pfedafm_released`, whose clients depend on one another. All have a
`run_round`, the last two an `evaluate`, with the engine's interface.
"""

from pfedafm_jax.engine.reference import algorithm1, plain, released
