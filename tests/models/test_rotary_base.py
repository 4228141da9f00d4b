"""The base of rotary positions is the same in every environment that reads a folder, or the model is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tangent_lens import Lens
from tangent_lens.models.protocol import UnsupportedModel
from tangent_lens.models.rotary_base import write_rotary_base

TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
WRITTEN_BY_5 = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, **TINY}


def written(folder, config=WRITTEN_BY_5):
    """A folder with this config."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inverse_frequencies(config):
    """The angles that a model of this config turns by."""
    return LlamaForCausalLM(config).model.rotary_emb.inv_freq


def test_both_versions_turn_by_the_written_base(tmp_path):
    write_rotary_base(written(tmp_path))
    expected = 500.0 ** (-torch.arange(0, 8, 2).float() / 8)
    torch.testing.assert_close(inverse_frequencies(LlamaConfig.from_pretrained(tmp_path)), expected)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 9.0}},
        {},
        {"rope_parameters": {"full": {"rope_theta": 9.0}}},
    ],
)
def test_nothing_is_written_over_or_invented(tmp_path, config):
    write_rotary_base(written(tmp_path, config))
    assert json.loads((tmp_path / "config.json").read_text()) == config


def test_a_lost_base_is_refused_with_both_values_and_the_way_out(tmp_path):
    config = LlamaConfig.from_pretrained(written(tmp_path))
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    model = LlamaForCausalLM(config)
    # What transformers 4 leaves behind when it reads such a folder.
    config.rope_theta = 10000.0
    with pytest.raises(
        UnsupportedModel, match=r"rope_theta 500, and the model turns with rope_theta 10000.*transformers 5"
    ):
        Lens(model)


def test_a_folder_of_version_5_is_measured_rightly_or_not_at_all(tmp_path):
    config = LlamaConfig.from_pretrained(written(tmp_path))
    model = LlamaForCausalLM(config)
    kept = torch.allclose(model.model.rotary_emb.inv_freq[1], torch.tensor(500.0**-0.25))
    try:
        Lens(model)
        assert kept
    except UnsupportedModel:
        assert not kept
