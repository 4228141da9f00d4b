"""Local geometry through the front door: what the measures say of rows that loops over the plain model gather."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from conformance.families import tiny_model

import tangent_lens as tln
from tangent_lens.measures.curvature_summary import curvature_summary
from tangent_lens.measures.local_tangent import fit_local_tangent, local_dimension
from tangent_lens.measures.tangent_order import order_parts
from tangent_lens.recording.occurrences import choose_occurrences

DRAW = np.random.default_rng(4)
SEQUENCES = [(DRAW.zipf(1.3, size=length) % 97).tolist() for length in range(8, 60)]
SITES = ("resid_post.0", "resid_post.2")
OPTIONS = {
    "occurrences": 30,
    "buckets": 2,
    "tokens": 4,
    "m": 2,
    "gradient_layers": 2,
    "neighbours": 5,
    "linear_m": 4,
    "seed": 2,
    "progress": False,
}


@pytest.fixture(scope="module")
def lens():
    return tln.Lens(tiny_model("llama", torch.float64))


@pytest.fixture(scope="module")
def report(lens):
    return lens.geometry(SEQUENCES, SITES, name="numbers", **OPTIONS)


def chosen_occurrences(lens):
    corpus = lens.corpus(SEQUENCES)
    return choose_occurrences(corpus.batches(3, skip_first=True), 30, buckets=2, tokens=4, seed=2), sorted(
        corpus.sequences, key=len, reverse=True
    )


def rows_by_loops(lens, site):
    """Rows of every chosen token, one sequence at a time."""
    found, sequences = chosen_occurrences(lens)
    clouds = {token: [] for token in found.chosen}
    for number, sequence in enumerate(sequences):
        own = found.sequences == number
        with lens.attach(site) as taps:
            lens.model.module(input_ids=torch.as_tensor(np.asarray(sequence)).long()[None])
        for position, token in zip(found.positions[own], found.tokens[own], strict=True):
            assert sequence[position] == token and position > 0
            clouds[token].append(taps[site].activations[0, position].detach())
    return {token: torch.stack(rows) for token, rows in clouds.items()}


@pytest.mark.parametrize("site", SITES)
def test_numbers_are_those_of_the_rows_up_to_their_order(lens, report, site):
    # The halves are cut by the order in which rows were drawn, so only what needs no halves compares exactly.
    clouds, found = rows_by_loops(lens, site), report.of(site)
    assert found.everything.order.tokens == len(clouds) and found.everything.order.rows == 30 * len(clouds)
    samples = lens.geometry(SEQUENCES, site, **{**OPTIONS, "m": "participation_ratio"}).of(site)
    assert samples.everything.order.m == local_dimension(list(clouds.values()), "participation_ratio")
    radii = [float(order_parts({token: rows}, 2, seed=2).radius.mean()) for token, rows in clouds.items()]
    assert found.everything.order.radius == pytest.approx(np.mean(radii), rel=0.05)


def test_buckets_are_their_tokens_alone(lens, report):
    site = report.of("resid_post.2")
    assert sum(one.order.rows for one in site.buckets) == site.everything.order.rows
    assert sorted(np.concatenate([one.radii for one in site.buckets])) == pytest.approx(sorted(site.everything.radii))
    names = [bucket.name for bucket in report.buckets]
    assert [one.name for one in site.buckets] == names
    assert [text for bucket in report.buckets for text in bucket.texts] == [
        str(token) for bucket in report.buckets for token in bucket.tokens
    ]


@pytest.mark.parametrize("change", [{"batch_size": 1}, {"batch_size": 50}, {"padding_side": "left"}])
def test_batches_and_padding_change_nothing(lens, report, change):
    other = lens.geometry(SEQUENCES, SITES, name="numbers", **OPTIONS, **change)
    for first, second in ((report.to_pandas(), other.to_pandas()), (report.sensitivity(), other.sensitivity())):
        numbers = first.select_dtypes("number").columns
        np.testing.assert_allclose(first[numbers], second[numbers], rtol=1e-6, atol=1e-9)
    gradients = report.gradient_orders().drop(columns="why"), other.gradient_orders().drop(columns="why")
    numbers = gradients[0].select_dtypes("number").columns
    np.testing.assert_allclose(gradients[0][numbers], gradients[1][numbers], rtol=1e-5, atol=1e-9)
    assert report.depth.to_pandas().equals(other.depth.to_pandas()) or np.allclose(
        report.depth.to_pandas().drop(columns="site").astype(float),
        other.depth.to_pandas().drop(columns="site").astype(float),
        equal_nan=True,
        rtol=1e-6,
    )


def rows_and_signals(lens, found, sequences, token):
    """Inputs of the last query map at the occurrences of a token, and torch.autograd's gradients of its output there."""
    module, rows, signals = lens.model.module.model.layers[2].self_attn.q_proj, [], []
    for number, sequence in enumerate(sequences):
        places = found.positions[(found.sequences == number) & (found.tokens == token)]
        seen = []
        handle = module.register_forward_hook(lambda module, args, output, seen=seen: seen.extend((args[0], output)))
        ids = torch.as_tensor(np.asarray(sequence)).long()[None]
        logits = lens.model.module(input_ids=ids).logits
        handle.remove()
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        signals.append(torch.autograd.grad(loss, seen[1])[0][0, places])
        rows.append(seen[0][0, places].detach())
    return torch.cat(rows), torch.cat(signals)


def test_gradient_rows_are_autograds(lens, report):
    found, sequences = chosen_occurrences(lens)
    one = next(one for one in report.gradients if one.map == "query.2")
    for token in found.chosen[:3]:
        rows, signals = rows_and_signals(lens, found, sequences, token)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
        sizes = []
        for fitted, seen in ((order[15:], order[:15]), (order[:15], order[15:])):
            parts = fit_local_tangent(rows[fitted], 2).parts(rows[seen])
            size = signals[seen].norm(dim=1)
            sizes.append(
                torch.stack([size * parts.tangent.norm(dim=1), size * parts.normal.norm(dim=1)], dim=1)[size > 0]
            )
        tangent, normal = torch.cat(sizes).mean(dim=0).tolist()
        entry = next(entry for entry in one.order.tokens if entry.token == token)
        assert entry.tangent_rows == pytest.approx(tangent, rel=1e-5)
        assert entry.normal_rows == pytest.approx(normal, rel=1e-5)


def test_megabytes_are_those_of_the_rows(report, lens):
    rows, width = report.corpus.rows, 24
    assert report.corpus.rows == 30 * report.corpus.chosen
    width = lens.description.d_model
    maps = {one.map: one for one in report.gradients}
    assert report.corpus.megabytes > 4e-6 * rows * width * (len(SITES) + len({one.site for one in maps.values()}))


def test_embedding_has_no_cloud(lens):
    with pytest.raises(ValueError, match="no context has entered"):
        lens.geometry(SEQUENCES, "embedding", **{**OPTIONS, "gradient_layers": 0})


def test_a_map_before_any_context_is_left_out_and_said(report):
    assert "query.0" not in {one.map for one in report.gradients}
    assert any("query.0" in warning for warning in report.warnings)
    assert {one.map for one in report.gradients} == {"mlp_in.0", "query.2", "mlp_in.2"}


def test_what_was_not_asked_for_is_not_there(lens):
    report = lens.geometry(
        SEQUENCES, "resid_post.1", **{**OPTIONS, "gradient_layers": 0}, depth=False, sensitivity=False
    )
    assert report.gradients == () and report.depth is None and report.gradient_orders().empty
    assert report.of("resid_post.1").everything.order.others == ()
    assert report.settings.loss == "none"
    with pytest.raises(KeyError, match=r"resid_post\.0 was not measured; measured: resid_post\.1"):
        report.of("resid_post.0")


def test_sensitivity_shows_other_m_and_other_shares(report):
    found = report.sensitivity()
    own = found[found["site"] == "resid_post.2"]
    # Half of 15 rows would not do for m = 2, so that choice is not shown.
    assert own["chosen"].tolist() == [True, False, False]
    assert {(row.m, row.nearest) for row in own.itertuples()} == {(2, 1.0), (1, 1.0), (4, 1.0)}


def test_curvature_takes_the_rows_of_a_bucket(lens, report):
    found = report.of("resid_post.2").buckets[0].curvature
    clouds = {
        token: rows for token, rows in rows_by_loops(lens, "resid_post.2").items() if token in report.buckets[0].tokens
    }
    direct = curvature_summary(clouds, 2, seed=2)
    assert found.m == direct.m and found.tokens == direct.tokens == len(report.buckets[0].tokens)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"occurrences": 10}, "use 20 or more"),
        ({"occurrences": 3000}, "most frequent"),
        ({"m": 12}, "use m <= 4"),
        ({"m": "nonsense"}, "nonsense"),
        ({"nearest": 0.0}, "nearest"),
        ({"gradient_layers": -1}, "0 or more"),
        ({"maps": ("gate",)}, "no map 'gate'"),
        ({"neighbours": 5000}, "neighbours"),
    ],
)
def test_what_cannot_be_measured_is_said(lens, options, said):
    with pytest.raises(ValueError, match=said):
        lens.geometry(SEQUENCES, "resid_post.2", **{**OPTIONS, **options})


def test_only_models_that_read_tokens_have_occurrences():
    lens = tln.Lens(torch.nn.Sequential(torch.nn.Linear(3, 3)), sites={"first": "0"})
    with pytest.raises(ValueError, match="only tokens have occurrences"):
        lens.geometry([torch.randn(4, 3)], progress=False)


def test_the_model_comes_back_as_it_was(lens):
    module = lens.model.module
    before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    lens.geometry(SEQUENCES, "resid_post.2", **OPTIONS)
    assert before == {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in module.parameters())
    assert not any(module._forward_hooks for module in module.modules())


def test_masked_models_too():
    lens = tln.Lens(tiny_model("bert", torch.float32))
    report = lens.geometry(
        SEQUENCES,
        "resid_post.1",
        **{**OPTIONS, "maps": ("query",), "gradient_layers": 1, "loss": tln.MaskedLoss(mask_id=99)},
    )
    assert report.settings.loss != "next-token" and report.gradients[0].map == "query.1"


def test_settings_are_kept(report):
    assert dataclasses.asdict(report.settings)["occurrences"] == 30 and report.settings.m == 2
    assert report.corpus.name == "numbers" and report.corpus.chosen == len(
        report.buckets[0].tokens + report.buckets[1].tokens
    )


def test_too_many_rows_are_refused_before_the_model_runs(lens, monkeypatch):
    from tangent_lens.measures import geometry_measure

    monkeypatch.setattr(geometry_measure, "MOST_BYTES", 10_000)
    monkeypatch.setattr(lens.model, "run_without_logits", None)
    with pytest.raises(ValueError, match="240 occurrences at 2 sites and 4 maps take about"):
        lens.geometry(SEQUENCES, SITES, **OPTIONS)


def test_without_scikit_dimension_it_says_so_at_once_and_how_to_go_on(lens, monkeypatch):
    monkeypatch.setitem(sys.modules, "skdim.id", None)
    with pytest.raises(ImportError, match=r"tangent-lens\[dimension\].*depth=False"):
        lens.geometry(SEQUENCES, "resid_post.2", **OPTIONS)
    assert lens.geometry(SEQUENCES, "resid_post.2", **{**OPTIONS, "gradient_layers": 0}, depth=False).depth is None
