"""The page's server answers with what the run predicts, and says what is wrong with a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from support.small_federations import FEATURES, Classifier, classes, solver

import fedtorch as ft

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from fastapi.testclient import TestClient

from experiments import serve


@pytest.fixture(scope="module")
def run() -> ft.Run:
    return ft.run(ft.fedavg(solver()), ft.InProcess(classes()), rounds=2, progress=False)


@pytest.fixture(scope="module")
def client(run: ft.Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("serve") / "model.safetensors"
    save_model(run.global_module(), str(path))
    with TestClient(serve.server(Classifier(seed=9), path, (FEATURES,), most=5000)) as client:
        yield client


def test_it_answers_with_what_the_run_predicts(run: ft.Run, client: Any) -> None:
    x = classes()[0][0]
    answer = client.post("/predict", json={"inputs": x.tolist()})
    assert answer.status_code == 200
    outputs = torch.tensor(answer.json()["outputs"])
    torch.testing.assert_close(outputs, run.global_module().eval()(x).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"inputs": [[1, 2, NaN, 4]]}', "but got NaN, Inf"),
        ('{"inputs": [[1, 2, 1e999, 4]]}', "but got NaN, Inf"),
        ('{"inputs": [[1, 2, 3]]}', "each row of shape [4], but got inputs of shape [1, 3]"),
        ('{"inputs": [1, 2, 3, 4]}', "but got inputs of shape [4]"),
        ('{"inputs": []}', "but got inputs of shape [0]"),
        ('{"inputs": 1}', "but got inputs of shape []"),
        ('{"inputs": [[1, 2, 3, 4], [1]]}', "but got something else"),
        ('{"inputs": [["a", 2, 3, 4]]}', "but got something else"),
        ('{"inputs": null}', "but got something else"),
        (f'{{"inputs": [[1{"0" * 400}, 2, 3, 4]]}}', "but got something else"),
        ('{"rows": [[1, 2, 3, 4]]}', "but got something else"),
        ("[1]", "but got something else"),
        ("not JSON", "but got something else"),
        (b"\xff\xfe", "but got something else"),
        ("", "but got something else"),
        ("[" * 4000, "but got something else"),
    ],
)
def test_error_responses(client: Any, body: str | bytes, said: str) -> None:
    answer = client.post("/predict", content=body)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_outputs_that_overflow_are_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(module.weight)
    save_model(module, str(tmp_path / "sum.safetensors"))
    with TestClient(serve.server(module, tmp_path / "sum.safetensors", (2,))) as client:
        answer = client.post("/predict", json={"inputs": [[3e38, 3e38]]})
    assert answer.status_code == 422
    assert "outputs are not finite" in answer.json()["detail"]


def test_long_requests_are_refused_whatever_their_header_says(client: Any) -> None:
    body = json.dumps({"inputs": [[1.0] * FEATURES] * 1000}).encode()

    def chunks() -> Iterator[bytes]:  # without a length
        yield from (body[i : i + 1000] for i in range(0, len(body), 1000))

    for content in (body, chunks()):
        answer = client.post("/predict", content=content)
        assert answer.status_code == 413
        assert "at most 5000 bytes" in answer.json()["detail"]


def test_it_loads_safetensors_of_this_module_only(tmp_path: Path) -> None:
    torch.save(Classifier().state_dict(), tmp_path / "pickled.pt")
    with pytest.raises(SafetensorError):
        serve.server(Classifier(), tmp_path / "pickled.pt", (FEATURES,))
    save_model(torch.nn.Linear(2, 2), str(tmp_path / "other.safetensors"))
    with pytest.raises(RuntimeError, match="Missing key"):
        serve.server(Classifier(), tmp_path / "other.safetensors", (FEATURES,))


def test_it_listens_on_this_machine_only_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(serve.uvicorn, "run", lambda application, **settings: told.update(settings))
    save_model(serve.LitClassifier(1), str(tmp_path / "digits.safetensors"))
    serve.main([str(tmp_path / "digits.safetensors")])
    assert told["host"] == "127.0.0.1"
