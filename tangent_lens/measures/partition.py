"""Isotropy by the partition function: how much more a softmax sees in one direction than in another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tangent_lens.measures.cosine import checked_rows, unit_rows


@dataclass(frozen=True)
class PartitionIsotropy:
    """I = min Z(c) / max Z(c), with Z(c) = sum_i exp(c . x_i).

    Attributes:
        isotropy: I, in [0, 1]; 1 is isotropic. It is 0 where exp(log_isotropy) lies below the numbers of float64.
        log_isotropy: log I, exact where I itself underflows.
        rows: how many.
        unit_norm, both_signs: as they were asked for.
    """

    isotropy: float
    log_isotropy: float
    rows: int
    unit_norm: bool
    both_signs: bool


def partition_isotropy(
    rows: Float[Tensor, "n d"], *, unit_norm: bool = False, both_signs: bool = True
) -> PartitionIsotropy:
    """I of rows x_i over directions c that are the eigenvectors of X^T X (Mu, Bhat and Viswanath 2018).

    It depends on the scale of the rows: larger ones are less isotropic (log I grows about with the norm). Compare
    numbers of one scale only, or use ``unit_norm``. Where eigenvalues of X^T X are equal, its eigenvectors, and so I,
    are not unique.

    Args:
        rows: taken as they are, not centred.
        unit_norm: divide every row by its norm first.
        both_signs: take c and -c. An eigenvector has no sign of its own; the published recipe takes the one that its
            library happens to give. Both make I unique and no larger than with any choice. False takes the sign with
            which the rows' sum is positive.

    Raises:
        ValueError: not of shape (n, d), a value that is not finite, or rows that are all zero (with ``unit_norm``: any).

    Source: "All-but-the-top: simple and effective postprocessing for word representations", ICLR 2018, equation (2).
    """
    values = unit_rows(rows) if unit_norm else checked_rows(rows)
    scale = float(values.abs().max())
    if scale == 0:
        raise ValueError(f"all {len(values)} rows are zero, so no direction differs from another; there is no isotropy")
    scaled = values / scale
    directions = torch.linalg.eigh(scaled.T @ scaled).eigenvectors
    along = values @ directions
    if both_signs:
        logs = torch.cat([torch.logsumexp(along, dim=0), torch.logsumexp(-along, dim=0)])
    else:
        logs = torch.logsumexp(torch.where(along.sum(dim=0) < 0, -along, along), dim=0)
    log_isotropy = float(logs.min() - logs.max())
    return PartitionIsotropy(math.exp(log_isotropy), log_isotropy, len(values), unit_norm, both_signs)
