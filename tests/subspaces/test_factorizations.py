"""The fits of scikit-learn on planted parts, sources, clusters and atoms, and against scikit-learn called plainly."""

from __future__ import annotations

import math
import sys
import warnings

import numpy as np
import pytest
import torch
from explicit import array, projector, random_frame, random_rows
from sklearn.cluster import KMeans
from sklearn.decomposition import NMF, PCA, FastICA

from tangent_lens.recording.moments import SecondMoments
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.subspaces.factorizations import fit_dictionary, fit_ica, fit_kmeans, fit_nmf
from tangent_lens.subspaces.fits import fit_pca
from tangent_lens.subspaces.methods import FITS, fit
from tangent_lens.subspaces.semi_nmf import fit_semi_nmf

ALL = [fit_nmf, fit_ica, fit_kmeans, fit_dictionary]


def parts(count: int = 300, d: int = 12, rank: int = 3) -> tuple[torch.Tensor, np.ndarray]:
    """Rows that are sums of a few non-negative parts, and the parts as columns of length 1."""
    generator = np.random.default_rng(0)
    codes = generator.exponential(size=(count, rank)) * (generator.random((count, rank)) < 0.5)
    columns = generator.exponential(size=(d, rank)) * (generator.random((d, rank)) < 0.6)
    columns /= np.linalg.norm(columns, axis=0)
    return torch.from_numpy(codes @ columns.T), columns


def closest(found: torch.Tensor | None, columns: np.ndarray) -> np.ndarray:
    """For each column, |cosine| with the nearest direction that was found."""
    assert found is not None
    directions = array(found) / np.linalg.norm(array(found), axis=0)
    return np.abs(directions.T @ (columns / np.linalg.norm(columns, axis=0))).max(axis=0)


def test_nmf_finds_planted_parts():
    rows, columns = parts()
    subspace = fit_nmf(rows, 3, iterations=5000, tolerance=1e-8)
    assert (closest(subspace.directions, columns) > 0.99).all()
    assert np.allclose(projector(subspace.basis), projector(torch.linalg.qr(torch.from_numpy(columns))[0]), atol=0.05)
    assert not subspace.centre.any()
    assert subspace.origin["relative_error"] < 0.01


def test_nmf_is_that_of_scikit_learn():
    rows, _ = parts()
    reference = NMF(3, init="nndsvda", random_state=0, max_iter=500).fit(array(rows))
    expected = reference.components_.T / np.linalg.norm(reference.components_, axis=1)
    assert np.allclose(array(fit_nmf(rows, 3).directions), expected)


def test_ica_finds_planted_sources_and_spans_the_principal_directions():
    generator = np.random.default_rng(0)
    mixing = generator.normal(size=(8, 3))
    rows = torch.from_numpy(generator.laplace(size=(3000, 3)) @ mixing.T + 5)
    subspace = fit_ica(rows, 3)
    assert (closest(subspace.directions, mixing) > 0.995).all()
    components = PCA(3, svd_solver="full").fit(array(rows)).components_
    assert np.allclose(projector(subspace.basis), components.T @ components, rtol=0, atol=1e-8)
    assert np.allclose(array(subspace.centre), array(rows).mean(0))
    deviations = array(rows).std(axis=0)
    assert np.allclose(np.linalg.norm(array(subspace.directions), axis=1), deviations, rtol=0.05)


def test_ica_is_that_of_scikit_learn():
    rows = random_rows(200, 6) ** 3
    reference = FastICA(2, whiten="unit-variance", random_state=0, max_iter=500).fit(array(rows - rows.mean(0)))
    assert np.allclose(array(fit_ica(rows, 2).directions), reference.mixing_)


def test_kmeans_finds_planted_clusters():
    centres = np.random.default_rng(0).normal(size=(4, 10)) * 10
    labels = np.arange(200) % 4
    rows = torch.from_numpy(centres[labels] + np.random.default_rng(1).normal(size=(200, 10)) * 0.1)
    subspace = fit_kmeans(rows, 3)
    means = np.array([array(rows)[labels == one].mean(0) for one in range(4)])
    expected = means - array(rows).mean(0)
    found = array(subspace.directions).T
    assert np.allclose(np.sort(found, axis=0), np.sort(expected, axis=0), rtol=0, atol=1e-9)
    left = np.linalg.svd(expected.T)[0][:, :3]
    assert np.allclose(projector(subspace.basis), left @ left.T, rtol=0, atol=1e-9)
    assert subspace.origin["clusters"] == 4
    assert math.isfinite(subspace.condition_number)


def test_kmeans_is_that_of_scikit_learn():
    rows = random_rows(200, 6)
    reference = KMeans(3, n_init=4, random_state=0).fit(array(rows - rows.mean(0)))
    subspace = fit_kmeans(rows, 2)
    assert np.allclose(array(subspace.directions), reference.cluster_centers_.T)
    assert subspace.origin["relative_error"] == pytest.approx(
        np.sqrt(reference.inertia_) / np.linalg.norm(array(rows - rows.mean(0)))
    )


def test_a_dictionary_finds_planted_atoms():
    generator = np.random.default_rng(0)
    codes = generator.normal(size=(2000, 4)) * (generator.random((2000, 4)) < 0.2)
    atoms = generator.normal(size=(12, 4))
    rows = torch.from_numpy(codes @ atoms.T)
    subspace = fit_dictionary(rows, 4)
    assert (closest(subspace.directions, atoms) > 0.98).all()
    assert np.allclose(np.linalg.norm(array(subspace.directions), axis=0), 1)


@pytest.mark.parametrize("fit_one", ALL)
def test_the_origin_records_sample_seed_and_convergence(fit_one):
    rows, _ = parts()
    sample = RowSample(rows, torch.zeros(300).long(), torch.zeros(300).long(), 900, "here", 7)
    origin = fit_one(sample, 2, seed=3).origin
    assert (origin["method"], origin["fitted_on"]) == (fit_one.__name__.removeprefix("fit_"), "here")
    assert (origin["rows"], origin["rows_seen"], origin["seed"], origin["rank"]) == (300, 900, 3, 2)
    assert isinstance(origin["converged"], bool) and origin["iterations"] >= 1


@pytest.mark.parametrize("fit_one", ALL)
def test_fits_cut_short_say_so_and_do_not_warn(fit_one):
    rows, _ = parts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_one(rows, 2, iterations=1).origin["converged"] is False


@pytest.mark.parametrize("fit_one", ALL)
def test_one_seed_gives_one_answer(fit_one):
    rows, _ = parts()
    assert torch.equal(fit_one(rows, 2, seed=5).basis, fit_one(rows, 2, seed=5).basis)


@pytest.mark.parametrize("fit_one", [fit_ica, fit_kmeans])
def test_a_rotation_turns_the_span(fit_one):
    rows, turn = random_rows(150, 6), random_frame(6, 6, 3)
    turned = fit_one(rows @ turn.T, 2)
    assert np.allclose(projector(turned.basis), projector(turn @ fit_one(rows, 2).basis), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fit_one", ALL)
def test_ranks_that_the_rows_do_not_allow_are_refused(fit_one):
    rows, _ = parts()
    for rank, taught in [(13, "does not fit in 12"), (0, "spans nothing"), (0.5, "whole number here")]:
        with pytest.raises(ValueError, match=taught):
            fit_one(rows, rank)
    with pytest.raises(ValueError, match=r"rows determine at most . directions, rank 5 was asked"):
        fit_one(rows[:3], 5)


@pytest.mark.parametrize("fit_one", ALL)
def test_dependent_directions_are_refused(fit_one):
    line = torch.arange(1.0, 41.0)[:, None] * torch.arange(1.0, 7.0)
    with pytest.raises(ValueError, match=r"span only 1 dimensions, rank 2 was asked; use rank <= 1"):
        fit_one(line, 2)


def test_rows_that_nmf_and_ica_cannot_use_are_refused():
    with pytest.raises(ValueError, match="the least is -1; use fit_semi_nmf, which takes any"):
        fit_nmf(-torch.eye(4), 2)
    with pytest.raises(ValueError, match="all 9 rows are equal"):
        fit_ica(torch.ones(9, 4), 2)
    with pytest.raises(ValueError, match="penalty=0 must be above 0"):
        fit_dictionary(torch.eye(4), 2, penalty=0)


@pytest.mark.parametrize("fit_one", ALL)
def test_a_missing_scikit_learn_is_taught(fit_one, monkeypatch):
    for module in ("sklearn.decomposition", "sklearn.cluster"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "tangent-lens\[fits\]"'):
        fit_one(parts()[0], 2)


@pytest.mark.parametrize("method", FITS)
def test_every_fit_is_called_by_its_name(method):
    rows, _ = parts()
    direct = {"pca": lambda: fit_pca(SecondMoments.of(rows), 2), "semi_nmf": lambda: fit_semi_nmf(rows, 2, seed=1)}
    direct["pca_uncentred"] = lambda: fit_pca(SecondMoments.of(rows), 2, center=False)
    direct |= {one.__name__.removeprefix("fit_"): lambda one=one: one(rows, 2, seed=1) for one in ALL}
    data = SecondMoments.of(rows) if FITS[method].needs == "moments" else RowSample.of(rows)
    found, expected = fit(method, data, 2, 1), direct[method]()
    assert torch.equal(found.basis, expected.basis)
    assert found.origin == expected.origin


def test_fits_by_name_ask_for_what_they_need():
    rows, _ = parts()
    with pytest.raises(ValueError, match="no fit 'tsne'; there are pca, pca_uncentred, semi_nmf"):
        fit("tsne", rows)
    with pytest.raises(ValueError, match="pca needs moments, not RowSample; SecondMoments"):
        fit("pca", RowSample.of(rows))
    with pytest.raises(ValueError, match="nmf needs rows, and moments keep none; record a RowSample"):
        fit("nmf", SecondMoments.of(rows))
