"""Attention reports to show: of made-up numbers, so that every kind of number is there, for any number of heads."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from tangent_lens.measures.attention import SHARES, AttentionDominance, AttentionScaling, DominanceByBucket
from tangent_lens.measures.attention_report import AttentionReport, AttentionSettings
from tangent_lens.measures.report import CorpusDescription, Space
from tangent_lens.measures.spectrum import Spectrum
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.subspaces.subspace import Subspace

CONTROLS = 20


def nested(values):
    return tuple(tuple(row) for row in np.asarray(values).tolist())


def layer_of(number: int | None, heads: int = 4, controls: int = CONTROLS, axes: bool = True, **changes):
    """One layer of random numbers; D of every head is above its controls, but for the last head of odd layers."""
    draw = np.random.default_rng(number or 0)
    dominance = draw.uniform(0.05, 0.95, heads)
    random = draw.uniform(1e-6, 1e-3, (heads, controls))
    if (number or 0) % 2:
        dominance[-1] = random[-1].mean()
    names = [name for name in SHARES if name != "bias"]
    shares = {name: tuple(draw.normal(0.11, 0.3, heads).tolist()) for name in names} | {"bias": (0.0,) * heads}
    optional = {}
    if axes:
        optional = {
            "by_distance": buckets("key distance", ("0", "1-3", "4-15", "16+"), heads, draw),
            "by_frequency": buckets("query token frequency", ("1 times", "2 to 1203 times"), heads, draw),
            "scaling": scaling_of(heads, draw),
        }
    made = AttentionDominance(
        layer=number,
        dominance=tuple(dominance.tolist()),
        random=nested(random),
        shares=shares,
        random_shares={name: nested(draw.normal(0, 0.1, (heads, controls))) for name in SHARES},
        kl=tuple(draw.uniform(0.01, 2, heads).tolist()),
        random_kl=nested(draw.uniform(1, 12, (heads, controls))),
        variance_baseline=0.25 + 0.01 * (number or 0),
        rows=(1000,) * heads,
        pairs=(32000,) * heads,
        left_out_rows=(8,) * heads,
        random_rows=(1000,) * heads,
        **optional,
    )
    return dataclasses.replace(made, **changes)


def buckets(axis, labels, heads, draw):
    return DominanceByBucket(
        axis, tuple(labels), nested(draw.uniform(0, 1, (heads, len(labels)))), nested([[7] * len(labels)] * heads)
    )


def scaling_of(heads, draw):
    bins, names = 5, ("tangent_tangent", "mixed", "normal_normal")
    return AttentionScaling(
        radius=nested(np.sort(draw.uniform(1, 100, (heads, bins)))),
        pairs=nested([[10] * bins] * heads),
        mean_square={name: nested(draw.uniform(0, 1, (heads, bins))) for name in names},
        dominance=nested(draw.uniform(0, 1, (heads, bins))),
        exponent={name: tuple(draw.normal(place + 2, 0.3, heads).tolist()) for place, name in enumerate(names)},
        standard_error={name: tuple(draw.uniform(0.01, 0.4, heads).tolist()) for name in names},
    )


def unknown_head(layer: AttentionDominance) -> AttentionDominance:
    """The layer with a first head of which nothing is known."""

    def first_unknown(values):
        return (math.nan, *values[1:])

    scaling = layer.scaling and dataclasses.replace(
        layer.scaling,
        exponent={name: first_unknown(values) for name, values in layer.scaling.exponent.items()},
        standard_error={name: first_unknown(values) for name, values in layer.scaling.standard_error.items()},
    )
    empty = tuple(math.nan for _ in layer.random[0])
    return dataclasses.replace(
        layer,
        dominance=first_unknown(layer.dominance),
        random=(empty, *layer.random[1:]),
        shares={name: first_unknown(values) for name, values in layer.shares.items()},
        kl=first_unknown(layer.kl),
        scaling=scaling,
    )


def report_of(layers, **changes) -> AttentionReport:
    subspace = Subspace(torch.eye(8, 3, dtype=torch.float64), torch.ones(8, dtype=torch.float64))
    made = AttentionReport(
        model=ModelDescription(
            name="[tiny] model", revision="step7", architecture="LlamaForCausalLM", library="transformers 5",
            weights="as stored", dtype="float64", n_layers=3, d_model=8, n_heads=4, n_key_value_heads=2, d_head=2,
            vocabulary=100, parameters=12345,
        ),
        corpus=CorpusDescription("numbers [1]", 12, 13, 1200, 1300, 1200, 1287, None),
        settings=AttentionSettings(rank=3, controls=CONTROLS, seed=4, distance_edges=(1, 4, 16)),
        layers=tuple(layers),
        spaces=(Space("resid_pre.0", 0, 3, 0.5, 0.1, Spectrum(4.0, 5.0, 6.0, 8, 2, 0.3), 0, 0.1, 0.05),),
        worst_sum=3.2e-7,
        warnings=("position 0 holds 96% of the variance",),
        versions={"tangent-lens": "0.1.0"},
        created="2026-01-01T00:00:00+00:00",
        subspaces={"resid_pre.0": subspace},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)
