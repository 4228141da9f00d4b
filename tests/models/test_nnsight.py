"""Models that nnsight holds here: the same numbers as without it, weights loaded only when they are needed."""

from __future__ import annotations

import nnsight
import pytest
import torch
import transformers
from conformance.families import FAMILIES, NotInThisVersion, tiny_model
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tangent_lens as tln
from tangent_lens.models.huggingface import HuggingFaceModel
from tangent_lens.models.nnsight import order_of_calls

TOKENS = [[3, 5, 7, 9, 11, 2, 4, 6], [8, 1, 90, 14, 3, 3], [12, 13, 14, 15, 16], [7, 6, 5, 4, 3, 2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_folder):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=32, **shape)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def plain(folder):
    return LlamaForCausalLM.from_pretrained(folder)


def held_in(how, folder, plain):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if how == "NNsight":
        return nnsight.NNsight(plain)
    if how == "LanguageModel":
        with pytest.warns(FutureWarning, match="deprecated"):
            return nnsight.LanguageModel(str(folder), tokenizer=tokenizer, task="text-generation")
    options = {"dispatch": True} if how == "dispatched" else {}
    return nnsight.TransformersModel(str(folder), tokenizer=tokenizer, task="text-generation", **options)


HOLDERS = ["NNsight", *(["LanguageModel", "lazy", "dispatched"] if hasattr(nnsight, "TransformersModel") else [])]


@pytest.mark.parametrize("how", HOLDERS)
class TestEveryHolder:
    def test_measures_as_the_plain_model(self, how, folder, plain):
        options = {"rank": 2, "controls": 3, "progress": False, "batch_size": 2}
        found = tln.Lens(held_in(how, folder, plain)).measure(TOKENS, **options)
        expected = tln.Lens(plain).measure(TOKENS, **options)
        for one, other in zip(found.measurements, expected.measurements, strict=True):
            assert (one.name, one.energy.energy, one.isotropy.delta) == (
                other.name,
                other.energy.energy,
                other.isotropy.delta,
            )
        assert found.model.library.startswith("nnsight")

    def test_attention_shape_and_removal_too(self, how, folder, plain):
        lens, expected = tln.Lens(held_in(how, folder, plain)), tln.Lens(plain)
        options = {"progress": False}
        heads = [one.attention(TOKENS, rank=2, controls=2, **options).to_pandas() for one in (lens, expected)]
        assert heads[0].equals(heads[1])
        shapes = [one.shape(TOKENS, dimensions=(), **options).to_pandas() for one in (lens, expected)]
        assert shapes[0].equals(shapes[1])
        losses = [one.ablate(TOKENS, rank=2, controls=2, **options).to_pandas() for one in (lens, expected)]
        assert losses[0].equals(losses[1])

    def test_taps_see_what_a_person_runs(self, how, folder, plain):
        held = held_in(how, folder, plain)
        lens = tln.Lens(held)
        with lens.attach("resid_post.1", gradients=True) as taps, lens.gradients():
            held._module(input_ids=torch.tensor([TOKENS[0]])).logits.sum().backward()
        assert taps["resid_post.1"].gradients.shape == (1, 8, 16)


@pytest.mark.parametrize("how", HOLDERS)
def test_the_tokenizer_saved_beside_the_weights_is_found(how, folder, plain):
    lens, expected = tln.Lens(held_in(how, folder, plain)), tln.Lens(plain)
    found = [one.corpus(["5 6 7 8", "9 10 11"]).sequences for one in (lens, expected)]
    assert [one.tolist() for one in found[0]] == [one.tolist() for one in found[1]] != []


class TestWeights:
    @pytest.mark.skipif("lazy" not in HOLDERS, reason="nnsight before 0.8 has no TransformersModel")
    def test_are_loaded_when_they_are_first_needed(self, folder, plain):
        held = held_in("lazy", folder, plain)
        lens = tln.Lens(held)
        assert lens.description.n_layers == 2 and len(lens.sites) == 17 and "2 layers" in repr(lens)
        assert lens.resolve("resid_post.*") and not held.dispatched
        lens.record(TOKENS, "resid_post.0", gradients=False, progress=False)
        assert held.dispatched

    def test_come_back_as_they_were(self, folder, plain):
        held = nnsight.NNsight(plain)
        asked = {name: parameter.requires_grad for name, parameter in plain.named_parameters()}
        tln.Lens(held).measure(TOKENS, rank=2, controls=2, progress=False)
        assert asked == {name: parameter.requires_grad for name, parameter in plain.named_parameters()}
        assert all(parameter.grad is None for parameter in plain.parameters())

    def test_a_trace_still_runs_afterwards(self, plain):
        held = nnsight.NNsight(plain)
        tln.Lens(held).record(TOKENS, progress=False)
        with held.trace(torch.tensor([TOKENS[0]])):
            hidden = nnsight.save(held.model.layers[0].output)
        expected = tln.Lens(plain)
        with expected.attach("resid_post.0") as taps, torch.no_grad():
            plain(torch.tensor([TOKENS[0]]))
        rows = hidden[0] if isinstance(hidden, tuple) else hidden
        assert torch.allclose(taps["resid_post.0"].activations, rows, atol=1e-6)


class TestWhatItHolds:
    def test_an_unknown_module_is_refused_with_a_way_out(self):
        with pytest.raises(TypeError, match=r"nnsight holds a .*Linear here.*name the places yourself"):
            tln.Lens(nnsight.NNsight(nn.Linear(3, 3)))

    def test_and_can_be_measured_at_named_places(self):
        module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        batches = [torch.randn(5, 3) for _ in range(2)]
        found = tln.Lens(nnsight.NNsight(module), sites={"middle": "0"}).record(
            batches, gradients=False, progress=False
        )
        expected = tln.Lens(module, sites={"middle": "0"}).record(batches, gradients=False, progress=False)
        ((one,), (other,)) = found.values(), expected.values()
        assert torch.equal(one.activations.scatter, other.activations.scatter)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_calls_is_that_of_a_real_pass(family):
    """nnsight serves the tensors of a pass in no other order; known without weights, and without numbers."""
    try:
        model = tiny_model(family, torch.float32)
    except NotInThisVersion as reason:
        pytest.skip(str(reason))
    order, wrapped, found = order_of_calls(HuggingFaceModel(model)), HuggingFaceModel(model), []
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: found.append((path, "input")))
        module.register_forward_hook(lambda *_, path=path: found.append((path, "output")))
    with torch.no_grad():
        model(input_ids=torch.arange(5, 10)[None])
    expected = list(dict.fromkeys(found))
    known = sorted(order, key=order.__getitem__)
    assert known == [place for place in expected if place in order]
    # Which rows an expert reads, and which rows ModernBERT of transformers 4 takes for padding, are numbers.
    depends_on_numbers = any(one.startswith("mlp_in") for one in wrapped.absent) or (
        family == "modernbert" and transformers.__version__ < "5"
    )
    assert depends_on_numbers or known == expected


def test_standardised_models_of_nnterp(folder, plain):
    """nnterp 1.3.0 imports beside nnsight 0.6 and 0.7, and not beside 0.5 or 0.8, which its metadata allow."""
    nnterp = pytest.importorskip("nnterp", reason="nnterp does not import here", exc_type=ImportError)
    lens = tln.Lens(nnterp.StandardizedTransformer(str(folder), tokenizer=AutoTokenizer.from_pretrained(folder)))
    found = lens.record(TOKENS, progress=False)
    expected = tln.Lens(plain).record(TOKENS, progress=False)
    for site, moments in expected.items():
        assert torch.equal(found[site].gradients.scatter, moments.gradients.scatter)
