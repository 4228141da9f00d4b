"""What a sketch tells of a second moment or covariance beside one subspace: parts that are exact, and estimates.

A (d, d) falls into its block along Q, its block B in the complement, and what mixes the two. Controls are frames N of the
complement; each is a combination of the sketch's own columns, so A N follows from what was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.probing import (
    Estimate,
    Fold,
    averaged,
    estimated_cube,
    estimated_square,
    estimated_trace,
)
from tangent_lens.recording.sketch import SketchedGradient, SketchedMoments, gaussian_directions
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.controls import check_normal_controls_fit
from tangent_lens.subspaces.sketched import nystroem, orthonormal
from tangent_lens.subspaces.subspace import Subspace

# Fewer probes say little about their own spread.
FEWEST_PROBES = 64
# Rows of the left test matrix of a weight gradient: a direction of the subspace, and in all at least.
LEFT_ROWS_A_DIRECTION, FEWEST_LEFT_ROWS = 16, 128


@dataclass(frozen=True, eq=False)
class SketchedMatrix:
    """A / tr(A) about, beside a subspace Q of rank k.

    Attributes:
        inside: Q^T A Q (k, k).
        cross: |(I - QQ^T) A Q|_F^2.
        trace, square, cube: tr(B), tr(B^2), tr(B^3) of the complement's block B.
        control_insides: N^T A N of every control (m, k, k); control_squares: |A N|_F^2 (m,).
        rivals: the same two of each rival of the subspace.
        leading: sum of the k largest eigenvalues of A, as far as the sketch shows them.
    """

    d: int
    inside: Float[Tensor, "k k"]
    cross: Estimate
    trace: Estimate
    square: Estimate
    cube: Estimate
    control_insides: Float[Tensor, "m k k"]
    control_squares: Float[Tensor, " m"]
    rivals: Mapping[str, tuple[Tensor, float]]
    leading: float


@dataclass(frozen=True, eq=False)
class _Columns:
    """The test matrix taken apart: Q, its rivals, and the probes with their part along Q removed."""

    basis: Float[Tensor, "d k"]
    rivals: Mapping[str, slice]
    mixing: Float[Tensor, "k n"]
    probes: Float[Tensor, "d n"]
    controls: int

    def normal(self, image: Float[Tensor, "e w"]) -> Float[Tensor, "e n"]:
        """The image of the probes' normal part under a linear map, from the image of all columns."""
        return image[:, -self.probes.shape[1] :] - image[:, : self.mixing.shape[0]] @ self.mixing

    def frames(self, image: Float[Tensor, "e n"]) -> Float[Tensor, "m e k"]:
        """The image of the orthonormal control frames, from that of the probes' normal part."""
        k, m = self.basis.shape[1], self.controls
        parts = [whole[:, : m * k].view(len(whole), m, k).transpose(0, 1) for whole in (self.probes, image)]
        triangle = torch.linalg.qr(parts[0], mode="r").R
        return torch.linalg.solve_triangular(triangle, parts[1], upper=True, left=False)

    @property
    def halves(self) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """(approximation, probes) of both folds, cut between two frames."""
        k, n = self.basis.shape[1], self.probes.shape[1]
        cut = n // k // 2 * k
        first, second = slice(0, cut), slice(cut, n)
        return (first, second), (second, first)


def gradient_directions(tangent: Subspace) -> Float[Tensor, "d w"]:
    """What the gradients of one subspace are sketched with beside the probes: [Q | its rivals]."""
    return torch.cat([tangent.basis, *tangent.rivals.values()], dim=1)


def gradient_probes(width: int, rank: int, controls: int, seed: int) -> Float[Tensor, "width n"]:
    """Gaussian probes, the same for all subspaces of one rank and width: the first ``controls`` blocks of k columns, made
    orthonormal in the complement of Q, are the control frames.

    Raises:
        ValueError: 2k > d.
    """
    check_normal_controls_fit(rank, width)
    return gaussian_directions(width, gradient_probe_columns(rank, controls), f"{seed}/controls")


def gradient_probe_columns(rank: int, controls: int) -> int:
    """How many there are."""
    return max(controls, 2, -(-FEWEST_PROBES // rank)) * rank


def left_rows(rank: int) -> int:
    """How many Gaussian rows the left test matrix of a weight gradient has."""
    return max(LEFT_ROWS_A_DIRECTION * rank, FEWEST_LEFT_ROWS)


def sketched_matrix(
    gradient: SketchedMoments | SketchedGradient | Sequence[SketchedGradient],
    tangent: Subspace,
    controls: int,
    *,
    centred: bool,
) -> SketchedMatrix:
    """The second moment of gradient rows (or their covariance), or G^T G of weight gradients, beside a subspace.

    Args:
        gradient: of rows; or of one map, or of several maps that read the same rows, whose gradients are stacked.

    Raises:
        ValueError: no rows, a gradient that is zero everywhere, or directions that are not those of this subspace.
    """
    if isinstance(gradient, SketchedMoments):
        return _of_rows(gradient, tangent, controls, centred)
    return _of_maps(
        [gradient] if isinstance(gradient, SketchedGradient) else list(gradient), tangent, controls, centred
    )


def _taken_apart(
    sketch: SketchedMoments | SketchedGradient, tangent: Subspace, controls: int, name: str
) -> tuple[_Columns, Float[Tensor, "d w"]]:
    own, gaussian, k = as_float64(sketch.own), as_float64(sketch.probes), tangent.rank
    expected = gradient_directions(tangent)
    if own.shape != expected.shape or not torch.equal(own, expected):
        raise ValueError(
            f"{name}: this was sketched for another subspace; record it again with gradient_directions of it"
        )
    blocks = gaussian.shape[1] // k
    if not 1 <= controls <= blocks or blocks < 2:
        raise ValueError(
            f"{name}: {controls} controls of rank {k} need as many blocks of {k} probes, and 2 at the least; "
            f"{gaussian.shape[1]} probes are here"
        )
    rivals, start = {}, k
    for rival, columns in tangent.rivals.items():
        rivals[rival] = slice(start, start + columns.shape[1])
        start += columns.shape[1]
    mixing = tangent.basis.T @ gaussian
    probes = gaussian - tangent.basis @ mixing
    return _Columns(tangent.basis, rivals, mixing, probes, controls), torch.cat([own, gaussian], dim=1)


def _of_rows(sketch: SketchedMoments, tangent: Subspace, controls: int, centred: bool) -> SketchedMatrix:
    if sketch.count == 0:
        raise ValueError(f"{sketch.name}: no gradient was gathered; attach with gradients=True and run a backward pass")
    columns, directions = _taken_apart(sketch, tangent, controls, sketch.name)
    through = as_float64(sketch.covariance_through() if centred else sketch.second_moment_through())
    total = _checked_total(sketch.total_variance() if centred else sketch.square_total(), sketch.name, centred)
    through = through / total
    basis, along = columns.basis, through[:, : tangent.rank]
    inside = basis.T @ along
    whole = columns.normal(through)
    normal = whole - basis @ (basis.T @ whole)
    folds = [_rows_fold(columns.probes, normal, *half) for half in columns.halves]
    frames, images = columns.frames(columns.probes), columns.frames(whole)
    rivals = {name: (directions[:, own], through[:, own]) for name, own in columns.rivals.items()}
    return SketchedMatrix(
        d=tangent.d,
        inside=inside,
        cross=Estimate(max(float(along.square().sum() - inside.square().sum()), 0.0)),
        trace=Estimate(max(1 - float(inside.diagonal().sum()), 0.0)),
        square=estimated_square(folds),
        cube=estimated_cube(folds),
        control_insides=frames.transpose(1, 2) @ images,
        control_squares=images.square().sum(dim=(1, 2)),
        rivals={name: (one.T @ image, float(image.square().sum())) for name, (one, image) in rivals.items()},
        leading=float(torch.linalg.svdvals(nystroem(*orthonormal(directions, through)))[: tangent.rank].square().sum()),
    )


def _rows_fold(probes: Tensor, images: Tensor, used: slice, compared: slice) -> Fold:
    factor = nystroem(*orthonormal(probes[:, used], images[:, used]))
    own, image = probes[:, compared], images[:, compared]
    return Fold(factor, own, own.T @ image, image.square().sum(dim=0))


def _of_maps(maps: list[SketchedGradient], tangent: Subspace, controls: int, centred: bool) -> SketchedMatrix:
    name = maps[0].name if len(maps) == 1 else f"{maps[0].name} and {len(maps) - 1} more"
    columns, directions = _taken_apart(maps[0], tangent, controls, name)
    for other in maps[1:]:
        if other.directions.shape != directions.shape or not torch.equal(as_float64(other.directions), directions):
            raise ValueError(f"{name}: these maps were sketched with different directions and cannot be pooled")
    parts = [(as_float64(one.through), as_float64(one.left), as_float64(one.left_directions)) for one in maps]
    if centred:
        mean = torch.stack([left[-1] for _, left, _ in parts]).sum(dim=0)
        mean = mean / sum(len(through) for through, _, _ in parts)
        parts = [(through - mean @ directions, left - torch.outer(psi.sum(dim=1), mean), psi)
                 for through, left, psi in parts]  # fmt: skip
    scale = sum(float(through.square().sum()) for through, _, _ in parts)
    scale = _checked_total(scale, name, centred) ** 0.5
    parts = [(through / scale, left / scale, psi) for through, left, psi in parts]
    return _of_scaled_maps(parts, columns, tangent)


def _of_scaled_maps(
    parts: Sequence[tuple[Tensor, Tensor, Tensor]], columns: _Columns, tangent: Subspace
) -> SketchedMatrix:
    k = tangent.rank
    through = torch.cat([part for part, _, _ in parts])
    along, normal = through[:, :k], columns.normal(through)
    frames = columns.frames(normal)
    folds, approximations, leading = [], [], []
    for used, compared in columns.halves:
        seen = [torch.cat([part[:, :k], columns.normal(part)[:, used]], dim=1) for part, _, _ in parts]
        left, factor = _low_rank(seen, parts)
        outside = factor - columns.basis @ (columns.basis.T @ factor)
        own = columns.probes[:, compared]
        folds.append(Fold(outside, own, normal[:, compared].T @ normal[:, compared]))
        approximations.append((left, outside, own, normal[:, compared]))
        leading.append(left @ torch.linalg.svd(factor, full_matrices=False)[2][:k].T)

    def normal_square(image: Tensor, which: Sequence[int] = (0, 1)) -> Estimate:
        return averaged(_image_square(image, *approximations[one]) for one in which)

    first_half = columns.halves[0][0].stop // k
    # A frame is compared on the half of the probes that it is not itself made of.
    squares = torch.cat([_frame_squares(own, *approximations[one])
                         for one, own in enumerate((frames[:first_half], frames[first_half:])) if len(own)])  # fmt: skip
    images = {name: through[:, own] for name, own in columns.rivals.items()}
    # The energy of G along fixed output directions, which no k directions can exceed its leading ones in.
    held = [
        float((one.T @ along).square().sum()) + normal_square(one, [place]).value for place, one in enumerate(leading)
    ]
    return SketchedMatrix(
        d=tangent.d,
        inside=along.T @ along,
        cross=normal_square(along),
        trace=estimated_trace(folds),
        square=estimated_square(folds),
        cube=estimated_cube(folds),
        control_insides=frames.transpose(1, 2) @ frames,
        control_squares=squares + (along.T @ frames).square().sum(dim=(1, 2)),
        rivals={
            name: (image.T @ image, normal_square(image).value + float((along.T @ image).square().sum()))
            for name, image in images.items()
        },
        leading=sum(held) / len(held),
    )


def _low_rank(
    seen: Sequence[Tensor], parts: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> tuple[Float[Tensor, "out r"], Float[Tensor, "in r"]]:
    """U, F with the stacked G about U F^T and orthonormal U, from the right and left sketches of each map.

    G is about U (Psi U)^+ Psi G with U a basis of the range that the right sketch saw, cut to half as many directions as
    Psi has rows, so that the least-squares problem is well posed (Tropp, Yurtsever, Udell, Cevher 2017, Algorithm 4).
    """
    bases, factors = [], []
    for columns, (_, left, psi) in zip(seen, parts, strict=True):
        gaussian = psi[:-1]
        basis, values, _ = torch.linalg.svd(columns, full_matrices=False)
        rank = max(min(int((values > 1e-9 * values[0]).sum()), len(gaussian) // 2), 1)
        bases.append(basis[:, :rank])
        factors.append(torch.linalg.lstsq(gaussian @ basis[:, :rank], left[:-1]).solution.T)
    return torch.block_diag(*bases), torch.cat(factors, dim=1)


def _image_square(
    image: Float[Tensor, "out k"], left: Tensor, factor: Tensor, probes: Tensor, through: Tensor
) -> tuple[Tensor, Tensor]:
    """|G^T Y|_F^2 for Y (out, k), by the approximation and what each probe adds: |Y^T G w|^2 is known."""
    short = left.T @ image
    known = (image.T @ through).square().sum(dim=0)
    return (factor @ short).square().sum(), known - (short.T @ (factor.T @ probes)).square().sum(dim=0)


def _frame_squares(
    images: Float[Tensor, "m out k"], left: Tensor, factor: Tensor, probes: Tensor, through: Tensor
) -> Float[Tensor, " m"]:
    """:func:`_image_square` of many at once: one product for all of them is several times quicker."""
    m, out, k = images.shape
    stacked = images.transpose(0, 1).reshape(out, m * k)
    short = left.T @ stacked
    known = (stacked.T @ through).square() - (short.T @ (factor.T @ probes)).square()
    exact = (factor @ short).square().sum(dim=0)
    return (exact + known.mean(dim=1)).view(m, k).sum(dim=1)


def _checked_total(total: float, name: str, centred: bool) -> float:
    if not total > 0:
        raise ValueError(
            f"{name} has no variance, so it has no isotropy; the rows are all equal"
            if centred
            else f"{name} is zero everywhere, so it has no direction; the loss does not depend on this place"
        )
    return total
