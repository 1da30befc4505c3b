"""The command line: `main` finds the command among `commands/`, one file each.

`options` and `flags` read settings and options, `plugins` loads files with methods and networks of
one's own. Imports everything; nothing imports it.
"""
