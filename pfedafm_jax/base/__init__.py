"""What every other folder uses, and what knows nothing of federated learning.

Errors that a user can mend and their sentences (`errors`, `aborts`), models of what comes from
outside (`checked`), files that are written whole or not at all (`files`), what is printed for people
(`terminal`), trees of arrays by path (`trees`), the version. Imports no other folder.
"""
