"""The one exception type for everything a user can cause and mend."""


class PfedafmError(Exception):
    """Bad input or a missing resource; the message says what was wrong and what to do next.

    The commands print the message alone and exit with code 2; from Python it is raised as it is.
    """
