"""Local geometry of SmolLM2-135M: what recording adds to the passes, and what the numbers cost against what one would write.

python benchmarks/geometry.py

Every ratio is of two things timed in turn in this run; the smaller of two turns counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.spatial import KDTree
from torch import Tensor

import tangent_lens as tln
from tangent_lens.measures.curvature_summary import curvature_summary
from tangent_lens.measures.local_tangent import fit_local_tangent, nearness
from tangent_lens.measures.neighbourhoods import nearest_neighbours
from tangent_lens.measures.tangent_order import order_parts
from tangent_lens.models.state import evaluation_mode, frozen_parameters
from tangent_lens.recording.losses import CausalLoss
from tangent_lens.recording.occurrences import choose_occurrences
from tangent_lens.recording.passes import record_activations, record_gradients

SEQUENCES, LENGTH, EACH, M, NEIGHBOURS, ROWS = 64, 128, 60, 8, 30, 2000
LAYERS = (0, 8, 15, 22, 29)


def main() -> None:
    """Passes first, then the numbers of one site."""
    lens = tln.Lens.from_pretrained("smollm2-135m", progress=False)
    corpus = lens.corpus(tln.reference_prose(), sequence_length=LENGTH, pack=True, max_sequences=SEQUENCES)
    chosen = choose_occurrences(corpus.batches(skip_first=True), EACH, seed=0)
    console = Console(width=120)
    console.print(passes_table(lens, corpus, chosen))
    sites = [f"resid_post.{layer}" for layer in LAYERS]
    samples = lens.sample(corpus, sites, rows=10_000, skip_first=True, progress=False)
    sample = samples[lens.resolve("resid_post.15")[0]]
    rows = {token: sample.rows[sample.tokens == token][:EACH] for token in chosen.chosen}
    console.print(numbers_table(rows, sample.rows[:ROWS].double()))


def passes_table(lens: Any, corpus: Any, chosen: Any) -> Table:
    """Plain passes against the same with the chosen rows kept."""
    model = lens.model
    sites = lens.resolve(",".join(f"resid_post.{layer}" for layer in LAYERS))
    maps = [one for one in lens.maps if one.layer in (8, 15, 22, 29) and one.kind in ("query", "mlp_in")]
    recorded = partial(record_activations, model, sites=sites, sample=len(chosen))
    ways = {
        "plain forward pass": partial(forward, model, corpus),
        f"with the rows of {len(chosen.chosen)} tokens at {len(sites)} sites": lambda: recorded(
            batches=chosen.only(corpus.batches())
        ),
        "plain forward and backward pass": partial(backward, model, corpus),
        f"with inputs and signals of {len(maps)} maps": lambda: record_gradients(
            model, chosen.only(corpus.batches()), maps=maps, keep_rows=True
        ),
    }
    seconds = {name: best(way) for name, way in ways.items()}
    table = Table(title=f"{corpus.tokens:,} tokens, {torch.get_num_threads()} threads")
    for heading in ("pass", "seconds", "ratio"):
        table.add_column(heading, justify="left" if heading == "pass" else "right")
    names = list(seconds)
    for name in names:
        plain = seconds[names[0]] if name in names[:2] else seconds[names[2]]
        table.add_row(name, f"{seconds[name]:.1f}", f"{seconds[name] / plain:.2f}")
    return table


def numbers_table(clouds: dict[int, Tensor], rows: Tensor) -> Table:
    """The numbers of one site, and two steps against what one would write."""
    cloud = next(iter(clouds.values()))
    table = Table(title=f"one site: {len(clouds)} tokens of {EACH} rows, m = {M}")
    for heading in ("what", "milliseconds", "times ours", "agreement"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    table.add_row("exponents of all tokens", f"{1000 * best(partial(order_parts, clouds, M)):.0f}", "", "")
    table.add_row("curvature of all tokens", f"{1000 * best(partial(curvature_summary, clouds, M)):.0f}", "", "")
    ours, theirs = best(partial(fit_local_tangent, cloud, M)), best(partial(covariance_basis, cloud, M))
    table.add_row("one tangent space (foot, tilt, basis)", f"{1000 * ours:.1f}", "1", "")
    overlap = float((fit_local_tangent(cloud, M)._first.T @ covariance_basis(cloud, M)).square().sum()) / M
    table.add_row(
        "  its basis alone by a d x d covariance", f"{1000 * theirs:.0f}", f"{theirs / ours:.0f}", f"{overlap:.6f}"
    )
    ours, theirs = best(partial(nearest_neighbours, rows, NEIGHBOURS)), best(partial(tree_neighbours, rows))
    table.add_row(f"{NEIGHBOURS} neighbours of {len(rows)} rows", f"{1000 * ours:.0f}", "1", "")
    found = nearest_neighbours(rows, NEIGHBOURS), tree_neighbours(rows)
    same = float((found[0].sort().values == found[1].sort().values).double().mean())
    table.add_row("  by scipy's KDTree", f"{1000 * theirs:.0f}", f"{theirs / ours:.1f}", f"{same:.6f}")
    return table


def forward(model: Any, corpus: Any) -> None:
    """As anybody would run it."""
    with evaluation_mode(model.module), torch.no_grad():
        for batch in corpus.batches():
            model.run_without_logits(batch)


def backward(model: Any, corpus: Any) -> None:
    """Gradients of the embedding alone, as recording asks for them."""
    loss = CausalLoss()
    with evaluation_mode(model.module), torch.enable_grad(), frozen_parameters(model):
        for batch in corpus.batches():
            value, _ = loss(model.run(batch), batch)
            value.backward()


def covariance_basis(rows: Tensor, m: int) -> Tensor:
    """Leading eigenvectors of the weighted covariance."""
    values = rows.double()
    weights = nearness((values - values.mean(dim=0)).norm(dim=1), 1.0)
    centred = values - (weights @ values) / weights.sum()
    return torch.linalg.eigh(centred.T @ (weights[:, None] * centred)).eigenvectors[:, -m:]


def tree_neighbours(rows: Tensor) -> Tensor:
    """The row itself is the first that a tree finds."""
    return torch.from_numpy(KDTree(rows.numpy()).query(rows.numpy(), k=NEIGHBOURS + 1)[1][:, 1:])


def best(way: Callable[[], object], turns: int = 2) -> float:
    """The smallest of a few times, in seconds."""
    found = []
    for _ in range(turns):
        started = time.perf_counter()
        way()
        found.append(time.perf_counter() - started)
    return min(found)


if __name__ == "__main__":
    main()
