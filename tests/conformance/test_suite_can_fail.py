"""The suite itself: a reader that is wrong in one way must be found wrong, by the check that is there for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conformance.backends import backends_here
from conformance.cells import run_cell
from conformance.expected import surprises
from conformance.judging import NOT_OFFERED, OK, REFUSED, WRONG
from conformance.refusals import Crashed, Refused, or_refused
from conformance.run import main
from conformance.showing import read_json, write_json

from tangent_lens.lens import Lens
from tangent_lens.models.protocol import UnsupportedModel
from tangent_lens.sites import Site

NEEDS_BRIDGE = pytest.mark.skipif("bridge" not in backends_here(), reason="this transformer-lens has no bridge")


class Changed:
    """A model of tangent_lens with some parts replaced: by values, or by functions of the model that was."""

    def __init__(self, model, **parts):
        self._model, self._parts = model, parts

    def __getattr__(self, name):
        parts = self.__dict__["_parts"]
        return parts[name](self._model) if name in parts else getattr(self._model, name)


def broken(**parts):
    """A lens on a changed model."""
    return lambda model: Lens(Changed(Lens(model).model, **parts))


def at_other_kinds(**kinds):
    """Taps of some kinds sit where those of other kinds belong."""

    def tap_point(model):
        return lambda site: model.tap_point(replace(site, kind=kinds.get(site.kind, site.kind)))

    return tap_point


def maps_renamed(**kinds):
    return lambda model: tuple(replace(one, kind=kinds.get(one.kind, one.kind)) for one in model.maps)


def run_with(change):
    """Every batch is changed before the model sees it."""
    return lambda model: lambda batch: model.run(change(batch))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


def doubled_gradients(model):
    def run(batch):
        output = model.run(batch)
        output.logits = _Doubled.apply(output.logits)
        return output

    return run


def unmasked(batch):
    return replace(batch, attention_mask=torch.ones_like(batch.attention_mask))


def shifted(batch):
    return replace(batch, positions=batch.positions + 1)


def without(kind, reason=None):
    """Sites of a kind are gone; with a reason or without."""
    gone = {
        "sites": lambda model: tuple(site for site in model.sites if site.kind != kind),
        "maps": lambda model: tuple(one for one in model.maps if one.reads.kind != kind),
    }
    return gone if reason is None else gone | {"absent": lambda model: dict(model.absent) | {kind: reason}}


def checks_of(family, backend, **parts):
    """Names of the checks that are wrong."""
    cell = run_cell(family, backend, broken(**parts))
    assert cell.verdict == (WRONG if cell.wrong else OK)
    return set(cell.wrong)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "modernbert"])
def test_queries_for_keys_are_wrong(family):
    swapped = at_other_kinds(query="key", key="query")
    found = checks_of(family, "huggingface", tap_point=swapped)
    assert {"activations", "gradients", "activations left", "bfloat16 gradients"} <= found
    assert "weight gradients" not in found


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "modernbert"])
def test_other_columns_of_a_fused_map_are_wrong(family):
    def shifted_columns(model):
        def tap_point(site):
            point = model.tap_point(site)
            return point if point.columns is None else replace(point, columns=point.columns.roll(1))

        return tap_point

    assert {"activations", "gradients"} <= checks_of(family, "huggingface", tap_point=shifted_columns)


@pytest.mark.parametrize("family", ["llama", "phi3", "modernbert"])
def test_gate_for_in_is_wrong(family):
    found = checks_of(family, "huggingface", maps=maps_renamed(mlp_in="mlp_gate", mlp_gate="mlp_in"))
    assert {"weight gradients", "weight gradients left", "bfloat16 weight gradients"} <= found
    assert "gradients" not in found


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_gradients_twice_too_large_are_wrong(family):
    found = checks_of(family, "huggingface", run=doubled_gradients)
    assert {"gradients", "weight gradients", "gradients right", "gradient moments", "bfloat16 gradients"} <= found
    assert "activations" not in found


@pytest.mark.parametrize(("kind", "instead"), [("resid_mid", "mlp_input"), ("attention_input", "resid_pre")])
def test_another_tensor_of_the_same_width_is_wrong(kind, instead):
    found = checks_of("gpt2", "huggingface", tap_point=at_other_kinds(**{kind: instead}))
    assert {"activations", "gradients"} <= found


def test_a_mask_that_is_ignored_is_wrong_on_the_left():
    found = checks_of("gpt_neox", "huggingface", run=run_with(unmasked))
    assert {"activations left", "gradients left", "weight gradients left"} <= found
    assert "activations" not in found and "activations right" not in found


@pytest.mark.parametrize("family", ["gpt2", "roberta"])
def test_positions_one_too_far_are_wrong_where_there_is_padding(family):
    found = checks_of(family, "huggingface", run=run_with(shifted))
    assert {"activations right", "activations left"} <= found


def test_a_pass_without_logits_that_ignores_the_mask_is_wrong():
    """Only the moments of activations come from it."""

    def run_without_logits(model):
        return lambda batch: model.run_without_logits(unmasked(batch))

    found = checks_of("gpt_neox", "huggingface", run_without_logits=run_without_logits)
    assert found == {"activation moments left"}


def test_a_site_that_silently_lacks_is_wrong():
    assert checks_of("gpt2", "huggingface", **without("resid_mid")) == {"places"}


def test_a_reason_makes_a_lack_legal_but_not_unnoticed():
    reason = "it stands in another room of the house"
    cell = run_cell("gpt2", "huggingface", broken(**without("resid_mid", reason)))
    assert (cell.verdict, cell.lacks) == (OK, {"resid_mid": reason})
    assert surprises(cell)


def test_a_site_that_the_contract_does_not_give_is_wrong():
    """OLMo-2's MLP reads the stream itself."""
    more = {
        "sites": lambda model: (*model.sites, Site("mlp_input", 0)),
        "tap_point": at_other_kinds(mlp_input="resid_mid"),
        "absent": lambda model: {"attention_input": model.absent["attention_input"]},
    }
    assert {"places", "activations"} <= checks_of("olmo2", "huggingface", **more)


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_processed_weights_that_are_said_to_be_stored_are_wrong(family):
    described = {"description": lambda model: replace(model.description, weights="as stored")}
    assert {"activations", "weight gradients"} <= checks_of(family, "bridge_compatibility", **described)


@NEEDS_BRIDGE
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("kind", "instead"), [("resid_mid", "mlp_input"), ("attention_input", "resid_pre")])
def test_another_tensor_is_wrong_with_processed_weights_too(family, kind, instead):
    found = checks_of(family, "bridge_compatibility", tap_point=at_other_kinds(**{kind: instead}))
    assert {"activations", "gradients"} <= found


@NEEDS_BRIDGE
def test_gate_for_in_is_wrong_with_processed_weights_too():
    swapped = maps_renamed(mlp_in="mlp_gate", mlp_gate="mlp_in")
    assert "weight gradients" in checks_of("llama", "bridge_compatibility", maps=swapped)


@NEEDS_BRIDGE
def test_gradients_twice_too_large_are_wrong_where_tensors_are_nudged():
    """Which needs no reference."""
    found = checks_of("gpt2", "bridge_compatibility", run=lambda model: lambda batch: _Doubled.apply(model.run(batch)))
    assert {"nudged sites", "nudged weights", "gradients"} <= found


class TestRefusals:
    def test_a_sentence_of_tangent_lens_is_a_refusal(self):
        with pytest.raises(Refused, match=r"has no resid_mid|no site"):
            or_refused(Lens(_tiny()).resolve, "nothing.1")

    def test_a_refusal_is_a_verdict_and_a_surprise(self):
        cell = run_cell("gpt2", "huggingface", lambda model: Lens(torch.nn.Linear(2, 2)))
        assert cell.verdict == REFUSED and "Linear" in cell.sentence
        assert surprises(cell)

    @pytest.mark.parametrize(
        "error", [ValueError, TypeError, RuntimeError, UnsupportedModel, KeyError, ZeroDivisionError]
    )
    def test_what_others_raise_is_a_crash_whatever_it_says(self, error):
        def fall_over(model):
            raise error("a long sentence that explains nothing at all")

        cell = run_cell("gpt2", "huggingface", fall_over)
        assert cell.verdict == WRONG and "crashed" in cell.sentence

    def test_a_slip_inside_tangent_lens_is_a_crash(self):
        with pytest.raises(Crashed, match=r"AttributeError|TypeError"):
            or_refused(Lens(_tiny()).model.tap_point, None)

    def test_torchs_own_words_are_a_crash(self):
        with pytest.raises(Crashed, match=r"RuntimeError at"):
            or_refused(lambda: torch.ones(2, 3) @ torch.ones(2, 3))

    def test_what_a_library_does_not_know_is_not_offered(self):
        cells = [
            run_cell("camembert", backend) for backend in backends_here() if backend not in ("huggingface", "nnsight")
        ]
        assert {cell.verdict for cell in cells} <= {NOT_OFFERED}
        assert all(len(cell.sentence) > 20 for cell in cells)


class TestTable:
    @pytest.fixture
    def files(self, tmp_path):
        right = run_cell("gpt2", "huggingface")
        wrong = run_cell("llama", "huggingface", broken(maps=maps_renamed(mlp_in="mlp_gate", mlp_gate="mlp_in")))
        refused = run_cell("bert", "huggingface", lambda model: Lens(torch.nn.Linear(2, 2)))
        paths = [tmp_path / name for name in ("one.json", "two.json")]
        write_json([right, refused], paths[0])
        write_json([wrong], paths[1])
        return [str(path) for path in paths]

    def test_shows_several_files_and_fails_if_anything_is_wrong(self, files, capsys):
        assert main(["--show", *files]) == 1
        shown = capsys.readouterr().out
        assert max(len(line) for line in shown.splitlines()) <= 120
        rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if "│" in line}
        assert rows == {"gpt2": "✓ -14", "llama": "✗", "bert": "refused"}
        assert shown.index("weight gradients: ") < shown.index("a torch.nn.modules.linear.Linear")

    def test_does_not_fail_where_nothing_is_wrong(self, files, capsys):
        assert main(["--show", files[0]]) == 0

    def test_markdown(self, files, capsys):
        assert main(["--show", *files, "--markdown"]) == 1
        header, rule, *rows = capsys.readouterr().out.strip().splitlines()
        assert header.startswith("| family | HF ") and rule == "|---|---|"
        assert rows == ["| gpt2 | ✓ -14 |", "| llama | ✗ |", "| bert | refused |"]

    def test_cells_come_back_from_json_as_they_were(self, files):
        cells = read_json(Path(file) for file in files)
        assert [cell.verdict for cell in cells] == [OK, REFUSED, WRONG]
        assert cells[0] == run_cell("gpt2", "huggingface")

    def test_unknown_names_end_the_run(self):
        with pytest.raises(SystemExit, match="no family gpt9 here; known: gpt2"):
            main(["--families", "gpt9"])


def _tiny():
    from conformance.families import tiny_model

    return tiny_model("gpt2")
