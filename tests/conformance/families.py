"""Tiny random models of every family: 3 layers, d_model 32, 4 heads, vocabulary 100, every part of which matters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS = 3, 32, 4, 100, 64
SEQUENCE_LENGTHS = (9, 12, 5, 2)
# Ids below are special in the configs of masked models; the mask itself is one of them.
FIRST_WORD, MASK = 5, 4

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 2}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_OWN_HEAD_WIDTH = _GROUPED | {"head_dim": 12, "sliding_window": 4, "layer_types": _LAYER_TYPES}
# Gemma divides the scores by the root of query_pre_attn_scalar, here not the width of a head.
_GEMMA = _OWN_HEAD_WIDTH | {"query_pre_attn_scalar": 20}


class NotInThisVersion(Exception):
    """A family that the installed transformers does not know."""


@dataclass(frozen=True)
class Family:
    """How to make a tiny model of one family.

    Attributes:
        name: what the table calls it.
        classes: prefix of the classes in transformers: ``Llama`` for ``LlamaConfig``, ``LlamaForCausalLM``.
        options: what goes into its config.
        objective: ``causal`` or ``masked``.
        eager: softcaps exist in eager attention only.
        exact: whether transformers computes it in float64 throughout. Otherwise its norms (in ModernBERT the rotated queries
            and keys; a softmax or a router here and there) go through float32 whatever the dtype, and two programs that add
            in another order differ by float32's rounding.
        rotary: angles are computed in float32 by transformers; a library that computes them in float64 differs by that.
    """

    name: str
    classes: str
    options: dict[str, Any] = field(hash=False)
    objective: str = "causal"
    eager: bool = False
    exact: bool = False
    rotary: bool = True
    head: str = ""
    config_class: str = ""

    @property
    def model_class(self) -> str:
        """Name of the class with the language-model head."""
        return self.classes + (self.head or {"causal": "ForCausalLM", "masked": "ForMaskedLM"}[self.objective])

    @property
    def first_word(self) -> int:
        """Masked models give the first ids a meaning of their own (RoBERTa counts positions by the padding id)."""
        return FIRST_WORD if self.objective == "masked" else 0


_CAUSAL = (
    Family(
        "gpt2",
        "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS},
        head="LMHeadModel",
        exact=True,
        rotary=False,
    ),
    Family("gpt_neox", "GPTNeoX", _SHAPE, exact=True),
    Family("gpt_neox_sequential", "GPTNeoX", _SHAPE | {"use_parallel_residual": False}, exact=True),
    Family("llama", "Llama", _GROUPED),
    Family("llama_tied", "Llama", _GROUPED | {"tie_word_embeddings": True}),
    Family("mistral", "Mistral", _GROUPED | {"sliding_window": 4}),
    Family("qwen2", "Qwen2", _GROUPED),
    Family("qwen3", "Qwen3", _GROUPED | {"head_dim": 12}),
    Family("gemma", "Gemma", _GROUPED | {"head_dim": 12}),
    Family("gemma2", "Gemma2", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}, eager=True),
    Family("gemma3", "Gemma3", _GEMMA, config_class="Gemma3TextConfig"),
    Family("olmo", "Olmo", _SHAPE | {"clip_qkv": 3.0}),
    Family("olmo2", "Olmo2", _SHAPE),
    Family("mixtral", "Mixtral", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12},
    ),
    Family("olmoe", "Olmoe", _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("phi3", "Phi3", _GROUPED),
)
_BERT = _SHAPE | {"type_vocab_size": 2}
_MASKED = (
    Family("bert", "Bert", _BERT, "masked", exact=True, rotary=False),
    Family("roberta", "Roberta", _BERT | {"pad_token_id": 1, "bos_token_id": 0}, "masked", exact=True, rotary=False),
    Family(
        "camembert", "Camembert", _BERT | {"pad_token_id": 1, "bos_token_id": 0}, "masked", exact=True, rotary=False
    ),
    Family(
        "modernbert",
        "ModernBert",
        _SHAPE
        | {
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "reference_compile": False,
        },
        "masked",
    ),
    Family("eurobert", "EuroBert", _GROUPED, "masked"),
)
FAMILIES = {family.name: family for family in (*_CAUSAL, *_MASKED)}


def tiny_model(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """The same random model at every call, in evaluation mode.

    Raises:
        NotInThisVersion: transformers here has no such family.
    """
    family = FAMILIES[name]
    config_class = family.config_class or f"{family.classes}Config"
    if not hasattr(transformers, family.model_class) or not hasattr(transformers, config_class):
        raise NotInThisVersion(f"transformers {transformers.__version__} has no {family.model_class}")
    config = getattr(transformers, config_class)(**family.options)
    model_class = getattr(transformers, family.model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, **({"attn_implementation": "eager"} if family.eager else {}))
        if hasattr(config, "_experts_implementation"):
            # The grouped matrix product that transformers 5 takes by default has no float64.
            model.config._experts_implementation = "eager"
        _randomise(model)
    model.config.architectures = [family.model_class]
    return model.to(dtype).eval()


def _randomise(model: Any) -> None:
    """Matrices are drawn anew; norms and biases move away from the 0 or 1 that would hide an error in them.

    bfloat16 values, so that the model in bfloat16 and the one in float64 are the same.
    """
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        fresh = 0.3 * noise if parameter.ndim > 1 else parameter.data + 0.1 * noise
        parameter.data = fresh.bfloat16().to(parameter.dtype)


@dataclass(frozen=True)
class Example:
    """One sequence: what the model reads, and what it should say at each position (-100: nothing)."""

    tokens: torch.Tensor
    targets: torch.Tensor


def examples_of(name: str, lengths: tuple[int, ...] = SEQUENCE_LENGTHS, seed: int = 0) -> list[Example]:
    """Random sequences of these lengths, with targets for the family's objective."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(seed)
    drawn = [torch.randint(family.first_word, VOCABULARY, (length,), generator=generator) for length in lengths]
    if family.objective == "causal":
        return [Example(tokens, torch.cat([tokens[1:], torch.tensor([-100])])) for tokens in drawn]
    return [_corrupted(tokens, generator) for tokens in drawn]


def _corrupted(tokens: torch.Tensor, generator: torch.Generator) -> Example:
    """About a third of the positions (at least one) must be guessed: most behind the mask, one left as it is."""
    count = max(1, len(tokens) // 3)
    chosen = torch.randperm(len(tokens), generator=generator)[:count]
    targets, inputs = torch.full_like(tokens, -100), tokens.clone()
    targets[chosen] = tokens[chosen]
    inputs[chosen[: max(1, count - 1)]] = MASK
    return Example(inputs, targets)
