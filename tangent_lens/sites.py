"""Sites: named places in a transformer where a (batch, position, width) tensor passes.

A person writes ``resid_post.3``, ``resid_post.*``, ``query.0:4`` or a TransformerLens name such as
``blocks.3.hook_resid_post``; the builders ``resid_post(3, 4)`` and ``resid_post()`` (all layers) say the same.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# In the order in which a forward pass meets them inside one layer.
LAYER_KINDS = (
    "resid_pre",
    "attention_input",
    "query",
    "key",
    "value",
    "resid_mid",
    "mlp_input",
    "resid_post",
)
KINDS = ("embedding", *LAYER_KINDS)
# A place in a module that is no transformer known here; the person gives it its name.
NAMED = "named"

_TRANSFORMER_LENS_NAMES = {
    "hook_resid_pre": "resid_pre",
    "hook_in": "resid_pre",
    "ln1.hook_out": "attention_input",
    "attn.q.hook_in": "attention_input",
    "attn.hook_q": "query",
    "attn.q.hook_out": "query",
    "attn.hook_k": "key",
    "attn.k.hook_out": "key",
    "attn.hook_v": "value",
    "attn.v.hook_out": "value",
    "hook_resid_mid": "resid_mid",
    "ln2.hook_out": "mlp_input",
    "mlp.hook_in": "mlp_input",
    "mlp.in.hook_in": "mlp_input",
    "hook_resid_post": "resid_post",
    "hook_out": "resid_post",
}
# Names whose meaning depends on the version or the options of TransformerLens: refused, with the name to use.
_AMBIGUOUS_NAMES = {
    "ln1.hook_normalized": "attention_input",
    "ln2.hook_normalized": "mlp_input",
    "hook_attn_in": "resid_pre",
    "hook_mlp_in": "resid_mid",
}


@dataclass(frozen=True)
class Site:
    """One place in one model: a kind and, except for ``embedding``, a layer counted from 0.

    In a module of unknown structure, kind is ``named`` and ``label`` is the name the person gave the place.
    """

    kind: str
    layer: int | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if (self.kind == NAMED) != bool(self.label):
            raise ValueError(f"{self.kind!r} with label {self.label!r}: named sites have a label, and only they")
        if self.kind == NAMED:
            return
        _check_kind(self.kind)
        if (self.layer is None) != (self.kind == "embedding"):
            raise ValueError(f"{self.kind!r} with layer {self.layer}: every kind but embedding has a layer")

    @property
    def name(self) -> str:
        """``resid_post.3``, ``embedding``, or the label of a named site."""
        if self.label:
            return self.label
        return self.kind if self.layer is None else f"{self.kind}.{self.layer}"

    @property
    def order(self) -> tuple[int, int]:
        """Sorts sites as a forward pass meets them."""
        return (-1 if self.layer is None else self.layer, 0 if self.label else KINDS.index(self.kind))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SitePattern:
    """Sites still to be looked up in a model: a kind and its layers; ``layers=None`` means all of them.

    Negative layers count from the last one; a slice keeps its Python meaning.
    """

    kind: str
    layers: tuple[int, ...] | slice | None = None

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if self.kind == "embedding" and self.layers is not None:
            raise ValueError(f"embedding has no layers, {self.layers} was asked; write just embedding")

    def __str__(self) -> str:
        if self.kind == "embedding":
            return self.kind
        if self.layers is None:
            return f"{self.kind}.*"
        if isinstance(self.layers, slice):
            start, stop = (("" if bound is None else bound) for bound in (self.layers.start, self.layers.stop))
            return f"{self.kind}.{start}:{stop}"
        return ", ".join(f"{self.kind}.{layer}" for layer in self.layers)


SiteSelection = str | Site | SitePattern | Iterable["str | Site | SitePattern"]


def _builder(kind: str, meaning: str) -> Callable[..., SitePattern]:
    def build(*layers: int) -> SitePattern:
        return SitePattern(kind, layers or None)

    build.__name__ = kind
    build.__qualname__ = kind
    build.__doc__ = f"{meaning}, at these layers, or at all of them when none is given."
    return build


resid_pre = _builder("resid_pre", "The residual stream entering a block (batch, position, d_model)")
resid_mid = _builder("resid_mid", "The residual stream between attention and MLP (batch, position, d_model)")
resid_post = _builder("resid_post", "The residual stream leaving a block (batch, position, d_model)")
attention_input = _builder("attention_input", "What the query, key and value maps read, after the norm")
mlp_input = _builder("mlp_input", "What the MLP's first maps read, after the norm")
query = _builder("query", "Queries of all heads side by side (batch, position, heads * d_head), before any rotation")
key = _builder("key", "Keys of all heads side by side (batch, position, heads * d_head), before any rotation")
value = _builder("value", "Values of all heads side by side (batch, position, heads * d_head)")


def embedding() -> SitePattern:
    """The token embedding, before any position embedding (batch, position, d_model)."""
    return SitePattern("embedding")


def parse(text: str) -> SitePattern:
    """Read ``resid_post.3``, ``resid_post.-1``, ``resid_post.*``, ``resid_post.0:6`` or a TransformerLens name.

    Raises:
        ValueError: the text names no site; the sentence offers the nearest names.
    """
    text = text.strip()
    if text in ("embedding", "hook_embed", "embed.hook_out"):
        return SitePattern("embedding")
    transformer_lens = re.fullmatch(r"blocks\.(\d+|\*)\.(.+)", text)
    if transformer_lens:
        return SitePattern(_kind_of_hook(text, transformer_lens[2]), _parse_layers(text, transformer_lens[1]))
    kind, _, layers = text.partition(".")
    if kind in LAYER_KINDS:
        return SitePattern(kind, _parse_layers(text, layers or "*"))
    near = difflib.get_close_matches(kind, KINDS, n=2, cutoff=0.5) or list(KINDS)
    raise ValueError(
        f"{text!r} names no site; did you mean {_listed(near)}? Write for example resid_post.3 or resid_post.*"
    )


def resolve(
    selection: SiteSelection,
    available: Sequence[Site],
    absent: Mapping[str, str] | None = None,
    misleading_names: Mapping[str, str] | None = None,
) -> tuple[Site, ...]:
    """The sites of a model that a selection names, each once, in the order of the forward pass.

    Args:
        selection: a name, names between commas (``resid_post.4,14,query.0:2``), a Site, a pattern, or any iterable of these.
        available: every site that the model has.
        absent: for kinds, or single sites, that the model lacks, the reason in a sentence.
        misleading_names: TransformerLens names that mean another tensor in this model, and what to write instead.

    Raises:
        ValueError: nothing selected, a name that would mislead, or a layer or kind that the model does not have (with the
            nearest names).
    """
    parts = [selection] if isinstance(selection, (str, Site, SitePattern)) else list(selection)
    words = [word for part in parts for word in (_words(part) if isinstance(part, str) else [part])]
    named = {site.label: site for site in available if site.label}
    found: set[Site] = set()
    for word in words:
        if named:
            found.update(_named(word, named))
            continue
        if isinstance(word, str):
            _refuse_misleading(word, misleading_names or {})
            word = parse(word)
        elif isinstance(word, Site):
            word = SitePattern(word.kind, None if word.layer is None else (word.layer,))
        found.update(_matches(word, available, absent or {}))
    if not found:
        raise ValueError("no site selected; name at least one, for example resid_post.*")
    return tuple(site for site in available if site in found)


def _words(text: str) -> list[str]:
    """What stands between commas; a layer alone is of the kind before it: ``resid_post.4,14``."""
    found: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        bare = re.fullmatch(r"-?\d+|(-?\d+)?:(-?\d+)?", word)
        kind = found[-1].rpartition(".")[0] if bare and found else ""
        found.append(f"{kind}.{word}" if kind in LAYER_KINDS else word)
    return found


def _named(word: str | Site | SitePattern, named: Mapping[str, Site]) -> list[Site]:
    name = str(word).strip()
    if name == "*":
        return list(named.values())
    if name not in named:
        raise ValueError(f"{name!r} is no site of this module; the sites you named: {_listed(list(named))}")
    return [named[name]]


def _refuse_misleading(name: str, misleading_names: Mapping[str, str]) -> None:
    hook = re.fullmatch(r"blocks\.(\d+|\*)\.(.+)", name.strip())
    if hook and hook[2] in misleading_names:
        raise ValueError(f"{name!r}: {misleading_names[hook[2]]}")


def _matches(pattern: SitePattern, available: Sequence[Site], absent: Mapping[str, str]) -> list[Site]:
    of_kind = [site for site in available if site.kind == pattern.kind]
    if not of_kind:
        reason = absent.get(pattern.kind, "its structure offers no such place")
        kinds = sorted({site.kind for site in available}, key=KINDS.index)
        raise ValueError(f"this model has no {pattern.kind}: {reason}. It has {_listed(kinds)}")
    if pattern.layers is None:
        return of_kind
    if isinstance(pattern.layers, slice):
        # Layers of the model, also those that lack this kind.
        depth = 1 + max(site.layer for site in available if site.layer is not None)
        wanted = range(depth)[pattern.layers]
        chosen = [site for site in of_kind if site.layer in wanted]
        if not chosen:
            raise ValueError(f"{pattern} selects no layer of this model, which has {_layer_range(of_kind)}")
        return chosen
    return [_at_layer(pattern.kind, layer, of_kind, absent) for layer in pattern.layers]


def _at_layer(kind: str, layer: int, of_kind: Sequence[Site], absent: Mapping[str, str]) -> Site:
    by_layer = {site.layer: site for site in of_kind}
    wanted = layer if layer >= 0 else layer + 1 + max(known for known in by_layer if known is not None)
    if wanted in by_layer:
        return by_layer[wanted]
    if f"{kind}.{wanted}" in absent:
        raise ValueError(f"this model has no {kind}.{wanted}: {absent[f'{kind}.{wanted}']}")
    nearest = sorted(of_kind, key=lambda site: abs((site.layer or 0) - wanted))[:2]
    raise ValueError(
        f"{kind}.{layer} is not in this model, which has {_layer_range(of_kind)}; "
        f"the nearest: {_listed([site.name for site in nearest])}"
    )


def _layer_range(of_kind: Sequence[Site]) -> str:
    layers = [site.layer for site in of_kind if site.layer is not None]
    return f"{len(layers)} layers, {min(layers)} to {max(layers)}"


def _kind_of_hook(text: str, hook: str) -> str:
    if hook in _AMBIGUOUS_NAMES:
        raise ValueError(
            f"{text!r} is another tensor in another version or mode of TransformerLens; write {_AMBIGUOUS_NAMES[hook]!r} instead"
        )
    if hook not in _TRANSFORMER_LENS_NAMES:
        near = difflib.get_close_matches(hook, _TRANSFORMER_LENS_NAMES, n=2, cutoff=0.5) or ["hook_resid_post"]
        raise ValueError(f"{text!r} names no site; the nearest: {_listed(near)}")
    return _TRANSFORMER_LENS_NAMES[hook]


def _parse_layers(text: str, layers: str) -> tuple[int, ...] | slice | None:
    if layers == "*":
        return None
    if re.fullmatch(r"-?\d+", layers):
        return (int(layers),)
    if re.fullmatch(r"(-?\d+)?:(-?\d+)?", layers):
        start, _, stop = layers.partition(":")
        return slice(int(start) if start else None, int(stop) if stop else None)
    raise ValueError(f"{layers!r} in {text!r} is no layer; write a number, * for all layers, or a slice such as 0:6")


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=2, cutoff=0.5) or list(KINDS)
        raise ValueError(f"{kind!r} is no kind of site; did you mean {_listed(near)}?")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
