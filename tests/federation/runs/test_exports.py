"""Exported programs predict what the run, the loaded module and the client's module predict, to float rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from support.small_federations import Classifier, classes, solver
from torch import Tensor, nn

import fedtorch as ft

DATA = classes()
X = torch.cat([x for x, _ in DATA])
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # of float32
ROWS = ({0: torch.export.Dim("rows")},)


def federated(personal: bool) -> tuple[ft.Run, nn.Module, Tensor]:
    """A run, the module that comes out of it, and its predictions by the run's own evaluation."""
    algorithm = ft.personal_layers(solver(), "head.*") if personal else ft.fedavg(solver())
    run = ft.run(algorithm, ft.InProcess(DATA), rounds=2, progress=False)
    module = run.client_module("site 1") if personal else run.global_module()
    everywhere = X.expand(len(DATA), *X.shape)
    return run, module.eval(), algorithm.predict(run.tensors(), everywhere)[1].detach()


@pytest.mark.parametrize("personal", [False, True])
def test_an_exported_program_predicts_alike(personal: bool, tmp_path: Path) -> None:
    run, module, expected = federated(personal)
    torch.testing.assert_close(module(X).detach(), expected, **ROUNDING)
    program = torch.export.export(module, (X,), dynamic_shapes=ROWS)
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    for rows in (len(X), 3):
        torch.testing.assert_close(again(X[:rows]).detach(), expected[:rows], **ROUNDING)
    save_model(module, str(tmp_path / "model.safetensors"))
    plain = Classifier(seed=9).eval()
    load_model(plain, tmp_path / "model.safetensors")
    assert torch.equal(plain(X), module(X))
    if not personal:
        run.save(tmp_path / "run.safetensors")
        assert torch.equal(ft.load_module(tmp_path / "run.safetensors", Classifier(seed=9)).eval()(X), module(X))


@pytest.mark.parametrize("personal", [False, True])
def test_onnx_runtime_predicts_alike(personal: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime: Any = pytest.importorskip("onnxruntime")
    _, module, expected = federated(personal)
    torch.onnx.export(module, (X,), tmp_path / "model.onnx", dynamo=True, input_names=["x"], dynamic_shapes=ROWS)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for rows in (len(X), 3):
        (output,) = session.run(None, {"x": X[:rows].numpy()})
        torch.testing.assert_close(torch.from_numpy(output), expected[:rows], **ROUNDING)


ADAPTED = """
import sys, torch, peft, transformers, lightning as L, fedtorch as ft

class LitBert(L.LightningModule):
    def __init__(self, base):
        super().__init__()
        self.model = base

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    def training_step(self, batch):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

def base():
    torch.manual_seed(0)
    shape = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**shape, max_position_embeddings=32))

def adapted():
    torch.manual_seed(1)
    return LitBert(peft.get_peft_model(base(), peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4)))

folder = sys.argv[1]
torch.manual_seed(2)
rows = [{"input_ids": torch.randint(50, (6, 8)), "attention_mask": torch.ones(6, 8, dtype=torch.int64),
         "labels": torch.randint(2, (6,))} for _ in range(3)]
data = ft.data.from_tensors(rows)
run = ft.run(ft.fedavg(ft.gradient_descent(adapted(), epochs=1, batch_size=3, batched=False)), ft.InProcess(data),
             rounds=2, progress=False)
run.save(f"{folder}/run.safetensors")
inputs = {name: rows[0][name] for name in ("input_ids", "attention_mask")}
trained = ft.load_module(f"{folder}/run.safetensors", adapted()).eval()
expected = run.client_module(0).eval()(**inputs).detach()
assert (expected - adapted().eval()(**inputs)).abs().max() > 1e-3
torch.testing.assert_close(trained(**inputs), run.global_module().eval()(**inputs))
trained.model.save_pretrained(f"{folder}/adapter")
again = peft.PeftModel.from_pretrained(base(), f"{folder}/adapter").eval()
torch.testing.assert_close(again(**inputs).logits, expected)
trained.model.merge_and_unload().save_pretrained(f"{folder}/merged")
merged = transformers.AutoModelForSequenceClassification.from_pretrained(f"{folder}/merged").eval()
torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_adapters_saved_for_transformers_predict_alike(tmp_path: Path) -> None:
    """In a process of its own: these packages warn of each other."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ADAPTED, str(tmp_path)],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout.endswith("equal\n"), done.stderr
