"""One client's epochs of SGD, and its accuracy: written for one client, the engine maps it over many.

`train` is the loop that every method uses, of `batches`, `sgd` and a loss (`losses`); `accuracy` is
the one evaluation of all methods. Imports `base` to `models`.
"""
