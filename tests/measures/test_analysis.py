"""From records made by hand to measurements: controls, pooling and order; and the warnings about massive activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from explicit import array, energy, random_rows

from tangent_lens.measures.analysis import concentration_warnings, fit_proxies, measure_gradients, summarise_space
from tangent_lens.measures.energy import BackwardSignals, shuffled_energy
from tangent_lens.measures.report import Settings, Space
from tangent_lens.measures.spectrum import Spectrum
from tangent_lens.recording.moments import Moments, SecondMoments
from tangent_lens.recording.passes import ActivationRecord, GradientRecord
from tangent_lens.recording.receivers import WATCHED_POSITIONS, PositionVariance, WeightGradient
from tangent_lens.sites import Site

WIDTH = 8
SETTINGS = Settings(rank=2, controls=6)


def space(
    site: str = "resid_post.3",
    layer: int | None = 3,
    position: tuple[int, float, float] = (0, 0.1, 0.01),
    dimension: tuple[int, float] = (5, 0.1),
) -> Space:
    """A site with its top position (place, share of variance, share of rows) and top dimension (place, share)."""
    spectrum = Spectrum(WIDTH, 2.0, 3.0, 4.0, *dimension)
    return Space(site, layer, 2, 0.9, 0.1, spectrum, *position)


def at_layers(*layers: int, **options) -> list[Space]:
    return [space(f"resid_post.{layer}", layer, **options) for layer in layers]


def test_evenly_spread_variance_needs_no_warning():
    assert concentration_warnings([space()]) == ()
    assert concentration_warnings([]) == ()


def test_a_position_that_holds_most_of_the_variance_is_named():
    (sentence,) = concentration_warnings([space(position=(0, 0.913, 0.008))])
    assert sentence == (
        "massive activations: position 0 holds 91.3% of the variance at resid_post, layer 3; "
        "skip_first=True leaves the first position out"
    )


def test_a_dimension_that_holds_most_of_the_variance_is_named():
    (sentence,) = concentration_warnings([space(dimension=(5, 0.75))])
    assert sentence == "massive activations: dimension 5 holds 75.0% of the variance at resid_post, layer 3"


@pytest.mark.parametrize(("share", "warned"), [(0.5, False), (0.51, True)])
def test_most_is_more_than_half(share, warned):
    assert bool(concentration_warnings([space(position=(0, share, 0.01))])) is warned
    assert bool(concentration_warnings([space(dimension=(5, share))])) is warned


@pytest.mark.parametrize(("rows", "warned"), [(0.5, False), (0.19, False), (0.17, True)])
def test_in_short_sequences_a_position_of_many_rows_is_no_concentration(rows, warned):
    assert bool(concentration_warnings([space(position=(0, 0.9, rows))])) is warned


@pytest.mark.parametrize(
    ("layers", "written"),
    [((2,), "layer 2"), ((0, 1, 2), "layers 0 to 2"), ((0, 2, 3, 7), "layers 0, 2 to 3, 7"), ((5, 1), "layers 1, 5")],
)
def test_layers_are_written_as_runs(layers, written):
    (sentence,) = concentration_warnings(at_layers(*layers, dimension=(5, 0.75)))
    assert sentence.endswith(f"75.0% of the variance at resid_post, {written}")


def test_shares_of_several_layers_are_written_as_a_range():
    spaces = [space("resid_post.1", 1, dimension=(5, 0.9)), space("resid_post.2", 2, dimension=(5, 0.6))]
    (sentence,) = concentration_warnings(spaces)
    assert "dimension 5 holds 60.0% to 90.0% of the variance at resid_post, layers 1 to 2" in sentence


def test_kinds_and_dimensions_are_kept_apart():
    spaces = [
        space("resid_post.1", 1, dimension=(5, 0.9)),
        space("resid_post.2", 2, dimension=(6, 0.9)),
        space("resid_pre.2", 2, position=(0, 0.8, 0.01), dimension=(5, 0.9)),
    ]
    sentences = concentration_warnings(spaces)
    assert len(sentences) == 4
    assert "position 0 holds 80.0% of the variance at resid_pre, layer 2" in sentences[0]


@pytest.mark.parametrize("name", ["embedding", "enc.a"])
def test_a_place_without_a_layer_is_named_in_full(name):
    (sentence,) = concentration_warnings([space(name, None, dimension=(5, 0.75))])
    assert sentence.endswith(f"at {name}")


def test_leaving_the_first_position_out_is_only_advised_against_the_first():
    (sentence,) = concentration_warnings([space(position=(3, 0.9, 0.01))])
    assert "position 3 holds 90.0%" in sentence
    assert "skip_first" not in sentence


def recorded(rows: torch.Tensor, positions: torch.Tensor, batch: int = 11) -> ActivationRecord:
    watched = PositionVariance(rows.shape[1])
    for some, places in zip(rows.split(batch), positions.split(batch), strict=True):
        watched.update(some, places)
    return ActivationRecord(SecondMoments.of(rows, name="resid_post.3"), watched)


def test_a_space_names_the_position_that_holds_most_of_the_variance():
    length = WATCHED_POSITIONS + 4
    positions = torch.arange(length).repeat(10)
    rows = random_rows(len(positions), WIDTH) + 1000
    rows[positions == 2] *= 1.05
    site, record = Site("resid_post", 3), recorded(rows, positions)
    summary = summarise_space(site, record, fit_proxies({site: record}, SETTINGS)[site])
    distances = np.square(array(rows) - array(rows).mean(axis=0)).sum(axis=1)
    shares = [distances[positions == place].sum() / distances.sum() for place in range(WATCHED_POSITIONS)]
    assert array(record.positions.shares(record.moments)) == pytest.approx(np.array(shares), abs=1e-9)
    assert (summary.site, summary.layer, summary.rank) == ("resid_post.3", 3, 2)
    assert summary.top_position == int(np.argmax(shares)) == 2
    assert summary.top_position_share == pytest.approx(max(shares), rel=1e-9)
    assert summary.top_position_rows == pytest.approx(1 / length)
    values = np.linalg.eigvalsh(np.cov(array(rows).T))[::-1]
    assert summary.variance_share == pytest.approx(values[:2].sum() / values.sum(), rel=1e-9)


def weight(kind: str, layer: int, outputs: int = 5, seed: int = 0, site: Site | None = None) -> WeightGradient:
    """The gradient of a map whose signals are random; its input rows are ``inputs()``."""
    deltas = random_rows(40, outputs, seed)
    return WeightGradient(
        kind=kind,
        layer=layer,
        reads=site or Site("attention_input", layer),
        gradient=deltas.T @ inputs(),
        rows=40,
        signal_sum=deltas.sum(dim=0),
        signal_square_sum=deltas.square().sum(dim=0),
    )


def inputs(seed: int = 30) -> torch.Tensor:
    return random_rows(40, WIDTH, seed)


def record_of(weights: list[WeightGradient], residual: tuple[Site, ...] = ()) -> GradientRecord:
    moments = {site: Moments.of(inputs(50), inputs(51), name=site.name) for site in residual}
    read = {one.reads: SecondMoments.of(inputs()) for one in weights}
    return GradientRecord(moments, read, tuple(weights), loss=1.0, targets=39)


def measured(record: GradientRecord, settings: Settings = SETTINGS, fit_site_of=None, progress=None):
    """All measurements by name; the proxy of every site is fitted on the same rows."""
    mapping = fit_site_of or {site: site for site in record.inputs}
    sites = {*record.moments, *mapping.values()}
    proxies = fit_proxies({site: recorded(inputs(60), torch.arange(40)) for site in sites}, settings)
    return {one.name: one for one in measure_gradients(record, proxies, mapping, settings, progress)}


def proxy_basis() -> torch.Tensor:
    site = Site("resid_post", 0)
    return fit_proxies({site: recorded(inputs(60), torch.arange(40))}, SETTINGS)[site].basis


def test_each_map_is_measured_by_the_rows_of_its_own_gradient():
    maps = [weight("query", 1, seed=1), weight("key", 1, outputs=3, seed=2)]
    results = measured(record_of(maps))
    for one in maps:
        result = results[one.name]
        assert result.energy.energy == pytest.approx(energy(one.gradient.T @ one.gradient, proxy_basis()), rel=1e-10)
        signals = BackwardSignals.of(one.signal_sum, one.signal_square_sum, SecondMoments.of(inputs()))
        assert result.energy.shuffled == pytest.approx(shuffled_energy(signals, proxy_basis()), rel=1e-10)
        assert (result.gradient, result.kind, result.layer, result.pooled) == ("weight", one.kind, 1, False)


def test_maps_of_one_input_are_pooled_as_if_they_were_one():
    maps = [weight("query", 1, seed=1), weight("key", 1, outputs=3, seed=2), weight("value", 1, outputs=4, seed=3)]
    stacked = torch.cat([one.gradient for one in maps])
    pooled = measured(record_of(maps))["attention.1"]
    assert pooled.energy.energy == pytest.approx(energy(stacked.T @ stacked, proxy_basis()), rel=1e-10)
    sums = [torch.cat([getattr(one, name) for one in maps]) for name in ("signal_sum", "signal_square_sum")]
    expected = shuffled_energy(BackwardSignals.of(*sums, SecondMoments.of(inputs())), proxy_basis())
    assert pooled.energy.shuffled == pytest.approx(expected, rel=1e-10)
    assert pooled.isotropy.score == pytest.approx(isotropy_of(stacked), rel=1e-9)
    assert (pooled.pooled, pooled.kind) == (True, "attention")


def isotropy_of(rows: torch.Tensor) -> float:
    values = np.linalg.eigvalsh(np.cov(array(rows).T))
    return (values.sum() ** 2 / np.square(values).sum() - 1) / (len(values) - 1)


def test_mlp_maps_are_pooled_under_their_own_name():
    site = Site("mlp_input", 2)
    results = measured(record_of([weight("mlp_in", 2, seed=1, site=site), weight("mlp_gate", 2, seed=2, site=site)]))
    assert results.keys() == {"mlp.2", "mlp_in.2", "mlp_gate.2"}
    assert (results["mlp.2"].kind, results["mlp.2"].site) == ("mlp", "mlp_input.2")


def test_residual_gradients_are_measured_at_their_site_without_shuffling():
    site = Site("resid_post", 1)
    result = measured(record_of([], (site,)))["resid_post.1"]
    assert result.energy.energy == pytest.approx(energy(inputs(51).T @ inputs(51), proxy_basis()), rel=1e-10)
    assert result.isotropy.score == pytest.approx(isotropy_of(inputs(51)), rel=1e-9)
    assert (result.gradient, result.site, result.fit_site, result.energy.shuffled) == (
        "residual",
        "resid_post.1",
        "resid_post.1",
        None,
    )


def test_gradients_of_one_site_meet_the_same_controls():
    same = [weight("query", 1, seed=1), weight("key", 1, seed=1)]
    results = measured(record_of(same))
    assert results["query.1"].energy.random == results["key.1"].energy.random
    assert len(results["query.1"].energy.random) == SETTINGS.controls


def test_two_sites_meet_different_controls():
    results = measured(record_of([weight("query", 1, seed=1), weight("query", 2, seed=1)]))
    assert results["query.1"].energy.energy == results["query.2"].energy.energy
    assert not set(results["query.1"].energy.random) & set(results["query.2"].energy.random)


def test_the_seed_alone_decides_the_controls():
    record = record_of([weight("query", 1)], (Site("resid_post", 1),))
    first = measured(record)["query.1"].energy.random
    torch.rand(5)
    assert measured(record)["query.1"].energy.random == first
    assert measured(record, replace(SETTINGS, seed=1))["query.1"].energy.random != first


def test_controls_do_not_depend_on_which_other_sites_are_measured():
    alone = measured(record_of([weight("query", 1)]))
    beside = measured(record_of([weight("query", 1), weight("query", 0)], (Site("resid_post", 1),)))
    assert alone["query.1"] == beside["query.1"]


def test_a_proxy_fitted_at_another_site_brings_that_sites_controls():
    record, stream = record_of([weight("query", 1)], (Site("resid_pre", 1),)), Site("resid_pre", 1)
    result = measured(record, fit_site_of={Site("attention_input", 1): stream})["query.1"]
    assert (result.site, result.fit_site) == ("attention_input.1", "resid_pre.1")
    assert result.energy.random != measured(record)["query.1"].energy.random


def test_measurements_come_in_the_order_of_layers():
    maps = [weight("query", 2), weight("key", 0), weight("mlp_in", 0, site=Site("mlp_input", 0))]
    residual = (Site("resid_post", 1), Site("embedding"))
    names = list(measured(record_of(maps, residual)))
    assert names == ["embedding", "attention.0", "key.0", "mlp.0", "mlp_in.0", "resid_post.1", "attention.2", "query.2"]


class CountedProgress:
    def __init__(self) -> None:
        self.total, self.done, self.finished = None, 0.0, 0

    def start(self, description: str, total: float | None = None, unit: str = "") -> None:
        self.total = total

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        self.done += amount

    def finish(self) -> None:
        self.finished += 1


def test_progress_reaches_its_end_and_finishes_on_errors_too():
    record = record_of([weight("query", 1), weight("key", 1)], (Site("resid_post", 1),))
    whole, broken = CountedProgress(), CountedProgress()
    measured(record, progress=whole)
    assert (whole.total, whole.done, whole.finished) == (4, 4, 1)
    silent = replace(record, moments={Site("resid_post", 1): Moments.of(inputs(), 0 * inputs(), name="resid_post.1")})
    with pytest.raises(ValueError, match=r"gradients at resid_post\.1 is zero everywhere"):
        measured(silent, progress=broken)
    assert broken.finished == 1
