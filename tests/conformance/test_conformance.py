"""Every family in every library of this environment, against plain PyTorch on plain HuggingFace.

The whole table of several environments comes from ``python tests/conformance/run.py``; see there.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conformance.backends import backends_here
from conformance.cells import run_cell
from conformance.comparing import difference
from conformance.expected import surprises
from conformance.families import FAMILIES, LAYERS, NotInThisVersion, examples_of, tiny_model
from conformance.judging import LIBRARY_DIFFERS, NOT_OFFERED, OK, REFUSED
from conformance.nudging import Nudge, worst_slope
from conformance.reference import ATTENTION_KINDS, PLACES, part_at, plain_reference, reference_of

from tangent_lens.models.protocol import TapPoint

CELLS = [(family, backend) for family in FAMILIES for backend in backends_here()]
# The encoder class is for BERT alone: no need to hear of every other family that it is not one.
CELLS = [(family, backend) for family, backend in CELLS if backend != "hooked_encoder" or family == "bert"]


@pytest.mark.parametrize(("family", "backend"), CELLS)
def test_every_cell_is_right_or_says_why_not(family, backend):
    cell = run_cell(family, backend)
    assert cell.verdict in (OK, REFUSED, NOT_OFFERED, LIBRARY_DIFFERS), cell.sentence
    assert cell.verdict == OK or len(cell.sentence) > 20
    assert surprises(cell) == []


class TestReference:
    """The expectation itself: plain autograd, held against arithmetic that shares nothing with its hooks."""

    @pytest.fixture(params=FAMILIES)
    def family(self, request):
        try:
            tiny_model(request.param)
        except NotInThisVersion as reason:
            pytest.skip(str(reason))
        return request.param

    def test_weight_gradients_are_products_of_its_rows(self, family):
        """dL/dW = sum of delta u^T: ties rows and gradients of queries, keys, values to the parameters' own gradients."""
        reference = reference_of(family)
        for name, gradient in reference.weights.items():
            kind, _, layer = name.partition(".")
            if kind in ATTENTION_KINDS:
                reads = f"attention_input.{layer}"
                rows = reference.activations.get(reads) or reference.activations[f"resid_pre.{layer}"]
                product = sum(delta.T @ u for delta, u in zip(reference.gradients[name], rows, strict=True))
                assert difference(product, gradient) < 1e-12, name

    def test_gradients_predict_how_the_loss_moves(self, family):
        """Moves every block's input, what attention adds to the stream, norms and separate maps, in random directions."""
        model, (example, *_) = tiny_model(family), examples_of(family)
        nudges = list(reference_nudges(family, model, plain_reference(family, model, [example])))
        plain = SimpleNamespace(model=SimpleNamespace(run=lambda batch: model(input_ids=batch.tokens)))
        exact = FAMILIES[family].exact
        error = worst_slope(plain, example, nudges, (1e-5,) if exact else (1e-4, 3e-4, 1e-3))
        assert len(nudges) >= 3 * LAYERS
        assert error.size < (1e-5 if exact else 3e-2), error

    def test_a_block_hands_on_what_the_next_one_reads(self, family):
        reference = reference_of(family)
        for layer in range(LAYERS - 1):
            for tensors in (reference.activations, reference.gradients):
                pairs = zip(tensors[f"resid_post.{layer}"], tensors[f"resid_pre.{layer + 1}"], strict=True)
                assert all(torch.equal(after, before) for after, before in pairs)


def reference_nudges(family, model, reference):
    """What the reference says of tensors that a module hands on whole."""
    places, generator = PLACES[family], torch.Generator().manual_seed(3)
    paths = {
        "attention_input": places.attention_norm,
        "mlp_input": places.mlp_norm,
        "resid_mid": places.attention_adds or places.middle,
        **({} if places.split else {kind: places.maps[kind] for kind in ATTENTION_KINDS}),
    }
    for layer, block in enumerate(part_at(model, places.blocks)):
        points = {kind: TapPoint(part_at(block, path), "output", kind) for kind, path in paths.items() if path}
        for kind, point in (points | {"resid_pre": TapPoint(block, "input", "block")}).items():
            name = f"{kind}.{layer}"
            if name in reference.gradients:
                (gradient,) = reference.gradients[name]
                direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
                predicted = float((gradient * direction).sum())
                yield Nudge(name, (point,), direction, predicted, float(gradient.norm()))
