"""The far side of the rehearsal: a process that has torch and nnsight and, like NDIF, nothing of tangent_lens.

    python server.py FOLDER TASK

It loads the model of a folder with frozen weights and runs the payloads that come in on its standard input, the way an
NDIF model actor does. Lengths and payloads go over the pipes as they are.
"""

import io
import sys
import traceback
from typing import BinaryIO


class NotInstalledHere:
    """Whoever imports the library on the server is told what a server would say."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "tangent_lens":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(folder: str, task: str, dtype: str) -> None:
    sys.meta_path.insert(0, NotInstalledHere())
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    import nnsight
    import torch
    from transformers import AutoTokenizer

    model = nnsight.TransformersModel(
        folder, task=task, tokenizer=AutoTokenizer.from_pretrained(folder), dispatch=True, dtype=getattr(torch, dtype)
    )
    model._module.requires_grad_(False)
    send(answers, b"ready")
    while payload := receive(sys.stdin.buffer):
        send(answers, answer(model, payload))


def answer(model: object, payload: bytes) -> bytes:
    """The saved values of one payload, or what went wrong as text; the first byte tells which."""
    import linecache

    import torch
    import zstandard
    from nnsight.schema.request import RequestModel
    from nnsight.tracing.globals import BLOCKS, SOURCES
    from nnsight.tracing.tracer import _saves, dec, inc

    # A payload puts its source under the client's file name; what was there before must come back.
    known = [(store, dict(store)) for store in (linecache.cache, SOURCES, BLOCKS)]
    try:
        tracer = RequestModel.deserialize(payload, model._remoteable_persistent_objects(), compress=True)
        inc()
        try:
            # As NDIF does: where the weights are of half precision, all that runs is under autocast.
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model._module.dtype == torch.bfloat16):
                tracer.execute(tracer.info.code)
            saves = _saves()
            found = {name: value for name, value in tracer.info.frame.f_locals.items() if id(value) in saves}
        finally:
            dec()
        buffer = io.BytesIO()
        torch.save(found, buffer)
        return b"+" + zstandard.ZstdCompressor().compress(buffer.getvalue())
    except Exception:
        return b"-" + traceback.format_exc().encode()
    finally:
        for store, before in known:
            store.clear()
            store.update(before)


def receive(pipe: BinaryIO) -> bytes:
    """One message; empty at the end."""
    return pipe.read(int.from_bytes(pipe.read(8), "big"))


def send(pipe: BinaryIO, message: bytes) -> None:
    pipe.write(len(message).to_bytes(8, "big") + message)
    pipe.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
