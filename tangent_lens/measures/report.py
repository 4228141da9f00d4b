"""The result of one run: what was measured, on what, and how. Frozen numbers; tables and files are views of it."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from tangent_lens.measures.bootstrap import Uncertainty
from tangent_lens.measures.energy import EnergyTest
from tangent_lens.measures.isotropy import IsotropyTest
from tangent_lens.measures.spectrum import Spectrum
from tangent_lens.models.protocol import ATTENTION_MAPS, MLP_MAPS, ModelDescription
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.inputs import InputCorpus
from tangent_lens.showing import Shown
from tangent_lens.subspaces.subspace import Subspace

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Settings:
    """How a run was made; every choice that can change a number.

    ``fit`` names the method of the subspaces; all but PCA work on a sample of at most ``fit_rows`` rows a site. ``rank`` may
    be a rule by name. ``bootstrap`` is the number of resampled corpora, 0 for none. ``sequence_length=None`` means 128 for
    texts, and token ids as they are. ``statistics`` is what was summed: ``exact``, whole matrices, or ``sketch``; a request may
    also say ``auto``.
    """

    rank: int | float | str = 16
    controls: int = 20
    seed: int = 0
    gradients: tuple[str, ...] = ("residual", "weight")
    maps: tuple[str, ...] = (*ATTENTION_MAPS, *MLP_MAPS)
    loss: str = "next-token"
    fit_site: str = "input"
    center: bool = True
    shrinkage: float = 0.0
    fit: str = "pca"
    fit_rows: int = 20_000
    bootstrap: int = 0
    fit_fraction: float = 0.5
    sequence_length: int | None = None
    pack: bool = False
    max_sequences: int | None = None
    prepend_bos: bool | None = None
    skip_first: bool = False
    skip_special: bool = False
    batch_size: int = 8
    padding_side: str = "right"
    statistics: str = "exact"

    def __post_init__(self) -> None:
        """Numbers of NumPy become Python's own, which files can hold."""
        hold_plain_numbers(self)


def hold_plain_numbers(settings: Any) -> None:
    """Turn the NumPy numbers among the fields of a frozen dataclass into Python's own."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if isinstance(value, np.generic):
            object.__setattr__(settings, one.name, value.item())


@dataclass(frozen=True)
class CorpusDescription:
    """What the model read.

    Attributes:
        fit_rows: rows behind each subspace; test_rows: rows behind each gradient.
        loss: mean loss on the test sequences, in nats, over each ``loss_unit`` (token, masked token, sequence);
            None where none was computed.
    """

    name: str
    fit_sequences: int
    test_sequences: int
    fit_tokens: int
    test_tokens: int
    fit_rows: int
    test_rows: int
    loss: float | None
    left_out: tuple[str, ...] = ()
    loss_unit: str = "token"

    @classmethod
    def of(
        cls, corpus: Corpus | InputCorpus, fit: Corpus | InputCorpus, test: Corpus | InputCorpus, **measured: Any
    ) -> CorpusDescription:
        """Of a corpus and its two parts; ``measured`` are rows and loss."""
        return cls(
            name=corpus.name,
            fit_sequences=len(fit.sequences),
            test_sequences=len(test.sequences),
            fit_tokens=fit.tokens,
            test_tokens=test.tokens,
            left_out=corpus.left_out,
            **measured,
        )


@dataclass(frozen=True)
class Space:
    """One site on the fit split: its tangent proxy and the shape of its activations.

    Attributes:
        variance_share: share of the activations' variance that the tangent proxy holds.
        iso_score: IsoScore* of the activations.
        top_position, top_position_share: the early position that holds most of the variance, and how much;
            ``top_position_rows`` is the share of rows that stand there.
        standard_error: of ``iso_score`` where a sketch estimated it; None where exact.
    """

    site: str
    layer: int | None
    rank: int
    variance_share: float
    iso_score: float
    spectrum: Spectrum
    top_position: int
    top_position_share: float
    top_position_rows: float
    standard_error: float | None = None


@dataclass(frozen=True, repr=False)
class Measurement(Shown):
    """One gradient at one place against one tangent proxy.

    Attributes:
        gradient: ``residual`` (rows dL/dx at a site) or ``weight`` (rows of dL/dW of maps that read the site).
        name: the site (``resid_post.3``), one map (``query.3``), or all maps of an input that were measured
            together (``attention.3``: query, key and value; ``mlp.3``: MLP in and gate).
        site: where the gradient lives; ``fit_site``: where the proxy was fitted.
        pooled: whether several maps were taken together.
        energy_q_value, isotropy_q_value: the p-values of both tests (of the energy the exact null's, where there is one),
            corrected over all layers of this kind in the run (Benjamini and Hochberg).
        uncertainty: bootstrap intervals; None where none were asked for.
    """

    gradient: str
    name: str
    kind: str
    layer: int | None
    site: str
    fit_site: str
    pooled: bool
    energy: EnergyTest
    isotropy: IsotropyTest
    energy_q_value: float | None = None
    isotropy_q_value: float | None = None
    uncertainty: Uncertainty | None = None

    @property
    def corrected_energy_p(self) -> float:
        """What tables go by; reports of before the correction know only the single test."""
        return self.energy.p_value if self.energy_q_value is None else self.energy_q_value

    @property
    def corrected_isotropy_p(self) -> float:
        """The same of the change of isotropy."""
        return self.isotropy.p_value if self.isotropy_q_value is None else self.isotropy_q_value


@dataclass(frozen=True, repr=False, eq=False)
class Report(Shown):
    """All measurements of one run.

    Attributes:
        model, corpus, settings: what was measured, on what, and how.
        spaces: one entry a site at which a proxy was fitted.
        measurements: one entry a gradient and place.
        warnings: sentences a reader must know before believing the numbers.
        versions: of the libraries that ran.
        created: when, UTC.
        subspaces: the tangent proxies by site name.
    """

    model: ModelDescription
    corpus: CorpusDescription
    settings: Settings
    spaces: tuple[Space, ...]
    measurements: tuple[Measurement, ...]
    warnings: tuple[str, ...]
    versions: Mapping[str, str]
    created: str
    subspaces: Mapping[str, Subspace] = field(default_factory=dict)

    def of(self, name: str) -> Measurement:
        """The measurement with this name: ``resid_post.3``, ``query.3``, ``attention.3``, ``mlp.3``.

        Raises:
            KeyError: not measured; the sentence lists some that were.
        """
        for measurement in self.measurements:
            if measurement.name == name:
                return measurement
        some = ", ".join(measurement.name for measurement in self.measurements[:8])
        raise KeyError(f"{name!r} was not measured; this report holds {some} ...")

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON; the subspaces are left out."""
        content = {name: getattr(self, name) for name in ("warnings", "versions", "created")}
        content |= {name: asdict(getattr(self, name)) for name in ("model", "corpus", "settings")}
        content |= {name: [asdict(one) for one in getattr(self, name)] for name in ("spaces", "measurements")}
        return content

    def to_pandas(self) -> pandas.DataFrame:
        """One row a measurement, one column a number."""
        import pandas

        return pandas.DataFrame([flat_row(measurement) for measurement in self.measurements])

    def plot(self) -> Any:
        """Lift and its companions over layers, as a matplotlib figure (needs the ``plot`` extra)."""
        from tangent_lens.reports.plots import plot_report

        return plot_report(self)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder of ``report.json`` and ``subspaces.safetensors``, so that a crash leaves the old or the new."""
        from tangent_lens.reports.files import save_report

        save_report(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Report:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: no report is there.
            FileProblem: it is damaged or of a newer format.
        """
        from tangent_lens.reports.files import load_report

        return load_report(folder)

    def maps(self) -> MapsView:
        """The table of every single map: query, key, value, MLP in, MLP gate."""
        return MapsView(self)


@dataclass(frozen=True, repr=False)
class MapsView(Shown):
    """A report seen map by map; it shows itself as a table."""

    report: Report


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def library_versions() -> dict[str, str]:
    """Of the libraries whose version can change a number."""
    found = {}
    for name in ("tangent-lens", "torch", "transformers", "transformer-lens", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def flat_row(measurement: Measurement) -> dict[str, Any]:
    """One measurement as a flat row of named numbers."""
    energy, isotropy = measurement.energy, measurement.isotropy
    return {
        "gradient": measurement.gradient,
        "name": measurement.name,
        "kind": measurement.kind,
        "layer": measurement.layer,
        "site": measurement.site,
        "fit_site": measurement.fit_site,
        "pooled": measurement.pooled,
        "rank": energy.rank,
        "d": energy.d,
        "energy": energy.energy,
        "energy_standard_error": energy.standard_error,
        "lift": energy.lift,
        "signal_lift": energy.signal_lift,
        "p_value": energy.p_value,
        "exact_p_value": energy.exact_p_value,
        "q_value": measurement.energy_q_value,
        "expected_random": energy.expected_random,
        "expected_random_sd": energy.expected_random_sd,
        "random_mean": energy.random_mean,
        "random_sd": energy.random_sd,
        "shuffled": energy.shuffled,
        "trailing": energy.trailing,
        "trailing_ratio": energy.trailing_ratio,
        "following": energy.following,
        "following_ratio": energy.following_ratio,
        "oracle": energy.oracle,
        "alignment": energy.alignment,
        "iso_score": isotropy.score,
        "iso_score_standard_error": isotropy.standard_error,
        "delta_iso": isotropy.delta,
        "delta_iso_standard_error": isotropy.delta_standard_error,
        "delta_iso_random": isotropy.random_mean,
        "delta_iso_trailing": isotropy.trailing,
        "delta_iso_p_value": isotropy.p_value,
        "delta_iso_q_value": measurement.isotropy_q_value,
        **_interval_columns(measurement.uncertainty),
    }


def _interval_columns(uncertainty: Uncertainty | None) -> dict[str, float]:
    """Both ends of the BCa intervals that there are."""
    named = {} if uncertainty is None else {one.name: getattr(uncertainty, one.name) for one in fields(uncertainty)}
    return {
        f"{name.removesuffix('_interval')}_{end}": getattr(interval, f"bca_{end}")
        for name, interval in named.items()
        if interval is not None
        for end in ("low", "high")
    }
