"""The gallery: no figure of an experiment is missing, and its pictures are small and say in words what they show."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery.md"
PICTURES = re.findall(r"!\[(.*?)\]\((.*?)\)", GALLERY.read_text(), flags=re.DOTALL)


def test_every_experiment_with_a_figure_is_there():
    drawn = re.compile(r"^def draw(_maps)?\(|figures = \{", flags=re.MULTILINE)
    root = ROOT / "experiments"
    files = [*root.glob("*.py"), *(file for file in root.glob("*/*.py") if file.parent.name != "benchmarks")]
    drawing = [
        ".".join(file.relative_to(root).with_suffix("").parts) for file in files if drawn.search(file.read_text())
    ]
    assert len(drawing) > 20
    assert [name for name in drawing if f"experiments.{name} --out" not in GALLERY.read_text()] == []


@pytest.mark.parametrize(("words", "file"), PICTURES, ids=[Path(file).stem for _, file in PICTURES])
def test_pictures_are_small_and_described(words, file):
    assert len(words.split()) >= 8
    assert (GALLERY.parent / file).stat().st_size < 100_000


def test_no_picture_is_left_over():
    shown = {Path(file).name for _, file in PICTURES}
    assert {path.name for path in (GALLERY.parent / "_static" / "gallery").iterdir()} <= shown
