"""What the pages here run on: models with random weights, 2 layers, d_model 32, in float64. Nothing is downloaded.

The tokenizer knows the numbers 0 to 99 as words: 0 is padding, 1 begins a text, 2 ends it, 4 is the mask.
"""

import atexit
import logging
import os
import tempfile
import warnings

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 100
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM"),
}


def model(kind, attention="sdpa"):
    """A HuggingFace model of one of the kinds above; the same at every call."""
    config_class, model_class = KINDS[kind]
    sizes = SIZES | ({"pad_token_id": 1, "bos_token_id": 0} if kind == "roberta" else {})
    config = getattr(transformers, config_class)(**sizes, architectures=[model_class])
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, model_class)(config)
        _fill(made)
    return made.double().eval()


def tokenizer():
    """The numbers 0 to 99 as words. It is saved and loaded, since TransformerLens loads it again from where it came."""
    if not os.listdir(_FOLDER.name):
        words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="3"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"unk_token": "3", "bos_token": "1", "eos_token": "2", "pad_token": "0", "mask_token": "4"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(_FOLDER.name)
    return transformers.AutoTokenizer.from_pretrained(_FOLDER.name)


def bridge(model):
    """A TransformerBridge around a HuggingFace model."""
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(
        "tiny", hf_model=model, tokenizer=tokenizer(), device="cpu", dtype=torch.float64
    )


def hooked_transformer():
    """A HookedTransformer in the shape of GPT-2."""
    return _hooked("HookedTransformer", act_fn="gelu_new")


def hooked_encoder():
    """A HookedEncoder in the shape of BERT."""
    return _hooked("HookedEncoder", act_fn="gelu", attention_dir="bidirectional")


def loss(logits, tokens):
    """The summed next-token loss, in plain PyTorch."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def gradient_into(part, model, tokens):
    """The gradient of that loss at the tensor that goes into a part of a HuggingFace model, in plain PyTorch."""
    seen = []
    handle = part.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    total = loss(model(tokens).logits, tokens)
    handle.remove()
    return torch.autograd.grad(total, seen[0])[0]


def _hooked(class_name, **options):
    import transformer_lens

    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "d_mlp": 64, "n_ctx": 64, "d_vocab": WORDS}
    config = transformer_lens.HookedTransformerConfig(
        **sizes, **options, normalization_type="LN", dtype=torch.float64, device="cpu", seed=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(transformer_lens, class_name)(config, tokenizer())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _fill(made)
    return made.eval()


def _fill(made):
    """Random numbers everywhere, also where a new model has ones and zeros, so that every part matters."""
    for parameter in made.parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 0.3 * noise if parameter.ndim > 1 else parameter.data + 0.3 * noise


_FOLDER = tempfile.TemporaryDirectory()
atexit.register(_FOLDER.cleanup)
logging.getLogger("transformer_lens").setLevel(logging.ERROR)
logging.getLogger().setLevel(logging.ERROR)
