"""The command `fedtorch`: runs from files, data, reports, ranks and sites; `fedtorch COMMAND --help` tells more.

Exit codes: 0 when all is well, 1 when something could not be done or is not as it should be, 2 for a wrong call.
A command's module says what it takes and imports what it needs only when it runs, so that help comes at once.
"""

from fedtorch._lazy import attach

__getattr__, __dir__ = attach(__name__, __file__)
