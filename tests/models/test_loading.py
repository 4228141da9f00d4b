"""From an object or a name to a model that can be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import boot_bridge, tiny_model
from plain_reference import assert_close, random_tokens
from transformers import LlamaForCausalLM

from tangent_lens.lens import Lens
from tangent_lens.models.huggingface import HuggingFaceModel
from tangent_lens.models.loading import load, wrap
from tangent_lens.models.protocol import UnsupportedModel
from tangent_lens.models.transformer_lens import BridgeModel
from tangent_lens.sites import Site

TOKENS = random_tokens(2, 9)


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory):
    """A saved model without a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("bare")
    tiny_model("llama", dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A saved model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_huggingface_model_is_wrapped_itself():
    model = tiny_model("llama")
    wrapped = wrap(model)
    assert isinstance(wrapped, HuggingFaceModel)
    assert wrapped.module is model


def test_a_bridge_is_wrapped_itself(tokenizer):
    bridge = boot_bridge(tiny_model("gpt2"), tokenizer)
    wrapped = wrap(bridge)
    assert isinstance(wrapped, BridgeModel)
    assert wrapped.module is bridge and wrapped.tokenizer is bridge.tokenizer


def test_a_wrapped_model_stays_as_it_is():
    wrapped = wrap(tiny_model("llama"))
    assert wrap(wrapped) is wrapped
    assert Lens(wrapped).model is wrapped


def test_options_beside_a_wrapped_model_are_not_ignored(tokenizer):
    """Either they count or they are refused; a tokenizer that is taken and dropped helps nobody."""
    wrapped = wrap(tiny_model("llama"))
    try:
        lens = Lens(wrapped, tokenizer=tokenizer, name="mine")
    except (TypeError, ValueError):
        return
    assert lens.model.tokenizer is tokenizer
    assert lens.description.name == "mine"


def test_a_name_is_sent_to_the_loader():
    with pytest.raises(UnsupportedModel, match=r"'gpt2' is a name, not a model; load it with Lens.from_pretrained"):
        wrap("gpt2")


@pytest.mark.parametrize("thing", [None, torch.nn.Linear(2, 2), Lens], ids=["None", "Linear", "class"])
def test_other_objects_are_refused_with_what_to_pass(thing):
    with pytest.raises(
        UnsupportedModel,
        match=r"is no model known here; pass a HuggingFace model, a TransformerLens HookedTransformer.*from_pre",
    ):
        wrap(thing)


def test_a_compiled_model_is_refused_by_its_own_name():
    with pytest.raises(UnsupportedModel, match=r"OptimizedModule is no model known here"):
        wrap(torch.compile(tiny_model("llama")))


def test_a_lens_is_no_model():
    with pytest.raises(UnsupportedModel, match=r"tangent_lens\.lens\.Lens is no model known here"):
        Lens(Lens(tiny_model("llama")))


def test_a_model_without_a_name_has_no_tokenizer_and_says_so_for_texts():
    lens = Lens(tiny_model("llama"))
    assert lens.model.tokenizer is None
    with pytest.raises(
        ValueError, match=r"came without a tokenizer; pass Lens\(model, tokenizer=\.\.\.\), or token ids"
    ):
        lens.record(["5 6 7"], progress=False)


def test_the_tokenizer_beside_the_weights_is_found(folder):
    lens = Lens(LlamaForCausalLM.from_pretrained(folder))
    assert lens.corpus(["5 6 7"]).sequences[0].tolist() == [5, 6, 7]


def test_a_tokenizer_given_wins_over_the_one_beside_the_weights(folder, tokenizer):
    assert Lens(LlamaForCausalLM.from_pretrained(folder), tokenizer).model.tokenizer is tokenizer


def test_weights_without_a_tokenizer_beside_them_are_wrapped(bare_folder):
    assert Lens(LlamaForCausalLM.from_pretrained(bare_folder)).model.tokenizer is None


@pytest.mark.parametrize("backend", ["huggingface", "transformer_lens"])
def test_a_folder_loads_in_either_library_with_the_same_numbers(folder, backend):
    lens = Lens(load(folder, backend=backend))
    found = lens.record(TOKENS, "resid_post.1", progress=False)[Site("resid_post", 1)]
    expected = Lens(tiny_model("llama", dtype=torch.float32)).record(TOKENS, "resid_post.1", progress=False)
    wanted = expected[Site("resid_post", 1)].gradients.second_moment()
    assert_close(found.gradients.second_moment(), wanted, 1e-5)
    assert lens.description.name == folder
    assert lens.corpus(["5 6 7"], prepend_bos=False).sequences[0].tolist() == [5, 6, 7]


@pytest.mark.parametrize("backend", ["huggingface", "transformer_lens"])
def test_a_loaded_model_has_the_dtype_asked_for_and_is_in_eval_mode(folder, backend):
    model = load(folder, backend=backend, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    assert model.description.dtype == "bfloat16"
    assert not model.module.training


def test_lens_loads_by_name(folder):
    lens = Lens.from_pretrained(folder, dtype="float64", progress=False)
    assert lens.description.dtype == "float64"
    assert repr(lens) == f"Lens({folder}, {lens.description.library}: 3 layers, d_model 32, 25 sites, 15 maps)"


def test_a_folder_without_a_tokenizer_loads_for_token_ids(bare_folder):
    """Checkpoints of a training loop often lie without one; token ids need none."""
    lens = Lens(load(str(bare_folder)))
    assert lens.record(TOKENS, progress=False)
    with pytest.raises(ValueError, match="came without a tokenizer"):
        lens.corpus(["5 6 7"])


def test_unknown_backend_names_those_there_are(folder):
    with pytest.raises(ValueError, match=r"backend 'jax' is not known; use one of huggingface, transformer_lens"):
        load(folder, backend="jax")


@pytest.mark.parametrize("dtype", ["f32", "Tensor", "nn", "int8"])
def test_unknown_dtype_names_those_there_are(folder, dtype):
    with pytest.raises(ValueError, match=rf"dtype '{dtype}' is not known; use .*float32, bfloat16, float16"):
        load(folder, dtype=dtype)


def test_a_folder_that_holds_no_model_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=rf"the folder {tmp_path} holds no config\.json, so it is no saved HuggingFace"
    ):
        load(str(tmp_path))


def test_a_folder_that_is_not_there_is_named():
    with pytest.raises(OSError, match="/nowhere/at/all"):
        load("/nowhere/at/all")


SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
}


def save(folder, class_name: str, **config) -> str:
    """Save a random tiny model of a class of transformers, and return its folder."""
    kind = getattr(transformers, class_name)
    kind(kind.config_class(**SHAPE | config)).save_pretrained(folder)
    return str(folder)


def forget_architectures(folder: str) -> None:
    """As checkpoints look that were saved without their class, for example by a training loop of one's own."""
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Camembert", "ModernBert", "EuroBert"])
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "by family"])
def test_a_masked_model_is_loaded_with_its_own_head(tmp_path, family, declared):
    if not hasattr(transformers, f"{family}ForMaskedLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    folder = save(tmp_path, f"{family}ForMaskedLM")
    if not declared:
        forget_architectures(folder)
    assert type(load(folder).module).__name__ == f"{family}ForMaskedLM"


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "GPTNeoXForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "by family"])
def test_a_causal_model_is_loaded_with_its_own_head(tmp_path, class_name, declared):
    folder = save(tmp_path, class_name)
    if not declared:
        forget_architectures(folder)
    assert type(load(folder).module).__name__ == class_name


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "by config"])
def test_a_bert_that_decodes_stays_causal(tmp_path, declared):
    folder = save(tmp_path, "BertLMHeadModel", is_decoder=True)
    if not declared:
        forget_architectures(folder)
    assert type(load(folder).module).__name__ == "BertLMHeadModel"


def test_a_pretraining_checkpoint_is_loaded_with_its_masked_head(tmp_path):
    """The first BERTs were saved with a second head, for the next sentence; it is left aside."""
    assert type(load(save(tmp_path, "BertForPreTraining")).module).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    "class_name", ["BertForMaskedLM", "CamembertForMaskedLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM"]
)
def test_no_tokenizer_is_made_up_where_none_was_saved(tmp_path, class_name):
    lens = Lens(load(save(tmp_path, class_name)))
    assert lens.model.tokenizer is None
    with pytest.raises(ValueError, match="came without a tokenizer"):
        lens.corpus(["5 6 7"])


@pytest.mark.parametrize("class_name", ["BertModel", "BertForSequenceClassification", "GPTNeoXModel"])
def test_a_checkpoint_without_a_head_is_not_given_a_random_one(tmp_path, class_name):
    folder = save(tmp_path, class_name)
    with pytest.raises(
        ValueError, match=rf"the checkpoint {folder} holds no .*would fill with random.*Lens\(model, tokenizer\)"
    ):
        load(folder)
