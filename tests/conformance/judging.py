"""The checks of one cell: every number that tangent_lens gives, against plain PyTorch on plain HuggingFace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from conformance.backends import PROCESSED, NotOffered, host
from conformance.batching import Layout, lay_out
from conformance.comparing import Error, joined, worst, worst_rows
from conformance.families import FAMILIES
from conformance.measuring import Rows, Sums, library_error, recorded_sums, remote_sums, tapped_rows
from conformance.nudging import map_nudges, site_nudges, worst_slope
from conformance.places import problems_of
from conformance.processing import folded, worst_of_either
from conformance.reference import map_names, reference_of
from conformance.refusals import Crashed, Refused, or_refused
from conformance.rounding import bfloat16_errors

OK, REFUSED, NOT_OFFERED, LIBRARY_DIFFERS, WRONG = "ok", "refused", "not offered", "library differs", "WRONG"
# Truly float64 arithmetic loses some 4 digits on the way through three random layers, forward and backward.
EXACT = 1e-10
# One float32 rounding (6e-8) inside, here of norms or rotary angles, grows as much; up to 6e-6 was seen.
ROUNDED = 3e-5
# In float32 throughout every operation rounds.
FLOAT32 = 2e-4
# Sums come back from a server in float32, each tensor scaled by its largest number.
TRAVELLED = 1e-6


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        outcome: ``ok``, ``refused``, ``library differs`` (the library itself is wrong here) or ``WRONG``.
        error: worst relative error, where numbers were compared.
        detail: where it is, or the sentence of the refusal.
    """

    name: str
    outcome: str
    error: float | None = None
    detail: str = ""


class Judge:
    """One family in one library and one precision.

    Args:
        lens_of: what stands for tangent_lens.

    Raises:
        NotOffered: the library does not take the family.
    """

    def __init__(self, name: str, backend: str, dtype: torch.dtype, lens_of: Callable[[Any], Any]) -> None:
        self.name, self.backend, self.dtype, self.lens_of = name, backend, dtype, lens_of
        self.hosted = host(name, backend, dtype)
        self.reference = reference_of(name)
        self.processed = backend in PROCESSED
        exact = FAMILIES[name].exact and not self.hosted.angles_differ and not self.processed
        self.tolerance = FLOAT32 if dtype == torch.float32 else EXACT if exact else ROUNDED
        self.alone = lay_out(self.reference.examples, "alone")

    def library_error(self, layout: Layout) -> Error:
        """How wrong the library itself is."""
        return library_error(self.hosted.logits, self.reference, layout, shift_free=self.processed)

    def library_is_right(self, layout: Layout) -> bool:
        """Whether its logits are those of HuggingFace."""
        return self.library_error(layout).size <= self.tolerance

    def checks(self, lens: Any) -> Iterator[Check]:
        """All of them."""
        problems = problems_of(lens, self.name)
        yield Check("places", WRONG if problems else OK, detail=problems)
        yield self._description(lens)
        yield from self.compared(lens, self.alone)
        for side in ("right", "left"):
            yield from self._padded(lens, lay_out(self.reference.examples, side))
        if self.backend == "nnsight":
            yield from self._remote()
        if self.dtype == torch.float64:
            yield from self._nudged(lens) if self.processed else self._bfloat16()

    def compared(self, lens: Any, layout: Layout) -> list[Check]:
        """Every number of one layout; a refusal or a crash stands for all of them."""
        suffix = "" if layout.side == "alone" else f" {layout.side}"
        suffix += " float32" if self.dtype == torch.float32 else ""
        same_program = (
            self.backend == "huggingface" and layout.side == "alone"
        )  # rounds to float32 alike, where it does
        tolerance = EXACT if same_program else self.tolerance
        return guarded(f"gradients{suffix}", lambda: self._numbers(lens, layout, tolerance, suffix))

    def _numbers(self, lens: Any, layout: Layout, tolerance: float, suffix: str) -> Iterator[Check]:
        _check_side(lens, layout)
        rows, sums = tapped_rows(lens, layout), recorded_sums(lens, layout, self.name)
        # A report that says "as stored" promises the numbers of the plain model, whatever was asked of the library.
        if self.processed and lens.description.weights != "as stored":
            yield from self._processed_numbers(rows, sums, tolerance, suffix)
        else:
            yield from self._stored_numbers(rows, sums, tolerance, suffix)
        off = Error(abs(sums.loss - self.reference.loss) / self.reference.loss, "the summed loss")
        yield judged(f"loss{suffix}", off, tolerance)

    def _stored_numbers(self, rows: Rows, sums: Sums, tolerance: float, suffix: str) -> Iterator[Check]:
        expected = self.reference
        yield judged(f"activations{suffix}", worst_rows(rows.activations, expected.activations), tolerance)
        yield judged(f"gradients{suffix}", worst_rows(rows.gradients, expected.gradients), tolerance)
        yield judged(f"weight gradients{suffix}", worst(sums.weights, expected.weights), tolerance)
        squares = _squares(joined(expected.activations, sums.activations))
        yield judged(f"activation moments{suffix}", worst(sums.activations, squares), 2 * tolerance)
        squares = _squares(joined(expected.gradients, sums.gradients))
        yield judged(f"gradient moments{suffix}", worst(sums.gradients, squares), 2 * tolerance)

    def _processed_numbers(self, rows: Rows, sums: Sums, tolerance: float, suffix: str) -> Iterator[Check]:
        stored, other = self.reference, folded(self.reference)
        for what in ("activations", "gradients"):
            found, *either = (joined(getattr(one, what), rows.activations) for one in (rows, stored, other))
            yield judged(f"{what}{suffix}", worst_of_either(found, *either, what=what), tolerance)
        weights = worst_of_either(sums.weights, stored.weights, other.weights, "weight gradients")
        yield judged(f"weight gradients{suffix}", weights, tolerance)

    def _padded(self, lens: Any, layout: Layout) -> Iterator[Check]:
        error = self.library_error(layout)
        if error.size <= self.tolerance:
            checks = self.compared(lens, layout)
        else:
            detail = f"the library's own logits are {'NaN' if not error.finite else f'off by {error.size:.0e}'}"
            yield Check(f"library {layout.side}", LIBRARY_DIFFERS, error.size, detail)
            checks = guarded(f"gradients {layout.side}", lambda: self._must_refuse(lens, layout, detail))
        yield from checks
        refused = any(check.outcome == REFUSED for check in checks)
        if refused and layout.side in lens.model.padding_sides and self.dtype == torch.float64:
            yield from self._in_float32(layout)

    def _remote(self) -> Iterator[Check]:
        """The functions that run on a server, whose sums travel in float32."""
        expected = self.reference
        for side in ("alone", "right", "left"):
            layout = lay_out(expected.examples, side)
            if not self.library_is_right(layout):
                continue

            def checks(layout: Layout = layout) -> Iterator[Check]:
                with tempfile.TemporaryDirectory() as folder:
                    sums = remote_sums(self.name, self.dtype, layout, folder)
                tolerance = max(self.tolerance, TRAVELLED)
                squares = _squares(joined(expected.activations, sums.activations))
                yield judged(f"remote activations {layout.side}", worst(sums.activations, squares), tolerance)
                squares = _squares(joined(expected.gradients, sums.gradients))
                yield judged(f"remote gradients {layout.side}", worst(sums.gradients, squares), tolerance)
                yield judged(f"remote weight gradients {layout.side}", worst(sums.weights, expected.weights), tolerance)
                off = Error(abs(sums.loss - expected.loss) / expected.loss, "the summed loss")
                yield judged(f"remote loss {layout.side}", off, tolerance)

            yield from guarded(f"remote gradients {side}", checks)

    def _must_refuse(self, lens: Any, layout: Layout, detail: str) -> Iterator[Check]:
        _check_side(lens, layout)
        recorded_sums(lens, layout, self.name)
        yield Check(f"gradients {layout.side}", WRONG, detail=f"{detail}, and tangent_lens measures all the same")

    def _in_float32(self, layout: Layout) -> list[Check]:
        """Most NaN is float64's: a mask of float32's lowest number, or a softmax in float32 of a row without entries."""
        narrow = Judge(self.name, self.backend, torch.float32, self.lens_of)
        error = narrow.library_error(layout)
        if error.size <= narrow.tolerance:
            return narrow.compared(self.lens_of(narrow.hosted.model), layout)
        detail = f"the library's own logits are off by {error.size:.0e} in float32 too"
        return [Check(f"library {layout.side} float32", LIBRARY_DIFFERS, error.size, detail)]

    def _nudged(self, lens: Any) -> Iterator[Check]:
        example, mixture = self.reference.examples[0], "mlp_in.0" not in map_names(self.name)
        float64 = FAMILIES[self.name].exact or (self.backend.startswith("hooked") and not mixture)
        # Where a norm or a router computes in float32, the loss carries some 1e-6 of rounding, in which a small step drowns;
        # a large one sends rows of a mixture to other experts.
        steps, tolerance = ((1e-5,), 1e-5) if float64 else ((1e-4, 3e-4, 1e-3), 3e-2)

        def checks() -> Iterator[Check]:
            nudges = site_nudges(lens, self.backend, self.name, example)
            yield judged("nudged sites", worst_slope(lens, example, nudges, steps), tolerance)
            nudges = map_nudges(lens, self.name, example)
            yield judged("nudged weights", worst_slope(lens, example, nudges, steps), tolerance)

        yield from guarded("nudged sites", checks)

    def _description(self, lens: Any) -> Check:
        """``as stored`` is held to its word by the numbers; where it is not said, the word must be ``processed``."""
        said = lens.description.weights
        right = said == "as stored" or (self.processed and said.startswith("processed"))
        return Check("description", OK if right else WRONG, detail=f"weights: {said}")

    def _bfloat16(self) -> Iterator[Check]:
        try:
            narrow = host(self.name, self.backend, torch.bfloat16)
            library_error(narrow.logits, self.reference, self.alone, shift_free=False)
        except (NotOffered, RuntimeError) as reason:
            yield Check("library bfloat16", LIBRARY_DIFFERS, detail=f"the library does not run in it: {reason}")
            return

        def checks() -> Iterator[Check]:
            for what, error, tolerance in bfloat16_errors(self.name, self.lens_of(narrow.model)):
                yield judged(f"bfloat16 {what}", error, tolerance)

        yield from guarded("bfloat16", checks)


def guarded(what: str, checks: Callable[[], Iterator[Check]]) -> list[Check]:
    """Checks, or the refusal or crash that kept them from being made."""
    try:
        return or_refused(lambda: list(checks()))
    except Refused as refusal:
        return [Check(what, REFUSED, detail=str(refusal))]
    except Crashed as crash:
        return [Check(what, WRONG, detail=str(crash))]


def judged(what: str, error: Error, tolerance: float) -> Check:
    """Right or wrong; NaN is wrong."""
    right = error.finite and error.size <= tolerance
    detail = f"{error.where}: {error.size:.1e}" + ("" if right else f", more than {tolerance:.0e}")
    return Check(what, OK if right else WRONG, error.size, detail)


def _squares(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.T @ tensor for name, tensor in rows.items()}


def _check_side(lens: Any, layout: Layout) -> None:
    """A side that the model says it cannot be padded on is refused by ``lens.record``, which alone pads."""
    if layout.side != "alone" and layout.side not in lens.model.padding_sides:
        (batch,) = layout.batches
        tokens = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.attention_mask, strict=True)]
        lens.record(tokens, gradients=False, padding_side=layout.side, progress=False)
