"""What the tables of reports on gradients share: one row a layer, and how settings and loss are said."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from tangent_lens.measures.report import CorpusDescription, Measurement, Settings


def rows_by_layer(measurements: Sequence[Measurement]) -> list[tuple[str, tuple[Measurement | None, ...]]]:
    """Labels, and (residual, attention, MLP) measurements; a layer has a row more for every further residual site."""
    residual = [one for one in measurements if one.gradient == "residual"]
    pooled = {(one.kind, one.layer): one for one in measurements if one.pooled}
    layers = sorted({one.layer for one in measurements}, key=lambda layer: -1 if layer is None else layer)
    several = len({one.kind for one in residual}) > 1
    rows = []
    for layer in layers:
        here: Sequence[Measurement | None] = [one for one in residual if one.layer == layer] or [None]
        for place, one in enumerate(here):
            last = place == len(here) - 1
            weights = [pooled.get((kind, layer)) if last else None for kind in ("attention", "mlp")]
            label = one.name if one is not None and (several or layer is None) else str(layer)
            rows.append((label, (one, *weights)))
    return rows


def loss_said(corpus: CorpusDescription, settings: Settings) -> str:
    """The loss, in nats where it is a likelihood, and its name where it is not the usual next-token one."""
    nats = "" if corpus.loss_unit == "sequence" else " nats"
    named = "" if settings.loss == "next-token" else f"{escape(settings.loss)} "
    return f"{named}loss {corpus.loss:.3f}{nats} a {corpus.loss_unit}"


def fit_site_said(settings: Settings) -> str:
    """Where the proxies of weight gradients were fitted."""
    return "the maps' own input" if settings.fit_site == "input" else "the residual stream before the norm"


def extras_said(settings: Settings) -> str:
    """Choices that are not the usual ones."""
    said = [
        (settings.skip_first, "first positions left out"),
        (settings.skip_special, "special tokens left out"),
        (not settings.center, "not centred"),
        (settings.shrinkage > 0, f"shrinkage {settings.shrinkage}"),
    ]
    return "".join(f", {sentence}" for holds, sentence in said if holds)
