"""A model held by nnsight: here, with its weights, or only its structure, with the weights on an NDIF server."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from tangent_lens.models.huggingface import HuggingFaceModel, describe
from tangent_lens.models.protocol import ModelDescription, UnsupportedModel


class NNsightModel(HuggingFaceModel):
    """The :class:`~tangent_lens.models.protocol.Model` of a ``TransformersModel``, ``LanguageModel`` or ``NNsight(module)``.

    nnsight keeps the HuggingFace module as it is, so the same taps read it. A model that nnsight has not loaded yet has its
    structure only; :meth:`loaded` loads the weights, and a remote run needs none.

    Raises:
        UnsupportedModel: nnsight holds another kind of module, or an architecture that is not known.
    """

    def __init__(
        self, envoy: Any, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None
    ) -> None:
        module = envoy._module
        if not isinstance(module, PreTrainedModel):
            raise UnsupportedModel(
                f"nnsight holds a {type(module).__module__}.{type(module).__name__} here, whose sites are not known; name the "
                "places yourself: Lens(model, sites={'middle': 'path.of.submodule'})"
            )
        self.envoy = envoy
        super().__init__(
            module,
            tokenizer,
            name=name or getattr(envoy, "repo_id", None),
            revision=revision or getattr(envoy, "revision", None),
        )

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes."""
        library = f"nnsight {version('nnsight')}, transformers {version('transformers')}"
        return describe(self.module, name=self._name, revision=self._revision, library=library, weights="as stored")

    @property
    def has_weights(self) -> bool:
        """Whether nnsight has loaded them."""
        return not any(parameter.is_meta for parameter in self.module.parameters())

    def loaded(self) -> NNsightModel:
        """The same model with its weights: itself, or a new view of it after nnsight has loaded them."""
        if self.has_weights:
            return self
        self.envoy.dispatch()
        self.envoy._module.eval()
        return NNsightModel(self.envoy, self.tokenizer, name=self._name, revision=self._revision)


def order_of_calls(model: HuggingFaceModel) -> dict[tuple[str, str], int]:
    """When the input and the output of each module pass, in one forward pass: by (path, ``input`` or ``output``).

    The model runs on tensors without numbers, so it needs no weights. A mixture of experts cannot be run so (which expert
    reads which row depends on numbers); what comes after its first router is then missing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    found: dict[tuple[str, str], int] = {}

    def note(path: str, side: str) -> Callable[..., None]:
        def passes(*_: Any) -> None:
            found.setdefault((path, side), len(found))

        return passes

    handles = []
    for path, module in model.module.named_modules():
        handles.append(module.register_forward_pre_hook(note(path, "input")))
        handles.append(module.register_forward_hook(note(path, "output")))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(assume_static_by_default=True)):
            device = next(model.module.parameters()).device
            model.module(input_ids=torch.zeros(1, 4, dtype=torch.long, device=device))
    except GuardOnDataDependentSymNode:
        # The router of a mixture asks for numbers; what was seen before it counts.
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found
