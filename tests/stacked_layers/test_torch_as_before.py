"""Whoever imports and uses fedtorch gets from torch, and from torch.vmap, the bits that they got before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import hashlib, json, sys, warnings

sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
import torch
import torch.nn.functional as F
from torch import nn
from support.layer_settings import settings

torch.set_num_threads(1)


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else [leaf for each in results for leaf in flat(each)]


def bits(run, tensors):
    try:
        outputs = flat(run(*tensors))
        parts = [each.square().sum() for each in outputs if each.requires_grad and not each.is_complex()]
        leaves = [each for each in tensors if each.requires_grad]
        if parts and leaves:
            found = torch.autograd.grad(sum(parts), leaves, allow_unused=True)
            outputs += [each for each in found if each is not None]
    except Exception as error:
        return type(error).__name__ + str(error)[:40]
    return hashlib.sha256(b"".join(each.detach().contiguous().numpy().tobytes() for each in outputs)).hexdigest()


def everything():
    found = {}
    for name, setting in settings().items():
        generator = torch.Generator().manual_seed(0)
        stacked = [torch.stack([draw(generator) for _ in range(2)]) for draw in setting.inputs]
        layer = setting.call.double() if isinstance(setting.call, nn.Module) else None
        names = [] if layer is None else [each for each, _ in layer.named_parameters()]
        weights = [] if layer is None else [torch.stack([p.detach(), 2 * p.detach()]) for p in layer.parameters()]
        tensors = [each.requires_grad_() if each.is_floating_point() else each for each in (*stacked, *weights)]
        count = len(stacked)

        def call(*each):
            if layer is None:
                return tuple(flat(setting.call(*each)))
            return tuple(flat(torch.func.functional_call(layer, dict(zip(names, each[count:])), each[:count])))

        found[name] = bits(call, [each[0].detach().requires_grad_(each.requires_grad) for each in tensors])
        found[name + ", stacked"] = bits(torch.vmap(call), tensors)
    return found


def rules():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    keys = "FuncTorchBatched", "FuncTorchBatchedDecomposition", "CPU", "AutogradCPU"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [[name, key] for name in names for key in keys if has(name, key)]


before, known = everything(), rules()
import fedtorch as ft
from fedtorch.trust import privacy


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.gru, self.lstm, self.rnn = (kind(8, 8, batch_first=True) for kind in (nn.GRU, nn.LSTM, nn.RNN))
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4 * 3 * 3 + 8, 3)

    def forward(self, x):
        h = self.encoder(self.embed(x))
        for layer in (self.gru, self.lstm, self.rnn):
            h = layer(h)[0]
        planes = F.max_pool2d(self.norm(self.conv(h[:, None])).relu(), 2)
        return self.head(torch.cat([planes.flatten(1), h[:, 0]], 1))


torch.manual_seed(0)
data = ft.data.from_tensors([(torch.randint(9, (4, 8)), torch.randint(3, (4,))) for _ in range(3)])
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
for batched in (True, False):
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    local = ft.gradient_descent(Everything(), epochs=2, loss=loss, optimizer=sgd, batched=batched)
    run = ft.run(ft.fedavg(local), ft.InProcess(data), rounds=1)
    run.evaluate(data, {"accuracy": ft.metrics.accuracy(), "loss": F.cross_entropy})
rows = ft.data.from_tensors([(torch.randn(6, 5, 3), torch.randint(3, (6,))) for _ in range(2)])
net = nn.Sequential(nn.Flatten(), nn.Linear(15, 3))
private = privacy.example_level(
    net, clip=1.0, noise=1.0, sampling_rate=0.5, steps=2, delta=1e-3, loss=F.cross_entropy, optimizer=sgd
)
ft.run(ft.fedavg(private), ft.InProcess(rows), rounds=1)
after = everything()
print(json.dumps({
    "calls": len(before),
    "changed": [name for name in before if before[name] != after[name]],
    "computed": sum(len(value) == 64 for value in before.values()),
    "rules": [each for each in rules() if each not in known],
}))
"""


def test_calls_of_torch_give_the_same_bits_before_and_after_fedtorch() -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tests)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["computed"] > 700
    assert found["changed"] == []
    assert found["rules"] == []
