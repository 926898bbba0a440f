"""A server of predictions: a module with the tensors of a safetensors file, behind FastAPI.

`python -m experiments.serve digits.safetensors` answers for the classifier of the quickstart at 127.0.0.1:8000.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from experiments.quickstart import LitClassifier

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.concurrency import run_in_threadpool
except ModuleNotFoundError as error:
    raise ImportError("Expected FastAPI and uvicorn for a server: pip install fastapi uvicorn") from error

MOST = 2**20  # bytes of a request


def server(module: nn.Module, weights: Path | str, shape: tuple[int, ...], most: int = MOST) -> FastAPI:
    """Return a server of `module`, of rows of one shape; a file of another kind than safetensors is refused."""
    load_model(module.eval(), weights)
    application = FastAPI(title=type(module).__name__)

    @application.post("/predict")
    async def predict(request: Request) -> dict[str, object]:
        body = bytearray()
        async for chunk in request.stream():  # which may be longer than its header says
            body += chunk
            if len(body) > most:
                raise HTTPException(413, f"Expected at most {most} bytes, but got more; send fewer rows at a time")
        outputs = await run_in_threadpool(_outputs, module, bytes(body), shape)
        return {"outputs": outputs.tolist()}

    return application


def _outputs(module: nn.Module, body: bytes, shape: tuple[int, ...]) -> Tensor:
    """Return the module's outputs for the rows of a request, or raise the answer that says what is wrong with it."""
    wanted = f'{{"inputs": rows}} of finite numbers, each row of shape {list(shape)}'
    try:
        rows = torch.tensor(json.loads(body)["inputs"], dtype=next(module.parameters()).dtype)
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError, RecursionError):
        raise HTTPException(422, f"Expected {wanted}, but got something else") from None
    if rows.shape[1:] != shape or not rows.dim():
        raise HTTPException(422, f"Expected {wanted}, but got inputs of shape {list(rows.shape)}")
    with torch.inference_mode():
        outputs = module(rows) if rows.isfinite().all() else rows
    if not outputs.isfinite().all():
        raise HTTPException(422, f"Expected {wanted}, but got NaN, Inf or numbers for which the outputs are not finite")
    return outputs


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the classifier of the quickstart, to this machine only unless told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", help="a safetensors file")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; behind a proxy with TLS if elsewhere")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    application = server(LitClassifier(1), options.weights, (64,))
    uvicorn.run(application, host=options.host, port=options.port, limit_concurrency=64)


if __name__ == "__main__":
    main()
