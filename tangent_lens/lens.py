"""Lens: the front door. It composes the rooms and does no mathematics of its own."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from tangent_lens.measures.analysis import concentration_warnings, fit_proxies, measure_gradients, summarise_space
from tangent_lens.measures.report import CorpusDescription, Report, Settings
from tangent_lens.models.loading import load, wrap
from tangent_lens.models.protocol import ATTENTION_MAPS, MLP_MAPS, LinearMap, Model, ModelDescription
from tangent_lens.models.state import frozen_parameters
from tangent_lens.progress import Progress
from tangent_lens.recording.attach import HostHook, Taps
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.moments import Moments
from tangent_lens.recording.passes import record_activations, record_gradients
from tangent_lens.sites import Site, SiteSelection, resid_post, resolve
from tangent_lens.subspaces.controls import check_normal_controls_fit

Texts = str | Iterable[str] | Iterable[Sequence[int]] | Tensor | Corpus


class Lens:
    """A model seen through its hook points.

    Args:
        model: a HuggingFace causal language model or a TransformerLens ``TransformerBridge``; it is not changed.
        tokenizer: needed for texts if the model does not bring its own; token ids need none.
        name, revision: what reports call the model.

    Raises:
        UnsupportedModel: an object or an architecture that is not known.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, name: str | None = None, revision: str | None = None
    ) -> None:
        self.model: Model = wrap(model, tokenizer, name=name, revision=revision)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        backend: str = "huggingface",
        revision: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        progress: bool | Progress = True,
    ) -> Lens:
        """Load a model by hub id, folder, or ``smollm2-135m``, the packaged real model.

        Raises: as :func:`tangent_lens.models.loading.load`.
        """
        options = {"backend": backend, "revision": revision, "dtype": dtype, "device": device}
        return cls(load(name, **options, progress=_progress(progress)))

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes of the model."""
        return self.model.description

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site of the model, in the order of the forward pass."""
        return self.model.sites

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        """Every linear map that reads a site."""
        return self.model.maps

    def resolve(self, sites: SiteSelection) -> tuple[Site, ...]:
        """The sites of this model that a selection names.

        Raises:
            ValueError: a site it does not have, with the nearest names.
        """
        return resolve(sites, self.model.sites, self.model.absent)

    def width(self, site: Site) -> int:
        """Numbers a row of this site holds: d_model, or heads * d_head for queries, keys and values."""
        shape = self.description
        heads = {"query": shape.n_heads, "key": shape.n_key_value_heads, "value": shape.n_key_value_heads}
        return heads[site.kind] * shape.d_head if site.kind in heads else shape.d_model

    def attach(self, sites: SiteSelection, *, gradients: bool = False, keep: str = "rows") -> Taps:
        """Tap sites while you run the model yourself, in a ``with`` block.

        Args:
            sites: which.
            gradients: also what your ``backward()`` brings.
            keep: ``rows`` keeps every tensor; ``moments`` keeps sums only.
        """
        return Taps(self.model, self.resolve(sites), gradients=gradients, keep=keep)

    def hooks(self, sites: SiteSelection, *, gradients: bool = False, keep: str = "rows") -> list[HostHook]:
        """The same taps in the host library's own style, for ``model.run_with_hooks(fwd_hooks=...)``."""
        return [
            HostHook(site, self.model.tap_point(site), gradients=gradients, keep=keep) for site in self.resolve(sites)
        ]

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Inside, parameters ask for no gradient and the token embedding does: cheaper passes, same site gradients."""
        with torch.enable_grad(), frozen_parameters(self.model):
            yield

    def corpus(self, texts: Texts, *, name: str = "texts", **options: Any) -> Corpus:
        """Texts or token ids as sequences for this model; ``options`` go to :meth:`Corpus.from_texts`.

        Token ids are sequences already: of the options, they take the name alone.

        Raises:
            ValueError: nothing to read, or texts without a tokenizer.
        """
        if isinstance(texts, Corpus):
            return texts
        if isinstance(texts, Tensor):
            return Corpus.from_tokens(texts, name=name, special_ids=self._special_ids())
        if not isinstance(texts, str):
            texts = iter(texts)
            first = next(texts, None)
            if first is None:
                raise ValueError("no text was given; pass a string, a list of strings, or token ids")
            texts = _chain(first, texts)
            if not isinstance(first, str):
                return Corpus.from_tokens(texts, name=name, special_ids=self._special_ids())  # pyright: ignore[reportArgumentType]
        if self.model.tokenizer is None:
            raise ValueError(
                "this model came without a tokenizer; pass Lens(model, tokenizer=...), or token ids instead of texts"
            )
        return Corpus.from_texts(texts, self.model.tokenizer, name=name, **options)  # pyright: ignore[reportArgumentType]

    def record(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        gradients: bool = True,
        cross: bool = False,
        batch_size: int = 8,
        padding_side: str = "right",
        skip_first: bool = False,
        skip_special: bool = False,
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> dict[Site, Moments]:
        """Stream a whole corpus into moments, one :class:`Moments` a site; nothing else is kept.

        Args:
            gradients: of the summed next-token loss, too; otherwise the passes are forward only.
            cross: the cross moment of gradients and activations, too.

        Raises: as :func:`record_gradients`.
        """
        corpus = self.corpus(texts, **corpus_options)
        chosen = self.resolve(sites if sites is not None else resid_post())
        skips = {"skip_first": skip_first, "skip_special": skip_special}
        batches = corpus.batches(batch_size, padding_side=padding_side, pad_id=self._pad_id(), **skips)
        shown = {"progress": _progress(progress), "tokens": corpus.tokens}
        if gradients or cross:
            return record_gradients(self.model, batches, chosen, activations=True, cross=cross, **shown).moments
        records = record_activations(self.model, batches, chosen, **shown)
        return {site: _activations_only(site, record.moments) for site, record in records.items()}

    def measure(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        rank: int | float = 16,
        gradients: Sequence[str] = ("residual", "weight"),
        maps: Sequence[str] = (*ATTENTION_MAPS, *MLP_MAPS),
        controls: int = 20,
        seed: int = 0,
        fit_site: str = "input",
        center: bool = True,
        shrinkage: float = 0.0,
        fit_fraction: float = 0.5,
        sequence_length: int = 128,
        pack: bool = False,
        max_sequences: int | None = None,
        prepend_bos: bool | None = None,
        skip_first: bool = False,
        skip_special: bool = False,
        batch_size: int = 8,
        padding_side: str = "right",
        name: str = "texts",
        progress: bool | Progress = True,
    ) -> Report:
        """Gradient energy and isotropy along the tangent proxy of every site, against normal controls.

        Two passes: forward only over the fit sequences (activations to proxies), then forward and backward over the
        test sequences (gradients). A batch passes once; only sums stay.

        Args:
            texts: a text, texts, token ids, or a :class:`Corpus`.
            sites: where residual gradients are measured; resid_post of every layer by default. Weight gradients
                are measured for the maps of the same layers.
            rank: k of the tangent proxy, or a variance share in (0, 1).
            gradients: ``residual``, ``weight``, or both.
            maps: which linear maps count for ``weight``.
            controls: random normal subspaces to draw.
            seed: of the split and of the controls.
            fit_site: where the proxy of a weight gradient is fitted: the map's own ``input`` (after the norm), or
                the ``residual`` stream before it.
            center: PCA about the mean (False: about zero).
            shrinkage: of the covariances in IsoScore*.
            fit_fraction: share of the sequences that the proxies are fitted on.
            sequence_length, pack, max_sequences, prepend_bos: see :meth:`Corpus.from_texts`.
            skip_first, skip_special: leave first positions, or special tokens, out of every statistic.
            batch_size, padding_side: change no number beyond rounding.
            name: what the report calls the texts.
            progress: show bars where the output is a terminal.

        Raises:
            ValueError: settings that do not fit the model or the corpus, in a sentence.
            SiteNeverFired, GradientNeverCame, NonFiniteRows: what went wrong inside the model.
        """
        settings = Settings(
            rank, controls, seed, tuple(gradients), fit_site, center, shrinkage, fit_fraction, sequence_length, pack,
            skip_first, skip_special, batch_size, padding_side,
        )  # fmt: skip
        chosen = self.resolve(sites if sites is not None else resid_post())
        chosen_maps = self._chosen_maps(chosen, maps) if "weight" in gradients else ()
        fit_site_of = {one.reads: self._fit_site(one.reads, fit_site) for one in chosen_maps}
        self._check(settings, chosen, fit_site_of)
        corpus = self.corpus(
            texts,
            sequence_length=sequence_length,
            pack=pack,
            max_sequences=max_sequences,
            prepend_bos=prepend_bos,
            name=name,
        )
        fit, test = corpus.split(fit_fraction, seed)
        at_residual = chosen if "residual" in gradients else ()
        fit_sites = sorted({*at_residual, *fit_site_of.values()}, key=lambda site: site.order)
        shown = _progress(progress)
        activations = record_activations(
            self.model, self._batches(fit, settings), fit_sites, progress=shown, tokens=fit.tokens
        )
        proxies = fit_proxies(activations, settings)
        recorded = record_gradients(
            self.model, self._batches(test, settings), at_residual, chosen_maps, progress=shown, tokens=test.tokens
        )
        spaces = tuple(summarise_space(site, record, proxies[site]) for site, record in activations.items())
        test_rows = [moments.gradients.count for moments in recorded.moments.values()] + [
            one.rows for one in recorded.weights
        ]
        return Report(
            model=self.description,
            corpus=CorpusDescription(
                name=corpus.name,
                fit_sequences=len(fit.sequences),
                test_sequences=len(test.sequences),
                fit_tokens=fit.tokens,
                test_tokens=test.tokens,
                fit_rows=next(iter(activations.values())).moments.count,
                test_rows=test_rows[0],
                loss=recorded.loss,
                left_out=corpus.left_out,
            ),
            settings=settings,
            spaces=spaces,
            measurements=measure_gradients(recorded, proxies, fit_site_of, settings, shown),
            warnings=(*corpus.left_out, *concentration_warnings(spaces)),
            versions=_versions(),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            subspaces={site.name: proxy for site, proxy in proxies.items()},
        )

    def _batches(self, corpus: Corpus, settings: Settings):
        return corpus.batches(
            settings.batch_size,
            padding_side=settings.padding_side,
            pad_id=self._pad_id(),
            skip_first=settings.skip_first,
            skip_special=settings.skip_special,
        )

    def _special_ids(self) -> tuple[int, ...]:
        return () if self.model.tokenizer is None else tuple(self.model.tokenizer.all_special_ids)

    def _pad_id(self) -> int:
        pad = getattr(self.model.tokenizer, "pad_token_id", None)
        return 0 if pad is None or pad >= self.description.vocabulary else pad

    def _chosen_maps(self, sites: Sequence[Site], kinds: Sequence[str]) -> tuple[LinearMap, ...]:
        """The maps of the layers selected; of a site inside the attention or the MLP, only the maps beside it."""
        unknown = set(kinds) - {*ATTENTION_MAPS, *MLP_MAPS}
        if unknown or not kinds:
            raise ValueError(
                f"maps {sorted(unknown) or '()'} are not known; choose from {', '.join((*ATTENTION_MAPS, *MLP_MAPS))}"
            )
        wanted = {(site.layer, kind) for site in sites for kind in _maps_beside(site.kind) if kind in kinds}
        return tuple(one for one in self.model.maps if (one.layer, one.kind) in wanted)

    def _fit_site(self, reads: Site, where: str) -> Site:
        if where == "input":
            return reads
        if reads.kind == "mlp_input" and "resid_mid" not in self.model.absent:
            return Site("resid_mid", reads.layer)
        return Site("resid_pre", reads.layer)

    def _check(self, settings: Settings, sites: Sequence[Site], fit_site_of: dict[Site, Site]) -> None:
        """Refuse what cannot work before the model runs for minutes."""
        unknown = set(settings.gradients) - {"residual", "weight"}
        if unknown or not settings.gradients:
            raise ValueError(f"gradients {settings.gradients} must name 'residual', 'weight' or both")
        if settings.fit_site not in ("input", "residual"):
            raise ValueError(
                f"fit_site {settings.fit_site!r} must be 'input' (after the norm) or 'residual' (before it)"
            )
        if settings.controls < 1:
            raise ValueError(f"{settings.controls} controls give no comparison; use 1 or more")
        if not 0 <= settings.shrinkage <= 1:
            raise ValueError(f"shrinkage {settings.shrinkage} must lie between 0 (none) and 1")
        if settings.gradients == ("weight",) and not fit_site_of:
            raise ValueError(
                f"no linear map reads {', '.join(site.name for site in sites)}, so it has no weight gradient"
            )
        if settings.rank >= 1:
            widths = {self.width(site) for site in sites} if "residual" in settings.gradients else set()
            widths |= {self.width(site) for site in fit_site_of.values()}
            check_normal_controls_fit(int(settings.rank), min(widths))

    def __repr__(self) -> str:
        shape = self.description
        return (
            f"Lens({shape.name}, {shape.library}: {shape.n_layers} layers, d_model {shape.d_model}, "
            f"{len(self.sites)} sites, {len(self.maps)} maps)"
        )


def _maps_beside(kind: str) -> tuple[str, ...]:
    if kind == "embedding":
        return ()
    if kind in ("attention_input", "query", "key", "value"):
        return ATTENTION_MAPS
    return MLP_MAPS if kind == "mlp_input" else (*ATTENTION_MAPS, *MLP_MAPS)


def _progress(wanted: bool | Progress) -> Progress | None:
    if not isinstance(wanted, bool):
        return wanted
    if not wanted:
        return None
    from tangent_lens.reports.console import terminal_progress

    return terminal_progress()


def _activations_only(site: Site, activations: Any) -> Moments:
    moments = Moments(activations.width, name=site.name)
    moments.activations = activations
    return moments


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _versions() -> dict[str, str]:
    names = ("tangent-lens", "torch", "transformers", "transformer-lens", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
