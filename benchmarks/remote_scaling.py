"""What remote runs cost on paper: bytes over the wire, memory on the server and jobs, for models that nobody here can hold.

    python benchmarks/remote_scaling.py

The models are built without weights. The same formulas are held against what really went over the wire in the tests.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from tangent_lens.measures.plan import plan_measurement
from tangent_lens.measures.remote_cost import remote_cost
from tangent_lens.measures.report import Settings
from tangent_lens.models.huggingface import HuggingFaceModel
from tangent_lens.sites import resid_post, resolve

# 128 sequences of 512 tokens, half of them to fit on, 4 a batch, 8 batches a job.
BATCHES, BATCHES_A_JOB = 16, 8
MODELS = {
    "SmolLM2-135M": (30, 576, 1536, 9, 3),
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8),
    "Llama-3.1-70B": (80, 8192, 28672, 64, 8),
    "Llama-3.1-405B": (126, 16384, 53248, 128, 8),
}


def structure(layers: int, width: int, mlp: int, heads: int, key_value_heads: int) -> HuggingFaceModel:
    """A Llama without weights."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
    )
    with torch.device("meta"):
        return HuggingFaceModel(LlamaForCausalLM(config))


def main() -> None:
    """Print one row a model, kind of gradients and kind of statistics."""
    table = Table("model, all layers", "gradients", "statistics", "jobs", "sent", "received", "sums on the server")
    for name, shape in MODELS.items():
        model = structure(*shape)
        sites = resolve(resid_post(), model.sites)
        for gradients in (("residual",), ("residual", "weight")):
            for statistics in ("exact", "sketch"):
                settings = Settings(rank=16, gradients=gradients, statistics=statistics)
                plan = plan_measurement(model, sites, settings)
                batches = {"fit_batches": BATCHES, "test_batches": BATCHES, "batches_per_job": BATCHES_A_JOB}
                cost = remote_cost(model, plan, settings, **batches)
                sizes = (f"{size / 1e9:,.1f} GB" for size in (cost.sent_bytes, cost.received_bytes, cost.server_bytes))
                table.add_row(name, " + ".join(gradients), statistics, str(cost.jobs), *sizes)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
