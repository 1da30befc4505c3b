"""Runs from start to finish: what is there already, the rounds, checkpoints, what is said meanwhile.

`drive` has each run that is not finished (`existing`) trained (`train`, the one loop over rounds);
`history` and `traffic` are what came out, `checkpoints` save it, `signals` stop it, `observers` and
`progress` report it. `experiment` is a handle on a run for notebooks.
Imports `base` to `results`.
"""
