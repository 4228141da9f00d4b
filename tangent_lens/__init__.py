"""tangent_lens: how much of a language model's learning lives in its tangent directions.

Everything public is named here. Names load when first used, so that ``import tangent_lens`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tangent_lens.dynamics.callback import TangentCallback as TangentCallback
    from tangent_lens.dynamics.comparison import dynamics_table as dynamics_table
    from tangent_lens.dynamics.geometry_run import GeometryRun as GeometryRun
    from tangent_lens.dynamics.geometry_run import geometry_checkpoints as geometry_checkpoints
    from tangent_lens.dynamics.recorder import TangentRecorder as TangentRecorder
    from tangent_lens.dynamics.report import DynamicsReport as DynamicsReport
    from tangent_lens.dynamics.run import measure_checkpoints as measure_checkpoints
    from tangent_lens.dynamics.schedule import LogSpaced as LogSpaced
    from tangent_lens.lens import Lens as Lens
    from tangent_lens.measures.ablation import Ablation as Ablation
    from tangent_lens.measures.ablation import AblationReport as AblationReport
    from tangent_lens.measures.activation_shape import ShapeReport as ShapeReport
    from tangent_lens.measures.attention_report import AttentionReport as AttentionReport
    from tangent_lens.measures.bootstrap import Interval as Interval
    from tangent_lens.measures.bootstrap import adjusted_p_values as adjusted_p_values
    from tangent_lens.measures.bootstrap import bootstrap as bootstrap
    from tangent_lens.measures.comparison import Comparison as Comparison
    from tangent_lens.measures.comparison import compare as compare
    from tangent_lens.measures.concept_geometry import concept_geometry as concept_geometry
    from tangent_lens.measures.concept_geometry import depth_geometry as depth_geometry
    from tangent_lens.measures.cosine import mean_cosine as mean_cosine
    from tangent_lens.measures.cosine import mean_cosine_of as mean_cosine_of
    from tangent_lens.measures.curvature import principal_curvatures as principal_curvatures
    from tangent_lens.measures.curvature import second_fundamental_form as second_fundamental_form
    from tangent_lens.measures.curvature_summary import curvature_summary as curvature_summary
    from tangent_lens.measures.curvature_visibility import curvature_visibility as curvature_visibility
    from tangent_lens.measures.curvature_visibility import radii_of as radii_of
    from tangent_lens.measures.curvature_visibility import visibility_by_concentration as visibility_by_concentration
    from tangent_lens.measures.dimension import intrinsic_dimension as intrinsic_dimension
    from tangent_lens.measures.energy import EnergyTest as EnergyTest
    from tangent_lens.measures.energy import energy_fraction as energy_fraction
    from tangent_lens.measures.energy import energy_test as energy_test
    from tangent_lens.measures.enrichment import FrequencyBuckets as FrequencyBuckets
    from tangent_lens.measures.enrichment import tangent_enrichment as tangent_enrichment
    from tangent_lens.measures.explained_normal import explained_normal as explained_normal
    from tangent_lens.measures.frequency import contextual_spread as contextual_spread
    from tangent_lens.measures.frequency import token_frequencies as token_frequencies
    from tangent_lens.measures.frequency import trajectory_spread as trajectory_spread
    from tangent_lens.measures.frequency_report import FrequencyReport as FrequencyReport
    from tangent_lens.measures.geometry_report import GeometryReport as GeometryReport
    from tangent_lens.measures.gradient_order import gradient_order as gradient_order
    from tangent_lens.measures.gradient_rows import TokenGradients as TokenGradients
    from tangent_lens.measures.gradient_rows import parabola_gradients as parabola_gradients
    from tangent_lens.measures.isotropy import IsotropyTest as IsotropyTest
    from tangent_lens.measures.isotropy import iso_score as iso_score
    from tangent_lens.measures.isotropy import iso_score_without as iso_score_without
    from tangent_lens.measures.isotropy import isotropy_test as isotropy_test
    from tangent_lens.measures.local_tangent import fit_local_tangent as fit_local_tangent
    from tangent_lens.measures.manifolds import Manifold as Manifold
    from tangent_lens.measures.neighbourhoods import neighbourhood_agreement as neighbourhood_agreement
    from tangent_lens.measures.neighbourhoods import neighbourhood_overlap as neighbourhood_overlap
    from tangent_lens.measures.overlaps import Overlaps as Overlaps
    from tangent_lens.measures.overlaps import Stability as Stability
    from tangent_lens.measures.overlaps import compare_subspaces as compare_subspaces
    from tangent_lens.measures.overlaps import projection_distance as projection_distance
    from tangent_lens.measures.overlaps import stability_over_halves as stability_over_halves
    from tangent_lens.measures.overlaps import stability_over_seeds as stability_over_seeds
    from tangent_lens.measures.partition import partition_isotropy as partition_isotropy
    from tangent_lens.measures.report import Report as Report
    from tangent_lens.measures.seen_curvature import seen_curvature as seen_curvature
    from tangent_lens.measures.sketched import sketched_energy_test as sketched_energy_test
    from tangent_lens.measures.sketched import sketched_isotropy_test as sketched_isotropy_test
    from tangent_lens.measures.sketched_matrix import gradient_directions as gradient_directions
    from tangent_lens.measures.sketched_matrix import gradient_probes as gradient_probes
    from tangent_lens.measures.spectrum import Spectrum as Spectrum
    from tangent_lens.measures.spectrum import effective_rank as effective_rank
    from tangent_lens.measures.spectrum import participation_ratio as participation_ratio
    from tangent_lens.measures.spectrum import power_law as power_law
    from tangent_lens.measures.spectrum import rank_me as rank_me
    from tangent_lens.measures.spectrum import spectrum_of as spectrum_of
    from tangent_lens.measures.spectrum import stable_rank as stable_rank
    from tangent_lens.measures.tangent_order import tangent_order as tangent_order
    from tangent_lens.models.checkpoints import folder_checkpoints as folder_checkpoints
    from tangent_lens.models.checkpoints import hub_checkpoints as hub_checkpoints
    from tangent_lens.models.checkpoints import state_checkpoints as state_checkpoints
    from tangent_lens.models.remote_jobs import GradientsRefused as GradientsRefused
    from tangent_lens.models.remote_jobs import Remote as Remote
    from tangent_lens.models.remote_jobs import RemoteRunFailed as RemoteRunFailed
    from tangent_lens.recording.corpus import Corpus as Corpus
    from tangent_lens.recording.corpus import reference_prose as reference_prose
    from tangent_lens.recording.losses import causal_loss_sum as causal_loss_sum
    from tangent_lens.recording.masking import MaskedLoss as MaskedLoss
    from tangent_lens.recording.moments import Moments as Moments
    from tangent_lens.recording.moments import SecondMoments as SecondMoments
    from tangent_lens.recording.row_sample import RowSample as RowSample
    from tangent_lens.recording.sketch import SketchedMoments as SketchedMoments
    from tangent_lens.recording.sketch import gaussian_directions as gaussian_directions
    from tangent_lens.sites import Site as Site
    from tangent_lens.sites import attention_input as attention_input
    from tangent_lens.sites import embedding as embedding
    from tangent_lens.sites import key as key
    from tangent_lens.sites import mlp_input as mlp_input
    from tangent_lens.sites import query as query
    from tangent_lens.sites import resid_mid as resid_mid
    from tangent_lens.sites import resid_post as resid_post
    from tangent_lens.sites import resid_pre as resid_pre
    from tangent_lens.sites import value as value
    from tangent_lens.subspaces.controls import random_normals as random_normals
    from tangent_lens.subspaces.factorizations import fit_dictionary as fit_dictionary
    from tangent_lens.subspaces.factorizations import fit_ica as fit_ica
    from tangent_lens.subspaces.factorizations import fit_kmeans as fit_kmeans
    from tangent_lens.subspaces.factorizations import fit_nmf as fit_nmf
    from tangent_lens.subspaces.fits import fit_pca as fit_pca
    from tangent_lens.subspaces.given import fit_token_directions as fit_token_directions
    from tangent_lens.subspaces.given import fit_vectors as fit_vectors
    from tangent_lens.subspaces.given import load_vectors as load_vectors
    from tangent_lens.subspaces.labelled import fit_class_means as fit_class_means
    from tangent_lens.subspaces.labelled import fit_contrast as fit_contrast
    from tangent_lens.subspaces.ranks import rank_by as rank_by
    from tangent_lens.subspaces.semi_nmf import fit_semi_nmf as fit_semi_nmf
    from tangent_lens.subspaces.sketched import fit_sketched_pca as fit_sketched_pca
    from tangent_lens.subspaces.sketched import range_directions as range_directions
    from tangent_lens.subspaces.subspace import Subspace as Subspace

_HOMES = {
    "dynamics.callback": ("TangentCallback",),
    "dynamics.comparison": ("dynamics_table",),
    "dynamics.geometry_run": ("GeometryRun", "geometry_checkpoints"),
    "dynamics.recorder": ("TangentRecorder",),
    "dynamics.report": ("DynamicsReport",),
    "dynamics.run": ("measure_checkpoints",),
    "dynamics.schedule": ("LogSpaced",),
    "lens": ("Lens",),
    "measures.ablation": ("Ablation", "AblationReport"),
    "measures.activation_shape": ("ShapeReport",),
    "measures.attention_report": ("AttentionReport",),
    "measures.bootstrap": ("Interval", "adjusted_p_values", "bootstrap"),
    "measures.comparison": ("Comparison", "compare"),
    "measures.concept_geometry": ("concept_geometry", "depth_geometry"),
    "measures.cosine": ("mean_cosine", "mean_cosine_of"),
    "measures.curvature": ("principal_curvatures", "second_fundamental_form"),
    "measures.curvature_summary": ("curvature_summary",),
    "measures.curvature_visibility": ("curvature_visibility", "radii_of", "visibility_by_concentration"),
    "measures.dimension": ("intrinsic_dimension",),
    "measures.energy": ("EnergyTest", "energy_fraction", "energy_test"),
    "measures.enrichment": ("FrequencyBuckets", "tangent_enrichment"),
    "measures.explained_normal": ("explained_normal",),
    "measures.frequency": ("contextual_spread", "token_frequencies", "trajectory_spread"),
    "measures.frequency_report": ("FrequencyReport",),
    "measures.geometry_report": ("GeometryReport",),
    "measures.gradient_order": ("gradient_order",),
    "measures.gradient_rows": ("TokenGradients", "parabola_gradients"),
    "measures.isotropy": ("IsotropyTest", "iso_score", "iso_score_without", "isotropy_test"),
    "measures.local_tangent": ("fit_local_tangent",),
    "measures.manifolds": ("Manifold",),
    "measures.neighbourhoods": ("neighbourhood_agreement", "neighbourhood_overlap"),
    "measures.overlaps": (
        "Overlaps", "Stability", "compare_subspaces", "projection_distance", "stability_over_halves",
        "stability_over_seeds",
    ),
    "measures.partition": ("partition_isotropy",),
    "measures.report": ("Report",),
    "measures.seen_curvature": ("seen_curvature",),
    "measures.sketched": ("sketched_energy_test", "sketched_isotropy_test"),
    "measures.sketched_matrix": ("gradient_directions", "gradient_probes"),
    "measures.spectrum": (
        "Spectrum", "effective_rank", "participation_ratio", "power_law", "rank_me", "spectrum_of", "stable_rank",
    ),
    "measures.tangent_order": ("tangent_order",),
    "models.checkpoints": ("folder_checkpoints", "hub_checkpoints", "state_checkpoints"),
    "models.remote_jobs": ("GradientsRefused", "Remote", "RemoteRunFailed"),
    "recording.corpus": ("Corpus", "reference_prose"),
    "recording.losses": ("causal_loss_sum",),
    "recording.masking": ("MaskedLoss",),
    "recording.moments": ("Moments", "SecondMoments"),
    "recording.row_sample": ("RowSample",),
    "recording.sketch": ("SketchedMoments", "gaussian_directions"),
    "sites": (
        "Site", "attention_input", "embedding", "key", "mlp_input", "query", "resid_mid", "resid_post", "resid_pre",
        "value",
    ),
    "subspaces.controls": ("random_normals",),
    "subspaces.factorizations": ("fit_dictionary", "fit_ica", "fit_kmeans", "fit_nmf"),
    "subspaces.fits": ("fit_pca",),
    "subspaces.given": ("fit_token_directions", "fit_vectors", "load_vectors"),
    "subspaces.labelled": ("fit_class_means", "fit_contrast"),
    "subspaces.ranks": ("rank_by",),
    "subspaces.semi_nmf": ("fit_semi_nmf",),
    "subspaces.sketched": ("fit_sketched_pca", "range_directions"),
    "subspaces.subspace": ("Subspace",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tangent_lens' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tangent_lens.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
