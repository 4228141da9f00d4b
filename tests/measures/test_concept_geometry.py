"""The geometry of concepts whose shape is known, and each number against its own measure or a slow one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from explicit import PROPERTY, array, random_frame, random_rows, scatter
from hypothesis import given
from hypothesis import strategies as st
from skdim.id import MLE, TwoNN
from sklearn.decomposition import PCA

from tangent_lens.measures.concept_geometry import concept_geometry, depth_geometry
from tangent_lens.measures.neighbourhoods import neighbourhood_agreement, neighbourhood_overlap
from tangent_lens.recording.row_sample import RowSample


def sample(rows: torch.Tensor, tokens: torch.Tensor | None = None) -> RowSample:
    count = torch.arange(len(rows))
    return RowSample(rows, count // 10, count % 4 if tokens is None else tokens, len(rows))


def flat(count: int, m: int, d: int, noise: float = 0.0, seed: int = 0) -> torch.Tensor:
    """m dimensions of variance 1, and noise in all d, far from the origin."""
    generator = np.random.default_rng(seed)
    inside = torch.from_numpy(generator.normal(size=(count, m))) @ random_frame(d, m, seed).T
    return 30 + inside + noise * torch.from_numpy(generator.normal(size=(count, d)))


def circle(count: int, d: int, seed: int = 0) -> torch.Tensor:
    angles = torch.from_numpy(np.random.default_rng(seed).uniform(0, 2 * math.pi, size=count))
    return 5 + torch.stack([angles.cos(), angles.sin()], dim=1) @ random_frame(d, 2, seed).T


def slow_linearity(rows: torch.Tensor, m: int, seed: int) -> float:
    """One held-out row at a time, with the principal directions of scikit-learn."""
    values = array(rows)
    order = np.random.default_rng(seed).permutation(len(values))
    first, second = np.split(order, [len(order) // 2])
    along = total = 0.0
    for fitted, held_out in ((first, second), (second, first)):
        model = PCA(m, svd_solver="full").fit(values[fitted])
        for row in values[held_out] - model.mean_:
            along += sum((row @ direction) ** 2 for direction in model.components_)
            total += row @ row
    return along / total


@pytest.mark.parametrize(("count", "width"), [(300, 12), (120, 200)], ids=["more rows", "more dimensions"])
def test_every_number_equals_its_own_measure(count, width):
    rows = random_rows(count, width, seed=3)
    labels = [place % 5 for place in range(count)]
    found = concept_geometry(rows, m=4, labels=labels, neighbours=9, seed=2)
    eigenvalues = np.linalg.eigvalsh(scatter(rows)).clip(min=0)
    shares = eigenvalues / eigenvalues.sum()
    positive = shares[shares > 1e-12]
    assert (found.rows, found.seen, found.seed, found.d, found.m) == (count, count, 2, width, 4)
    centred = array(rows - rows.mean(dim=0))
    assert found.two_nn == pytest.approx(TwoNN().fit(centred).dimension_, rel=1e-6)
    assert found.mle == pytest.approx(MLE().fit(centred, n_neighbors=20).dimension_, rel=1e-6)
    assert found.participation_ratio == pytest.approx(1 / (shares**2).sum())
    assert found.effective_rank == pytest.approx(math.exp(-(positive * np.log(positive)).sum()), rel=1e-6)
    assert found.linearity_fitted == pytest.approx(PCA(4).fit(array(rows)).explained_variance_ratio_.sum())
    assert found.linearity == pytest.approx(slow_linearity(rows, 4, seed=2), rel=1e-9)
    assert found.agreement == neighbourhood_agreement(rows, labels, 9)


def test_a_flat_set_with_noise_is_linear():
    found = concept_geometry(flat(800, 3, 40, noise=0.01), m=3)
    assert found.linearity == pytest.approx(3 / (3 + 40 * 1e-4), abs=1e-3)
    assert found.participation_ratio == pytest.approx(3, rel=0.05)
    assert concept_geometry(flat(800, 3, 40), m=3).linearity == pytest.approx(1, abs=1e-12)


def test_a_circle_is_one_dimensional_and_not_linear():
    found = concept_geometry(circle(1500, 20), m=1)
    assert found.linearity == pytest.approx(0.5, abs=0.03)
    assert found.two_nn == pytest.approx(1, rel=0.12) and found.mle == pytest.approx(1, rel=0.12)
    assert found.participation_ratio == pytest.approx(2, rel=0.01)
    assert concept_geometry(circle(1500, 20), m=2).linearity == pytest.approx(1)


def test_held_out_is_the_share_of_noise_and_fitted_is_above_it():
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(60, 200)))
    found = concept_geometry(noise, m=10)
    assert found.linearity == pytest.approx(10 / 200, abs=0.02)
    assert found.linearity_fitted > 4 * found.linearity


@PROPERTY
@given(
    seed=st.integers(0, 1000),
    scale=st.floats(1e-6, 1e6),
    shift=st.floats(-100, 100),
    zeros=st.integers(0, 40),
    m=st.integers(1, 5),
)
def test_rotation_scale_shift_and_empty_columns_change_nothing(seed, scale, shift, zeros, m):
    rows = random_rows(50, 5, seed)
    labels = torch.arange(50) % 3
    turned = scale * (torch.nn.functional.pad(rows, (0, zeros)) @ random_frame(5 + zeros, 5 + zeros, seed).T + shift)
    one = concept_geometry(rows, m=m, labels=labels, neighbours=5, seed=seed)
    other = concept_geometry(turned, m=m, labels=labels, neighbours=5, seed=seed)
    assert other.agreement == one.agreement
    for name in ("two_nn", "mle", "effective_rank", "participation_ratio", "linearity", "linearity_fitted"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-5), name


def test_order_changes_only_the_halves():
    rows, order = random_rows(90, 6), torch.from_numpy(np.random.default_rng(4).permutation(90))
    labels = torch.arange(90) % 4
    one = concept_geometry(rows, m=2, labels=labels)
    other = concept_geometry(rows[order], m=2, labels=labels[order])
    assert other.agreement is not None and one.agreement is not None
    assert other.agreement.agreement == pytest.approx(one.agreement.agreement)
    for name in ("two_nn", "mle", "effective_rank", "participation_ratio", "linearity_fitted"):
        assert getattr(other, name) == pytest.approx(getattr(one, name)), name
    assert other.linearity == pytest.approx(one.linearity, abs=0.05)


def test_of_many_rows_as_many_as_allowed_are_chosen_by_seed():
    rows = random_rows(300, 6)
    found = concept_geometry(rows, m=2, most=100, seed=5)
    assert (found.rows, found.seen, found.seed) == (100, 300, 5)
    assert found == concept_geometry(rows, m=2, most=100, seed=5)
    assert found != concept_geometry(rows, m=2, most=100, seed=6)
    places = np.sort(np.random.default_rng(5).choice(300, size=100, replace=False))
    assert replace(found, seen=100) == concept_geometry(rows[places], m=2, seed=5)


def test_few_distinct_rows_have_no_dimension_but_a_shape():
    rows = random_rows(10, 6).repeat(10, 1)
    found = concept_geometry(rows, m=2)
    assert found.two_nn is None and found.mle is None
    assert 0 < found.linearity <= 1
    assert found.participation_ratio == pytest.approx(concept_geometry(random_rows(10, 6), m=2).participation_ratio)
    twenty = concept_geometry(random_rows(20, 6), m=2)
    assert twenty.two_nn is not None and twenty.mle is None


def test_a_half_without_variance_has_no_direction():
    """99 equal rows and another: the direction of one half is the only one there is, and the other half has none."""
    rows = torch.full((100, 5), 0.1, dtype=torch.float64)
    rows[0, 0] = 1.0
    one, turned = (concept_geometry(each, m=3) for each in (rows, rows @ random_frame(5, 5).T))
    assert one.linearity == pytest.approx(turned.linearity, abs=1e-9)
    assert one.linearity_fitted == pytest.approx(1) and one.effective_rank == pytest.approx(1)


def test_labels_that_say_nothing_give_no_agreement():
    rows = random_rows(50, 4)
    assert concept_geometry(rows, m=2).agreement is None
    assert concept_geometry(rows, m=2, labels=[7] * 50).agreement is None
    assert concept_geometry(rows, m=2, labels=range(50)).agreement is None


def test_float32_and_integer_rows_are_measured_in_float64():
    rows = random_rows(60, 4, dtype=torch.float32)
    assert concept_geometry(rows, m=2) == concept_geometry(rows.double(), m=2)
    whole = (100 * rows).round()
    assert concept_geometry(whole.long(), m=2) == concept_geometry(whole.double(), m=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m": 0}, "m=0 principal directions must be a whole number from 1 on"),
        ({"m": 2.5}, "m=2.5 principal directions must be a whole number from 1 on"),
        ({"m": 7}, "m=7 principal directions do not fit in 6 dimensions; use m <= 6"),
        ({"m": 30}, "60 of 60 rows do not determine m=30 .* use 62 rows or more, .*, or m <= 29"),
        ({"m": 5, "most": 10}, "10 of 60 rows do not determine m=5 .* a value of most that allows them, or m <= 4"),
        ({"m": 2, "most": 1.5}, "most=1.5 must be a whole number, 0 or more"),
        ({"m": 2, "seed": -1}, "seed=-1 must be a whole number, 0 or more"),
        ({"m": 2, "labels": [0, 1] * 30, "neighbours": 60}, "k=60 neighbours do not fit 60 rows"),
        ({"m": 2, "labels": [0, 1]}, "2 labels do not fit 60 rows"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        concept_geometry(random_rows(60, 6), **options)


def test_bad_rows_are_refused():
    rows = random_rows(60, 6)
    rows[59, 0] = math.nan
    for most in (2000, 20):
        with pytest.raises(ValueError, match="NaN or infinity"):
            concept_geometry(rows, m=2, most=most)
    with pytest.raises(ValueError, match="all 60 rows are equal"):
        concept_geometry(torch.full((60, 6), 0.1), m=2)
    with pytest.raises(ValueError, match=r"rows must be of shape \(n, d\)"):
        concept_geometry(random_rows(60, 6)[None].expand(60, -1, -1), m=2)
    with pytest.raises(ValueError, match=r"1 of 1 rows do not determine m=1 .* that allows them$"):
        concept_geometry(rows[:1], m=1)


@pytest.fixture(scope="module")
def layers():
    """Three sites of 120 rows, of two widths; the second is the first one turned."""
    rows = random_rows(120, 6)
    return {
        "resid_post.0": sample(rows),
        "resid_post.1": sample(rows @ random_frame(6, 6).T + 3),
        "resid_post.2": sample(rows @ random_rows(6, 9, seed=1) + random_rows(120, 9, seed=2)),
    }


def test_depth_is_each_site_and_the_overlaps_between_them(layers):
    found = depth_geometry(layers, m=3, neighbours=7, seed=1)
    assert found.sites == tuple(layers)
    for site, one in layers.items():
        assert found.of(site) == concept_geometry(one.rows, m=3, labels=one.tokens, neighbours=7, seed=1)
    first, second, third = (one.rows for one in layers.values())
    assert found.overlap_before == (
        None,
        neighbourhood_overlap(first, second, 7),
        neighbourhood_overlap(second, third, 7),
    )
    assert found.overlap_first[2] == found.overlap_last[0] == neighbourhood_overlap(first, third, 7)
    assert found.overlap_before[1] is not None and found.overlap_before[1].overlap == 1
    assert found.overlap_first[0].overlap == found.overlap_last[2].overlap == 1
    assert found.overlap_first[2].overlap < 0.9


def test_the_same_rows_are_chosen_at_every_site(layers):
    found = depth_geometry(layers, m=3, neighbours=7, most=50, seed=1)
    places = np.sort(np.random.default_rng(1).choice(120, size=50, replace=False))
    first, _, third = (one.rows[places] for one in layers.values())
    assert all((one.rows, one.seen) == (50, 120) for one in found.geometries)
    assert found.overlap_last[0] == neighbourhood_overlap(first, third, 7)
    assert found.overlap_first[1].overlap == 1


def test_rows_of_pandas_are_the_sites(layers):
    found = depth_geometry(layers, m=3, neighbours=7)
    frame = found.to_pandas()
    assert frame["site"].tolist() == list(layers)
    assert math.isnan(frame["overlap_before"][0]) and frame["overlap_before"][1] == 1
    assert frame["linearity"].tolist() == [one.linearity for one in found.geometries]
    assert frame["agreement"].tolist() == [one.agreement.agreement for one in found.geometries]
    assert frame["neighbours"].tolist() == [7, 7, 7]
    assert frame["overlap_expected"].tolist() == [7 / 119] * 3
    one_token = {site: RowSample.of(one.rows) for site, one in layers.items()}
    empty = depth_geometry(one_token, m=3, neighbours=7).to_pandas()
    assert empty["agreement"].isna().all() and empty["agreement"].dtype == float
    with pytest.raises(KeyError, match=r"'resid_post.7' was not measured; measured: resid_post.0, resid_post.1"):
        found.of("resid_post.7")


def test_samples_that_do_not_go_together_are_refused(layers):
    first = layers["resid_post.0"]
    others = {
        "tokens": replace(first, tokens=first.tokens.flip(0)),
        "sequences": replace(first, sequences=first.sequences + 1),
        "count": sample(first.rows[1:]),
    }
    for name, other in others.items():
        with pytest.raises(
            ValueError, match=rf"{name} holds 1\d\d rows of other tokens or sequences than the 120 of a"
        ):
            depth_geometry({"a": first, name: other}, m=2)
    with pytest.raises(ValueError, match="no samples, so there is no depth"):
        depth_geometry({})


def test_the_site_that_cannot_be_measured_is_named(layers):
    flat_site = sample(torch.ones(120, 6))
    with pytest.raises(ValueError, match=r"^resid_pre\.0: all 120 rows are equal"):
        depth_geometry({**layers, "resid_pre.0": flat_site}, m=2)
    with pytest.raises(ValueError, match=r"^resid_post\.0: k=200 neighbours do not fit 120 rows"):
        depth_geometry(layers, m=2, neighbours=200)
