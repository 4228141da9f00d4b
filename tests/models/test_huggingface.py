"""A plain HuggingFace model: every site and every map against plain PyTorch on the same weights."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, tiny_model
from plain_reference import (
    assert_close,
    plain_pass,
    random_sequences,
    random_tokens,
    rows_of,
    summed_loss,
    tiny_relative,
    tolerance_of,
)
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    GPT2ForSequenceClassification,
    LlamaModel,
    OPTConfig,
    OPTForCausalLM,
)

from tangent_lens.lens import Lens
from tangent_lens.models.protocol import UnsupportedModel
from tangent_lens.recording.moments import NonFiniteRows
from tangent_lens.recording.passes import record_gradients
from tangent_lens.sites import Site

RELATIVES = ("mistral", "qwen2")
HEADS_OF_16 = "llama with heads of 16"
MODELS = (*FAMILIES, *RELATIVES, HEADS_OF_16)
TOKENS = random_tokens(2, 9)
SEQUENCES = random_sequences([3, 9, 5, 12])
SMALL_BERT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def model_of(name):
    if name in RELATIVES:
        return tiny_relative(name)
    return tiny_model("llama", head_dim=16, attention_bias=True) if name == HEADS_OF_16 else tiny_model(name)


def taps_of_own_run(lens, sites, tokens):
    with lens.attach(sites, gradients=True) as taps:
        summed_loss(lens.model.module(input_ids=tokens).logits, tokens).backward()
    return taps


@pytest.mark.parametrize("name", MODELS)
def test_activations_and_gradients_of_every_site_equal_the_plain_model(name):
    lens = Lens(model_of(name))
    expected = plain_pass(model_of(name), [TOKENS])
    taps = taps_of_own_run(lens, lens.sites, TOKENS)
    assert len(taps) == len(lens.sites)
    for site in lens.sites:
        assert_close(rows_of(taps[site].activations), expected.activations[site.name], 1e-12, f"activation {site}")
        assert_close(rows_of(taps[site].gradients), expected.gradients[site.name], 1e-12, f"gradient {site}")


@pytest.mark.parametrize("name", MODELS)
def test_weight_gradient_of_every_map_equals_the_parameters_own(name):
    lens = Lens(model_of(name))
    expected = plain_pass(model_of(name), [TOKENS])
    recorded = record_gradients(lens.model, lens.corpus(TOKENS).batches(), (), lens.maps)
    assert {weight.name for weight in recorded.weights} == set(expected.weights)
    for weight in recorded.weights:
        assert_close(weight.gradient, expected.weights[weight.name], 1e-12, weight.name)
        assert weight.rows == TOKENS.numel()


@pytest.mark.parametrize("name", MODELS)
def test_backward_signals_of_every_map_equal_the_plain_model(name):
    lens = Lens(model_of(name))
    expected = plain_pass(model_of(name), [TOKENS]).gradients
    for weight in record_gradients(lens.model, lens.corpus(TOKENS).batches(), (), lens.maps).weights:
        signals = expected[weight.name]
        # GPT-2 keys are shifted freely by the softmax: their signals sum to nothing but rounding.
        spread = signals.abs().sum(0)
        assert_close(weight.signal_sum + spread, signals.sum(0) + spread, 1e-12, weight.name)
        assert_close(weight.signal_square_sum, signals.square().sum(0), 1e-11, weight.name)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_gradients_predict_how_the_loss_moves(family):
    """Independent of autograd: a nudge of the tensor itself, two-sided."""
    lens = Lens(tiny_model(family))
    taps = taps_of_own_run(lens, lens.sites, TOKENS)
    for site in lens.sites:
        if site.kind == "resid_mid":  # its tap is the norm's input; the nudge would miss the skip connection
            continue
        direction = torch.randn(taps[site].gradients.shape, dtype=torch.float64, generator=torch.manual_seed(1))
        slope = (loss_nudged(lens, site, 1e-5 * direction) - loss_nudged(lens, site, -1e-5 * direction)) / 2e-5
        assert slope == pytest.approx(float((taps[site].gradients * direction).sum()), rel=1e-5, abs=1e-6), site.name


def loss_nudged(lens, site, nudge):
    point = lens.model.tap_point(site)

    def moved(value):
        tensor = value[0] if isinstance(value, tuple) else value
        tensor = tensor.clone()
        columns = slice(None) if point.columns is None else point.columns
        tensor[..., columns] += nudge
        return (tensor, *value[1:]) if isinstance(value, tuple) else tensor

    if point.side == "output":
        handle = point.module.register_forward_hook(lambda module, args, output: moved(output))
    else:
        handle = point.module.register_forward_pre_hook(lambda module, args: moved(args))
    with torch.no_grad():
        loss = summed_loss(lens.model.module(input_ids=TOKENS).logits, TOKENS)
    handle.remove()
    return float(loss)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_kept_row(name, side):
    short, long = random_tokens(1, 5, seed=3), random_tokens(1, 9, seed=4)
    lens = Lens(model_of(name))
    alone = plain_pass(model_of(name), [long, short])
    corpus = lens.corpus([long[0].tolist(), short[0].tolist()])
    (batch,) = corpus.batches(padding_side=side)
    with lens.attach(lens.sites, gradients=True) as taps:
        logits = lens.model.run(batch).logits
        loss = summed_loss(logits[:1], long)
        start = 4 if side == "left" else 0
        (loss + summed_loss(logits[1:, start : start + 5], short)).backward()
    for site in lens.sites:
        found = taps[site].gradients[batch.keep]
        assert_close(taps[site].activations[batch.keep], alone.activations[site.name], tolerance_of(name), site.name)
        assert_close(found, alone.gradients[site.name], tolerance_of(name), site.name)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_in_either_attention(attention, side):
    model = tiny_model("gpt_neox", dtype=torch.float32)
    model.set_attn_implementation(attention)
    sequences = [random_tokens(5).tolist(), random_tokens(9).tolist()]
    found = Lens(model).record(sequences, padding_side=side, progress=False)
    expected = plain_pass(tiny_model("gpt_neox"), [torch.tensor([one]) for one in sequences])
    for site, moments in found.items():
        g = expected.gradients[site.name]
        assert_close(moments.gradients.second_moment(), g.T @ g, 1e-4, site.name)


def test_left_padding_in_float64_eager_attention_is_refused_not_measured():
    """transformers masks with float64's lowest number but takes the softmax in float32, where that is -inf: NaN."""
    model = tiny_model("gpt_neox", dtype=torch.float64)
    model.set_attn_implementation("eager")
    sequences = [random_tokens(5).tolist(), random_tokens(9).tolist()]
    with pytest.raises(NonFiniteRows, match=r"resid_post\.\d: \d+ of 448 values are NaN or infinite \(first at row 9"):
        Lens(model).record(sequences, padding_side="left", progress=False)


def test_parallel_blocks_have_no_middle_and_say_why():
    lens = Lens(tiny_model("gpt_neox"))
    assert not [site for site in lens.sites if site.kind == "resid_mid"]
    with pytest.raises(ValueError, match=r"no resid_mid: its attention and MLP read the same residual stream side by"):
        lens.resolve("resid_mid.1")


@pytest.mark.parametrize("family", ["gpt_neox_sequential", "llama", "gpt2"])
def test_sequential_blocks_have_a_middle(family):
    assert Lens(tiny_model(family)).resolve("resid_mid.1") == (Site("resid_mid", 1),)


def test_sites_come_in_the_order_of_the_forward_pass():
    lens = Lens(tiny_model("llama"))
    seen = []
    for site in lens.sites:
        point = lens.model.tap_point(site)
        after = point.side == "output"
        register = point.module.register_forward_hook if after else point.module.register_forward_pre_hook
        register(lambda *args, name=site.name: seen.append(name))
    with torch.no_grad():
        lens.model.module(input_ids=TOKENS)
    assert seen == [site.name for site in lens.sites]
    assert len(seen) == 1 + 3 * 8


@pytest.mark.parametrize("name", MODELS)
def test_names_of_places_are_the_models_own(name):
    model = model_of(name)
    lens = Lens(model)
    modules = dict(model.named_modules())
    points = [lens.model.tap_point(site) for site in lens.sites]
    points += [point for one in lens.maps for point in (*one.inputs, one.output)]
    assert points
    for point in points:
        assert modules[point.name] is point.module


def test_description_tells_shapes_and_names():
    model = tiny_model("llama", dtype=torch.bfloat16)
    shape = Lens(model, name="mine", revision="step3").description
    assert (shape.name, shape.revision, shape.architecture) == ("mine", "step3", "LlamaForCausalLM")
    assert (shape.n_layers, shape.d_model, shape.n_heads, shape.n_key_value_heads, shape.d_head) == (3, 32, 4, 2, 8)
    assert (shape.dtype, shape.vocabulary, shape.weights) == ("bfloat16", 100, "as stored")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.library.startswith("transformers 5")


def test_width_of_heads_that_do_not_fill_d_model():
    lens = Lens(model_of(HEADS_OF_16))
    assert lens.description.d_head == 16
    widths = {kind: lens.record(TOKENS, f"{kind}.1", progress=False)[Site(kind, 1)].width for kind in ("query", "key")}
    assert widths == {"query": 64, "key": 32}


def test_body_without_logits_gives_the_same_activations():
    lens = Lens(tiny_model("gpt2"))
    without = lens.record(TOKENS, lens.sites, gradients=False, progress=False)
    expected = plain_pass(tiny_model("gpt2"), [TOKENS]).activations
    for site, moments in without.items():
        assert_close(moments.activations.mean, expected[site.name].mean(0), 1e-12, site.name)
        assert moments.gradients.count == 0


def test_a_tap_sees_what_an_earlier_hook_put_in_place():
    model = tiny_model("llama")
    replaced = torch.full((2, 9, 32), 0.5, dtype=torch.float64)
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: replaced)
    found = Lens(model).record(TOKENS, "resid_post.1", gradients=False, progress=False)[Site("resid_post", 1)]
    handle.remove()
    assert torch.allclose(found.activations.mean, torch.full((32,), 0.5, dtype=torch.float64))


def test_other_architectures_are_refused_with_the_supported_ones():
    shape = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(UnsupportedModel, match=r"'opt' model are not known; supported: bert, camembert, .*sites=\{"):
        Lens(OPTForCausalLM(OPTConfig(**shape, ffn_dim=64, word_embed_proj_dim=32)))
    decoder = BertConfig(**shape, intermediate_size=64, is_decoder=True, add_cross_attention=True)
    with pytest.raises(UnsupportedModel, match=r"BertLMHeadModel attends to a second model"):
        Lens(BertLMHeadModel(decoder))


@pytest.mark.parametrize(
    "model",
    [
        LlamaModel(tiny_model("llama").config),
        GPT2ForSequenceClassification(tiny_model("gpt2").config),
        BertModel(BertConfig(**SMALL_BERT)),
    ],
    ids=lambda model: type(model).__name__,
)
class TestABodyWithoutAHead:
    def test_its_loss_must_be_given_and_the_sentence_says_how(self, model):
        name = type(model).__name__
        with pytest.raises(
            ValueError, match=rf"{name} has no language-model head.*loss=, a function.*AutoModelForMaskedLM"
        ):
            Lens(model).measure(SEQUENCES, rank=2, progress=False)
        with pytest.raises(ValueError, match=rf"{name} has no language-model head"):
            Lens(model).record(SEQUENCES, loss="masked", progress=False)

    def test_activations_need_no_loss(self, model):
        found = Lens(model).record(SEQUENCES, "resid_post.1", gradients=False, progress=False)
        assert found[Site("resid_post", 1)].activations.count == sum(map(len, SEQUENCES))
