"""Trained clients in use: `opened` opens a run, `client` predicts, `newcomer` joins, `export` writes.

`states` keeps a client's weights in files. Imports `base` to `runs`; no dataset is needed.
"""
