"""Subspaces from rows that somebody sorted: classes, or pairs of prompts that differ in one thing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.recording.row_sample import RowSample
from tangent_lens.storage import as_float64
from tangent_lens.subspaces.ranks import check_whole_rank
from tangent_lens.subspaces.sampled import as_sample, sample_origin, span_of
from tangent_lens.subspaces.subspace import Subspace

# Means closer than this share of the largest row are equal up to rounding.
_ROUNDING = 1e-12


def fit_class_means(
    sample: RowSample | Float[Tensor, "n d"],
    labels: Sequence[Hashable] | Tensor | Mapping[int, Hashable],
    rank: int | None = None,
    *,
    per: Literal["row", "sequence"] = "row",
) -> Subspace:
    """The span of the centred class means: the directions in which labelled classes differ.

    Args:
        sample: the rows.
        labels: one a row, in their order; with ``per="sequence"`` one a sequence of the corpus, in its order; or a
            mapping from sequence to label, which may leave sequences out of the fit.
        rank: at most classes - 1, which is what None takes; fewer are the leading singular directions of the means.
        per: what a list of labels is about.

    Returns:
        A subspace about the mean of the class means, each class counting alike; its ``directions`` are the centred
        means (d, classes), in the order of ``origin["classes"]``, where the rank is their whole span.

    Raises:
        ValueError: labels that do not fit the rows, fewer than two classes, a class without rows, a rank above
            classes - 1, or means that span less.

    Source: the between-class directions of Fisher 1936, Annals of Eugenics 7(2), with equal weights.
    """
    sample = as_sample(sample)
    classes, class_of_row = _classes(sample, labels, per)
    if rank is not None and check_whole_rank(rank) > len(classes) - 1:
        raise ValueError(
            f"{sample.name}: {len(classes)} class means differ in at most {len(classes) - 1} directions, rank {rank} was "
            "asked; use fewer, or more classes"
        )
    means, counts = _group_means(as_float64(sample.rows), class_of_row, len(classes))
    for one, count in zip(classes, counts.tolist(), strict=True):
        if not count:
            raise ValueError(f"{sample.name}: class {one!r} has no rows in the sample; take more rows, or leave it out")
    centre = means.mean(dim=0)
    origin = sample_origin(
        sample, "class_means", classes=[str(one) for one in classes], rows_of_class=[int(count) for count in counts]
    )
    wanted = min(len(classes) - 1, sample.width) if rank is None else rank
    return span_of((means - centre).T, wanted, centre, origin, noise=_noise(sample))


def fit_contrast(
    first: RowSample | Float[Tensor, "n d"],
    second: RowSample | Float[Tensor, "m d"],
    rank: int = 1,
    *,
    paired: bool = True,
) -> Subspace:
    """The direction from the second kind of prompt to the first, or several directions of paired differences.

    Each sequence counts once, with the mean of its rows (record one position to take, say, the last token of each).

    Args:
        first: rows of prompts of one kind.
        second: rows of prompts of the other kind; with ``paired``, sequence i of it is the partner of sequence i.
        rank: 1 for the mean difference; more for the leading singular directions of the paired differences, not centred.
        paired: False compares the two means only.

    Returns:
        A subspace about the middle of the two means. At rank 1 its ``directions`` are first minus second (d, 1), and
        the basis points the same way.

    Raises:
        ValueError: samples of two widths, sequences without a partner, a rank the pairs do not determine, or no
            difference.

    Source: difference in means as in Marks and Tegmark 2023 (arXiv 2310.06824); several directions of paired
    differences as in Zou et al. 2023 (arXiv 2310.01405), without their random signs.
    """
    first, second = as_sample(first), as_sample(second)
    if first.width != second.width:
        raise ValueError(f"rows of width {first.width} and of width {second.width} cannot be compared; use one site")
    if check_whole_rank(rank) > 1 and not paired:
        raise ValueError(f"unpaired prompts have one direction, the difference of two means; rank {rank} was asked")
    firsts, seconds = _sequence_means(first), _sequence_means(second)
    if paired:
        _check_partners(first, second)
    difference = firsts.mean(dim=0) - seconds.mean(dim=0)
    middle = (firsts.mean(dim=0) + seconds.mean(dim=0)) / 2
    origin = sample_origin(first, "contrast", **_facts_of_second(second), paired=paired)
    noise = max(_noise(first), _noise(second))
    if rank == 1:
        subspace = span_of(difference[:, None], 1, middle, origin | {"sequences": len(firsts)}, noise)
        return _pointing_along(subspace, difference)
    return span_of((firsts - seconds).T, rank, middle, origin | {"sequences": len(firsts)}, noise)


def _classes(
    sample: RowSample, labels: Sequence[Hashable] | Tensor | Mapping[int, Hashable], per: str
) -> tuple[list[Hashable], Int[Tensor, " n"]]:
    """The distinct labels, in the order in which they were given, and which each row has; -1 for none."""
    sequences = sample.sequences.tolist()
    if isinstance(labels, Mapping):
        given = list(labels.values())
        of_row = [labels.get(sequence) for sequence in sequences]
        if None in given:
            raise ValueError(f"{sample.name}: None is no label; leave that sequence out of the mapping")
    else:
        given = labels.tolist() if isinstance(labels, Tensor) else list(labels)
        of_row = _labels_of_rows(sample, given, sequences, per)
    if any(one != one for one in given):
        raise ValueError(f"{sample.name}: a label is NaN; give every row a label")
    classes = list(dict.fromkeys(given))
    if len(classes) < 2:
        raise ValueError(f"{sample.name}: {len(classes)} classes have no difference; label the rows with 2 or more")
    number = {one: index for index, one in enumerate(classes)}
    return classes, torch.tensor([-1 if one is None else number[one] for one in of_row])


def _labels_of_rows(sample: RowSample, given: list[Any], sequences: list[int], per: str) -> list[Any]:
    if None in given:
        raise ValueError(f"{sample.name}: None is no label; give a mapping from sequence to label to leave some out")
    if per == "row":
        if len(given) != len(sample):
            raise ValueError(
                f"{sample.name}: {len(given)} labels for {len(sample)} rows; give one a row, "
                'or per="sequence" for one a sequence'
            )
        return given
    if per != "sequence":
        raise ValueError(f'per={per!r} must be "row" or "sequence"')
    if max(sequences) >= len(given):
        raise ValueError(
            f"{sample.name}: sequence {max(sequences)} has no label, {len(given)} were given; give one a sequence"
        )
    return [given[sequence] for sequence in sequences]


def _group_means(
    rows: Float[Tensor, "n d"], groups: Int[Tensor, " n"], count: int
) -> tuple[Float[Tensor, "g d"], Int[Tensor, " g"]]:
    """The mean row of each group and how many rows it has; rows of group -1 are left out."""
    rows, groups = rows[groups >= 0], groups[groups >= 0]
    counts = torch.bincount(groups, minlength=count)
    sums = torch.zeros(count, rows.shape[1], dtype=rows.dtype).index_add_(0, groups, rows)
    return sums / counts.clamp(min=1)[:, None], counts


def _sequence_means(sample: RowSample) -> Float[Tensor, "s d"]:
    """One mean row a sequence, in the order of their numbers."""
    present, groups = torch.unique(sample.sequences.cpu(), return_inverse=True)
    return _group_means(as_float64(sample.rows), groups, len(present))[0]


def _check_partners(first: RowSample, second: RowSample) -> None:
    alone = sorted(set(first.sequences.tolist()) ^ set(second.sequences.tolist()))
    if alone:
        raise ValueError(
            f"{len(alone)} sequences have no partner (the first is {alone[0]}); give both prompts of each pair and keep "
            "rows of all of them, or compare only the means with paired=False"
        )


def _facts_of_second(second: RowSample) -> dict[str, Any]:
    return {"second_fitted_on": second.name, "second_rows": len(second), "second_rows_seen": second.seen}


def _pointing_along(subspace: Subspace, direction: Float[Tensor, " d"]) -> Subspace:
    """The same line, its basis turned so that it does not point the other way: a singular vector has no sign."""
    if float(subspace.basis[:, 0] @ direction) >= 0:
        return subspace
    return Subspace(-subspace.basis, subspace.centre, subspace.origin, directions=subspace.directions)


def _noise(sample: RowSample) -> float:
    return _ROUNDING * float(torch.linalg.vector_norm(as_float64(sample.rows), dim=1).max())
