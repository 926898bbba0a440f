"""Projects that nobody here wrote train stacked, client by client and by `lightning_fit`, as in a plain loop.

`make test-zoo` runs it in an environment of its own.
"""

from __future__ import annotations

import pytest
from zoo.case import WAYS
from zoo.cases import CASES
from zoo.loop import outcome

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.imports}, {case.name}")
def test_training_is_that_of_a_plain_loop(case, way):
    pytest.importorskip(case.imports)
    result = outcome(case, way)
    if way in case.ways:
        assert result < 1e-5
    else:
        assert isinstance(result, str)
