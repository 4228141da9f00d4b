"""The front door: every number of a Report against NumPy on rows kept by hand, and every refusal in a sentence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch
from conftest import FAMILIES, boot_bridge, tiny_model
from model_snapshot import Snapshot, unusual_state
from plain_reference import assert_close, plain_pass, random_sequences, random_tokens, singles

from tangent_lens.lens import Lens
from tangent_lens.measures.report import Report
from tangent_lens.recording.corpus import Corpus
from tangent_lens.sites import Site, resid_post

SEQUENCES = random_sequences([5, 9, 2, 14, 7, 23, 3, 11, 6, 17, 4, 8, 12, 2, 19, 10])
RANK = 6
D = 32


def measured(model, sequences=SEQUENCES, **options):
    return Lens(model).measure(sequences, **{"rank": RANK, "progress": False} | options)


def numbers_of(report):
    """Every number of every measurement, the sampled controls included."""
    found = {}
    for one in report.measurements:
        for part in ("energy", "isotropy"):
            for name, value in asdict(getattr(one, part)).items():
                if not isinstance(value, str):
                    found[one.name, one.gradient, part, name] = value
    return found


def assert_same_numbers(found, expected, tolerance):
    found, expected = numbers_of(found), numbers_of(expected)
    assert found.keys() == expected.keys() and len(found) > 50
    for place, value in expected.items():
        same = found[place] is value or found[place] == pytest.approx(value, rel=tolerance, abs=tolerance)
        assert same, f"{place}: {found[place]} is not {value}"


# --- The reference: plain PyTorch for rows, NumPy for the rest ---------------------------------------------------------


@dataclass
class Rows:
    """What the plain model says on one half of the corpus."""

    x: dict[str, np.ndarray]
    g: dict[str, np.ndarray]
    loss: float
    targets: int


class Reference:
    """The measurement spelt out: eigenvectors of the fit rows, sums over the test rows, explicit N x N permutations."""

    def __init__(self, family, seed=0, fit_fraction=0.5, keep=None):
        fit, test = Corpus.from_tokens(SEQUENCES).split(fit_fraction, seed)
        self.fit, self.test = (self.rows(family, half, keep) for half in (fit, test))

    def rows(self, family, half, keep):
        found = plain_pass(tiny_model(family), singles(half.sequences))
        tokens = np.concatenate(half.sequences)
        kept = np.ones(len(tokens), bool) if keep is None else keep(tokens, found.positions.numpy())
        as_arrays = [
            {name: tensor.numpy()[kept] for name, tensor in rows.items()}
            for rows in (found.activations, found.gradients)
        ]
        return Rows(*as_arrays, found.loss, found.targets)

    def directions(self, site, center=True):
        """All principal directions of the fit rows, the leading first."""
        x = self.fit.x[site]
        moment = np.cov(x.T) if center else x.T @ x
        return np.linalg.eigh(moment)[1][:, ::-1]

    def weight(self, name, site):
        return self.test.g[name].T @ self.test.x[site]

    def shuffled(self, names, site, basis):
        """Sums over all pairs of rows, each pair of signals replaced by what a uniform permutation gives it on average."""
        u = self.test.x[site]
        inside, whole = u @ basis @ basis.T @ u.T, u @ u.T
        above = below = 0.0
        for name in names:
            products = self.test.g[name] @ self.test.g[name].T
            n = len(products)
            same, other = np.trace(products) / n, (products.sum() - np.trace(products)) / (n * (n - 1))
            weights = np.full((n, n), other)
            np.fill_diagonal(weights, same)
            above, below = above + (weights * inside).sum(), below + (weights * whole).sum()
        return above / below


def energy_of(moment, basis):
    return np.trace(basis.T @ moment @ basis) / np.trace(moment)


def iso_score_of(covariance):
    """The published recipe, with its eigenvalues."""
    values = np.linalg.eigvalsh(covariance).clip(0)
    d = len(values)
    values = math.sqrt(d) * values / np.linalg.norm(values)
    defect = np.linalg.norm(values - 1) / math.sqrt(2 * (d - math.sqrt(d)))
    phi = (d - defect**2 * (d - math.sqrt(d))) ** 2 / d**2
    return (d * phi - 1) / (d - 1)


def check_energy(energy, moment, directions, tolerance=1e-9, rank=RANK):
    tangent, following, trailing = directions[:, :rank], directions[:, rank : 2 * rank], directions[:, -rank:]
    share = energy_of(moment, tangent)
    d = len(moment)
    close = {"rel": tolerance, "abs": tolerance}
    assert (energy.rank, energy.d) == (rank, d)
    assert energy.energy == pytest.approx(share, **close)
    assert energy.lift == pytest.approx(share * (d - rank) / (rank * (1 - share)), **close)
    assert energy.following == pytest.approx(energy_of(moment, following), **close)
    assert energy.trailing == pytest.approx(energy_of(moment, trailing), **close)
    assert energy.oracle == pytest.approx(np.linalg.eigvalsh(moment)[-rank:].sum() / np.trace(moment), **close)
    assert energy.alignment == pytest.approx(share / energy.oracle, **close)
    assert energy.expected_random == pytest.approx(rank / (d - rank) * (1 - share), **close)
    assert energy.p_value == (1 + sum(one >= energy.energy for one in energy.random)) / (len(energy.random) + 1)


def check_isotropy(isotropy, covariance, directions, tolerance=1e-9):
    without = np.eye(D) - directions[:, :RANK] @ directions[:, :RANK].T
    delta = iso_score_of(without @ covariance @ without) - iso_score_of(covariance)
    assert isotropy.score == pytest.approx(iso_score_of(covariance), rel=tolerance)
    assert isotropy.delta == pytest.approx(delta, rel=tolerance, abs=tolerance)
    assert isotropy.p_value == (1 + sum(one >= isotropy.delta for one in isotropy.random)) / (len(isotropy.random) + 1)


def check_residual(report, reference, site, **options):
    one = report.of(site)
    g, directions = reference.test.g[site], reference.directions(site)
    check_energy(one.energy, g.T @ g, directions, **options)
    check_isotropy(one.isotropy, np.cov(g.T), directions, **options)
    assert (one.gradient, one.site, one.fit_site, one.pooled) == ("residual", site, site, False)
    assert one.energy.shuffled is None and one.energy.signal_lift is None


def check_weight(report, reference, name, kinds, fit_site=None, **options):
    """One map, or several pooled: their matrices one under the other."""
    one = report.of(name)
    layer = name.split(".")[1]
    site = f"{'mlp' if kinds[0].startswith('mlp') else 'attention'}_input.{layer}"
    names = [f"{kind}.{layer}" for kind in kinds]
    stacked = np.concatenate([reference.weight(part, site) for part in names])
    directions = reference.directions(fit_site or site)
    check_energy(one.energy, stacked.T @ stacked, directions, **options)
    check_isotropy(one.isotropy, np.cov(stacked.T), directions, **options)
    shuffled = reference.shuffled(names, site, directions[:, :RANK])
    tolerance = options.get("tolerance", 1e-9)
    assert one.energy.shuffled == pytest.approx(shuffled, rel=tolerance)
    assert one.energy.signal_lift == pytest.approx(one.energy.energy / shuffled, rel=tolerance)
    assert (one.gradient, one.site, one.fit_site) == ("weight", site, fit_site or site)
    assert one.pooled == (name.split(".")[0] in ("attention", "mlp"))


MAPS = {
    "gpt_neox": ("query", "key", "value", "mlp_in"),
    "gpt_neox_sequential": ("query", "key", "value", "mlp_in"),
    "gpt2": ("query", "key", "value", "mlp_in"),
    "llama": ("query", "key", "value", "mlp_in", "mlp_gate"),
}
# Llama's norms are float32 inside: batches of another shape round its rows differently.
TOLERANCE = {"llama": 1e-4}


class TestMeasureAgainstNumPy:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_residual_gradients(self, family):
        report, reference = measured(tiny_model(family)), Reference(family)
        for layer in range(3):
            check_residual(report, reference, f"resid_post.{layer}", tolerance=TOLERANCE.get(family, 1e-8))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_weight_gradients_of_single_maps(self, family):
        report, reference = measured(tiny_model(family)), Reference(family)
        for layer in range(3):
            for kind in MAPS[family]:
                tolerance = TOLERANCE.get(family, 1e-8)
                check_weight(report, reference, f"{kind}.{layer}", (kind,), tolerance=tolerance)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_pooled_maps_are_their_matrices_one_under_the_other(self, family):
        report, reference = measured(tiny_model(family)), Reference(family)
        for layer in range(3):
            tolerance = TOLERANCE.get(family, 1e-8)
            check_weight(report, reference, f"attention.{layer}", MAPS[family][:3], tolerance=tolerance)
            check_weight(report, reference, f"mlp.{layer}", MAPS[family][3:], tolerance=tolerance)

    @pytest.mark.parametrize("family", ["gpt_neox", "gpt_neox_sequential", "gpt2"])
    def test_proxies_fitted_on_the_residual_stream_before_the_norm(self, family):
        report, reference = measured(tiny_model(family), fit_site="residual"), Reference(family)
        before_mlp = "resid_pre.1" if family == "gpt_neox" else "resid_mid.1"
        check_weight(report, reference, "query.1", ("query",), fit_site="resid_pre.1", tolerance=1e-8)
        check_weight(report, reference, "attention.1", MAPS[family][:3], fit_site="resid_pre.1", tolerance=1e-8)
        check_weight(report, reference, "mlp.1", MAPS[family][3:], fit_site=before_mlp, tolerance=1e-8)
        check_residual(report, reference, "resid_post.1", tolerance=1e-8)

    def test_on_a_bridge(self, tokenizer):
        report, reference = measured(boot_bridge(tiny_model("gpt2"), tokenizer)), Reference("gpt2")
        check_residual(report, reference, "resid_post.1", tolerance=1e-8)
        check_weight(report, reference, "value.1", ("value",), tolerance=1e-8)
        check_weight(report, reference, "mlp.1", ("mlp_in",), tolerance=1e-8)

    def test_some_maps_only(self):
        report, reference = measured(tiny_model("gpt2"), maps=("key", "query")), Reference("gpt2")
        check_weight(report, reference, "attention.1", ("query", "key"), tolerance=1e-8)
        names = {one.name for one in report.measurements if one.layer == 1}
        assert names == {"resid_post.1", "attention.1", "query.1", "key.1"}

    def test_without_first_positions(self):
        report = measured(tiny_model("gpt2"), skip_first=True)
        reference = Reference("gpt2", keep=lambda tokens, positions: positions > 0)
        check_residual(report, reference, "resid_post.1", tolerance=1e-8)
        check_weight(report, reference, "query.1", ("query",), tolerance=1e-8)
        assert report.corpus.fit_rows == report.corpus.fit_tokens - report.corpus.fit_sequences
        assert report.corpus.test_rows == len(reference.test.x["resid_post.1"])

    def test_without_special_tokens(self):
        corpus = Corpus.from_tokens(SEQUENCES, special_ids=[0, 1])
        report = measured(tiny_model("gpt2"), corpus, skip_special=True)
        reference = Reference("gpt2", keep=lambda tokens, positions: tokens > 1)
        assert len(reference.test.x["resid_post.1"]) < report.corpus.test_tokens
        check_residual(report, reference, "resid_post.1", tolerance=1e-8)
        check_weight(report, reference, "mlp.1", ("mlp_in",), tolerance=1e-8)

    def test_second_moments_about_zero(self):
        report, reference = measured(tiny_model("gpt2"), center=False), Reference("gpt2")
        g, directions = reference.test.g["resid_post.1"], reference.directions("resid_post.1", center=False)
        check_energy(report.of("resid_post.1").energy, g.T @ g, directions, tolerance=1e-8)

    def test_another_share_of_sequences_to_fit_on(self):
        report, reference = measured(tiny_model("gpt2"), fit_fraction=0.75), Reference("gpt2", fit_fraction=0.75)
        check_residual(report, reference, "resid_post.1", tolerance=1e-8)
        assert (report.corpus.fit_sequences, report.corpus.test_sequences) == (12, 4)

    def test_a_rank_given_as_a_share_of_variance(self):
        report, reference = measured(tiny_model("gpt2"), rank=0.7, sites="resid_post.1"), Reference("gpt2")
        variances = np.linalg.eigvalsh(np.cov(reference.fit.x["resid_post.1"].T))[::-1]
        rank = int(np.argmax(variances.cumsum() / variances.sum() >= 0.7)) + 1
        g = reference.test.g["resid_post.1"]
        directions = reference.directions("resid_post.1")
        check_energy(report.of("resid_post.1").energy, g.T @ g, directions, 1e-8, rank)
        assert 1 < rank < 16

    def test_sites_inside_the_attention(self):
        report, reference = measured(tiny_model("gpt2"), sites="query.*"), Reference("gpt2")
        one = next(one for one in report.measurements if one.name == "query.1 (residual)")
        g = reference.test.g["query.1"]
        check_energy(one.energy, g.T @ g, reference.directions("query.1"), tolerance=1e-8)
        assert {one.name.split(".")[0] for one in report.measurements if one.gradient == "weight"} == {
            "attention", "query", "key", "value",
        }  # fmt: skip

    def test_what_the_report_says_of_corpus_and_spaces(self):
        report, reference = measured(tiny_model("gpt2")), Reference("gpt2")
        test_rows = len(reference.test.x["resid_post.1"])
        corpus = report.corpus
        assert corpus.fit_tokens + corpus.test_tokens == sum(len(sequence) for sequence in SEQUENCES)
        assert (corpus.fit_rows, corpus.test_rows) == (corpus.fit_tokens, test_rows)
        assert corpus.loss == pytest.approx(reference.test.loss / reference.test.targets, rel=1e-10)
        assert {space.site for space in report.spaces} == set(report.subspaces)
        for space in report.spaces:
            covariance = np.cov(reference.fit.x[space.site].T)
            variances = np.linalg.eigvalsh(covariance)[::-1]
            assert space.variance_share == pytest.approx(variances[:RANK].sum() / variances.sum(), rel=1e-8)
            assert space.iso_score == pytest.approx(iso_score_of(covariance), rel=1e-8)
            assert space.rank == RANK


class TestWhatChangesNoNumber:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(("batch_size", "side"), [(1, "right"), (4, "left"), (16, "right"), (16, "left")])
    def test_batches_and_padding(self, family, batch_size, side):
        expected = measured(tiny_model(family), batch_size=4, padding_side="right")
        found = measured(tiny_model(family), batch_size=batch_size, padding_side=side)
        assert_same_numbers(found, expected, 1e-3 if family == "llama" else 1e-8)

    @pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
    def test_the_library_around_the_model(self, family, tokenizer):
        expected = measured(tiny_model(family))
        assert_same_numbers(measured(boot_bridge(tiny_model(family), tokenizer)), expected, 1e-8)

    def test_asking_again(self):
        lens = Lens(tiny_model("llama"))
        torch.rand(5)
        first = lens.measure(SEQUENCES, rank=RANK, progress=False)
        torch.rand(5)
        again = lens.measure(SEQUENCES, rank=RANK, progress=False)
        assert numbers_of(first) == numbers_of(again)

    def test_another_lens_on_the_same_model(self):
        model = tiny_model("llama")
        assert numbers_of(measured(model)) == numbers_of(measured(model))

    def test_the_state_the_model_was_in(self):
        expected = measured(tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5))
        model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
        unusual_state(model)
        before = Snapshot.of(model)
        assert numbers_of(measured(model)) == numbers_of(expected)
        before.assert_unchanged(model)

    @pytest.mark.parametrize("gradients", [("residual",), ("weight",)])
    def test_one_kind_of_gradient_alone(self, gradients):
        model = tiny_model("gpt2")
        whole, alone = measured(model), measured(model, gradients=gradients)
        expected, found = numbers_of(whole), numbers_of(alone)
        assert {one.gradient for one in alone.measurements} == set(gradients)
        assert len(alone.measurements) == sum(one.gradient in gradients for one in whole.measurements)
        assert found == {place: expected[place] for place in found}
        assert alone.corpus.test_rows == whole.corpus.test_rows

    def test_fewer_sites(self):
        model = tiny_model("gpt2")
        whole, alone = numbers_of(measured(model)), numbers_of(measured(model, sites="resid_post.2"))
        assert alone == {place: value for place, value in whole.items() if place[0].endswith(".2")}

    def test_bfloat16_runs_and_stays_near(self):
        exact, rough = measured(tiny_model("gpt_neox")), measured(tiny_model("gpt_neox", dtype=torch.bfloat16))
        assert all(math.isfinite(one.energy.lift) and math.isfinite(one.isotropy.delta) for one in rough.measurements)
        for one in rough.measurements:
            assert one.energy.energy == pytest.approx(exact.of(one.name).energy.energy, abs=0.1), one.name


class TestWhatChangesNumbers:
    def test_the_seed_draws_another_split_and_other_controls(self):
        model = tiny_model("gpt2")
        first, second = measured(model, seed=0), measured(model, seed=1)
        assert first.corpus.fit_tokens != second.corpus.fit_tokens
        assert first.of("resid_post.1").energy.energy != second.of("resid_post.1").energy.energy
        check_residual(second, Reference("gpt2", seed=1), "resid_post.1", tolerance=1e-8)

    def test_controls_of_two_sites_are_not_the_same_frames(self):
        """One tensor under two names: all is equal but the controls drawn for it."""
        report = measured(tiny_model("gpt2"), sites="resid_post.0, resid_pre.1", gradients=("residual",))
        one, other = report.of("resid_post.0").energy, report.of("resid_pre.1").energy
        assert (one.energy, one.trailing, one.oracle) == (other.energy, other.trailing, other.oracle)
        assert not set(one.random) & set(other.random)

    def test_the_number_of_controls(self):
        report = measured(tiny_model("gpt2"), controls=7)
        for one in report.measurements:
            assert len(one.energy.random) == len(one.isotropy.random) == 7
            assert one.energy.p_value >= 1 / 8

    def test_shrinkage_moves_scores_towards_isotropy(self):
        model = tiny_model("gpt2")
        plain, shrunk = measured(model), measured(model, shrinkage=0.5)
        one, other = plain.of("resid_post.1").isotropy, shrunk.of("resid_post.1").isotropy
        assert one.score < other.score < 1
        g = Reference("gpt2").test.g["resid_post.1"]
        covariance = np.cov(g.T)
        target = 0.5 * covariance + 0.5 * np.trace(covariance) / D * np.eye(D)
        assert other.score == pytest.approx(iso_score_of(target), rel=1e-8)


class TestRecord:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_moments_of_both_and_of_them_together(self, family):
        found = Lens(tiny_model(family)).record(SEQUENCES, "resid_post.*, query.0", cross=True, progress=False)
        expected = plain_pass(tiny_model(family), singles(SEQUENCES))
        assert [site.name for site in found] == ["query.0", *(f"resid_post.{layer}" for layer in range(3))]
        for site, moments in found.items():
            x, g = expected.activations[site.name], expected.gradients[site.name]
            tolerance = 1e-5 if family == "llama" else 1e-10
            assert_close(moments.activations.second_moment(), x.T @ x, tolerance, site.name)
            assert_close(moments.gradients.second_moment(), g.T @ g, tolerance, site.name)
            assert_close(moments.cross_moment(), g.T @ x, tolerance, site.name)

    def test_forward_only(self):
        found = Lens(tiny_model("gpt2")).record(SEQUENCES, gradients=False, progress=False)
        expected = plain_pass(tiny_model("gpt2"), singles(SEQUENCES)).activations
        for site, moments in found.items():
            x = expected[site.name]
            assert_close(moments.activations.scatter, (x - x.mean(0)).T @ (x - x.mean(0)), 1e-10)
            assert moments.gradients.count == 0 and moments.name == site.name
            with pytest.raises(ValueError, match="ask for it with cross=True"):
                moments.cross_moment()

    def test_residual_stream_after_every_block_by_default(self):
        lens = Lens(tiny_model("gpt2"))
        assert tuple(lens.record(SEQUENCES, progress=False)) == lens.resolve(resid_post())

    def test_the_persons_progress_is_told(self):
        told = []

        class Told:
            def start(self, description, total=None, unit=""):
                told.append((description, total, unit))

            def advance(self, amount=1.0, note=""):
                pass

            def finish(self):
                told.append("finished")

        total = sum(len(sequence) for sequence in SEQUENCES)
        Lens(tiny_model("gpt2")).record(SEQUENCES, progress=Told())
        assert told == [("gradients", total, "tokens"), "finished"]


class TestTexts:
    def lens(self, tokenizer, family="gpt2"):
        return Lens(tiny_model(family), tokenizer=tokenizer)

    def test_texts_become_the_tokens_of_the_tokenizer(self, tokenizer):
        # The special tokens "0" and "1" would be cut out of numbers that hold these digits.
        numbers = [number for number in range(2, 100) if not set(str(number)) & set("01")]
        sequences = [[numbers[token % len(numbers)] for token in sequence] for sequence in SEQUENCES]
        texts = [" ".join(str(token) for token in sequence) for sequence in sequences]
        found = self.lens(tokenizer).measure(texts, rank=RANK, progress=False)
        assert_same_numbers(found, measured(tiny_model("gpt2"), sequences), 1e-12)
        assert found.corpus.name == "texts"

    def test_a_tensor_lists_a_corpus_and_a_generator_are_the_same(self, tokenizer):
        lens, tokens = self.lens(tokenizer), random_tokens(6, 9)
        forms = [tokens, tokens.tolist(), Corpus.from_tokens(tokens), (row for row in tokens), tokens.numpy()]
        found = [lens.record(form, "resid_post.1", progress=False)[Site("resid_post", 1)] for form in forms]
        for other in found[1:]:
            assert torch.equal(other.gradients.scatter, found[0].gradients.scatter)

    def test_long_texts_are_cut_into_windows(self, tokenizer):
        corpus = self.lens(tokenizer).corpus(["2 " * 10], sequence_length=4)
        assert [len(sequence) for sequence in corpus.sequences] == [4, 4, 2]

    @pytest.mark.parametrize("texts", ["", [""], ["", " "]])
    def test_empty_text_is_refused(self, tokenizer, texts):
        with pytest.raises(ValueError, match=r"the corpus 'texts' holds no tokens at all; give text with at least 2"):
            self.lens(tokenizer).measure(texts, rank=RANK, progress=False)

    def test_no_text_is_refused(self, tokenizer):
        with pytest.raises(ValueError, match=r"no text was given; pass a string, a list of strings, or token ids"):
            self.lens(tokenizer).measure([], rank=RANK, progress=False)

    def test_texts_of_one_token_are_refused(self, tokenizer):
        with pytest.raises(ValueError, match=r"holds only 2 sequences of fewer than 2 tokens"):
            self.lens(tokenizer).measure(["5", "6"], rank=RANK, progress=False)

    def test_sequences_left_out_are_told(self):
        report = measured(tiny_model("gpt2"), [*SEQUENCES, [3], [4]])
        assert report.warnings[0] == "2 sequences of fewer than 2 tokens left out: they have no next token"
        assert report.corpus.left_out == report.warnings[:1]

    def test_one_sequence_cannot_be_split(self):
        with pytest.raises(
            ValueError, match=r"1 sequence cannot be split into fit and test; give more text or a shorter"
        ):
            measured(tiny_model("gpt2"), SEQUENCES[:1])

    def test_texts_without_a_tokenizer(self):
        with pytest.raises(ValueError, match=r"came without a tokenizer; pass Lens\(model, tokenizer=\.\.\.\)"):
            Lens(tiny_model("gpt2")).measure("5 6 7", rank=RANK, progress=False)

    def test_special_tokens_of_the_tokenizer_are_left_out_of_token_ids_too(self, tokenizer):
        """``skip_special`` must not be accepted and do nothing, where the tokenizer is at hand."""
        report = self.lens(tokenizer).measure(SEQUENCES, rank=RANK, skip_special=True, progress=False)
        special = sum(token in (0, 1) for sequence in SEQUENCES for token in sequence)
        assert special > 0
        total = sum(len(sequence) for sequence in SEQUENCES)
        assert report.corpus.fit_rows + report.corpus.test_rows == total - special

    def test_the_name_given_is_the_name_reported(self):
        assert measured(tiny_model("gpt2"), SEQUENCES, name="mine").corpus.name == "mine"

    @pytest.mark.parametrize("form", ["tensor", "corpus"])
    def test_options_of_texts_beside_token_ids_count_or_are_refused(self, form):
        tokens = random_tokens(8, 12)
        corpus = Corpus.from_tokens(tokens) if form == "corpus" else tokens
        try:
            report = measured(tiny_model("gpt2"), corpus, max_sequences=4, sequence_length=8)
        except (TypeError, ValueError) as refusal:
            assert "max_sequences" in str(refusal)
            return
        assert report.corpus.fit_sequences + report.corpus.test_sequences == 4
        # Windows of two sequences of 12: 8 and 4 tokens each.
        assert report.corpus.fit_tokens + report.corpus.test_tokens == 24

    def test_options_that_are_not_known_are_refused_beside_token_ids_too(self, tokenizer):
        lens = self.lens(tokenizer)
        with pytest.raises(TypeError, match="sequence_lenght"):
            lens.record(["5 6 7 8"], sequence_lenght=3, progress=False)
        with pytest.raises(TypeError, match="sequence_lenght"):
            lens.record(SEQUENCES, sequence_lenght=3, progress=False)

    def test_the_same_texts_are_the_same_tokens_in_either_library_or_the_report_says_so(self, tokenizer):
        """A bridge keeps a copy of the tokenizer that prepends the beginning-of-text token."""
        texts = [" ".join(["22", "33", "44", "55", "66"][: 2 + number % 4]) for number in range(8)]
        plain = self.lens(tokenizer).measure(texts, rank=2, progress=False)
        bridge = Lens(boot_bridge(tiny_model("gpt2"), tokenizer)).measure(texts, rank=2, progress=False)
        told = [warning for warning in bridge.warnings if "beginning" in warning or "BOS" in warning]
        assert bridge.corpus.fit_tokens == plain.corpus.fit_tokens or told


class TestRefusals:
    """Settings that cannot work are refused before the model runs for minutes."""

    def refused_at_once(self, match, sequences=SEQUENCES, error=ValueError, family="gpt2", **options):
        model, runs = tiny_model(family), []
        model.get_input_embeddings().register_forward_hook(lambda *args: runs.append(1))
        with pytest.raises(error, match=match):
            measured(model, sequences, **options)
        assert not runs

    @pytest.mark.parametrize("gradients", [("residual",), ("weight",), ("residual", "weight")])
    def test_a_rank_without_room_for_controls(self, gradients):
        sentence = r"rank 17 needs 2\*rank <= d = 32 for a normal control; use rank <= 16"
        self.refused_at_once(sentence, rank=17, gradients=gradients)

    def test_the_largest_rank_with_room_for_controls_works(self):
        report = measured(tiny_model("gpt2"), rank=16, sites="resid_post.1", gradients=("residual",))
        assert report.of("resid_post.1").energy.rank == 16

    def test_room_is_that_of_the_narrowest_site(self):
        sentence = r"rank 9 needs 2\*rank <= d = 16 for a normal control; use rank <= 8"
        self.refused_at_once(sentence, family="llama", rank=9, sites="value.*", gradients=("residual",))

    @pytest.mark.parametrize(
        ("rank", "sentence"),
        [(0, "rank 0 spans nothing; use 1 or more"), (-2, "rank -2 spans nothing"), (2.5, "rank 2.5 must be a whole")],
    )
    @pytest.mark.parametrize("when", ["ever", "before the model runs"])
    def test_ranks_that_mean_nothing(self, rank, sentence, when):
        if when == "before the model runs":
            self.refused_at_once(sentence, rank=rank)
        else:
            with pytest.raises(ValueError, match=sentence):
                measured(tiny_model("gpt2"), rank=rank)

    def test_a_rank_that_is_no_number(self):
        self.refused_at_once(r"rank 'many' must be a whole number, or a variance share between 0 and 1", rank="many")

    def test_a_rank_above_the_number_of_rows(self):
        with pytest.raises(ValueError, match=r"5 rows determine at most 4 directions, rank 6 was asked; use more text"):
            measured(tiny_model("gpt2"), [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])

    def test_unknown_gradients(self):
        self.refused_at_once(r"gradients \('weights',\) must name 'residual', 'weight' or both", gradients=("weights",))
        self.refused_at_once(r"gradients \(\) must name 'residual', 'weight' or both", gradients=())

    def test_unknown_maps(self):
        self.refused_at_once(
            r"maps \['queries'\] are not known; choose from query, key, value, mlp_in", maps=("queries",)
        )
        self.refused_at_once(r"maps \(\) are not known; choose from query", maps=())

    def test_unknown_fit_site(self):
        self.refused_at_once(r"fit_site 'norm' must be 'input' \(after the norm\) or 'residual'", fit_site="norm")

    def test_no_controls(self):
        self.refused_at_once(r"0 controls give no comparison; use 1 or more", controls=0)

    @pytest.mark.parametrize("shrinkage", [-0.1, 1.5])
    def test_shrinkage_outside_its_range(self, shrinkage):
        self.refused_at_once(rf"shrinkage {shrinkage} must lie between 0 \(none\) and 1", shrinkage=shrinkage)

    @pytest.mark.parametrize("fraction", [0, 1, 1.5])
    def test_fractions_outside_their_range(self, fraction):
        self.refused_at_once(rf"fit_fraction {fraction} must lie between 0 and 1", fit_fraction=fraction)

    def test_unknown_padding_side_and_batch_size(self):
        self.refused_at_once(r"padding_side 'middle' must be 'left' or 'right'", padding_side="middle")
        self.refused_at_once(r"batch_size 0 must be 1 or more", batch_size=0)

    def test_layers_and_sites_that_are_not_there(self):
        self.refused_at_once(r"resid_post\.3 is not in this model, which has 3 layers, 0 to 2", sites="resid_post.3")
        self.refused_at_once(r"'resid_pots\.\*' names no site; did you mean", sites="resid_pots.*")
        sentence = r"no resid_mid: its attention and MLP read the same residual stream"
        self.refused_at_once(sentence, family="gpt_neox", sites="resid_mid.*")

    @pytest.mark.parametrize(
        "options",
        [{"sites": "embedding"}, {"sites": "mlp_input.1", "maps": ("query",)}],
        ids=["embedding", "no such map"],
    )
    def test_weight_gradients_where_no_map_reads(self, options):
        sentence = r"no linear map reads (embedding|mlp_input\.1), so it has no weight gradient"
        self.refused_at_once(sentence, gradients=("weight",), **options)

    def test_a_map_asked_for_beside_residuals_is_not_dropped_silently(self):
        """``maps=("query",)`` at a site that queries do not stand beside: an error, or a warning in the report."""
        try:
            report = measured(tiny_model("gpt2"), sites="mlp_input.1", maps=("query",))
        except ValueError as refusal:
            assert "no linear map" in str(refusal)
            return
        assert any("weight" in warning for warning in report.warnings)

    def test_a_measurement_that_was_not_made(self):
        with pytest.raises(
            KeyError, match=r"'resid_post\.9' was not measured; this report holds resid_post\.0, attention"
        ):
            measured(tiny_model("gpt2")).of("resid_post.9")

    def test_a_name_means_one_measurement(self):
        """At ``sites="query.*"`` the residual gradient of a site and the weight gradient of a map are both query.1."""
        report = measured(tiny_model("gpt2"), sites="query.*")
        names = [one.name for one in report.measurements]
        assert len(set(names)) == len(names)

    def test_token_ids_of_another_vocabulary(self):
        with pytest.raises(ValueError, match=r"token id 100 is outside this model's vocabulary of 100"):
            measured(tiny_model("gpt2"), [[*sequence, 100] for sequence in SEQUENCES])

    def test_a_model_of_equal_rows_has_no_direction(self):
        with pytest.raises(ValueError, match=r"at \w+\.0: all \d+ rows are equal, so they have no principal direction"):
            model = tiny_model("llama")
            for parameter in model.parameters():
                parameter.data.zero_()
            measured(model)


class TestDescribingItself:
    def test_names_shapes_and_counts(self):
        lens = Lens(tiny_model("llama"), name="mine")
        assert repr(lens).startswith("Lens(mine, transformers 5.")
        assert repr(lens).endswith(": 3 layers, d_model 32, 25 sites, 15 maps)")
        assert len(lens.sites) == 25 and len(lens.maps) == 15

    def test_a_report_knows_how_it_was_made(self):
        report = Lens(tiny_model("llama"), name="mine", revision="step7").measure(
            SEQUENCES, rank=RANK, seed=3, skip_first=True, batch_size=5, padding_side="left", progress=False
        )
        assert (report.model.name, report.model.revision) == ("mine", "step7")
        settings = report.settings
        assert (settings.rank, settings.seed, settings.skip_first) == (RANK, 3, True)
        assert (settings.batch_size, settings.padding_side) == (5, "left")
        assert {"torch", "transformers", "numpy", "tangent-lens"} <= set(report.versions)
        assert report.created.endswith("+00:00")

    def test_measurements_come_in_the_order_of_layers(self):
        layers = [one.layer for one in measured(tiny_model("llama")).measurements]
        assert layers == sorted(layers) and set(layers) == {0, 1, 2}

    def test_plain_numbers_for_pandas_and_json(self):
        report = measured(tiny_model("llama"))
        table = report.to_pandas()
        assert len(table) == len(report.measurements) == 3 * (1 + 5 + 2)
        row = table[table.name == "query.1"].iloc[0]
        assert row.energy == report.of("query.1").energy.energy
        assert row.delta_iso == report.of("query.1").isotropy.delta
        assert report.to_dict()["corpus"]["loss"] == report.corpus.loss


class TestWhatPeopleHold:
    """Other things than lists of texts: read rightly, or refused with what to pass."""

    def test_what_a_tokenizer_returns_is_token_ids_with_their_mask(self):
        tokens = random_tokens(6, 9)
        mask = torch.ones_like(tokens)
        mask[:3, 5:] = 0
        corpus = Lens(tiny_model("gpt2")).corpus({"input_ids": tokens, "attention_mask": mask})
        assert [len(sequence) for sequence in corpus.sequences] == [5, 5, 5, 9, 9, 9]

    def test_tables_and_paths_are_refused(self, tmp_path):
        lens = Lens(tiny_model("gpt2"))
        for thing in ({"text": ["1 2 3"]}, tmp_path):
            with pytest.raises(ValueError, match="pass the texts themselves"):
                lens.corpus(thing)

    def test_a_bare_name_is_a_list_of_one(self):
        report = measured(tiny_model("gpt2"), gradients="weight", maps="query")
        assert {one.kind for one in report.measurements} == {"attention", "query"}
        assert report.settings.maps == ("query",)

    def test_a_share_too_large_for_a_control_is_refused_by_site(self):
        with pytest.raises(ValueError, match=r"\.\d: what was asked for is of rank \d+, and a normal control needs"):
            measured(tiny_model("gpt2"), rank=0.9999)

    def test_whole_numbers_are_asked_for(self):
        for name, value in (("seed", -1), ("controls", 2.5), ("batch_size", 2.5)):
            with pytest.raises(ValueError, match=f"{name} {value} must be a whole number"):
                measured(tiny_model("gpt2"), **{name: value})


def test_settings_that_are_numpy_numbers_can_be_saved(tmp_path):
    numbers = {"rank": np.int64(2), "seed": np.int64(3), "controls": np.int32(5), "shrinkage": np.float64(0.25)}
    report = Lens(tiny_model("gpt2")).measure(SEQUENCES, progress=False, **numbers)
    report.save(tmp_path)
    loaded = Report.load(tmp_path)
    assert loaded.settings == report.settings
    assert (loaded.settings.rank, loaded.settings.seed, loaded.settings.shrinkage) == (2, 3, 0.25)
