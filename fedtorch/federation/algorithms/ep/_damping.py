r"""Step sizes of the sites in a round, and retreats of all sites to earlier values.

A client's step goes a fraction δ, the damping, of the way to the site that its rows imply. Full steps of all clients at
once can make q or a cavity improper, or circle around their fixed point. The sites at which all are densities form a
convex set that contains the start, so the way back to sites known to be good leads into it:

- if q is improper, or has moved by more than five sds (the larger of the old and new sds), or a client's cavity is
  improper, every client goes half the way back to its last good site, until q is a density again; δ is halved, so that
  the next step ends short of that place. A client alone has the prior as its cavity, so its step is exact, however
  long;
- a cavity that is still improper after five such rounds will stay so, as with few clients of very different sizes; from
  then on that client keeps its site, and the others continue;
- if changes of q, divided by δ, do not shrink, δ is halved too: the map overshoots. This is tested after the fourth
  round, since the first ones move q in any case, and only in rounds with all clients, since changes of two cohorts
  cannot be compared;
- a good round recovers half of a halving, so that two make up for one, and δ ends near the largest value that works.

δ is at least 1/64: below that a fit would need too many rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.models import gaussian
from fedtorch.models.gaussian import Natural

_FARTHEST = 5.0  # most sds that a mean of q may move in a round
_RETREATS = 5  # most retreats because of cavities; after them, clients without a cavity keep their sites
_SETTLED = 4  # rounds after which changes should shrink
_RECOVERY = 2**0.5  # growth of the damping in a good round
_LEAST = 1 / 64  # damping
_STILL = 1e-9  # change in sds that counts as rounding and need not shrink


class Pace(NamedTuple):
    """Settings of the next round; scalars."""

    damping: Tensor  # δ of its steps
    speed: Tensor  # the greatest change of a mean or sd of q in the last round, divided by δ
    back: Tensor  # bool: whether clients go half the way back instead of a step
    good: Tensor  # the last version of q of which all cavities were densities, −1 before the first
    retreats: Tensor  # rounds of retreat because of a cavity


class Moved(NamedTuple):
    """Change of q in a round; scalars."""

    mean_change: Tensor  # the greatest change of a mean of q, in its sd; NaN where q was no density
    sd_change: Tensor  # the greatest relative change of an sd of q
    damping: Tensor  # damping of the round's steps
    # sum of all future changes if they shrink at the last rate, in sd; infinite if they do not shrink
    remaining: Tensor
    improper: Tensor  # the share of clients whose cavity was no density


def begun(damping: float) -> tuple[Pace, Moved]:
    """Return the pace before the first round, with the damping of undisturbed rounds."""
    number = lambda value: torch.tensor(value, dtype=torch.float64)
    far, nothing = torch.inf, 0.0
    pace = Pace(number(damping), number(far), torch.tensor(False), torch.tensor(-1), torch.tensor(0))
    return pace, Moved(number(far), number(far), number(damping), number(far), number(nothing))


def update(
    pace: Pace, change: Tensor, *, version: int, proper: Tensor, improper: Tensor, everybody: Tensor, most: float
) -> tuple[Pace, Moved]:
    """Return the pace after a round.

    Args:
        pace: settings of the round.
        change: changes of the means and sds of q `(2,)`, see `changes`.
        version: rounds before it; the first one makes the start.
        proper: () whether q is a density again, near the last trusted one.
        improper: () the share of clients whose cavity was no density; their round started from the q before.
        everybody: () whether all clients have answered.
        most: the damping of undisturbed rounds.
    """
    speed = change.amax() / pace.damping
    still = (speed < _STILL) & ~pace.back & (improper == 0)  # all clients took a step
    slows = still | (speed < pace.speed)
    looked = (pace.back, improper == 0, pace.retreats < _RETREATS, proper, everybody, slows)
    was_back, cavities, patient, is_proper, complete, slower = torch.stack(looked).tolist()
    for_a_cavity = not cavities and not was_back and patient
    back = not is_proper or for_a_cavity
    worse = complete and version >= _SETTLED and not slower
    factor = 1.0 if was_back else 0.5 if back or worse else _RECOVERY
    good = torch.full_like(pace.good, version) if version and not was_back and cavities else pace.good
    remaining = torch.full_like(speed, torch.inf)
    if version > 1 and not back and slower:
        remaining = torch.where(still, speed, speed * speed / (pace.speed - speed))
    after = Pace(
        damping=(pace.damping * factor).clamp(min=min(_LEAST, most), max=most),
        speed=speed,
        back=torch.full_like(pace.back, back),
        good=good,
        retreats=pace.retreats + int(for_a_cavity),
    )
    return after, Moved(change[0], change[1], pace.damping, remaining, improper)


def changes(before: Natural, after: Natural) -> Tensor:
    """Return the greatest changes of a mean of q, in sd, and of an sd, relative `(2,)`; NaN where one is no density."""
    old, new = gaussian.moments(before), gaussian.moments(after)
    sd, old_sd = (m.covariance.diagonal(dim1=-2, dim2=-1).sqrt() for m in (new, old))
    return torch.stack([((new.mean - old.mean).abs() / sd).amax(), ((sd - old_sd).abs() / sd).amax()])


def is_near(trusted: Natural, posterior: Natural) -> Tensor:
    """Return whether no mean of q has moved far, `()`, in units of the larger sd of both; true if q was improper
    before.

    In units of the previous sd, q could never leave a first estimate that is too narrow.
    """
    old, new = gaussian.moments(trusted), gaussian.moments(posterior)
    sd = torch.maximum(old.covariance.diagonal(), new.covariance.diagonal()).sqrt()
    jump = ((new.mean - old.mean).abs() / sd).amax().nan_to_num(0.0)
    return jump <= _FARTHEST


def last_good(site: Natural, before: Natural, good: Natural, stepped: Tensor, version: Tensor) -> Natural:
    """Return each client's site to go back to.

    Args:
        site: the present site, which is good if no step has been taken.
        before: the site before its last step; good if all cavities of that round's q were densities.
        good: the one known to be good until then.
        stepped: version of q that the last step started from, `(K,)`; −1 before the first.
        version: the last one of which all cavities were densities, `(K,)`.
    """
    return tree.where(stepped < 0, site, tree.where(version >= stepped, before, good))


def halfway(site: Natural, good: Natural) -> Natural:
    """Return the midpoint between a site and the one to go back to."""
    return tree.scale(tree.add(site, good), 0.5)
