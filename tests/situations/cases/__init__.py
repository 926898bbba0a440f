"""Situations by theme."""

from situations.case import Case
from situations.cases import (
    coupled,
    embeddings,
    forms,
    gradients,
    kept_elsewhere,
    layers,
    losses,
    operations,
    packages,
    repeats,
    reports,
    state,
    training,
)

THEMES = {
    "embeddings": embeddings.CASES,
    "coupled rows": coupled.CASES,
    "losses of torch": losses.CASES,
    "forms and dtypes": forms.CASES,
    "gradients": gradients.CASES,
    "state": state.CASES,
    "kept elsewhere": kept_elsewhere.CASES,
    "layers": layers.CASES,
    "operations": operations.CASES,
    "training": training.CASES,
    "packages": packages.CASES,
    "reports": reports.CASES,
}
CASES: list[Case] = [case for cases in THEMES.values() for case in cases]
REPEATED = {name for names in repeats.REPEATS.values() for name in names}
FIRST: list[Case] = [case for case in CASES if case.name not in REPEATED]  # of their kind; they run in the fast suite
