"""Overlaps as tables: the whole matrix where there is room, neighbours where there is not."""

from __future__ import annotations

import pytest
from explicit import random_frame

from tangent_lens.measures.overlaps import compare_subspaces, stability_over_seeds
from tangent_lens.reports.console import as_text
from tangent_lens.subspaces.subspace import Subspace


def overlaps(names):
    return compare_subspaces({name: Subspace.spanned_by(random_frame(20, 3, seed)) for seed, name in enumerate(names)})


def test_layers_of_one_site_are_headed_by_their_numbers():
    found = overlaps([f"resid_post.{layer}" for layer in range(8)])
    lines = as_text(found, width=70).splitlines()
    assert next(line for line in lines if line.strip()[:1].isdigit()).split() == [str(layer) for layer in range(8)]
    row = next(line for line in lines if line.lstrip().startswith("resid_post.2"))
    assert row.split()[1:] == [f"{value:.2f}" for value in found.overlap[2]]


def test_subspaces_with_names_of_their_own_keep_them():
    lines = as_text(overlaps(["PCA", "class means"]), width=70)
    assert "class means" in lines.split("PCA")[1]


@pytest.mark.parametrize("width", [60, 80])
def test_many_layers_are_shown_against_the_next(width):
    found = overlaps([f"resid_post.{layer}" for layer in range(24)])
    text = as_text(found, width=width)
    assert "overlap with the next" in text and "…" not in text
    row = next(line for line in text.splitlines() if line.lstrip().startswith("resid_post.4 "))
    assert row.split()[1:] == [
        "resid_post.5",
        f"{found.overlap[4][5]:.2f}",
        f"{found.largest_angle[4][5]:.0f}°",
        f"{found.distance[4][5]:.2f}",
    ]


def test_a_stability_is_a_sentence_beside_chance():
    stable = stability_over_seeds(lambda seed: Subspace.spanned_by(random_frame(20, 4, 0)), range(3))
    assert "1.00 on average between every two fits (3 fits)" in " ".join(str(stable).split())
    assert "chance is 0.20 (rank 4 of 20)" in " ".join(str(stable).split())


def test_the_plot_names_every_subspace():
    figure = overlaps(["PCA", "class means", "words"]).plot()
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert labels == ["PCA", "class means", "words"]
    assert [text.get_text() for text in figure.axes[0].texts][:1] == ["1.00"]
