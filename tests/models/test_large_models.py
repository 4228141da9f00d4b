"""Models too large for one device: offloaded by accelerate, or quantised. The numbers are those of the plain model."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from model_snapshot import hooks_of
from plain_reference import (
    assert_close,
    at,
    block_list,
    own_part,
    places_of,
    plain_pass,
    random_sequences,
    random_tokens,
    rows_of,
    singles,
    summed_loss,
    tolerance_of,
)
from torch import nn

from tangent_lens.lens import Lens
from tangent_lens.models.loading import wrap
from tangent_lens.models.placement import input_device
from tangent_lens.models.protocol import UnsupportedModel
from tangent_lens.models.quantisation import parameter_count, precision_of
from tangent_lens.models.state import evaluation_mode, frozen_parameters
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.passes import record_activations, record_gradients

SEQUENCES = random_sequences([9, 5, 12, 7])
TOKENS = random_tokens(2, 9)
OFFLOADED_FAMILIES = ("llama", "gpt2")  # gpt2 ties its weights
BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h"}


def batches(size=2):
    return Corpus.from_tokens(SEQUENCES).batches(size)


def device_map(model, family):
    """Two of three blocks on the disk, all else where it is computed."""
    base = BLOCKS[family].split(".")[0]
    others = [f"{base}.{name}" for name, _ in getattr(model, base).named_children() if name not in ("layers", "h")]
    blocks = {f"{BLOCKS[family]}.{layer}": "cpu" if layer == 1 else "disk" for layer in range(3)}
    return dict.fromkeys([*others, "lm_head"], "cpu") | blocks


def offload_to_cpu(family, folder):
    import accelerate

    return accelerate.cpu_offload(tiny_model(family), execution_device="cpu")


def offload_to_disk(family, folder):
    import accelerate

    return accelerate.disk_offload(tiny_model(family), str(folder / "offloaded"), execution_device="cpu")


def dispatch_blocks(family, folder):
    import accelerate

    model = tiny_model(family)
    return accelerate.dispatch_model(model, device_map(model, family), offload_dir=str(folder / "offloaded"))


def dispatch_whole_parts(family, folder):
    """Weights of a whole MLP are loaded at once, by a hook on the MLP."""
    import accelerate

    model = tiny_model(family)
    options = {"offload_dir": str(folder / "offloaded"), "preload_module_classes": ["LlamaMLP", "GPT2MLP"]}
    return accelerate.dispatch_model(model, device_map(model, family), **options)


def load_with_device_map(family, folder):
    from transformers import AutoModelForCausalLM

    model = tiny_model(family)
    model.save_pretrained(folder / "saved")
    places = {"device_map": device_map(model, family), "offload_folder": str(folder / "offloaded")}
    return AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float64, **places).eval()


WAYS = (offload_to_cpu, offload_to_disk, dispatch_blocks, dispatch_whole_parts, load_with_device_map)
every_way = pytest.mark.parametrize("offload", WAYS, ids=lambda way: way.__name__)
both_families = pytest.mark.parametrize("family", OFFLOADED_FAMILIES)


@pytest.fixture(autouse=True)
def accelerate_is_there(request):
    if "offload" in request.fixturenames:
        pytest.importorskip("accelerate")


def flags_of(model):
    return {name: one.requires_grad for name, one in model.named_parameters(remove_duplicate=False)}


def mixed_flags(model):
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    return flags_of(model)


def offloaded_names(model):
    return [name for name, one in model.named_parameters() if one.is_meta]


@both_families
@every_way
class TestOffloaded:
    def test_moments_and_weight_gradients_are_the_plain_models(self, family, offload, tmp_path):
        model = offload(family, tmp_path)
        assert offloaded_names(model)
        expected, tolerance = plain_pass(tiny_model(family), singles(SEQUENCES)), tolerance_of(family)
        wrapped = wrap(model)
        activations = record_activations(wrapped, batches(), wrapped.sites)
        recorded = record_gradients(wrapped, batches(), wrapped.sites, wrapped.maps, cross=True)
        for site in wrapped.sites:
            rows, slopes, name = expected.activations[site.name], expected.gradients[site.name], site.name
            assert_close(activations[site].moments.second_moment(), rows.T @ rows, tolerance, name)
            assert_close(recorded.moments[site].gradients.second_moment(), slopes.T @ slopes, tolerance, name)
        for weight in recorded.weights:
            assert_close(weight.gradient, expected.weights[weight.name], tolerance, weight.name)
        assert recorded.loss == pytest.approx(expected.loss / expected.targets)

    def test_the_model_comes_back_and_still_runs(self, family, offload, tmp_path):
        model = offload(family, tmp_path)
        expected = tiny_model(family)(input_ids=TOKENS).logits
        model.train()
        flags, offloaded = mixed_flags(model), offloaded_names(model)
        hooks, random_state = [hooks_of(part) for part in model.modules()], torch.get_rng_state()
        Lens(model).measure(SEQUENCES, rank=2, controls=2, progress=False)
        assert flags_of(model) == flags
        assert offloaded_names(model) == offloaded
        assert [hooks_of(part) for part in model.modules()] == hooks
        assert all(part.training for part in model.modules())
        assert torch.equal(torch.get_rng_state(), random_state)
        assert_close(model.eval()(input_ids=TOKENS).logits.detach(), expected.detach(), 1e-10)

    def test_your_own_passes(self, family, offload, tmp_path):
        model = offload(family, tmp_path)
        expected = plain_pass(tiny_model(family), [TOKENS]).gradients
        lens = Lens(model)
        with lens.gradients(), lens.attach("resid_post.*", gradients=True) as taps:
            summed_loss(model(input_ids=TOKENS).logits, TOKENS).backward()
        for layer in range(3):
            name = f"resid_post.{layer}"
            assert_close(rows_of(taps[name].gradients), expected[name], tolerance_of(family), name)

    def test_the_description_is_the_plain_models(self, family, offload, tmp_path):
        model, plain = offload(family, tmp_path), tiny_model(family)
        assert parameter_count(model) == sum(parameter.numel() for parameter in plain.parameters())
        assert Lens(model).description.dtype == "float64"


@contextmanager
def watched_weights(monkeypatch):
    """Weak references to every weight matrix that passes ``functional.linear``."""
    seen, linear = [], nn.functional.linear

    def watching(rows, weight, bias=None):
        seen.append(weakref.ref(weight))
        return linear(rows, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", watching)
        yield seen


class TestMemoryOfTheBackwardPass:
    """Plain autograd keeps each weight until the backward pass, all at once on the device that is too small for them."""

    def alive_after_forward(self, model, monkeypatch, context):
        with watched_weights(monkeypatch) as seen, context:
            loss = summed_loss(model(input_ids=TOKENS).logits, TOKENS)
            alive = sum(weight() is not None for weight in seen)
            assert len(seen) > 15
            loss.backward()
        return alive, len(seen)

    @pytest.mark.parametrize("offload", [offload_to_disk], ids=["disk"])
    def test_no_offloaded_weight_waits_for_it(self, offload, tmp_path, monkeypatch):
        model = offload("llama", tmp_path)
        alive, _ = self.alive_after_forward(model, monkeypatch, frozen_parameters(wrap(model)))
        assert alive == 0

    @pytest.mark.parametrize("offload", [dispatch_whole_parts], ids=["whole parts"])
    def test_nor_one_that_its_parent_loads(self, offload, tmp_path, monkeypatch):
        model = offload("llama", tmp_path)
        offloaded = len([name for name in offloaded_names(model) if "_proj" in name])
        alive, passed = self.alive_after_forward(model, monkeypatch, frozen_parameters(wrap(model)))
        assert (alive, passed - alive) == (8, offloaded)  # the middle block's seven, and the unembedding

    @pytest.mark.parametrize("offload", [offload_to_disk], ids=["disk"])
    def test_plain_autograd_keeps_them_all(self, offload, tmp_path, monkeypatch):
        model = offload("llama", tmp_path)
        alive, passed = self.alive_after_forward(model, monkeypatch, torch.enable_grad())
        assert alive == passed

    @pytest.mark.parametrize("offload", [offload_to_disk], ids=["disk"])
    def test_a_change_in_place_is_still_found(self, offload, tmp_path):
        with frozen_parameters(wrap(offload("llama", tmp_path))):
            start = torch.ones(3, requires_grad=True)
            middle = start * 2
            squares = middle * middle
            middle.add_(1)
            with pytest.raises(RuntimeError, match="changed in place"):
                squares.sum().backward()


class UpperHalf(nn.Module):
    """Multiplies with a part of its weight, which itself is a part of a larger table."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(40.0).view(10, 4)[2:], requires_grad=False)

    def forward(self, rows):
        return rows @ self.weight[3:].T


def test_a_part_of_a_weight_is_loaded_again():
    accelerate = pytest.importorskip("accelerate")
    part = UpperHalf()
    expected = part.weight[3:].sum(dim=0)
    root = accelerate.cpu_offload(nn.Sequential(part), execution_device="cpu")
    rows = torch.ones(1, 4, requires_grad=True)
    with frozen_parameters(SimpleNamespace(module=root, gradient_starts=lambda: ())):
        root(rows).sum().backward()
    assert torch.equal(rows.grad[0], expected)


class TestNewParametersInThePlaceOfOld:
    @pytest.mark.parametrize("offload", [offload_to_cpu], ids=["cpu"])
    def test_flags_come_back_after_an_exception(self, offload, tmp_path):
        model = offload("gpt2", tmp_path)
        flags, before = mixed_flags(model), list(model.parameters())
        with pytest.raises(ZeroDivisionError), frozen_parameters(wrap(model)):
            model(input_ids=TOKENS)
            raise ZeroDivisionError
        assert not any(new is old for new, old in zip(model.parameters(), before, strict=True))
        assert flags_of(model) == flags

    def test_a_parameter_that_came_meanwhile_keeps_its_flag(self):
        model = tiny_model("llama")
        with frozen_parameters(wrap(model)):
            model.lm_head.register_parameter("adapter", nn.Parameter(torch.ones(2)))
        assert model.lm_head.adapter.requires_grad and model.lm_head.weight.requires_grad


def computed_on(module, device):
    """As accelerate says it: a hook that names the device a module is computed on."""
    module._hf_hook = SimpleNamespace(execution_device=device)


class TestWhereTheInputGoes:
    def test_of_a_plain_model(self):
        assert input_device(tiny_model("gpt2")) == torch.device("cpu")

    def test_of_a_module_without_weights(self):
        assert input_device(nn.Identity()) == torch.device("cpu")

    def test_of_a_module_without_embedding(self):
        assert input_device(nn.Sequential(nn.ReLU(), nn.Linear(2, 2))) == torch.device("cpu")

    @pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda", 1)])
    def test_of_an_offloaded_embedding(self, device):
        model = tiny_model("llama").to("meta")
        computed_on(model.model.embed_tokens, device)
        computed_on(model, "cuda:0")
        assert input_device(model) == torch.device("cuda", 1)

    def test_of_an_embedding_inside_an_offloaded_whole(self):
        model = tiny_model("llama").to("meta")
        computed_on(model.model.embed_tokens, None)
        model._hf_hook = SimpleNamespace(hooks=(SimpleNamespace(), SimpleNamespace(execution_device="cuda:2")))
        assert input_device(model) == torch.device("cuda", 2)

    def test_weights_beside_an_offloading_hook_say_where_they_are(self):
        model = tiny_model("llama")
        computed_on(model, "cuda:0")
        assert input_device(model) == torch.device("cpu")

    def test_weights_that_were_never_loaded_are_refused(self):
        with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM are on the meta device.*from_pretrained"):
            input_device(tiny_model("llama").to("meta"))


def test_every_cuda_device_keeps_its_random_state(monkeypatch):
    model, forked = tiny_model("llama"), []
    computed_on(model.model.layers[0], "cuda:1")
    computed_on(model.model.layers[1], "cuda:0")
    computed_on(model.model.layers[2], "cpu")

    @contextmanager
    def fork(devices):
        forked.extend(devices)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    with evaluation_mode(model):
        pass
    assert forked == [torch.device("cuda", 0), torch.device("cuda", 1)]


class Packed(nn.Module):
    """A linear map as quantising libraries keep it: integers in a buffer; ``cuts`` as kernels for inference do."""

    def __init__(self, linear, cuts):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale, self.cuts = float(linear.weight.detach().abs().max()) / 127, cuts
        self.register_buffer("qweight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, rows):
        output = rows @ (self.qweight.to(rows.dtype) * self.scale).T
        return output.detach() if self.cuts else output


def partly_packed(cuts):
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj = Packed(attention.o_proj, cuts)
    return model


class TestQuantisedInAWayOfItsOwn:
    def test_is_measured_where_gradients_pass(self):
        recorded = Lens(partly_packed(cuts=False)).record(SEQUENCES, "resid_post.*", progress=False)
        plain = Lens(tiny_model("llama")).record(SEQUENCES, "resid_post.*", progress=False)
        for site, moments in plain.items():
            expected = moments.gradients.second_moment()
            assert_close(recorded[site].gradients.second_moment(), expected, 0.1, site.name)

    def test_is_refused_where_they_do_not(self):
        sentence = r"no gradient passes model.layers.1.self_attn.o_proj \(Packed \(.*\)\).*load the model unquantised"
        with pytest.raises(RuntimeError, match=sentence):
            Lens(partly_packed(cuts=True)).record(SEQUENCES, "resid_post.*", progress=False)

    def test_has_activations_all_the_same(self):
        Lens(partly_packed(cuts=True)).record(SEQUENCES, gradients=False, progress=False)

    def test_is_described(self):
        model = partly_packed(cuts=False)
        assert precision_of(model) == f"Packed ({__name__}); the rest float64"
        assert parameter_count(model) == parameter_count(tiny_model("llama"))

    def test_a_table_of_integers_is_no_weight(self):
        model = tiny_model("llama")
        model.model.layers[0].register_buffer("table", torch.zeros(2, 2, dtype=torch.int32))
        assert precision_of(model) == "float64"

    def test_repacked_weights_are_refused(self):
        model = tiny_model("llama")
        model.model.layers[2].mlp.up_proj.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)
        with pytest.raises(
            RuntimeError, match=r"model.layers.2.mlp.up_proj: bitsandbytes repacked.*load the model again"
        ):
            Lens(model).record(SEQUENCES, progress=False)


class TestPrecision:
    def test_of_mixed_types_names_the_commonest_first(self):
        model = tiny_model("llama").to(torch.bfloat16)
        model.model.norm.float()
        assert precision_of(model) == "bfloat16 and float32"

    def test_without_parameters(self):
        assert (precision_of(nn.Identity()), parameter_count(nn.Identity())) == ("without parameters", 0)


@pytest.fixture(scope="module")
def bitsandbytes():
    pytest.importorskip("accelerate")
    return pytest.importorskip("bitsandbytes")


def shape_for_quantising(family):
    # bitsandbytes scales blocks of 64 numbers: at width 32 a weight matrix would not fill its rows with them.
    return {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}


def quantised(family, folder, **how):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = tiny_model(family, torch.float32, **shape_for_quantising(family))
    for parameter in plain.parameters():
        parameter.data *= 0.6
    plain.save_pretrained(folder)
    config = BitsAndBytesConfig(**how)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
DOUBLY = FOUR_BITS | {"bnb_4bit_use_double_quant": True}
EIGHT_BITS = {"load_in_8bit": True}


@pytest.mark.usefixtures("bitsandbytes")
@both_families
class TestBitsAndBytes:
    @pytest.mark.parametrize("how", [FOUR_BITS, DOUBLY], ids=["4 bits", "doubly"])
    def test_four_bits_are_the_dequantised_model(self, family, how, tmp_path):
        wrapped = wrap(quantised(family, tmp_path, **how))
        activations = record_activations(wrapped, batches(), wrapped.sites)
        recorded = record_gradients(wrapped, batches(), wrapped.sites, wrapped.maps)
        expected = plain_pass(with_plain_weights(tiny_plain(family), wrapped.module), singles(SEQUENCES))
        check_against(expected, wrapped, activations, recorded, 1e-4)

    def test_eight_bits_are_the_models_own_passes(self, family, tmp_path):
        model = quantised(family, tmp_path, **EIGHT_BITS)
        wrapped = wrap(model)
        expected = own_pass(model, singles(SEQUENCES))
        activations = record_activations(wrapped, batches(1), wrapped.sites)
        recorded = record_gradients(wrapped, batches(1), wrapped.sites, wrapped.maps)
        check_against(expected, wrapped, activations, recorded, 1e-4)

    @pytest.mark.parametrize("how", [FOUR_BITS, EIGHT_BITS], ids=["4 bits", "8 bits"])
    def test_the_model_comes_back(self, family, how, tmp_path):
        model = quantised(family, tmp_path, **how)
        Lens(model).record(SEQUENCES[:1], gradients=False, progress=False)  # bitsandbytes moves its 8-bit state once
        before, flags = {name: one.clone() for name, one in model.state_dict().items()}, flags_of(model)
        hooks = [hooks_of(part) for part in model.modules()]
        Lens(model).measure(SEQUENCES, rank=2, controls=2, progress=False)
        after = model.state_dict()
        assert flags_of(model) == flags
        assert [hooks_of(part) for part in model.modules()] == hooks
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)

    def test_is_described(self, family, tmp_path):
        four, eight = (quantised(family, tmp_path / str(n), **how) for n, how in enumerate((FOUR_BITS, EIGHT_BITS)))
        assert parameter_count(four) == parameter_count(eight) == parameter_count(tiny_plain(family))
        assert Lens(four).description.dtype == "4-bit nf4 (bitsandbytes), computed in float32; the rest float32"
        assert Lens(eight).description.dtype == "8-bit (bitsandbytes), inputs rounded to 8 bits; the rest float32"


def test_a_model_that_ran_before_is_refused_where_that_repacked_it(bitsandbytes, tmp_path):
    model = quantised("llama", tmp_path, **FOUR_BITS)
    with torch.no_grad():
        model(input_ids=TOKENS)
    state = model.model.layers[0].self_attn.q_proj.weight.quant_state
    if not getattr(state, "packing_format_for_cpu", False):
        pytest.skip("bitsandbytes does not repack weights for this CPU")
    with pytest.raises(RuntimeError, match=r"bitsandbytes repacked its 4-bit weights"):
        Lens(model).record(SEQUENCES, progress=False)
    Lens(model).record(SEQUENCES, gradients=False, progress=False)


def tiny_plain(family):
    return tiny_model(family, torch.float32, **shape_for_quantising(family))


def with_plain_weights(plain, model):
    """A plain model that holds the numbers the 4-bit weights stand for."""
    from bitsandbytes.functional import dequantize_4bit

    parts = dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            owner, _, kind = name.rpartition(".")
            own = getattr(parts[owner], kind)
            if hasattr(own, "quant_state"):
                own = dequantize_4bit(own.data, own.quant_state)
                own = own.T if plain.config.model_type == "gpt2" else own
            parameter.copy_(own)
    return plain


def own_pass(model, sequences):
    """Plain hooks on the quantised model: every module's rows and gradients, and weight gradients made of them."""
    with straight_hooks(model) as passed:
        for tokens in sequences:
            summed_loss(model(input_ids=tokens).logits, tokens).backward()
    return passed


@contextmanager
def straight_hooks(model):
    """What passes the residual stream and the maps of a model, without any code of this library."""
    passed = SimpleNamespace(activations={}, gradients={}, weights={})
    handles = []

    def add(rows, gradients, site):
        for found, tensor in ((passed.activations, rows), (passed.gradients, gradients)):
            found[site] = torch.cat([*([found[site]] if site in found else []), rows_of(tensor.detach())])

    def at_block(layer):
        def hook(module, args, output):
            tensor = output[0] if isinstance(output, tuple) else output
            tensor.register_hook(lambda gradient: add(tensor, gradient, f"resid_post.{layer}"))

        return hook

    def at_map(kind, layer):
        def hook(module, args, output):
            def take(gradient):
                own = own_part(model.config, kind, rows_of(gradient))
                name = f"{kind}.{layer}"
                passed.weights[name] = passed.weights.get(name, 0) + own.T @ rows_of(args[0].detach())

            output.register_hook(take)

        return hook

    for layer, block in enumerate(block_list(model)):
        handles.append(block.register_forward_hook(at_block(layer)))
        for kind, path in places_of(model).maps.items():
            handles.append(at(block, path).register_forward_hook(at_map(kind, layer)))
    try:
        yield passed
    finally:
        for handle in handles:
            handle.remove()


def check_against(expected, wrapped, activations, recorded, tolerance):
    sites = [site for site in wrapped.sites if site.name in expected.activations]
    assert len(sites) >= 3
    for site in sites:
        rows, slopes = expected.activations[site.name].double(), expected.gradients[site.name].double()
        assert_close(activations[site].moments.second_moment(), rows.T @ rows, tolerance, site.name)
        assert_close(recorded.moments[site].gradients.second_moment(), slopes.T @ slopes, tolerance, site.name)
    for weight in recorded.weights:
        assert_close(weight.gradient, expected.weights[weight.name], tolerance, weight.name)
