"""Normal controls: subspaces of the same rank in the orthogonal complement of the tangent proxy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.storage import as_float64
from tangent_lens.subspaces.subspace import Subspace, check_orthonormal

# Numbers of one batch of frames: 32 MB in float64, whatever the width and the rank.
_NUMBERS_AT_ONCE = 4_000_000
# torch draws normal numbers in blocks of this size; batches of whole blocks continue one stream.
_BLOCK = 16
_ANOTHER_STREAM = 0x5EED


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
    return torch.cat(list(random_normal_batches(tangent, count, seed, at_once=count)))


def random_normal_batches(
    tangent: Subspace | Float[Tensor, "d k"], count: int = 20, seed: int = 0, *, at_once: int | None = None
) -> Iterator[Float[Tensor, "batch d k"]]:
    """The frames of :func:`random_normals`, the same ones in the same order, a batch at a time in bounded memory.

    Args:
        tangent, count, seed: as for :func:`random_normals`.
        at_once: about how many frames a batch holds (rounded up to whole blocks of the random stream, at most 16 more);
            by default as many as fill 32 MB.

    Raises:
        ValueError: 2k > d, or a count or batch below 1.
    """
    basis = tangent.basis if isinstance(tangent, Subspace) else as_float64(tangent)
    check_orthonormal(basis)
    d, k = basis.shape
    check_normal_controls_fit(k, d)
    if count < 1:
        raise ValueError(f"{count} controls give no comparison; use 1 or more (20 make the smallest p-value 1/21)")
    if at_once is not None and at_once < 1:
        raise ValueError(f"at_once={at_once} frames make no batch; use 1 or more, or None for as many as fill 32 MB")
    return _drawn(basis, _batch_sizes(count, d * k, at_once or _NUMBERS_AT_ONCE // (d * k)), seed)


def _drawn(basis: Float[Tensor, "d k"], sizes: list[int], seed: int) -> Iterator[Float[Tensor, "batch d k"]]:
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        gaussian = torch.randn(size, *basis.shape, generator=generator, dtype=torch.float64)
        rest = _outside(gaussian, basis)
        lost = rest.norm(dim=(1, 2)) < 1e-6 * gaussian.norm(dim=(1, 2))
        if bool(lost.any()):
            # Somebody's random tangent came from the same seed: all that is left of that control is rounding.
            other = torch.Generator().manual_seed(seed + _ANOTHER_STREAM)
            again = torch.randn(size, *basis.shape, generator=other, dtype=torch.float64)
            rest[lost] = _outside(again, basis)[lost]
        # One layout, so that a frame gives the same energy to the last bit whatever batch it came in.
        yield torch.linalg.qr(rest).Q.contiguous()


def _outside(gaussian: Float[Tensor, "m d k"], basis: Float[Tensor, "d k"]) -> Float[Tensor, "m d k"]:
    # Twice: one projection leaves a tangent part of the size of rounding times the norm.
    for _ in range(2):
        gaussian = gaussian - basis @ (basis.T @ gaussian)
    return gaussian


def _batch_sizes(count: int, numbers_each: int, at_once: int) -> list[int]:
    """Sizes that add up to ``count``, each of whole blocks but the last, which holds one block or more."""
    whole = _BLOCK // math.gcd(numbers_each, _BLOCK)
    size = whole * -(-max(at_once, 1) // whole)
    full, rest = divmod(count, size)
    sizes = [size] * full
    if rest * numbers_each >= _BLOCK or not sizes:
        return [*sizes, rest]
    return [*sizes[:-1], sizes[-1] + rest]


def normal_frame_batches(
    tangent: Subspace, controls: int | Float[Tensor, "m d k"], seed: int
) -> Iterator[Float[Tensor, "batch d k"]]:
    """The frames of :func:`normal_frames` a batch at a time; those to be drawn are never all in memory.

    Raises: as :func:`normal_frames`.
    """
    check_normal_controls_fit(tangent.rank, tangent.d)
    if _is_count(controls):
        return random_normal_batches(tangent, int(controls), seed)  # pyright: ignore[reportArgumentType]
    return iter(normal_frames(tangent, controls, seed).split(max(_NUMBERS_AT_ONCE // tangent.basis.numel(), 1)))


def normal_frames(tangent: Subspace, controls: int | Float[Tensor, "m d k"], seed: int) -> Float[Tensor, "m d k"]:
    """Frames to compare a subspace with: drawn here if ``controls`` is a number, else checked and taken as they are.

    Raises:
        ValueError: a number below 1, or frames of another rank or width.
    """
    check_normal_controls_fit(tangent.rank, tangent.d)
    if _is_count(controls):
        return random_normals(tangent, int(controls), seed)  # pyright: ignore[reportArgumentType]
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


def _is_count(controls: object) -> bool:
    return isinstance(controls, numbers.Integral) and not isinstance(controls, bool)
