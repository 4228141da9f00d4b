"""The front door with statistics="sketch": the same report in less memory, named as such, or a sentence."""

import dataclasses

import pytest
import torch
from conftest import boot_bridge, tiny_model
from plain_reference import random_sequences
from typer.testing import CliRunner

import tangent_lens as tln
from tangent_lens.cli import app
from tangent_lens.measures import statistics_choice
from tangent_lens.measures.plan import plan_measurement
from tangent_lens.measures.report import Settings
from tangent_lens.reports.console import as_text
from tangent_lens.reports.numbers import percent

SEQUENCES = random_sequences([5, 9, 2, 14, 7, 23, 3, 11, 6, 17, 4, 8, 12, 2, 19, 10])


def lens_of(family="llama"):
    return tln.Lens(tiny_model(family))


def measured(lens, **options):
    return lens.measure(SEQUENCES, **{"rank": 4, "progress": False, "statistics": "sketch"} | options)


@pytest.fixture(scope="module")
def both():
    lens = lens_of()
    return measured(lens, statistics="exact"), measured(lens)


@pytest.fixture(scope="module")
def wide():
    """At d = 200, more than the probes span: whole sums, and a sketch with the same subspaces."""
    shape = {"hidden_size": 200, "intermediate_size": 300, "num_attention_heads": 10}
    lens = tln.Lens(tiny_model("llama", layers=2, **shape))
    exact = measured(lens, rank=2, statistics="exact")
    return exact, measured(lens, rank=2, subspaces=exact.subspaces)


def test_it_is_the_exact_report_up_to_what_it_says(both):
    """At d = 32 the probes span the space, so that nothing is left to estimate."""
    exact, found = both
    assert [one.name for one in found.measurements] == [one.name for one in exact.measurements]
    for one, other in zip(found.measurements, exact.measurements, strict=True):
        tolerance = 1e-6
        assert one.energy.energy == pytest.approx(other.energy.energy, rel=tolerance), one.name
        assert one.energy.lift == pytest.approx(other.energy.lift, rel=2 * tolerance)
        assert one.energy.expected_random == pytest.approx(other.energy.expected_random, rel=2 * tolerance)
        assert one.isotropy.score == pytest.approx(other.isotropy.score, rel=5 * tolerance)
        assert one.isotropy.delta == pytest.approx(other.isotropy.delta, abs=tolerance)
        if other.energy.shuffled is not None:
            assert one.energy.shuffled == pytest.approx(other.energy.shuffled, rel=1e-6)
        assert (one.site, one.fit_site, one.pooled) == (other.site, other.fit_site, other.pooled)
        assert one.energy.standard_error is not None and one.energy_q_value is not None
    for one, other in zip(found.spaces, exact.spaces, strict=True):
        assert one.variance_share == pytest.approx(other.variance_share, rel=1e-6)
        assert one.iso_score == pytest.approx(other.iso_score, rel=1e-6)
        assert one.spectrum.effective_rank == pytest.approx(other.spectrum.effective_rank, rel=1e-6)
        assert one.top_position_share == pytest.approx(other.top_position_share, rel=1e-6)
        assert found.subspaces[one.site].overlap(exact.subspaces[one.site]) == pytest.approx(1, abs=1e-8)
    assert (found.corpus, found.warnings) == (exact.corpus, exact.warnings)


def test_what_is_estimated_is_as_near_as_it_says(wide):
    exact, found = wide
    estimated = 0
    for one, other in zip(found.measurements, exact.measurements, strict=True):
        error = one.energy.standard_error
        assert one.energy.energy == pytest.approx(other.energy.energy, abs=4 * error + 1e-9), one.name
        assert one.energy.energy == pytest.approx(other.energy.energy, rel=0.03), one.name
        assert one.isotropy.score == pytest.approx(other.isotropy.score, abs=5 * one.isotropy.standard_error), one.name
        estimated += error > 1e-6
        if one.gradient == "residual":
            assert error == 0 and one.isotropy.standard_error > 0
    assert estimated >= 4
    for one, other in zip(found.spaces, exact.spaces, strict=True):
        assert one.variance_share == pytest.approx(other.variance_share, rel=1e-6)
        assert one.iso_score == pytest.approx(other.iso_score, abs=5 * one.standard_error + 1e-9)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 3, "padding_side": "left"}])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_batches_and_padding_change_nothing(family, options):
    lens = lens_of(family)
    for one, other in zip(measured(lens, **options).measurements, measured(lens).measurements, strict=True):
        for part in ("energy", "isotropy"):
            found, expected = (dataclasses.asdict(getattr(report, part)) for report in (one, other))
            for name, value in expected.items():
                if not isinstance(value, str) and value is not None:
                    assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-7), (one.name, name)


def test_the_seed_decides_everything():
    lens = lens_of()
    first, again, other = ([one.energy.random for one in measured(lens, seed=seed).measurements] for seed in (3, 3, 4))
    for one, two, three in zip(first, again, other, strict=True):
        assert one == pytest.approx(two, rel=1e-9) and one != pytest.approx(three, rel=1e-3)


@pytest.mark.parametrize("options", [{"center": False}, {"fit_site": "residual"}, {"gradients": "weight"}, {"rank": 2}])
def test_options_mean_what_they_mean_for_whole_sums(options):
    lens = lens_of()
    exact, found = (measured(lens, statistics=kind, **options) for kind in ("exact", "sketch"))
    for one, other in zip(found.measurements, exact.measurements, strict=True):
        assert one.energy.energy == pytest.approx(other.energy.energy, rel=0.05), one.name


def test_given_subspaces_take_one_pass_over_the_fit_split(monkeypatch):
    lens, passes = lens_of(), []
    given = lens.fit(SEQUENCES, "resid_post.*", rank=3, progress=False)
    run = type(lens.model).run_without_logits
    monkeypatch.setattr(
        type(lens.model), "run_without_logits", lambda model, batch: (passes.append(1), run(model, batch))
    )
    options = {"subspaces": given, "gradients": "residual", "batch_size": 8}
    exact, found = (measured(lens, statistics=kind, **options) for kind in ("exact", "sketch"))
    assert len(passes) == 2
    for one, other in zip(found.measurements, exact.measurements, strict=True):
        assert one.energy.energy == pytest.approx(other.energy.energy, rel=1e-6)
        assert one.energy.trailing == pytest.approx(other.energy.trailing, rel=1e-6)
    for one, other in zip(found.spaces, exact.spaces, strict=True):
        assert one.variance_share == pytest.approx(other.variance_share, rel=1e-6)


def test_no_whole_matrix_is_summed(monkeypatch):
    from tangent_lens.recording import moments

    def refuse(*args, **options):
        raise AssertionError("a d x d sum was made")

    monkeypatch.setattr(moments.SecondMoments, "__init__", refuse)
    with pytest.raises(AssertionError, match="d x d"):
        measured(lens_of(), statistics="exact")
    assert measured(lens_of()).settings.statistics == "sketch"


def test_another_library_s_hooks_do(tokenizer):
    lens = tln.Lens(boot_bridge(tiny_model("gpt_neox"), tokenizer))
    exact, found = (measured(lens, statistics=kind) for kind in ("exact", "sketch"))
    for one, other in zip(found.measurements, exact.measurements, strict=True):
        assert one.energy.energy == pytest.approx(other.energy.energy, rel=1e-6), one.name
        assert one.isotropy.score == pytest.approx(other.isotropy.score, rel=1e-5), one.name


def test_a_module_of_ones_own_can_be_sketched():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    lens = tln.Lens(module, sites={"hidden": "1"})
    batches = [torch.randn(5, 6) for _ in range(20)]
    options = {"loss": lambda output, batch: output.square().sum(), "rank": 3, "progress": False}
    exact, found = (lens.measure(batches, statistics=kind, **options) for kind in ("exact", "sketch"))
    assert found.of("hidden").energy.energy == pytest.approx(exact.of("hidden").energy.energy, rel=1e-4)


class TestTheChoice:
    def plan(self, lens, settings):
        return plan_measurement(lens.model, lens.resolve("resid_post.*"), settings)

    def chosen(self, monkeypatch, free, **options):
        lens, settings = lens_of(), Settings(**{"rank": 4, "statistics": "auto"} | options)
        monkeypatch.setattr(statistics_choice, "available_memory", lambda device: free)
        return statistics_choice.choose_statistics(lens.model, self.plan(lens, settings), settings)

    def test_the_bytes_of_whole_sums(self):
        """Llama of 3 layers, d_model 32, 2 of 4 heads for keys and values: 9 fitted sites, 3 residual ones, 15 maps."""
        lens = lens_of()
        fitted, residual, maps = 9 * 32**2, 3 * 2 * 32**2, 3 * 32 * (32 + 16 + 16 + 128 + 128)
        expected = 8 * (fitted + residual + maps)
        assert statistics_choice.exact_bytes(lens.model, self.plan(lens, Settings(rank=4))) == expected

    def test_half_of_the_free_memory_decides(self, monkeypatch):
        lens = lens_of()
        needed = statistics_choice.exact_bytes(lens.model, self.plan(lens, Settings(rank=4)))
        assert self.chosen(monkeypatch, 2 * needed) == "exact"
        assert self.chosen(monkeypatch, 2 * needed - 2) == "sketch"
        assert self.chosen(monkeypatch, None) == "exact"

    @pytest.mark.parametrize("options", [{"bootstrap": 200}, {"rank": 0.9}, {"fit": "semi_nmf"}])
    def test_auto_does_not_choose_what_the_settings_forbid(self, monkeypatch, options):
        assert self.chosen(monkeypatch, 10, **options) == "exact"

    def test_what_was_asked_for_is_done(self, monkeypatch):
        assert self.chosen(monkeypatch, 10, statistics="exact") == "exact"
        assert self.chosen(monkeypatch, 10**12, statistics="sketch") == "sketch"

    def test_this_machine_has_some_memory_and_a_tiny_model_is_summed_whole(self):
        free = statistics_choice.available_memory(torch.device("cpu"))
        assert free is None or 2**20 < free < 2**50
        assert measured(lens_of(), statistics="auto", gradients="residual").settings.statistics == "exact"

    def test_little_memory_makes_a_sketch_of_a_whole_measurement(self, monkeypatch):
        monkeypatch.setattr(statistics_choice, "available_memory", lambda device: 1000)
        assert measured(lens_of(), statistics="auto").settings.statistics == "sketch"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bootstrap": 200}, "bootstrap=200 resamples whole rows.*bootstrap=0.*statistics='exact'"),
        ({"fit": "semi_nmf"}, "fit='semi_nmf' works on rows"),
        ({"fit": "pca_uncentred"}, "fit='pca_uncentred'"),
        ({"rank": 0.9}, "rank 0.9 needs the whole spectrum"),
        ({"rank": "effective_rank"}, "rank 'effective_rank' needs the whole spectrum"),
        ({"statistics": "some"}, "statistics 'some' must be 'auto', 'exact'"),
        ({"rank": 17}, r"2\*rank <= d"),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        measured(lens_of(), **options)


class TestReports:
    def test_the_header_and_the_legend_say_so(self, wide):
        exact, found = (" ".join(as_text(report, width=160).split()) for report in wide)
        assert "sums sketched" in found and "Sketched sums:" in found and "±" in found
        assert "sketched" not in exact.lower() and "±" not in exact

    def test_the_largest_standard_errors_are_shown(self, wide):
        found = wide[1]
        largest = max(one.energy.standard_error / one.energy.energy for one in found.measurements)
        assert largest > 1e-6 and f"weight gradients ± {percent(largest)}" in " ".join(
            as_text(found, width=160).split()
        )

    def test_single_tests_show_their_own(self, wide):
        exact, found = (as_text(report.of("mlp.1"), width=120) for report in wide)
        assert f"± {percent(wide[1].of('mlp.1').energy.standard_error)}" in found
        assert "lower bound" in found and "lower bound" not in exact

    def test_frames_and_files_keep_them(self, both, tmp_path):
        found = both[1]
        frame = found.to_pandas()
        assert frame["energy_standard_error"].tolist() == [one.energy.standard_error for one in found.measurements]
        assert (frame["iso_score_standard_error"] >= 0).all() and (frame["delta_iso_standard_error"] >= 0).all()
        assert both[0].to_pandas()["energy_standard_error"].isna().all()
        found.save(tmp_path)
        again = tln.Report.load(tmp_path)
        assert (again.measurements, again.settings, again.spaces) == (found.measurements, found.settings, found.spaces)

    def test_reports_of_before_are_exact(self, both, tmp_path):
        import json

        both[0].save(tmp_path)
        path = tmp_path / "report.json"
        document = json.loads(path.read_text())
        document["settings"].pop("statistics")
        for one in document["measurements"]:
            for part, names in (
                ("energy", ["standard_error"]),
                ("isotropy", ["standard_error", "delta_standard_error"]),
            ):
                for name in names:
                    one[part].pop(name)
        for one in document["spaces"]:
            one.pop("standard_error")
        path.write_text(json.dumps(document))
        again = tln.Report.load(tmp_path)
        assert again.settings.statistics == "exact" and again.measurements == both[0].measurements


def test_the_command_line_passes_it_on(monkeypatch, tmp_path, tokenizer_folder):
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    import shutil

    for file in tokenizer_folder.iterdir():
        shutil.copy(file, tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(str((7 * i + j) % 100) for j in range(12)) for i in range(20)))
    arguments = ["measure", str(tmp_path / "model"), "--text", str(text), "--lines", "--rank", "3", "--no-pack"]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [*arguments, "--statistics", "sketch", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert tln.Report.load(out).settings.statistics == "sketch"
    result = CliRunner().invoke(app, [*arguments, "--statistics", "none"])
    assert result.exit_code == 1
