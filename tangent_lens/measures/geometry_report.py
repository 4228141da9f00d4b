"""What a run about local geometry found: frozen numbers, of which tables and plots are views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tangent_lens.measures.concept_geometry import DepthGeometry
from tangent_lens.measures.curvature_summary import CurvatureSummary
from tangent_lens.measures.gradient_order import GradientOrder
from tangent_lens.measures.report import hold_plain_numbers
from tangent_lens.measures.seen_curvature import SeenCurvature
from tangent_lens.measures.tangent_order import TangentOrder, flat_order
from tangent_lens.models.protocol import ModelDescription
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class GeometrySettings:
    """How a run about local geometry was asked for.

    Attributes:
        m: dimension of tangent spaces: a whole number, a variance share in (0, 1), or a rule.
        nearest: share of the rows that a tangent space is fitted to.
        occurrences: rows of each token; tokens with fewer are left out, of those with more so many are drawn.
        buckets: of frequency, of equally many tokens; tokens: of each, at most.
        gradient_layers: how many layers, evenly apart, whose weight gradients are split; 0 for none.
        maps: which maps there; loss: which one was differentiated.
        depth: whether dimensions and neighbourhoods were compared along the sites; neighbours of each row, rows used at most, and
            ``linear_m`` principal directions for it.
        seed: of the choice of tokens and rows, and of every cut.
    """

    m: int | float | str = "participation_ratio"
    nearest: float = 1.0
    occurrences: int = 100
    buckets: int = 3
    tokens: int = 15
    sensitivity: bool = True
    gradient_layers: int = 4
    maps: tuple[str, ...] = ("query", "mlp_in")
    loss: str = "next-token"
    depth: bool = True
    neighbours: int = 30
    rows: int = 2000
    linear_m: int = 16
    level: float = 0.95
    seed: int = 0
    skip_first: bool = True
    skip_special: bool = True
    batch_size: int = 8
    padding_side: str = "right"

    def __post_init__(self) -> None:
        """Numbers of NumPy become Python's own."""
        hold_plain_numbers(self)


@dataclass(frozen=True)
class GeometryCorpus:
    """What was read.

    Attributes:
        eligible: tokens that occur often enough; chosen: those measured; rows: their occurrences, at every site.
        megabytes: what these rows take in memory, all sites and maps together, in float32.
    """

    name: str
    sequences: int
    tokens: int
    eligible: int
    chosen: int
    rows: int
    megabytes: float


@dataclass(frozen=True)
class TokenBucket:
    """Tokens of one frequency.

    Attributes:
        tokens: ids, the rarest first; texts: as the tokenizer shows them.
        low, high: fewest and most occurrences of one of them in the corpus.
    """

    name: str
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class BucketGeometry:
    """The tokens of one bucket (or all) at one site.

    Attributes:
        order: exponents of the tangent and normal part.
        curvature: how their clouds bend; None where their rows determine no quadratic.
        seen: which curvature near and far rows show; None likewise.
        radii: t of every row (n,), the radial density g.
    """

    name: str
    order: TangentOrder
    curvature: CurvatureSummary | None
    seen: SeenCurvature | None
    radii: np.ndarray


@dataclass(frozen=True, eq=False)
class OrderPoints:
    """Some rows for plots: t, tangent and normal part, each over its token's median of t (n,)."""

    radius: np.ndarray
    tangent: np.ndarray
    normal: np.ndarray


@dataclass(frozen=True, eq=False)
class SiteGeometry:
    """One site: all tokens together (with other choices of m in ``order.others``), and bucket by bucket.

    Attributes:
        wanted_m: the dimension that the rule finds; more than ``order.m`` where the rows do not determine so many directions.
    """

    site: str
    layer: int | None
    wanted_m: int
    everything: BucketGeometry
    buckets: tuple[BucketGeometry, ...]
    points: OrderPoints


@dataclass(frozen=True)
class MapGeometry:
    """One linear map: how its weight gradient's two parts grow.

    Attributes:
        map: for example ``query.3``; site: whose rows it reads, in which the tangent spaces lie; m: their dimension.
    """

    map: str
    layer: int
    site: str
    m: int
    order: GradientOrder


@dataclass(frozen=True, repr=False, eq=False)
class GeometryReport(Shown):
    """The theory's claims about local geometry, measured on the occurrences of single tokens (section 9 of ``MEASUREMENTS``).

    Attributes:
        buckets: the tokens.
        sites: one entry a site.
        gradients: one entry a map; () if none were asked for.
        depth: all rows together along the sites; None if not asked for.
        warnings: what a reader must know before believing the numbers.
        created: when, UTC.
    """

    model: ModelDescription
    corpus: GeometryCorpus
    settings: GeometrySettings
    buckets: tuple[TokenBucket, ...]
    sites: tuple[SiteGeometry, ...]
    gradients: tuple[MapGeometry, ...]
    depth: DepthGeometry | None
    warnings: tuple[str, ...]
    versions: Mapping[str, str]
    created: str

    def of(self, site: str) -> SiteGeometry:
        """The numbers of one site.

        Raises:
            KeyError: not measured.
        """
        for one in self.sites:
            if one.site == site:
                return one
        raise KeyError(f"{site} was not measured; measured: {', '.join(one.site for one in self.sites)}")

    def to_pandas(self) -> pandas.DataFrame:
        """One row a site and a bucket; the first bucket of each site, ``all``, holds all tokens."""
        import pandas

        return pandas.DataFrame(
            [
                {"site": site.site, "layer": site.layer, "bucket": one.name, **_flat(one)}
                for site in self.sites
                for one in (site.everything, *site.buckets)
            ]
        )

    def sensitivity(self) -> pandas.DataFrame:
        """One row a site and a choice of m and nearest, the chosen one first; all tokens together."""
        import pandas

        return pandas.DataFrame(
            [
                {"site": site.site, "layer": site.layer, "chosen": place == 0, **flat_order(one)}
                for site in self.sites
                for place, one in enumerate((site.everything.order.chosen, *site.everything.order.others))
            ]
        )

    def gradient_orders(self) -> pandas.DataFrame:
        """One row a map and a token."""
        import pandas

        frames = [one.order.to_pandas().assign(map=one.map, layer=one.layer, m=one.m) for one in self.gradients]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def plot(self) -> Any:
        """Exponents by layer, rows about one layer's means, radii, gradients and depth, as a matplotlib figure."""
        from tangent_lens.reports.geometry_plot import plot_geometry

        return plot_geometry(self)


def _flat(one: BucketGeometry) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": one.order.tokens, "rows": one.order.rows, **flat_order(one.order.chosen)}
    found |= {"radius": one.order.radius, "radius_variation": one.order.radius_variation}
    if one.curvature is not None:
        kept = {name: value for name, value in asdict(one.curvature).items() if name not in ("name", "tokens", "m")}
        found |= {"curvature_m": one.curvature.m, **kept}
    if one.seen is not None:
        found |= {"seen_ratio": one.seen.ratio, "seen_low": one.seen.low, "seen_high": one.seen.high}
    return found
