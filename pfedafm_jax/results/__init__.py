"""What a run leaves: its numbers in files, read back, chosen, tabulated and drawn.

`records` writes and `run` reads a run's folder; `select` tells runs apart; `tables`, `plots` (in one
`style`) and `page`, a report in HTML, show them. Imports `base` to `engine`; never trains.
"""
