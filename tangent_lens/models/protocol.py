"""What the rest of the library needs of a model, whatever library it comes from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
        targets: what a masked-token loss wants predicted at each position, -100 where nothing; None for other losses.
    """

    tokens: Int[Tensor, "batch pos"]
    attention_mask: Bool[Tensor, "batch pos"]
    positions: Int[Tensor, "batch pos"]
    keep: Bool[Tensor, "batch pos"]
    targets: Int[Tensor, "batch pos"] | None = None

    @property
    def padded(self) -> bool:
        """Whether any position is padding."""
        return not bool(self.attention_mask.all())

    @property
    def size(self) -> int:
        """Number of tokens that are not padding."""
        return int(self.attention_mask.sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        targets = None if self.targets is None else self.targets.to(device)
        here = (getattr(self, name).to(device) for name in ("tokens", "attention_mask", "positions", "keep"))
        return Batch(*here, targets=targets)

    def check_fits(self, vocabulary: int, longest_sequence: int | None) -> None:
        """Refuse tokens or lengths that a model would crash on, or silently wrap.

        Raises:
            ValueError: a token outside the vocabulary, or more positions than the model has.
        """
        highest, length = int(self.tokens.max()), self.tokens.shape[1]
        if highest >= vocabulary:
            raise ValueError(
                f"token id {highest} is outside this model's vocabulary of {vocabulary}; use its own tokenizer"
            )
        if longest_sequence is not None and length > longest_sequence:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the {longest_sequence} positions this model has; "
                "use a smaller sequence_length"
            )


@dataclass(frozen=True)
class Inputs:
    """One batch for a module that is no language model: what it is called with.

    Attributes:
        value: a tensor, or a tuple of positional arguments, or a mapping of named ones.
    """

    value: Any
    size: int = 1

    def to(self, device: torch.device | str) -> Inputs:
        """The same with every tensor on another device."""
        if isinstance(self.value, Mapping):
            return Inputs({name: _moved(one, device) for name, one in self.value.items()}, self.size)
        if isinstance(self.value, (tuple, list)):
            return Inputs(tuple(_moved(one, device) for one in self.value), self.size)
        return Inputs(_moved(self.value, device), self.size)

    def check_fits(self, vocabulary: int, longest_sequence: int | None) -> None:
        """Nothing is known of what a module takes."""


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class TapPoint:
    """Where the tensor of a site passes: a module, and whether it is what goes in or what comes out.

    Attributes:
        name: the host library's own name of the place.
        columns: which entries of the last dimension belong to the site; None for all of them
            (a fused query-key-value map holds three sites in one tensor).
        arguments: of an input, the arguments that carry it. Several are copies of one tensor, made for several readers:
            their gradients add up to the gradient of the site.
        width: numbers in a row, where known; another width means that the host library runs in a mode in which this is
            not the tensor the site is named for.
        hookable: whether the host library knows the place by ``name``, so that a person can hook it there.
    """

    module: nn.Module
    side: Literal["input", "output"]
    name: str
    columns: Tensor | None = None
    arguments: tuple[str, ...] = ("hidden_states",)
    width: int | None = None
    hookable: bool = True

    @property
    def whole(self) -> TapPoint:
        """The same place without the choice of columns: a fused tensor as it passes."""
        return self if self.columns is None else replace(self, columns=None, width=None)


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
    """What a report says of the model it measured. For a module of unknown structure the shapes are 0.

    Attributes:
        weights: ``as stored``, or how they were processed: that puts activations and gradients in another basis.
    """

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
    """A model with named sites.

    Attributes:
        module: the torch module that holds all parameters.
        sites: every site the model has, in the order of the forward pass.
        absent: why the model lacks a kind of site or map (``resid_mid``, ``mlp_in``), or one site (``attention_input.0``).
        misleading_names: names of the host library that mean another tensor here than elsewhere, and what to write.
        tokenizer: a HuggingFace tokenizer, or None.
        longest_sequence: where learned positions end; None where any length runs.
        objective: what it was trained for: ``causal``, ``masked``, or ``""`` where it has no language-model head.
        padding_sides: on which sides its sequences may be padded.
    """

    module: nn.Module
    sites: tuple[Site, ...]
    absent: Mapping[str, str]
    misleading_names: Mapping[str, str]
    tokenizer: Any
    longest_sequence: int | None
    objective: str
    padding_sides: tuple[str, ...]

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        """Every linear map that reads a site."""
        ...

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its inputs must lie."""
        ...

    def tap_point(self, site: Site) -> TapPoint:
        """Where the tensor of a site passes."""
        ...

    def gradient_starts(self) -> tuple[TapPoint, ...]:
        """Where gradients can start on a frozen model: before, or at, every site."""
        ...

    def run(self, batch: Any) -> Any:
        """Run the model and return what its library returns."""
        ...

    def run_without_logits(self, batch: Any) -> None:
        """Run the model for its hooks alone, skipping the unembedding where the library allows."""
        ...


def pad_id_of(model: Model) -> int:
    """What stands at padding: the tokenizer's own token, or 0 where it has none that the model knows."""
    pad = getattr(model.tokenizer, "pad_token_id", None)
    return 0 if pad is None or pad >= model.description.vocabulary else pad


def runs_remotely(model: Any) -> bool:
    """Whether a model's weights are on a server, so that sums are all that can be had of it."""
    return hasattr(model, "jobs")


def logits_of(output: Any) -> Tensor:
    """The logits (batch, position, vocabulary) in whatever a language model returned.

    Raises:
        TypeError: there are none.
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "prediction_logits"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise TypeError(f"the model returned a {type(output).__name__} without logits, so it has no language-model loss")


def width_of(shape: ModelDescription, site: Site) -> int | None:
    """Numbers a row of this site holds: d_model, or heads * d_head for queries, keys and values; None if unknown."""
    if not shape.d_model:
        return None
    heads = {"query": shape.n_heads, "key": shape.n_key_value_heads, "value": shape.n_key_value_heads}
    return heads[site.kind] * shape.d_head if site.kind in heads else shape.d_model


def forward_parameters(module: nn.Module) -> list[str]:
    """Names of what a module is called with, in order. Of its class: nnsight and others wrap the forward of the instance."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def read_tensor(value: Any) -> Tensor:
    """The tensor that passes, where a module hands over a tuple whose first entry it is."""
    tensor = value[0] if isinstance(value, (tuple, list)) else value
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a tensor should pass here, but {type(tensor).__name__} does")
    if tensor.is_nested:
        raise TypeError(
            "a nested tensor passes here, which has no rows of one length; build a torch.nn.TransformerEncoder with "
            "enable_nested_tensor=False, or set encoder.use_nested_tensor = False"
        )
    return tensor
