"""Rounds as plain loops over clients: slow, obvious, and what the engine is tested against.

`PlainLoop` calls the functions of any method, one client after another; `Algorithm1` is the paper's
written out; `ReleasedLoop` is what the released code does instead, and not for tests alone: it runs
`pfedafm_released`, whose clients depend on one another. All are `Executor`s.
"""
