"""What the rest of the library needs of a model, whatever library it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from tangent_lens.sites import Site


class UnsupportedModel(TypeError):
    """A model that this library does not know how to read."""


@dataclass(frozen=True)
class Batch:
    """Sequences side by side, padded to one length.

    Attributes:
        tokens: token ids (batch, position).
        attention_mask: True where a real token stands.
        positions: place of each token in its own sequence, 0 at its first token; 0 at padding.
        keep: True where the position enters the statistics; always a subset of ``attention_mask``.
    """

    tokens: Int[Tensor, "batch pos"]
    attention_mask: Bool[Tensor, "batch pos"]
    positions: Int[Tensor, "batch pos"]
    keep: Bool[Tensor, "batch pos"]

    @property
    def padded(self) -> bool:
        """Whether any position is padding."""
        return not bool(self.attention_mask.all())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, name).to(device) for name in ("tokens", "attention_mask", "positions", "keep")))


@dataclass(frozen=True)
class TapPoint:
    """Where the tensor of a site passes: a module, and whether it is what goes in or what comes out.

    Attributes:
        name: the host library's own name of the place.
        columns: which entries of the last dimension belong to the site; None for all of them
            (a fused query-key-value map holds three sites in one tensor).
    """

    module: nn.Module
    side: Literal["input", "output"]
    name: str
    columns: Tensor | None = None


@dataclass(frozen=True)
class LinearMap:
    """A linear map W (out x in) that reads a site: one of query, key, value, mlp_in, mlp_gate.

    Attributes:
        reads: the site whose rows are its input.
        inputs: where its input rows pass; of several places, the last that fires in a pass counts.
        output: where its output rows pass; ``columns`` picks its own part of a fused map.
    """

    kind: str
    layer: int
    reads: Site
    inputs: tuple[TapPoint, ...]
    output: TapPoint

    @property
    def name(self) -> str:
        """``query.3``."""
        return f"{self.kind}.{self.layer}"


ATTENTION_MAPS = ("query", "key", "value")
MLP_MAPS = ("mlp_in", "mlp_gate")


@dataclass(frozen=True)
class ModelDescription:
    """What a report says of the model it measured."""

    name: str
    revision: str
    library: str
    architecture: str
    weights: str
    dtype: str
    parameters: int
    n_layers: int
    d_model: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    vocabulary: int


class Model(Protocol):
    """A language model with named sites.

    Attributes:
        module: the torch module that holds all parameters.
        sites: every site the model has, in the order of the forward pass.
        absent: for each kind of site the model lacks, why.
        tokenizer: a HuggingFace tokenizer, or None.
        longest_sequence: where learned positions end; None where any length runs.
    """

    module: nn.Module
    sites: tuple[Site, ...]
    absent: dict[str, str]
    tokenizer: Any
    longest_sequence: int | None

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        """Every linear map that reads a site."""
        ...

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes."""
        ...

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        ...

    def embedding_point(self) -> TapPoint:
        """Where the token embedding comes out: the place from which gradients can start on a frozen model."""
        ...

    def logits(self, batch: Batch) -> Tensor:
        """Run the model and return the logits (batch, position, vocabulary)."""
        ...

    def run_without_logits(self, batch: Batch) -> None:
        """Run the model for its hooks alone, skipping the unembedding where the library allows."""
        ...


def read_tensor(value: Any) -> Tensor:
    """The tensor that passes, where a module hands over a tuple whose first entry it is."""
    tensor = value[0] if isinstance(value, (tuple, list)) else value
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a tensor should pass here, but {type(tensor).__name__} does")
    return tensor
