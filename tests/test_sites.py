"""Names of sites: every spelling of one place is the same site, and a wrong one teaches the right one."""

from __future__ import annotations

import re

import pytest
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as st

from tangent_lens import sites
from tangent_lens.sites import KINDS, LAYER_KINDS, NAMED, Site, SitePattern, parse, resolve

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


# --- Models that lack a place in some layers ---------------------------------------------------------------------------

REASON = "its maps read the residual stream itself; write resid_pre"
WITHOUT_FIRST = tuple(site for site in AVAILABLE if site.name != "attention_input.0")
ABSENT = {"attention_input.0": REASON}


class TestASiteThatOneLayerLacks:
    @pytest.mark.parametrize(
        "selection",
        ["attention_input.0", f"attention_input.-{LAYERS}", "blocks.0.ln1.hook_out", Site("attention_input", 0)],
        ids=str,
    )
    def test_it_gives_its_own_reason(self, selection):
        with pytest.raises(ValueError, match=rf"this model has no attention_input\.0: {REASON}"):
            resolve(selection, WITHOUT_FIRST, ABSENT)

    def test_a_list_that_holds_it_is_refused(self):
        with pytest.raises(ValueError, match=r"no attention_input\.0: "):
            resolve(sites.attention_input(1, 0), WITHOUT_FIRST, ABSENT)

    def test_all_layers_are_those_that_have_it(self):
        for selection in ("attention_input.*", "attention_input", "blocks.*.ln1.hook_out", sites.attention_input()):
            assert names(selection, WITHOUT_FIRST, ABSENT) == at("attention_input", 1, 2, 3, 4, 5)

    def test_other_layers_and_other_kinds_do_not_notice(self):
        assert names("attention_input.1", WITHOUT_FIRST, ABSENT) == ["attention_input.1"]
        assert names("attention_input.-1", WITHOUT_FIRST, ABSENT) == ["attention_input.5"]
        assert names("mlp_input.0", WITHOUT_FIRST, ABSENT) == ["mlp_input.0"]

    def test_a_layer_that_no_model_of_this_depth_has_offers_the_nearest_as_ever(self):
        with pytest.raises(ValueError, match=r"attention_input\.9 is not in this model.*nearest: attention_input\.5"):
            resolve("attention_input.9", WITHOUT_FIRST, ABSENT)
        with pytest.raises(ValueError, match=r"attention_input\.0 is not in this model.*nearest: attention_input\.1"):
            resolve("attention_input.0", WITHOUT_FIRST)

    @given(start=layer_bounds, stop=layer_bounds, missing=st.sets(st.integers(0, LAYERS - 1), max_size=4))
    @PROPERTY
    def test_a_slice_counts_layers_and_not_the_sites_that_are_there(self, start, stop, missing):
        """``attention_input.1:3`` means layers 1 and 2, whether or not layer 0 has such a site."""
        lacking = {f"attention_input.{layer}" for layer in missing}
        available = [site for site in AVAILABLE if site.name not in lacking]
        expected = [layer for layer in range(LAYERS)[start:stop] if layer not in missing]
        pattern, absent = SitePattern("attention_input", slice(start, stop)), dict.fromkeys(lacking, REASON)
        for selection in (pattern, str(pattern)):
            if expected:
                assert names(selection, available, absent) == at("attention_input", *expected)
            else:
                with pytest.raises(ValueError, match="selects no layer"):
                    resolve(selection, available, absent)


class TestNamesThatWouldMislead:
    """A hook name of the host library that is another tensor here than the site it names elsewhere."""

    MISLEADING = {"hook_resid_mid": "on this model that stands before the norm; write resid_mid"}  # noqa: RUF012

    @pytest.mark.parametrize("layer", ["0", "3", "*"])
    def test_they_are_refused_with_what_to_write(self, layer):
        name = f"blocks.{layer}.hook_resid_mid"
        for selection in (name, f" {name} ", f"resid_post.1,{name}", [Site("resid_post", 1), name]):
            with pytest.raises(ValueError, match=r"hook_resid_mid ?': on this model .*; write resid_mid"):
                resolve(selection, AVAILABLE, {}, self.MISLEADING)
        assert resolve(name, AVAILABLE)

    def test_the_sites_own_names_and_other_hooks_mislead_nobody(self):
        for selection in ("resid_mid.3", Site("resid_mid", 3), sites.resid_mid(3)):
            assert resolve(selection, AVAILABLE, {}, self.MISLEADING) == (Site("resid_mid", 3),)
        assert resolve("blocks.3.hook_resid_post", AVAILABLE, {}, self.MISLEADING) == (Site("resid_post", 3),)


# --- Sites that a person named in a module of their own ----------------------------------------------------------------

LABELS = ("middle", "encoder.2.out", "resid_post.3", "embedding", "§ 4")
NAMED_SITES = tuple(Site(NAMED, label=label) for label in LABELS)


class TestNamedSites:
    @pytest.mark.parametrize("label", LABELS)
    def test_a_name_leads_to_its_site_even_if_it_looks_like_another(self, label):
        site = Site(NAMED, label=label)
        assert site.name == str(site) == label and site.kind == "named" and site.layer is None
        for selection in (label, f" {label} ", site, [site], [label, site]):
            assert resolve(selection, NAMED_SITES) == (site,)

    def test_several_come_once_and_in_the_order_of_the_module(self):
        assert names("§ 4, middle,§ 4", NAMED_SITES) == ["middle", "§ 4"]
        assert names(["embedding", NAMED_SITES[0]], NAMED_SITES) == ["middle", "embedding"]
        assert names("*", NAMED_SITES) == names(["*", "middle"], NAMED_SITES) == list(LABELS)
        assert sorted(NAMED_SITES, key=lambda site: site.order) == list(NAMED_SITES)

    @pytest.mark.parametrize(
        "selection",
        ["center", "resid_post.*", "resid_post.4", "encoder", "middle.0", "blocks.3.hook_resid_post", "", "0"],
    )
    def test_an_unknown_name_lists_the_persons_own(self, selection):
        with pytest.raises(
            ValueError, match=r"is no site of this module; the sites you named: middle, encoder\.2\.out, resid_p"
        ):
            resolve(selection, NAMED_SITES)

    def test_patterns_and_sites_of_transformers_are_unknown_too(self):
        for selection in (sites.resid_post(), Site("resid_post", 2), sites.embedding().kind + "s"):
            with pytest.raises(ValueError, match=rf"'{re.escape(str(selection))}' is no site of this module"):
                resolve(selection, NAMED_SITES)

    def test_nothing_selected(self):
        with pytest.raises(ValueError, match="no site selected"):
            resolve([], NAMED_SITES)

    def test_a_label_belongs_to_named_sites_and_only_to_them(self):
        with pytest.raises(ValueError, match=r"'named' with label ''"):
            Site(NAMED)
        with pytest.raises(ValueError, match=r"'resid_post' with label 'mine'"):
            Site("resid_post", 1, "mine")
        with pytest.raises(ValueError, match=r"'named' is no kind of site"):
            SitePattern(NAMED)
        with pytest.raises(ValueError, match=r"'named\.3' names no site"):
            parse("named.3")

    def test_two_labels_are_two_sites_and_a_label_is_no_kind(self):
        assert Site(NAMED, label="a") != Site(NAMED, label="b")
        assert len({Site(NAMED, label="a"), Site(NAMED, label="a")}) == 1
        assert NAMED not in KINDS
        assert Site(NAMED, label="resid_post.3") != Site("resid_post", 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resid_post.0,2", ["resid_post.0", "resid_post.2"]),
        ("resid_post.0, 2 ,-1", ["resid_post.0", "resid_post.2", f"resid_post.{LAYERS - 1}"]),
        ("query.1,resid_post.0,1:3", ["query.1", "resid_post.0", "resid_post.1", "resid_post.2"]),
        ("resid_post.:2,query.0", ["resid_post.0", "resid_post.1", "query.0"]),
    ],
)
def test_layers_between_commas_are_of_the_kind_before_them(text, expected):
    assert set(names(text)) == set(expected)


@pytest.mark.parametrize("text", ["2", "2,resid_post.0", "embedding,2"])
def test_a_layer_before_any_kind_names_no_site(text):
    with pytest.raises(ValueError, match="names no site"):
        resolve(text, AVAILABLE)


def test_what_the_commands_give_as_an_example_names_sites():
    """A help text once named sites that could not be read."""
    from typer.main import get_command

    from tangent_lens import cli

    deep = [Site("resid_post", layer) for layer in range(40)]
    seen = 0
    for command in get_command(cli.app).commands.values():
        for option in command.params:
            for example in re.findall(r"(?:resid_post|query)\.[-0-9:*,]*[0-9*]", getattr(option, "help", None) or ""):
                assert resolve(example, deep)
                seen += 1
    assert seen >= 2
