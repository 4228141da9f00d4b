"""Small models shared by the tests: random weights, real architectures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# Tiny models: two threads that wait for one another cost more than they bring, and on a busy machine much more.
torch.set_num_threads(1)

FAMILIES = ("gpt_neox", "gpt_neox_sequential", "llama", "gpt2")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A saved tokenizer of 100 words, the numbers 0 to 99; 1 is both beginning and end of text."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(100)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", bos_token="1", eos_token="1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def tiny_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, layers: int = 3, **changes):
    """A random model of 3 layers, d_model 32, 4 heads, vocabulary 100, whose every part matters."""
    shape = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "gpt_neox":
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape | changes))
        elif family == "gpt_neox_sequential":
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape | {"use_parallel_residual": False} | changes))
        elif family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape | {"num_key_value_heads": 2} | changes))
        elif family == "gpt2":
            own = {"vocab_size": 100, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64}
            model = GPT2LMHeadModel(GPT2Config(**own | changes))
        else:
            raise ValueError(family)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.data = 0.3 * noise if parameter.ndim > 1 else parameter.data + 0.1 * noise
    model.config.architectures = [type(model).__name__]
    return model.to(dtype).eval()


def boot_bridge(model, tokenizer):
    """A TransformerBridge around a model; it edits the model in place."""
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(
        "tiny", hf_model=model, tokenizer=tokenizer, device="cpu", dtype=model.dtype
    )


@pytest.fixture(scope="session")
def report():
    """A report of a tiny model, for the tests of its views."""
    import tangent_lens as tln

    lens = tln.Lens(tiny_model("llama"), name="[tiny] model", revision="step7")
    sequences = np.random.default_rng(0).integers(0, 100, size=(24, 12)).tolist()
    return lens.measure(sequences, "resid_post.*", rank=3, controls=20, seed=4, progress=False, name="numbers")
