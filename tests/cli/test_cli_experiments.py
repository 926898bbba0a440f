"""`fedtorch experiments`, and the files with the experiments' main settings."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from support.oracles.closed_forms import same_bits

import fedtorch as ft
from experiments import fedavg_family
from fedtorch.cli import _configuration as configuration, _experiments as experiments, main

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "experiments" / "configs").glob("*.yaml"))
DEPENDENT = "ignore:Expected columns of rank:UserWarning"  # of a school or a station alone; others and priors decide
QUIET = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_checkpointing")]

FOLDERS = {
    "fedlin_cmapss": "cmapss_fd001",
    "fedlin_school": "school",
    "fedlin_student": "student_performance",
    "fedmgp_battery": "battery",
    "gtv_fmi": "fmi_weather",
    "gtv_trust": "fmi_weather",
    "sparse_acyclic": "tcga_brca_expression",
    "sparse_directed": "tcga_brca_expression",
    "sparse_network": "tcpa_brca_rppa",
}


def needs_files(config: Path) -> None:
    """Skips where the data set of a configuration is not at hand, so that tests never download."""
    given = os.environ.get("FEDTORCH_DATA_DIR")
    folder = FOLDERS.get(config.stem)
    if folder and not (given and (Path(given) / folder).is_dir()):
        pytest.skip(f"needs the folder {folder} in FEDTORCH_DATA_DIR")


@pytest.fixture
def small_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one experiment, which is the current folder."""
    (tmp_path / "experiments" / "configs").mkdir(parents=True)
    (tmp_path / "experiments" / "family").mkdir()
    (tmp_path / "experiments" / "family" / "child.py").write_text('"""A child."""\ndef main(): pass\n')
    (tmp_path / "experiments" / "configs" / "family_child.yaml").touch()
    (tmp_path / "experiments" / "configs" / "tiny.yaml").touch()
    (tmp_path / "fedtorch").mkdir()
    for name in ("__init__.py", "common.py"):
        (tmp_path / "experiments" / name).touch()
    lines = ['"""A tiny one.', "", 'More."""', "import sys", "def main():", "    print(sys.argv[1:])", "    return 3"]
    (tmp_path / "experiments" / "tiny.py").write_text(
        "\n".join([*lines, "if __name__ == '__main__':", "    sys.exit(main())"])
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_reads_what_there_is(small_checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "list"]) == 0
    assert capsys.readouterr().out.split() == [
        "family.child",
        "config",
        "A",
        "child.",
        "tiny",
        "config",
        "A",
        "tiny",
        "one.",
    ]


def test_run_hands_on_arguments_and_the_exit_code(small_checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["experiments", "run", "tiny", "--smoke", "--seeds", "2"]) == 3
    assert capfd.readouterr().out == "['--smoke', '--seeds', '2']\n"
    assert main(["experiments", "run", "huge"]) == 2
    assert "Expected an experiment in ['family.child', 'tiny'], but got 'huge'" in capfd.readouterr().err


def test_without_a_checkout_it_says_where_to_get_one(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        experiments, "__file__", str(tmp_path / "site-packages" / "fedtorch" / "cli" / "experiments.py")
    )
    assert main(["experiments", "list"]) == 1
    assert "Expected the folder experiments/ of a checkout" in capsys.readouterr().err


def test_every_experiment_has_a_main_setting_or_a_reason_for_none() -> None:
    there = {each.name: each.config for each in experiments.experiments(ROOT)}
    excused = re.findall(
        r"^\| `([\w.]+)` \|", (ROOT / "experiments" / "configs" / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(excused) == sorted(name for name, config in there.items() if config is None)
    assert {config for config in there.values() if config} == set(CONFIGS)


@pytest.fixture(scope="module")
def listed() -> dict[Path, str]:
    """The checkout's experiments by their main setting."""
    found = experiments.experiments(ROOT)
    names = {each.config: each.name for each in found if each.config is not None}
    assert len(names) == sum(each.config is not None for each in found)
    return names


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_what_a_main_setting_names_is_there(
    file: Path, listed: dict[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", str(file), "--print_config"])
    assert caught.value.code == 0
    assert {"algorithm", "data", "trainer"} <= yaml.safe_load(capsys.readouterr().out).keys()
    assert f"experiments.{listed[file]}" in file.read_text().split("\n")[0]


def test_a_main_setting_is_the_experiment_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = "experiments/configs/fedavg_family.yaml"
    by_file = configuration.FederationCLI("fit", ["--config", file, *QUIET, "--trainer.max_epochs", "3"]).model
    algorithm = fedavg_family.algorithms()["SCAFFOLD"]
    by_hand = ft.run(algorithm, ft.InProcess(fedavg_family.problem(40, 0)), rounds=3, cohort=4)
    assert same_bits(by_file.server, by_hand.server)


@pytest.mark.slow
@pytest.mark.filterwarnings(DEPENDENT)
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_main_setting_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_files(file)
    monkeypatch.chdir(ROOT)
    arguments = ["--config", str(file), *QUIET, "--trainer.max_epochs", "1"]
    assert configuration.FederationCLI("fit", arguments).model.round == 1


@pytest.mark.slow
@pytest.mark.filterwarnings(DEPENDENT)
def test_the_published_errors_of_the_weather_come_out_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "experiments" / "configs" / "gtv_fmi.yaml"
    needs_files(file)
    monkeypatch.chdir(ROOT)
    model = configuration.FederationCLI("fit", ["--config", str(file), *QUIET]).model
    # 1000 rounds of sums in another order: some thousand roundings
    assert model.history["val_error_mean"].iloc[-1] == pytest.approx(21.336245897848386, rel=1e-12)
    assert torch.isfinite(model.run.tensors()["weight"]).all()
