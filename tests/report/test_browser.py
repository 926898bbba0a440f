"""The report in a real browser: nothing complains, nothing sticks out, everything can be read, on a desk and a phone.

`make test-browser` runs these; they skip where there is no Chromium. REPORT_PICTURES=DIR keeps pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from report.test_report import HOSTILE
from support import browser

import fedtorch as ft
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]
LONG = [f"{'W' * 30} {k}, the clinic of the west, ward of cardiology" for k in range(8)]
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Texts of pictures that leave their picture, and the smallest letters on the screen, in pixels.
CLIPPED = """[...document.querySelectorAll('svg text')].filter(text => {
  const own = text.getBoundingClientRect(), box = text.ownerSVGElement.getBoundingClientRect();
  return own.left < box.left - 1 || own.right > box.right + 1 || own.bottom > box.bottom + 1;
}).map(text => text.textContent)"""
# Tables that are wider than their card, which show the rest only to who scrolls.
CUT = """[...document.querySelectorAll('.scroll')]
  .filter(e => !e.closest('details') && e.scrollWidth > e.clientWidth + 1)
  .map(e => e.textContent.slice(0, 80))"""
SMALLEST = """Math.min(...[...document.querySelectorAll('svg text')].map(text =>
  parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a))"""
CONTRAST = """(() => {
  const channel = v => (v /= 255, v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = color => color.match(/[\\d.]+/g).slice(0, 3).map((v, i) => [.2126, .7152, .0722][i] * channel(+v))
    .reduce((a, b) => a + b);
  const paper = light(getComputedStyle(document.querySelector('.card')).backgroundColor);
  const ratio = color => (Math.max(light(color), paper) + .05) / (Math.min(light(color), paper) + .05);
  const words = [...document.querySelectorAll('p, a, th, td, dt, dd, li, h3, summary, svg text, .bad, .good')];
  return Math.min(...words.map(e => ratio(e.tagName == 'text' ? getComputedStyle(e).fill : getComputedStyle(e).color)));
})()"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    data = ft.data.partition(ft.data.digits(), ft.data.dirichlet(0.3, minimum=10), clients=40, seed=0)
    training, validation = data.split(0.7, seed=0)
    local = ft.gradient_descent(
        torch.nn.Linear(64, 10),
        epochs=1,
        batch_size=16,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )
    faults = ft.dropouts(0.2) | ft.lost_messages(0.1)
    run = ft.run(ft.fedavg(local), ft.InProcess(training), rounds=30, cohort=20, faults=faults)
    scores = run.evaluate(validation, {"accuracy": ft.metrics.accuracy()})
    x = ft.random.normal(ft.random.key(0), (8, 30, 3))
    rows = [(x[k], x[k, :, 0]) for k in range(8)]
    network = ft.Network.k_nearest(x[:, 0, :2], 3)
    relaxed = ft.run(
        ft.gtv(ft.least_squares(ft.LinearHead(3)), network, alpha=0.5),
        ft.InProcess(ft.data.from_tensors(rows, names=HOSTILE)),
        rounds=300,
    )
    sampler = ft.Sampler(burn_in=20)
    gibbs = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=5, chains=3)
    sampled = ft.run(gibbs, ft.InProcess(ft.data.from_tensors(rows)), torch.zeros(3), rounds=200, record=sampler)
    eight = [(torch.ones(9, 1).double(), level + torch.linspace(-1, 1, 9).double()) for level in range(8)]
    model = hierarchical.linear(hierarchical.normal(1, names=[HOSTILE[7]]))
    fitted = ft.run(ft.ep(model), ft.InProcess(ft.data.from_tensors(eight, names=[*HOSTILE, *LONG][:8])), rounds=20)
    return {
        "hierarchy": ft.report.write(fitted, folder / "hierarchy", title="A hierarchy"),
        "averaged": ft.report.write(run, folder / "averaged", title="Digits over forty clinics", scores=scores),
        "network": ft.report.write(relaxed, folder / "network", title=HOSTILE[7], network=network),
        "sampled": ft.report.write(sampled, folder / "sampled"),
    }


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (1000, False), (390, False), (390, True)])
@pytest.mark.parametrize("name", ["averaged", "network", "sampled", "hierarchy"])
def test_page_in_a_browser(name: str, width: int, dark: bool, shown: browser.Browser, pages: dict[str, Path]) -> None:
    shown.complaints.clear()
    shown.open(pages[name], width, 900, dark=dark)
    if folder := os.environ.get("REPORT_PICTURES"):
        shown.screenshot(Path(folder) / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert shown.complaints == []
    assert shown.value(WIDER) <= 0
    assert shown.value(CLIPPED) == []
    assert width < 1000 or shown.value(CUT) == []
    assert shown.value(SMALLEST) >= 10
    assert shown.value(CONTRAST) >= 4.5  # WCAG 2.2, success criterion 1.4.3
    assert shown.value("innerWidth") == width


def test_browser_reports_violations(tmp_path: Path, shown: browser.Browser) -> None:
    shown.complaints.clear()
    page = tmp_path / "bad.html"
    page.write_text(
        '<meta name="viewport" content="width=device-width"><div class="card" style="width:900px;background:#fff">'
        '<p style="color:#bbb">pale</p><svg width="300" height="20"><text x="280" y="9" font-size="7">too long</text>'
        "</svg></div><script>console.error('no'); alert(1)</script><img src='missing.png'>"
    )
    shown.open(page, 390, 900)
    assert len(shown.complaints) >= 3
    assert shown.value(WIDER) > 0
    assert shown.value(CLIPPED) == ["too long"]
    assert shown.value(SMALLEST) < 10
    assert shown.value(CONTRAST) < 4.5
