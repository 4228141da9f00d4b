"""Names of sites: every spelling of one place is the same site, and a wrong one teaches the right one."""

from __future__ import annotations

import pytest
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens import sites
from tangent_lens.sites import KINDS, LAYER_KINDS, Site, SitePattern, parse, resolve

LAYERS = 6
AVAILABLE = (Site("embedding"), *(Site(kind, layer) for layer in range(LAYERS) for kind in LAYER_KINDS))
BUILDERS = (
    sites.resid_pre,
    sites.resid_mid,
    sites.resid_post,
    sites.attention_input,
    sites.mlp_input,
    sites.query,
    sites.key,
    sites.value,
)


def names(selection, available=AVAILABLE, absent=None) -> list[str]:
    return [site.name for site in resolve(selection, available, absent)]


def at(kind: str, *layers: int) -> list[str]:
    return [f"{kind}.{layer}" for layer in layers]


@pytest.mark.parametrize("site", AVAILABLE, ids=str)
def test_a_sites_name_leads_back_to_it(site):
    assert resolve(site.name, AVAILABLE) == (site,)
    assert resolve(site, AVAILABLE) == (site,)


def test_every_kind_with_layers_has_a_builder():
    assert {build().kind for build in BUILDERS} == set(LAYER_KINDS)
    assert {build.__name__ for build in BUILDERS} == set(LAYER_KINDS)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_builders_name_some_layers_or_all(build):
    kind = build.__name__
    assert names(build(3, 1)) == at(kind, 1, 3)
    assert names(build(-1)) == at(kind, LAYERS - 1)
    assert names(build()) == at(kind, *range(LAYERS))


def test_the_embedding_builder():
    assert resolve(sites.embedding(), AVAILABLE) == (Site("embedding"),)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("resid_post.3", [3]),
        (" resid_post.3 ", [3]),
        ("resid_post.-2", [4]),
        ("resid_post.*", range(6)),
        ("resid_post", range(6)),
        ("resid_post.1:4", [1, 2, 3]),
        ("resid_post.:2", [0, 1]),
        ("resid_post.4:", [4, 5]),
        ("resid_post.-2:", [4, 5]),
        ("resid_post.:-4", [0, 1]),
        ("resid_post.:", range(6)),
        ("resid_post.4:99", [4, 5]),
        ("blocks.3.hook_resid_post", [3]),
        ("blocks.*.hook_resid_post", range(6)),
    ],
)
def test_layers_in_text(text, layers):
    assert names(text) == at("resid_post", *layers)


@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        ("hook_resid_pre", "resid_pre"),
        ("hook_in", "resid_pre"),
        ("ln1.hook_out", "attention_input"),
        ("attn.q.hook_in", "attention_input"),
        ("attn.hook_q", "query"),
        ("attn.q.hook_out", "query"),
        ("attn.hook_k", "key"),
        ("attn.k.hook_out", "key"),
        ("attn.hook_v", "value"),
        ("attn.v.hook_out", "value"),
        ("hook_resid_mid", "resid_mid"),
        ("ln2.hook_out", "mlp_input"),
        ("mlp.hook_in", "mlp_input"),
        ("mlp.in.hook_in", "mlp_input"),
        ("hook_resid_post", "resid_post"),
        ("hook_out", "resid_post"),
    ],
)
def test_transformer_lens_names(hook, kind):
    assert parse(f"blocks.2.{hook}") == SitePattern(kind, (2,))


@pytest.mark.parametrize("text", ["embedding", "hook_embed", "embed.hook_out"])
def test_names_of_the_embedding(text):
    assert names(text) == ["embedding"]


def test_a_selection_is_sorted_as_the_forward_pass_and_holds_each_site_once():
    mixed = ["resid_post.0, query.1", Site("embedding"), sites.resid_pre(1), "blocks.0.hook_resid_post", "query.0"]
    assert names(mixed) == ["embedding", "query.0", "resid_post.0", "resid_pre.1", "query.1"]


def test_any_iterable_is_a_selection():
    assert names(pattern for pattern in (sites.query(2), "key.2")) == ["query.2", "key.2"]


def test_the_order_of_sites_is_that_of_the_forward_pass():
    assert sorted(reversed(AVAILABLE), key=lambda site: site.order) == list(AVAILABLE)


layer_bounds = st.one_of(st.none(), st.integers(-LAYERS, LAYERS))
patterns = st.builds(
    SitePattern,
    st.sampled_from(LAYER_KINDS),
    st.one_of(
        st.none(),
        st.lists(st.integers(-LAYERS, LAYERS - 1), min_size=1, max_size=4).map(tuple),
        st.builds(slice, layer_bounds, layer_bounds),
    ),
)


@given(pattern=patterns)
@PROPERTY
def test_a_pattern_selects_what_it_is_written_as(pattern):
    try:
        expected = resolve(pattern, AVAILABLE)
    except ValueError:
        with pytest.raises(ValueError, match="selects no layer"):
            resolve(str(pattern), AVAILABLE)
    else:
        assert resolve(str(pattern), AVAILABLE) == expected


@given(start=layer_bounds, stop=layer_bounds)
@PROPERTY
def test_a_slice_keeps_its_python_meaning(start, stop):
    expected = list(range(LAYERS))[start:stop]
    pattern = SitePattern("key", slice(start, stop))
    if expected:
        assert names(pattern) == at("key", *expected)
    else:
        with pytest.raises(ValueError, match="selects no layer of this model, which has 6 layers, 0 to 5"):
            resolve(pattern, AVAILABLE)


def test_missing_layers_are_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"resid_post\.7 is not in this model, which has 6 layers, 0 to 5"):
        resolve("resid_post.7", AVAILABLE)
    with pytest.raises(ValueError, match=r"the nearest: resid_post\.5, resid_post\.4"):
        resolve("resid_post.7", AVAILABLE)
    with pytest.raises(ValueError, match=r"resid_post\.-9 is not in this model.*resid_post\.0, resid_post\.1"):
        resolve("resid_post.-9", AVAILABLE)


def test_negative_layers_count_from_the_models_last_layer_even_where_layers_lack_a_kind():
    every_other = [Site("resid_mid", layer) for layer in (0, 2, 4)]
    assert names("resid_mid.-1", every_other) == ["resid_mid.4"]
    with pytest.raises(ValueError, match=r"resid_mid\.-2 is not in this model"):
        resolve("resid_mid.-2", every_other)


@pytest.mark.parametrize(
    ("text", "taught"),
    [
        ("resid.3", r"'resid\.3' names no site; did you mean resid_pre, resid_mid\?"),
        ("resid_pots.3", r"did you mean resid_post"),
        ("", r"'' names no site; did you mean embedding, .*Write for example resid_post\.3 or resid_post\.\*"),
        (
            "resid_post.x",
            r"'x' in 'resid_post\.x' is no layer; write a number, \* for all layers, or a slice such as 0:6",
        ),
        ("resid_post.1:4:2", r"'1:4:2' in .* is no layer"),
        ("embedding.0", r"'embedding\.0' names no site; did you mean embedding"),
        ("blocks.2.hook_resid_pst", r"the nearest: hook_resid_post"),
        ("blocks.2.attn.hook_z", r"'blocks\.2\.attn\.hook_z' names no site; the nearest: attn\.hook_"),
        ("blocks.1.ln1.hook_normalized", r"another tensor in another version.*write 'attention_input' instead"),
        ("blocks.1.ln2.hook_normalized", r"write 'mlp_input' instead"),
        ("blocks.1.hook_attn_in", r"write 'resid_pre' instead"),
        ("blocks.1.hook_mlp_in", r"write 'resid_mid' instead"),
    ],
)
def test_wrong_names_teach_the_right_one(text, taught):
    with pytest.raises(ValueError, match=taught):
        parse(text)


def test_a_kind_that_the_model_lacks_gives_its_reason():
    parallel = [site for site in AVAILABLE if site.kind != "resid_mid"]
    with pytest.raises(ValueError, match="this model has no resid_mid: attention and MLP run side by side"):
        resolve("resid_mid.2", parallel, {"resid_mid": "attention and MLP run side by side"})
    with pytest.raises(ValueError, match=r"its structure offers no such place\. It has embedding, resid_pre"):
        resolve("resid_mid.2", parallel)


@pytest.mark.parametrize("nothing", [[], (), SitePattern("query", ())])
def test_an_empty_selection_is_an_error(nothing):
    with pytest.raises(ValueError, match=r"no site selected; name at least one, for example resid_post\.\*"):
        resolve(nothing, AVAILABLE)


def test_a_site_needs_a_known_kind_and_a_layer_where_it_has_one():
    with pytest.raises(ValueError, match="'resid_pots' is no kind of site; did you mean resid_post"):
        Site("resid_pots", 1)
    with pytest.raises(ValueError, match="'resid_post' with layer None"):
        Site("resid_post")
    with pytest.raises(ValueError, match="'embedding' with layer 1"):
        Site("embedding", 1)
    with pytest.raises(ValueError, match="'nothing' is no kind of site; did you mean embedding, resid_pre"):
        SitePattern("nothing")


@pytest.mark.parametrize("layer", [0, -1])
def test_a_layer_of_the_embedding_is_refused_with_a_sentence(layer):
    with pytest.raises(ValueError, match="embedding"):
        resolve(SitePattern("embedding", (layer,)), AVAILABLE)


def test_kinds_are_the_embedding_and_those_of_layers():
    assert KINDS[0] == "embedding"
    assert KINDS[1:] == LAYER_KINDS
    assert len(set(KINDS)) == len(KINDS)
