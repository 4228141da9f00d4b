"""The base of rotary positions, which transformers 5 writes where transformers 4 does not look."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangent_lens.models.protocol import UnsupportedModel


def check_rotary_base(config: Any) -> None:
    """Refuse a model that turns its queries and keys by other angles than its own config says.

    transformers 4 keeps ``rope_parameters`` of a config that transformers 5 wrote, and takes its own default base.

    Raises:
        UnsupportedModel: the base that is used differs from the one that was written.
    """
    used = getattr(config, "rope_theta", None)
    written = _base_in(getattr(config, "rope_parameters", None))
    if used is not None and written is not None and used != written:
        raise UnsupportedModel(
            f"the config says rope_parameters with rope_theta {written:g}, and the model turns with rope_theta {used:g}: "
            "transformers 5 wrote this config and transformers 4 does not read that entry, so every score is wrong. Load "
            f"it with transformers 5, or with config=AutoConfig.from_pretrained(folder, rope_theta={written:g})"
        )


def write_rotary_base(folder: Path) -> None:
    """Say the base where transformers 4 looks, too, in a folder that transformers 5 saved; once said, nothing is written."""
    file = folder / "config.json"
    if not file.is_file():
        return  # whoever loads the folder tells what is missing
    config = json.loads(file.read_text(encoding="utf-8"))
    base = _base_in(config.get("rope_parameters"))
    if base is not None and "rope_theta" not in config:
        file.write_text(json.dumps(config | {"rope_theta": base}, indent=2), encoding="utf-8")


def _base_in(rope_parameters: Any) -> float | None:
    """One base for all layers; none where every kind of layer has its own."""
    return rope_parameters.get("rope_theta") if isinstance(rope_parameters, Mapping) else None
