"""What every other folder uses, and what knows nothing of federated learning.

Errors that a user can mend and their sentences (`errors`, `aborts`), files that are written whole or
not at all (`files`), trees of arrays by path (`trees`), the version. Imports no other folder.
"""
