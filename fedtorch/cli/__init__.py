"""The command `fedtorch`: runs from files, data, reports, ranks and sites; see `fedtorch COMMAND --help`.

Exit codes: 0 for success, 1 for a failure or a failed check, 2 for wrong arguments. A command's module defines its
arguments, and imports what it needs only when it runs, so that help appears at once.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
