"""`python -m fedtorch.cli` is the command `fedtorch`."""

import sys

from fedtorch.cli import main

sys.exit(main())
