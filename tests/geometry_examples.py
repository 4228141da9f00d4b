"""Reports on local geometry to show: rows of paraboloids with noise, and gradients that vanish or not; the same at every call."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from tangent_lens.dynamics.geometry_run import GeometryPoint, GeometryRun
from tangent_lens.measures.concept_geometry import DepthGeometry, depth_geometry
from tangent_lens.measures.curvature_summary import curvature_summary
from tangent_lens.measures.geometry_measure import order_points
from tangent_lens.measures.geometry_report import (
    BucketGeometry,
    GeometryCorpus,
    GeometryReport,
    GeometrySettings,
    MapGeometry,
    SiteGeometry,
    TokenBucket,
)
from tangent_lens.measures.gradient_order import GradientOrder, gradient_order
from tangent_lens.measures.gradient_rows import TokenGradients
from tangent_lens.measures.manifolds import Manifold
from tangent_lens.measures.seen_curvature import seen_curvature
from tangent_lens.measures.slopes import EXPONENTS
from tangent_lens.measures.tangent_order import order_parts, tangent_order
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.recording.row_sample import RowSample

Clouds = dict[int, torch.Tensor]
ROWS, WIDTH, NEIGHBOURS = 60, 8, 10
BUCKETS = (
    TokenBucket("60 to 70", (0, 1, 2), (" or", "[/bold]", "\n"), 60, 70),
    TokenBucket("71 to 900", (3, 4, 5), (" the", "…", " [red]of"), 71, 900),
)


@functools.cache
def clouds_at(layer: int) -> Clouds:
    """Six tokens of a paraboloid, each with a place of its own; deeper layers bend more, the last one is mostly noise."""
    found = {}
    for token in range(6):
        noise = 0.3 if layer == 9 else 0.01
        surface = Manifold.paraboloid([1.0 + 0.2 * layer, 0.5])
        sample = surface.sample(ROWS, 1.0 + 0.1 * layer, d=WIDTH, noise=noise, seed=10 * layer + token)
        found[token] = sample.rows + 5 * token
    return found


def bucket_geometry(name: str, clouds: Clouds, sensitivity: bool = False) -> BucketGeometry:
    """By the real functions, at m = 2."""
    order = tangent_order(clouds, 2, sensitivity=sensitivity, name=name)
    bent = (curvature_summary(clouds, 2, name=name), seen_curvature(clouds, 2, name=name))
    return BucketGeometry(name, order, *bent, order_parts(clouds, 2).radius)


@functools.cache
def site_geometry(layer: int) -> SiteGeometry:
    """All tokens, and both buckets."""
    clouds = clouds_at(layer)
    buckets = [bucket_geometry(one.name, {token: clouds[token] for token in one.tokens}) for one in BUCKETS]
    whole = bucket_geometry("all", clouds, sensitivity=True)
    return SiteGeometry(f"resid_post.{layer}", layer, 2, whole, tuple(buckets), order_points(order_parts(clouds, 2), 0))


@functools.cache
def gradients_of(degenerate: bool, seed: int = 0, tokens: int = 9) -> GradientOrder:
    """Of x = (u, u^2), u symmetric about 0: a constant signal has no mean tangent gradient, one that knows u's sign has."""
    draw = torch.Generator().manual_seed(seed)
    groups = []
    for token in range(tokens):
        # As far to one side as to the other.
        u = torch.rand(20, 1, generator=draw, dtype=torch.float64)
        u = torch.cat([u, -u])
        signals = torch.ones_like(u) if degenerate else 1 + 2 * u.sign()
        groups.append(TokenGradients(token, u, u**2, signals))
    return gradient_order(groups, flips=99)


@functools.cache
def depth_of(layers: tuple[int, ...], seed: int = 0) -> DepthGeometry:
    """All tokens' rows."""
    tokens = torch.arange(6).repeat_interleave(ROWS)
    samples = {}
    for layer in layers:
        rows = torch.cat(list(clouds_at(layer).values())) + 0.05 * seed * torch.randn(
            6 * ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        samples[f"resid_post.{layer}"] = RowSample(rows, torch.arange(6 * ROWS), tokens, 6 * ROWS)
    return depth_geometry(samples, m=3, neighbours=NEIGHBOURS)


@functools.cache
def _report(layers: tuple[int, ...]) -> GeometryReport:
    settings = GeometrySettings(
        m=2, occurrences=ROWS, buckets=2, tokens=3, gradient_layers=2, neighbours=NEIGHBOURS, linear_m=3
    )
    maps = (
        MapGeometry("query.3", 3, "attn_in.3", 1, gradients_of(degenerate=True)),
        MapGeometry("mlp_in.3", 3, "mlp_in.3", 1, gradients_of(degenerate=False, seed=1)),
    )
    return GeometryReport(
        model=ModelDescription(
            name="[tiny] model",
            revision="step7",
            library="transformers 5",
            architecture="LlamaForCausalLM",
            weights="as stored",
            dtype="float64",
            parameters=12345,
            n_layers=10,
            d_model=WIDTH,
            n_heads=4,
            n_key_value_heads=2,
            d_head=2,
            vocabulary=40,
        ),
        corpus=GeometryCorpus("numbers [0]", 20, 3000, 8, 6, 6 * ROWS, 1.5),
        settings=settings,
        buckets=BUCKETS,
        sites=tuple(site_geometry(layer) for layer in layers),
        gradients=maps,
        depth=depth_of(layers),
        warnings=("a sentence to read first",),
        versions={"tangent-lens": "0"},
        created="2026-01-01",
    )


def geometry_report(layers: tuple[int, ...] = (3, 9), **changes) -> GeometryReport:
    """Of layers; any other field of the report as given."""
    return dataclasses.replace(_report(layers), **changes)


def undetermined(one: BucketGeometry) -> BucketGeometry:
    """The same numbers with an exponent above the floor that the rows say nothing about."""
    above_floor = dataclasses.replace(one.order.chosen.above_floor, exponent=1.35, low=EXPONENTS[0], high=EXPONENTS[-1])
    chosen = dataclasses.replace(one.order.chosen, above_floor=above_floor)
    return dataclasses.replace(one, order=dataclasses.replace(one.order, chosen=chosen))


def straight(one: BucketGeometry) -> BucketGeometry:
    """Without what only a normal part and many rows give."""
    chosen = dataclasses.replace(one.order.chosen, normal=None, above_floor=None, normal_share=0.0)
    order = dataclasses.replace(one.order, chosen=chosen, others=())
    return dataclasses.replace(one, order=order, curvature=None, seen=None)


def every_bucket(report: GeometryReport, change) -> GeometryReport:
    """A report with all its bucket geometries changed."""
    sites = tuple(
        dataclasses.replace(
            site, everything=change(site.everything), buckets=tuple(change(one) for one in site.buckets)
        )
        for site in report.sites
    )
    return dataclasses.replace(report, sites=sites)


def geometry_run(depth: bool = True, layers: tuple[int, ...] = (3, 5, 7, 9)) -> GeometryRun:
    """Three steps, with other neighbours at each; two sites' exponents stand at all layers."""
    found, points = _report((3, 9)), []
    sites = tuple(
        dataclasses.replace(found.sites[place % 2], site=f"resid_post.{layer}", layer=layer)
        for place, layer in enumerate(layers)
    )
    for place, step in enumerate((0, 10, 1000)):
        geometry = depth_of(layers, seed=place) if depth else None
        report = dataclasses.replace(found, sites=sites, gradients=(), depth=geometry)
        points.append(GeometryPoint(step, f"step {step}", report))
    return GeometryRun("a [run]", tuple(points))


def exponents_of(report: GeometryReport, name: str) -> np.ndarray:
    """Of all tokens at every site."""
    return np.array([getattr(one.everything.order.chosen, name).exponent for one in report.sites])
