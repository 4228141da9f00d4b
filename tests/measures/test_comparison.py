"""Reports side by side: each is called by what tells it apart, and a warning stands wherever numbers do not compare."""

from __future__ import annotations

import dataclasses

import pytest
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

import tangent_lens as tln
from tangent_lens.measures.comparison import Comparison, compare
from tangent_lens.measures.report import Measurement, Report

LIBRARIES = (
    "transformers 5.24.0",
    "transformer-lens 4.3.0 (TransformerBridge)",
    "transformer-lens 3.9.0 (HookedTransformer)",
    "torch 2.13.0+cpu",
)
CLASSES = ("transformers", "TransformerBridge", "HookedTransformer", "torch")
BOS = "every sequence begins with the special token '<s>', the beginning-of-text token this tokenizer sets by itself"


def like(report: Report, **changes) -> Report:
    """The same report but for some fields, wherever they stand; a warning of its own goes with ``warnings``."""
    own = {name: changes.pop(name) for name in ("warnings", "measurements") if name in changes}
    for part in ("model", "corpus", "settings"):
        fields = {field.name for field in dataclasses.fields(getattr(report, part))}
        prefixed = {key.removeprefix(f"{part}_"): value for key, value in changes.items() if key.startswith(f"{part}_")}
        assert set(prefixed) <= fields, prefixed
        own[part] = dataclasses.replace(getattr(report, part), **prefixed)
    return dataclasses.replace(report, **own)


def named(report: Report, *descriptions: dict[str, str]) -> tuple[str, ...]:
    return compare(
        *(like(report, **{f"model_{key}": value for key, value in one.items()}) for one in descriptions)
    ).names


class TestNames:
    def test_libraries_where_they_differ(self, report):
        assert named(report, *({"library": one} for one in LIBRARIES)) == CLASSES
        assert named(report, {"library": LIBRARIES[1]}, {"library": LIBRARIES[0]}) == CLASSES[1::-1]

    def test_models_where_the_library_is_one(self, report):
        assert named(report, {"name": "pythia-70m"}, {"name": "pythia-160m"}) == ("pythia-70m", "pythia-160m")

    def test_revisions_of_one_model(self, report):
        found = named(report, {"revision": "step1"}, {"revision": "step512"}, {"revision": "main"})
        assert found == ("step1", "step512", "main")

    def test_model_and_library_where_neither_tells_apart_alone(self, report):
        pairs = [{"name": name, "library": library} for name in ("a", "b") for library in LIBRARIES[:2]]
        assert named(report, *pairs) == (
            "a, transformers", "a, TransformerBridge", "b, transformers", "b, TransformerBridge",
        )  # fmt: skip

    def test_numbers_where_nothing_tells_apart(self, report):
        assert compare(report, report, like(report, settings_seed=5)).names == ("run 1", "run 2", "run 3")

    def test_another_version_of_one_library_is_no_name(self, report):
        assert named(report, {"library": "transformers 5.20"}, {"library": "transformers 5.24"}) == ("run 1", "run 2")

    @given(data=st.data(), count=st.integers(2, 5))
    @PROPERTY
    def test_whatever_they_are_each_has_another(self, report, data, count):
        few = st.sampled_from(["a", "b", "c"])
        reports = [
            like(
                report,
                model_name=data.draw(few),
                model_revision=data.draw(few),
                model_library=data.draw(st.sampled_from(LIBRARIES)),
            )
            for _ in range(count)
        ]
        names = compare(*reports).names
        assert len(set(names)) == len(names) == count

    def test_the_persons_own(self, report):
        assert compare(report, report, names=["before", "[after]"]).names == ("before", "[after]")
        assert isinstance(compare(report, report, names=["before", "after"]).names, tuple)


# By the field that changes: another value, and the words of the warning before the colon.
CHANGES = {
    "model_weights": (
        "folded and centred",
        "the weights are of different kinds (run 1: as stored; run 2: folded and centred)",
    ),
    "settings_loss": ("masked-token (0.15)", "the losses differ (run 1: next-token; run 2: masked-token (0.15))"),
    "model_dtype": ("bfloat16", "the precisions differ: run 1: float64; run 2: bfloat16"),
    "corpus_name": ("other texts", "the texts differ: run 1: numbers, 288 tokens; run 2: other texts, 288 tokens"),
    "corpus_test_tokens": (1144, "the texts differ: run 1: numbers, 288 tokens; run 2: numbers, 1,288 tokens"),
    "settings_rank": (4, "rank differs: run 1: 3; run 2: 4"),
    "settings_controls": (21, "controls differs: run 1: 20; run 2: 21"),
    "settings_seed": (5, "seed differs: run 1: 4; run 2: 5"),
    "settings_fit_site": ("residual", "fit_site differs: run 1: input; run 2: residual"),
    "settings_center": (False, "center differs: run 1: True; run 2: False"),
    "settings_shrinkage": (0.1, "shrinkage differs: run 1: 0.0; run 2: 0.1"),
    "settings_fit_fraction": (0.25, "fit_fraction differs: run 1: 0.5; run 2: 0.25"),
    "settings_sequence_length": (64, "sequence_length differs: run 1: None; run 2: 64"),
    "settings_pack": (True, "pack differs: run 1: False; run 2: True"),
    "settings_prepend_bos": (True, "prepend_bos differs: run 1: None; run 2: True"),
    "settings_skip_first": (True, "skip_first differs: run 1: False; run 2: True"),
    "settings_skip_special": (True, "skip_special differs: run 1: False; run 2: True"),
    "warnings": (
        (BOS,),
        "the beginnings of sequences differ: run 1: with the text or as asked; run 2: with a special token",
    ),
}
HARMLESS = {
    "settings_batch_size": 3,
    "settings_padding_side": "left",
    "settings_gradients": ("residual",),
    "warnings": ("massive activations: position 0 holds 90%",),
    "corpus_loss": 7.5,
    "model_parameters": 3,
}


class TestWarnings:
    @pytest.mark.parametrize("change", CHANGES)
    def test_each_difference_has_exactly_its_own(self, report, change):
        value, words = CHANGES[change]
        assert len(compare(like(report, **{change: value}), report).warnings) == 1
        (sentence,) = compare(report, like(report, **{change: value})).warnings
        assert sentence.startswith(words)

    def test_other_models_and_other_states_of_one(self, report):
        (sentence,) = compare(report, like(report, model_name="other")).warnings
        assert sentence == "the models differ: [tiny] model: [tiny] model; other: other"
        (sentence,) = compare(report, like(report, model_revision="step9")).warnings
        assert sentence == "the revisions differ: step7: step7; step9: step9"

    def test_the_maps_pooled_together_are_part_of_the_numbers(self, report):
        """``attention.3`` of queries alone is another gradient than that of queries, keys and values."""
        (sentence,) = compare(report, like(report, settings_maps=("query",))).warnings
        assert "maps" in sentence

    @pytest.mark.parametrize("change", HARMLESS)
    def test_what_changes_no_number_needs_none(self, report, change):
        assert compare(report, like(report, **{change: HARMLESS[change]})).warnings == ()

    def test_equal_runs_have_none(self, report):
        assert compare(report, report).warnings == compare(report, like(report), report, report).warnings == ()

    def test_another_library_alone_has_none(self, report):
        assert compare(report, like(report, model_library=LIBRARIES[1])).warnings == ()

    @given(chosen=st.sets(st.sampled_from(sorted(CHANGES))), place=st.integers(0, 3))
    @PROPERTY
    def test_as_many_as_there_are_differences_wherever_the_odd_one_stands(self, report, chosen, place):
        reports = [report] * 3
        reports.insert(place, like(report, **{change: CHANGES[change][0] for change in chosen}))
        found = compare(*reports).warnings
        texts = {"corpus_name", "corpus_test_tokens"}
        assert len(found) == len(chosen) - (texts <= chosen)
        assert all(f"run {place + 1}" in sentence for sentence in found)

    def test_a_sentence_names_every_run_with_its_value(self, report):
        found = compare(report, like(report, settings_seed=8), like(report, settings_seed=9), names=["x", "y", "z"])
        assert found.warnings == ("seed differs: x: 4; y: 8; z: 9",)

    def test_processed_weights_are_told_with_what_that_does(self, report):
        (sentence,) = compare(report, like(report, model_weights="folded")).warnings
        assert "another basis" in sentence and "do not compare number by number" in sentence


def at(report: Report, name: str, place: str) -> Measurement:
    """A measurement of the report, moved to another place."""
    kind, _, layer = place.partition(".")
    moved = {"name": place, "site": place, "kind": kind, "layer": int(layer) if layer else None}
    return dataclasses.replace(report.of(name), **moved)


class TestMeasurements:
    def test_residual_ones_side_by_side(self, report):
        found = compare(report, like(report)).measurements("residual", "")
        assert [name for name, _ in found] == [f"resid_post.{layer}" for layer in range(3)]
        assert all(cells == (report.of(name), report.of(name)) for name, cells in found)

    @pytest.mark.parametrize("kind", ["attention", "mlp"])
    def test_of_weights_the_maps_together(self, report, kind):
        found = compare(report, report).measurements("weight", kind)
        assert [name for name, _ in found] == [f"{kind}.{layer}" for layer in range(3)]
        assert all(one.pooled and one.gradient == "weight" for _, cells in found for one in cells)

    def test_what_a_report_has_not_is_none_in_its_place(self, report):
        fewer = like(report, measurements=tuple(one for one in report.measurements if one.layer != 1))
        residual = like(report, measurements=tuple(one for one in report.measurements if one.gradient == "residual"))
        found = dict(compare(fewer, report, residual).measurements("residual", ""))
        assert found["resid_post.1"] == (None, report.of("resid_post.1"), report.of("resid_post.1"))
        found = dict(compare(fewer, report, residual).measurements("weight", "mlp"))
        assert found["mlp.1"] == (None, report.of("mlp.1"), None)
        assert found["mlp.2"] == (report.of("mlp.2"), report.of("mlp.2"), None)
        assert compare(residual, residual).measurements("weight", "mlp") == []

    def test_layers_stand_in_the_order_of_numbers_whichever_report_has_them(self, report):
        deep = [at(report, "resid_post.0", f"resid_post.{layer}") for layer in (11, 3, 10)]
        embedding = at(report, "resid_post.0", "embedding")
        other = like(report, measurements=(*deep, embedding))
        expected = ["embedding", *(f"resid_post.{layer}" for layer in (0, 1, 2, 3, 10, 11))]
        for reports in ((report, other), (other, report)):
            assert [name for name, _ in compare(*reports).measurements("residual", "")] == expected

    def test_one_kind_of_residual_site(self, report):
        mid = at(report, "resid_post.1", "resid_mid.1")
        both = like(report, measurements=(mid, *report.measurements))
        assert [name for name, _ in compare(both, report).measurements("residual", "resid_mid")] == ["resid_mid.1"]
        assert len(compare(both, report).measurements("residual", "")) == 4


class TestFrame:
    def test_every_row_of_every_report_under_its_name(self, report):
        other = like(report, measurements=report.measurements[:4], model_revision="step9")
        frame = compare(report, other).to_pandas()
        assert list(frame.run) == ["step7"] * len(report.measurements) + ["step9"] * 4
        for name, one in (("step7", report), ("step9", other)):
            own = frame[frame.run == name].drop(columns="run").reset_index(drop=True)
            assert own.equals(one.to_pandas())


class TestErrors:
    @pytest.mark.parametrize("count", [0, 1])
    def test_fewer_than_two(self, report, count):
        with pytest.raises(ValueError, match=rf"{count} report cannot be compared; pass two or more"):
            compare(*[report] * count)

    @pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], [], ["a", "a"]], ids=str)
    def test_names_of_another_number_or_twice(self, report, names):
        with pytest.raises(ValueError, match=r"2 reports need as many names, each another; got \["):
            compare(report, report, names=names)

    def test_a_comparison_cannot_be_changed(self, report):
        found = tln.compare(report, report)
        assert isinstance(found, Comparison) and tln.Comparison is Comparison
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.names = ("x", "y")
