"""What is read of attention, held against what each library itself computes: every family in every library here.

What goes wrong in one place must not be hidden by the same error in another: queries, keys and masks are read of padded
batches, and the patterns and scores they must explain come from single sequences without padding.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conformance.backends import Hosted, NotOffered, backends_here, host, tokenizer
from conformance.batching import lay_out
from conformance.families import FAMILIES, LAYERS, NotInThisVersion, examples_of, tiny_model
from model_snapshot import Snapshot
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tangent_lens.measures.attention_parts import FrozenNorm, SplitLinear, apply_frozen_norm, apply_rotary, split_rows
from tangent_lens.models.attention import AttentionCall, AttentionReader, AttentionWeights, attention_reader
from tangent_lens.models.loading import wrap
from tangent_lens.models.protocol import Batch, UnsupportedModel

BACKENDS = backends_here()
CELLS = [(family, backend) for family in FAMILIES for backend in BACKENDS]
CELLS = [(family, backend) for family, backend in CELLS if backend != "hooked_encoder" or family == "bert"]
# A family each for the rest: fused, grouped, normed and sliding, encoders.
SOME = [cell for cell in CELLS if cell[0] in ("gpt2", "gpt_neox", "qwen3", "gemma2", "bert")]
TRANSFORMERS_4 = transformers.__version__.startswith("4.")
BY_THEMSELVES = ("bert", "roberta", "camembert", "modernbert", "olmoe")
QUERY_NORMED = ("qwen3", "gemma3", "olmo2", "qwen3_moe", "olmoe")
NO_NORM = ("olmo2", "bert", "roberta", "camembert")
LENGTHS = (9, 12, 5)


@dataclass
class Read:
    """A model in a library, and how its attention is read."""

    family: str
    backend: str
    host: Any
    model: Any
    reader: AttentionReader

    def calls(self, batch: Batch, layers=range(LAYERS)) -> list[AttentionCall]:
        found: list[AttentionCall] = []
        with torch.no_grad(), self.reader.watching(layers, found.append):
            self.reader.run(batch)
        return found


@pytest.fixture(autouse=True, scope="module")
def unclipped():
    """OLMo clips nothing here; where it does it is refused."""
    with mock.patch.dict(FAMILIES, olmo=with_options("olmo", clip_qkv=30.0)):
        yield


def with_options(family, **options):
    return replace(FAMILIES[family], options=FAMILIES[family].options | options)


@lru_cache(maxsize=2)
def read_of(family, backend) -> Read:
    try:
        return read_afresh(family, backend)
    except NotOffered as reason:
        pytest.skip(str(reason))


def read_afresh(family, backend):
    if backend == "huggingface" and TRANSFORMERS_4 and family in BY_THEMSELVES:
        pytest.skip("refused; see below")
    try:
        hosted = host(family, backend)
    except NotOffered:
        hosted = host(family, backend, torch.float32)
    model = wrap(hosted.model)
    return Read(family, backend, hosted, model, attention_reader(model))


def tolerance(read):
    wide = next(read.host.model.parameters()).dtype == torch.float64
    return 1e-10 if FAMILIES[read.family].exact and wide else 3e-5


def difference(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


@dataclass
class Own:
    """What the library says of one layer and sequence."""

    pattern: torch.Tensor
    scores: torch.Tensor | None


def own_numbers(read, example) -> list[Own]:
    """Patterns and scores of one sequence without padding; of plain HuggingFace where the library shows none."""
    blocks = getattr(read.host.model, "blocks", None)
    kept: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    for layer in range(LAYERS if blocks is not None else 0):
        for name in ("hook_pattern", "hook_attn_scores"):

            def keep(module, args, output, place=(layer, name)):
                kept[place] = output.clone()

            handles.append(getattr(blocks[layer].attn, name).register_forward_hook(keep))
    with torch.no_grad():
        read.host.logits(example.tokens[None], None, torch.arange(len(example.tokens))[None])
    for handle in handles:
        handle.remove()
    if not kept:
        return [Own(pattern, None) for pattern in plain_patterns(read.family, example)]
    return [own_of(kept[layer, "hook_pattern"], kept[layer, "hook_attn_scores"]) for layer in range(LAYERS)]


def own_of(pattern, scores):
    return Own(pattern, None if torch.equal(pattern, scores) else scores)


def plain_patterns(family, example):
    model = tiny_model(family)
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        return model(input_ids=example.tokens[None], output_attentions=True).attentions


def parts_of(call: AttentionCall, weights: AttentionWeights, kind):
    """Centre, tangent and normal part about an arbitrary centre and plane, through everything up to the score."""
    generator = torch.Generator().manual_seed(call.layer)
    width = call.rows.shape[-1]
    basis = torch.linalg.qr(torch.randn(width, 4, generator=generator, dtype=torch.float64))[0]
    centre = torch.randn(width, generator=generator, dtype=torch.float64)
    weight, bias, norm = (getattr(weights, f"{kind}_{part}") for part in ("weight", "bias", "norm"))
    linear = SplitLinear.of(
        weight,
        weights.heads if kind == "query" else weights.kv_heads,
        centre,
        basis,
        bias=bias,
        norm=None if weights.norm is None else FrozenNorm(**vars(weights.norm)),
        dtype=call.rows.dtype,
    )
    parts = linear.parts(split_rows(call.rows, centre, basis), call.row_scale)
    if norm is not None:
        parts = apply_frozen_norm(parts, getattr(call, f"{kind}_scale"), weight=norm.weight, bias=norm.bias)
    if call.cos is not None:
        parts = apply_rotary(parts, call.cos, call.sin, call.cos.shape[-1], interleaved=weights.interleaved)
    return parts


def scores_of(call: AttentionCall):
    """Spelled out: every query head with the key head of its group."""
    group = call.query.shape[1] // call.key.shape[1]
    heads = [call.query[:, head] @ call.key[:, head // group].transpose(1, 2) for head in range(call.query.shape[1])]
    scores = call.scaling * torch.stack(heads, dim=1)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if call.bias is None else scores + call.bias


def assert_explains(scores, allowed, own: Own, limit):
    """Scores of one sequence make its pattern (some softmaxes are in float32), and are the library's own where shown."""
    seen = own.pattern > 0
    assert torch.equal(allowed.expand_as(seen), seen)
    if own.scores is not None:
        assert difference(scores[seen], own.scores[seen]) < limit
    logarithms = own.pattern.double().log()
    gap = torch.where(seen, scores - logarithms, 0.0)
    gap = gap - gap.sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True)
    assert float(gap[seen].abs().max()) < max(limit, 3e-5) * max(1.0, float(scores[seen].abs().max()))


def assert_right(read: Read, side: str):
    examples = examples_of(read.family, LENGTHS)
    layout = lay_out(examples, side)
    own = [own_numbers(read, example) for example in examples]
    calls = [read.calls(batch) for batch in layout.batches]
    assert [call.layer for batch in calls for call in batch] == [*range(LAYERS)] * len(layout.batches)
    for call in (call for batch in calls for call in batch):
        weights = read.reader.weights(call.layer)
        for kind in ("query", "key"):
            assert difference(parts_of(call, weights, kind).sum(dim=0), getattr(call, kind)) < tolerance(read)
    for index, (batch, row, columns) in enumerate(layout.spans):
        for call, numbers in zip(calls[batch], own[index], strict=True):
            scores, allowed = scores_of(call)[row, :, columns, columns], call.allowed[row, :, columns, columns]
            # TransformerLens shifts each row's ALiBi by how much longer a sequence came before.
            shown = None if numbers.scores is None or call.bias is not None else numbers.scores[0]
            assert_explains(scores, allowed, Own(numbers.pattern[0], shown), tolerance(read))
            assert int(call.allowed[row, :, columns].sum()) == int(allowed.sum()), "real queries look at no padding"


@pytest.fixture(scope="class", params=CELLS, ids="-".join)
def read(request):
    return read_of(*request.param)


class TestEveryFamilyInEveryLibrary:
    def test_parts_scores_and_masks_are_the_models_own(self, read):
        own_numbers(read, examples_of(read.family)[0])  # at its first pass a bridge sets up hooks of its own
        before = Snapshot.of(read.host.model)
        assert_right(read, "alone" if refuses_nan(read, "right") else "right")
        before.assert_unchanged(read.host.model)

    def test_left_padding(self, read):
        if "left" in read.model.padding_sides and not refuses_nan(read, "left"):
            assert_right(read, "left")

    def test_weights_say_what_there_is(self, read):
        config = tiny_model(read.family).config
        (batch,) = lay_out(examples_of(read.family, LENGTHS), "right").batches
        weights, (call, *_) = read.reader.weights(0), read.calls(batch, [0])
        heads = config.num_attention_heads
        assert (weights.heads, weights.kv_heads) == (heads, getattr(config, "num_key_value_heads", None) or heads)
        assert (call.query.shape[1], call.key.shape[1]) == (weights.heads, weights.kv_heads)
        assert (weights.query_norm is not None) == (weights.key_norm is not None) == (read.family in QUERY_NORMED)
        width = getattr(config, "query_pre_attn_scalar", None) or call.query.shape[-1]
        assert call.scaling == pytest.approx(width**-0.5)
        assert call.softcap == getattr(config, "attn_logit_softcapping", None)
        assert (call.cos is not None) == FAMILIES[read.family].rotary

    def test_norms_folded_or_not(self, read):
        norm = read.reader.weights(1).norm
        assert (norm is None) == (read.family in NO_NORM)
        if norm is not None and read.family != "olmo":
            folded = norm.weight is None or float(norm.weight.std()) == 0
            processed = "norms folded" in read.model.description.weights or read.backend == "bridge_compatibility"
            assert folded == processed


def refuses_nan(read, side):
    """Whether the sentence comes, and if so, whether the library's own logits are NaN."""
    (batch,) = lay_out(examples_of(read.family, LENGTHS), side).batches
    try:
        read.calls(batch)
    except UnsupportedModel as refusal:
        assert "NaN" in str(refusal) and "batch_size=1" in str(refusal)
        with torch.no_grad():
            logits = read.host.logits(batch.tokens, batch.attention_mask, batch.positions)
        assert bool(logits[batch.attention_mask].isnan().any())
        return True
    return False


@pytest.mark.parametrize(("family", "backend"), SOME)
def test_bfloat16_is_read_too(family, backend):
    if backend == "huggingface" and TRANSFORMERS_4 and family in BY_THEMSELVES:
        pytest.skip("refused; see below")
    with unoffered_skips():
        hosted = host(family, backend, torch.bfloat16)
    read = Read(family, backend, hosted, wrap(hosted.model), attention_reader(wrap(hosted.model)))
    calls = read.calls(lay_out(examples_of(family, LENGTHS), "right").batches[0])
    for call in calls:
        parts = parts_of(call, read.reader.weights(call.layer), "query")
        assert difference(parts.float().sum(dim=0), call.query.float()) < 0.05


@contextlib.contextmanager
def unoffered_skips():
    try:
        yield
    except NotOffered as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("backend", BACKENDS)
def test_some_layers_in_any_order(backend):
    read = read_of("bert" if backend == "hooked_encoder" else "gpt2", backend)
    (batch,) = lay_out(examples_of(read.family, LENGTHS), "right").batches
    assert [call.layer for call in read.calls(batch, [2, 0])] == [0, 2]


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one != "hooked_encoder"])
@pytest.mark.parametrize("options", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}])
def test_scaling_options_of_gpt2(backend, options, monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpt2", with_options("gpt2", **options))
    assert_right(read_afresh("gpt2", backend), "right")


@pytest.mark.parametrize("backend", [one for one in BACKENDS if one != "hooked_encoder"])
def test_a_model_that_clips_is_refused_where_it_clips(backend, monkeypatch):
    monkeypatch.setitem(FAMILIES, "olmo", with_options("olmo", clip_qkv=3.0))
    with unoffered_skips():
        read = read_afresh("olmo", backend)
    with pytest.raises(UnsupportedModel, match=r"clip_qkv = 3, and here they reach \d"):
        read.calls(lay_out(examples_of("olmo"), "right").batches[0])


class TestHuggingFace:
    def test_implementation_and_registries_come_back(self):
        read = read_of("llama", "huggingface")
        config = read.host.model.config
        before = (config._attn_implementation, dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS))
        (batch,) = lay_out(examples_of("llama"), "right").batches
        read.calls(batch)
        with pytest.raises(ZeroDivisionError), read.reader.watching([0], lambda call: 1 / 0):  # type: ignore[arg-type]
            read.reader.run(batch)
        after = (config._attn_implementation, dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS))
        assert after == before

    def test_a_call_that_never_comes_is_an_error(self):
        model = tiny_model("llama")
        attention = model.model.layers[1].self_attn
        attention.forward = lambda hidden_states, **others: (hidden_states, None)
        reader = attention_reader(wrap(model))
        (batch,) = lay_out(examples_of("llama"), "right").batches
        with (
            pytest.raises(UnsupportedModel, match="layer 1 ran without handing"),
            reader.watching([0, 1], lambda call: None),
        ):
            reader.run(batch)

    @pytest.mark.parametrize("family", BY_THEMSELVES)
    def test_families_that_transformers_4_computes_by_itself(self, family):
        try:
            model = wrap(tiny_model(family))
        except NotInThisVersion as reason:
            pytest.skip(str(reason))
        if TRANSFORMERS_4:
            with pytest.raises(
                UnsupportedModel, match=r"transformers 4\..* computes its scores by itself.*transformers 5"
            ):
                attention_reader(model)
        else:
            attention_reader(model)


LENS_BACKENDS = [one for one in BACKENDS if one not in ("huggingface", "nnsight", "hooked_encoder")]


class TestTransformerLens:
    @pytest.mark.parametrize("backend", LENS_BACKENDS)
    @pytest.mark.parametrize("mode", ["use_split_qkv_input", "use_attn_in"])
    def test_split_inputs_are_refused(self, backend, mode):
        read = read_afresh("llama", backend)
        setattr(read.host.model.cfg, mode, True)
        with pytest.raises(UnsupportedModel, match=rf"with {mode} every head .* model.set_{mode}\(False\)"):
            read.calls(lay_out(examples_of("llama"), "right").batches[0])

    @pytest.mark.parametrize("backend", LENS_BACKENDS)
    @pytest.mark.parametrize("place", ["hook_k", "hook_rot_q", "hook_attn_scores"])
    def test_hooks_of_the_person_that_change_what_is_split_are_noticed(self, backend, place):
        read = read_afresh("llama", backend)
        model = read.host.model
        names = [name for name in model.hook_dict if name.endswith(f".1.attn.{place}")]
        if not names:
            names = ["blocks.1.attn.k.hook_out"]
        model.add_hook(names[0], lambda tensor, hook: tensor * 1.5)
        (batch,) = lay_out(examples_of("llama"), "right").batches
        with pytest.raises(UnsupportedModel, match=r"of layer 1 are not .*model\.reset_hooks\(\)\)"):
            read.calls(batch)
        model.reset_hooks()
        assert len(read.calls(batch)) == LAYERS

    @pytest.mark.skipif("hooked_transformer" not in BACKENDS, reason="this TransformerLens has no HookedTransformer")
    @pytest.mark.parametrize(
        "options",
        [
            {"positional_embedding_type": "alibi"},
            {"positional_embedding_type": "rotary", "rotary_dim": 4},
            {"positional_embedding_type": "rotary", "rotary_dim": 8, "rotary_adjacent_pairs": True},
            {"use_attn_scale": False},
            {"normalization_type": None},
            {"n_key_value_heads": 2, "ungroup_grouped_query_attention": True},
        ],
    )
    def test_options_of_no_family(self, options):
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        shape = {"n_layers": LAYERS, "d_model": 32, "n_ctx": 64, "d_head": 8, "d_vocab": 100, "act_fn": "gelu"}
        torch.manual_seed(0)
        config = HookedTransformerConfig(**shape, **options, dtype=torch.float64, init_weights=True, seed=0)
        model = HookedTransformer(config, tokenizer())
        for parameter in model.parameters():
            parameter.data = 0.1 * torch.randn_like(parameter) + (parameter.data if parameter.ndim == 1 else 0)

        def logits(tokens, mask, places):
            return model(tokens, return_type="logits")

        read = Read("gpt2", "hooked_transformer", Hosted(model, logits), wrap(model), attention_reader(wrap(model)))
        assert_right(read, "right")
        call = read.calls(lay_out(examples_of("gpt2"), "right").batches[0])[0]
        assert (call.bias is not None) == (options.get("positional_embedding_type") == "alibi")

    @pytest.mark.skipif("hooked_encoder" not in BACKENDS, reason="this TransformerLens has no HookedEncoder")
    def test_an_encoder_refuses_left_padding(self):
        read = read_of("bert", "hooked_encoder")
        with pytest.raises(ValueError, match="pad it on the right"):
            read.calls(lay_out(examples_of("bert"), "left").batches[0])


def test_modules_have_no_scores():
    from tangent_lens.lens import Lens

    lens = Lens(torch.nn.Sequential(torch.nn.Linear(4, 4)), sites={"middle": "0"})
    with pytest.raises(UnsupportedModel, match="cannot be split yet"):
        attention_reader(lens.model)
