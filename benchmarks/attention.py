"""What splitting attention scores costs beside a plain forward pass, measured side by side in one run.

    python benchmarks/attention.py [--sequences 32] [--rounds 3]

SmolLM2-135M (or, where it cannot be fetched, a Llama of its shape with random weights), all layers and heads, sequences
of 128 tokens in batches of 8: a plain forward pass with eager attention, and the same pass with every score split into
its parts and compared with 20 random normals of rank 16. Printed: seconds and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from tangent_lens.lens import Lens
from tangent_lens.measures.attention_report import AttentionSettings
from tangent_lens.measures.attention_rows import ChosenRows
from tangent_lens.measures.attention_run import record_attention
from tangent_lens.models.attention import attention_reader
from tangent_lens.models.packaged import PackagedModelUnavailable
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.passes import record_activations
from tangent_lens.sites import resid_pre
from tangent_lens.subspaces.fits import fit_pca

LENGTH, BATCH = 128, 8
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}


def load() -> Lens:
    """The packaged model, or one of its shape."""
    try:
        return Lens.from_pretrained("smollm2-135m")
    except PackagedModelUnavailable as problem:
        print(f"{problem}; going on with random weights")
        return Lens(LlamaForCausalLM(LlamaConfig(**SHAPE)).eval(), name="Llama of the same shape, random weights")


def seconds_of(run: Any) -> float:
    """One timed call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lens = load()
    module: Any = lens.model.module
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(lens.description.vocabulary, (options.sequences, LENGTH), generator=generator)
    corpus = Corpus.from_tokens(tokens)
    module.set_attn_implementation("eager")
    records = record_activations(lens.model, corpus.batches(BATCH), lens.resolve(resid_pre()))
    proxies = {site.layer: fit_pca(record.moments, 16) for site, record in records.items()}
    reader = attention_reader(lens.model)

    def plain() -> None:
        with torch.no_grad():
            for batch in corpus.batches(BATCH):
                lens.model.run_without_logits(batch)

    def split(controls: int) -> None:
        record_attention(
            lens.model,
            reader,
            corpus.batches(BATCH),
            proxies,
            AttentionSettings(controls=controls),
            chosen=ChosenRows.of(corpus.sequences, AttentionSettings().control_rows),
        )

    variants = {
        "plain forward pass, eager attention": plain,
        "split into parts, 1 control": lambda: split(1),
        "split into parts, 20 controls": lambda: split(20),
    }
    plain()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, run in variants.items():
            times[name].append(seconds_of(run))
    show(lens, times, options.sequences)


def show(lens: Lens, times: dict[str, list[float]], sequences: int) -> None:
    """Median seconds and ratios to the first variant."""
    table = Table(
        title=f"{lens.description.name}: {sequences} sequences of {LENGTH} tokens, {torch.get_num_threads()} threads"
    )
    for heading in ("variant", "seconds", "ratio"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    base = statistics.median(next(iter(times.values())))
    for name, found in times.items():
        middle = statistics.median(found)
        table.add_row(name, f"{middle:.1f}", f"{middle / base:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
