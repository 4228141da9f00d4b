"""Normal controls: subspaces of the same rank in the orthogonal complement of the tangent proxy."""

from __future__ import annotations

import numbers

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.storage import as_float64
from tangent_lens.subspaces.subspace import Subspace, check_orthonormal


def check_normal_controls_fit(rank: int, d: int) -> None:
    """A control of the same rank needs room beside the subspace.

    Raises:
        ValueError: 2 * rank > d.
    """
    if 2 * rank > d:
        raise ValueError(f"rank {rank} needs 2*rank <= d = {d} for a normal control; use rank <= {d // 2}")


def random_normals(
    tangent: Subspace | Float[Tensor, "d k"], count: int = 20, seed: int = 0
) -> Float[Tensor, "count d k"]:
    """Haar-random orthonormal k-frames of the orthogonal complement.

    A Gaussian matrix whose tangent part is removed is Gaussian in the complement, and the Q of its QR decomposition
    spans a Haar-distributed subspace of it.

    Args:
        tangent: the subspace, or its basis.
        count: how many frames.
        seed: the only source of randomness; torch's global state is not touched.

    Raises:
        ValueError: 2k > d, or a count below 1.
    """
    basis = tangent.basis if isinstance(tangent, Subspace) else as_float64(tangent)
    check_orthonormal(basis)
    d, k = basis.shape
    check_normal_controls_fit(k, d)
    if count < 1:
        raise ValueError(f"{count} controls give no comparison; use 1 or more (20 make the smallest p-value 1/21)")
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(count, d, k, generator=generator, dtype=torch.float64)
    # Twice: one projection leaves a tangent part of the size of rounding times the norm.
    for _ in range(2):
        gaussian = gaussian - basis @ (basis.T @ gaussian)
    return torch.linalg.qr(gaussian).Q


def normal_frames(tangent: Subspace, controls: int | Float[Tensor, "m d k"], seed: int) -> Float[Tensor, "m d k"]:
    """Frames to compare a subspace with: drawn here if ``controls`` is a number, else checked and taken as they are.

    Raises:
        ValueError: a number below 1, or frames of another rank or width.
    """
    check_normal_controls_fit(tangent.rank, tangent.d)
    if isinstance(controls, numbers.Integral) and not isinstance(controls, bool):
        return random_normals(tangent, int(controls), seed)
    if isinstance(controls, numbers.Real) or not hasattr(controls, "ndim"):
        raise ValueError(f"controls={controls} must be a whole number of random normals, or frames (m, d, k)")
    frames = as_float64(controls)  # pyright: ignore[reportArgumentType]
    if frames.ndim != 3 or not len(frames) or frames.shape[1:] != tangent.basis.shape:
        raise ValueError(
            f"controls of shape {tuple(frames.shape)} cannot be compared with a subspace of rank {tangent.rank} in "
            f"{tangent.d} dimensions; frames are (m, {tangent.d}, {tangent.rank})"
        )
    identity = torch.eye(tangent.rank, dtype=torch.float64)
    if float((frames.transpose(1, 2) @ frames - identity).abs().max()) > 1e-6:
        raise ValueError("these controls are not orthonormal frames; take them from random_normals")
    if float((tangent.basis.T @ frames).abs().max()) > 1e-6:
        raise ValueError("these controls are not normal to the subspace; take them from random_normals")
    return frames
