"""The command line: `main` finds the command among `commands/`, one file each.

`flags` makes flags of models and reads them, `options` lays settings one over the other, `page` is
the look of the help, `plugins` loads files with methods and networks of one's own, `sweep` ranks what
`pfedafm sweep` tried. Imports everything, JAX only once a command has been understood; nothing
imports it.
"""
