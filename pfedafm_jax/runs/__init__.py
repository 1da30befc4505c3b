"""Runs from start to finish: what is there already, the rounds, checkpoints, what is said meanwhile.

`drive` makes an `experiment` of each run that is not finished (`existing`) and `loop` takes it through
its rounds; `checkpoints` save it, `signals` stop it, `observers` and `progress` report it.
Imports `base` to `results`.
"""
