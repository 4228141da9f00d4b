"""Subspaces of directions that somebody else found: a decoder's rows, a probe's weights, tokens of an unembedding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tangent_lens.storage import FileProblem, as_float64
from tangent_lens.subspaces.sampled import span_of
from tangent_lens.subspaces.subspace import Subspace


def fit_vectors(
    vectors: Float[Tensor, "m d"],
    rank: int | None = None,
    *,
    centre: Float[Tensor, " d"] | None = None,
    name: str = "vectors",
) -> Subspace:
    """The span of given directions, such as rows of a sparse autoencoder's decoder or the weights of a probe.

    Args:
        vectors: one direction a row; a single one may be (d,).
        rank: None takes the whole span and refuses dependent directions; a number takes that many leading singular
            directions of the vectors as they are, so that longer ones count for more.
        centre: the point they are measured from; zeros by default.
        name: what they are called in ``origin``.

    Raises:
        ValueError: vectors that are not finite rows, dependent ones without a rank, or a rank above their span.
    """
    vectors = _checked_rows(vectors, name)
    origin = {"method": "vectors", "fitted_on": name, "vectors": len(vectors)}
    if centre is None:
        centre = torch.zeros(vectors.shape[1], dtype=torch.float64)
    if rank is not None:
        return span_of(vectors.T, rank, centre, origin)
    try:
        return Subspace.spanned_by(vectors.T, origin | {"rank": len(vectors)}, centre)
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}, or give a rank to take their leading singular directions") from None


def fit_token_directions(
    matrix: Float[Tensor, "vocabulary d"],
    token_ids: Sequence[int] | Int[Tensor, " m"],
    *,
    center: bool = True,
    name: str = "token directions",
) -> Subspace:
    """The span of some tokens' rows of an embedding or unembedding matrix.

    Args:
        matrix: one row a token; the weights of an unembedding ``W_U`` of TransformerLens are its transpose.
        token_ids: which rows, each once.
        center: measure the rows from the mean row: what is common to all logits changes no probability.
        name: what they are called in ``origin``.

    Returns:
        A subspace centred at the mean row, or at zero.

    Raises:
        ValueError: a matrix that is not finite rows, tokens it does not have, or rows that are dependent.
    """
    matrix = _checked_rows(matrix, name)
    chosen = _checked_indices(token_ids, len(matrix), f"{name}: token")
    centre = matrix.mean(dim=0) if center else torch.zeros(matrix.shape[1], dtype=torch.float64)
    origin = {"method": "token_directions", "fitted_on": name, "tokens": chosen, "centred": center, "rank": len(chosen)}
    try:
        return Subspace.spanned_by((matrix[chosen] - centre).T, origin, centre)
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None


def load_vectors(
    path: str | os.PathLike[str], key: str | None = None, rows: Sequence[int] | Int[Tensor, " m"] | None = None
) -> Float[Tensor, "m d"]:
    """Directions from a safetensors file, for example some rows of a sparse autoencoder's decoder.

    Args:
        path: the file.
        key: which tensor; None where the file has only one that is a matrix.
        rows: which of its rows, each once; None for all.

    Returns:
        The rows, in float64; a tensor (d,) is one row.

    Raises:
        FileNotFoundError: nothing is there.
        FileProblem: it is no safetensors file, or a damaged one.
        ValueError: a key that is missing or not given where it must be, a tensor that is not finite rows, or rows that
            it does not have.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file at {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            key = _chosen_key(file, path, key)
            tensor = file.get_tensor(key)
    except SafetensorError as problem:
        raise FileProblem(f"{path} is no safetensors file, or was cut short ({problem}); save it again") from problem
    tensor = tensor[None] if tensor.ndim == 1 else tensor
    if rows is not None and tensor.ndim == 2:
        tensor = tensor[_checked_indices(rows, len(tensor), f"{key} in {path}: row")]
    return _checked_rows(tensor, f"{key} in {path}")


def _chosen_key(file: Any, path: str | os.PathLike[str], key: str | None) -> str:
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "nothing"
    if key is not None:
        if key not in shapes:
            raise ValueError(f"{path} has no tensor {key!r}; it has {listed}")
        return key
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    if len(matrices) != 1:
        raise ValueError(f"{path} has {len(matrices)} matrices, so say which with key=...; it has {listed}")
    return matrices[0]


def _checked_rows(vectors: Tensor, name: str) -> Float[Tensor, "m d"]:
    vectors = as_float64(vectors)
    vectors = vectors[None] if vectors.ndim == 1 else vectors
    if vectors.ndim != 2 or not vectors.numel():
        raise ValueError(f"{name}: directions must be rows (m, d), not of shape {tuple(vectors.shape)}")
    if not bool(torch.isfinite(vectors).all()):
        raise ValueError(f"{name}: some numbers are NaN or infinite; find out where they come from")
    return vectors


def _checked_indices(indices: Sequence[int] | Tensor, count: int, subject: str) -> list[int]:
    numbers = torch.as_tensor(indices)
    if numbers.ndim != 1 or not len(numbers):
        raise ValueError(f"{subject} numbers must be a list of one or more, not of shape {tuple(numbers.shape)}")
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ValueError(f"{subject} numbers must be whole, not {numbers.dtype}")
    chosen = numbers.tolist()
    for one in chosen:
        if not 0 <= one < count:
            raise ValueError(f"{subject} {one} does not exist; there are 0 to {count - 1}")
    if len(set(chosen)) < len(chosen):
        repeated = next(one for one in chosen if chosen.count(one) > 1)
        raise ValueError(f"{subject} {repeated} is there more than once; give each once")
    return chosen
