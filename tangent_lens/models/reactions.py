"""Well-known reactions as texts for the rxnfp models."""

from __future__ import annotations

from importlib import resources


def reference_reactions() -> list[str]:
    """133 textbook reactions as reaction SMILES, ``starting materials and reagents>>product``.

    They were written for this library (the wheel of rxnfp carries none) the way the pretraining read its own: compounds
    in alphabetical order, separated by ``.``, the ions of one compound joined by ``~``. 27 to 135 symbols each; their
    names stand beside them in ``reactions.rsmi``. For other chemistry software, ``text.replace("~", ".")`` is plain
    reaction SMILES.
    """
    lines = resources.files("tangent_lens.models").joinpath("reactions.rsmi").read_text(encoding="utf-8").splitlines()
    return [line.split(" ", 1)[0] for line in lines]
