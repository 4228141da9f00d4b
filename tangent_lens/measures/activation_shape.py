"""The shape of a site's activations in several numbers side by side: isotropy, spectrum, cosines, intrinsic dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tangent_lens.measures.analysis import whole_moments
from tangent_lens.measures.cosine import mean_cosine_of
from tangent_lens.measures.dimension import IntrinsicDimension, intrinsic_dimension
from tangent_lens.measures.isotropy import iso_score
from tangent_lens.measures.partition import PartitionIsotropy, partition_isotropy
from tangent_lens.measures.spectrum import Spectrum, spectrum_of
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.recording.passes import ActivationRecord
from tangent_lens.showing import Shown
from tangent_lens.sites import Site

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class ActivationShape:
    """One site.

    Attributes:
        rows: behind the covariance; sampled: behind the numbers that need rows.
        iso_score: IsoScore* of the covariance; spectrum: its dimension counts and its power law.
        mean_cosine: over all pairs of different sampled rows, not centred.
        partition: isotropy by the partition function, of unit rows.
        dimensions: intrinsic dimension by each method asked for.
    """

    site: str
    layer: int | None
    rows: int
    sampled: int
    iso_score: float
    spectrum: Spectrum
    mean_cosine: float
    partition: PartitionIsotropy
    dimensions: tuple[IntrinsicDimension, ...]


@dataclass(frozen=True, repr=False, eq=False)
class ShapeReport(Shown):
    """The activations of several sites of one model.

    Attributes:
        model: whose; corpus: the name of the texts.
        shapes: one entry a site.
    """

    model: ModelDescription
    corpus: str
    shapes: tuple[ActivationShape, ...]

    def of(self, site: str) -> ActivationShape:
        """The shape of one site.

        Raises:
            KeyError: not measured.
        """
        for one in self.shapes:
            if one.site == site:
                return one
        raise KeyError(f"{site!r} was not measured; measured: {', '.join(one.site for one in self.shapes)}")

    def to_pandas(self) -> pandas.DataFrame:
        """One row a site, one column a number."""
        import pandas

        return pandas.DataFrame([_flat(one) for one in self.shapes])


def shapes_of(
    records: Mapping[Site, ActivationRecord], dimensions: Sequence[str] = ("two_nn", "mle")
) -> tuple[ActivationShape, ...]:
    """All numbers of every recorded site.

    Args:
        records: with samples.
        dimensions: methods of :func:`~tangent_lens.measures.dimension.intrinsic_dimension`; () for none.

    Raises:
        ImportError: a dimension was asked for and scikit-dimension is not installed.
        ValueError: a site without variance, or too few rows.
    """
    return tuple(_shape_of(site, record, dimensions) for site, record in records.items())


def _shape_of(site: Site, record: ActivationRecord, dimensions: Sequence[str]) -> ActivationShape:
    assert record.sample is not None
    covariance, rows = whole_moments(record).covariance(), record.sample.rows
    return ActivationShape(
        site=site.name,
        layer=site.layer,
        rows=record.moments.count,
        sampled=len(rows),
        iso_score=iso_score(covariance),
        spectrum=spectrum_of(covariance),
        mean_cosine=mean_cosine_of(rows),
        partition=partition_isotropy(rows, unit_norm=True),
        dimensions=tuple(intrinsic_dimension(rows, method) for method in dimensions),
    )


def _flat(one: ActivationShape) -> dict[str, object]:
    spectrum = asdict(one.spectrum)
    return {
        "site": one.site,
        "layer": one.layer,
        "rows": one.rows,
        "sampled": one.sampled,
        "iso_score": one.iso_score,
        **spectrum,
        "mean_cosine": one.mean_cosine,
        "log_partition_isotropy": one.partition.log_isotropy,
        **{f"dimension_{found.method}": found.dimension for found in one.dimensions},
        "duplicates": max((found.duplicates for found in one.dimensions), default=0),
    }
