"""Lens: the front door. It composes the rooms and does no mathematics of its own."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tangent_lens.measures.analysis import concentration_warnings, fit_proxies, measure_gradients, summarise_space
from tangent_lens.measures.attention_measure import measure_attention
from tangent_lens.measures.attention_report import AttentionReport, AttentionSettings
from tangent_lens.measures.plan import check_proxies, plan_measurement
from tangent_lens.measures.report import CorpusDescription, Report, Settings, library_versions
from tangent_lens.models.loading import load, wrap
from tangent_lens.models.modules import ModuleModel
from tangent_lens.models.protocol import ATTENTION_MAPS, MLP_MAPS, LinearMap, Model, ModelDescription, width_of
from tangent_lens.models.state import frozen_parameters
from tangent_lens.progress import Progress, chosen_progress
from tangent_lens.recording.attach import HostHook, Taps
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.inputs import InputCorpus, refuse_text_options
from tangent_lens.recording.losses import Loss, choose_loss
from tangent_lens.recording.moments import Moments
from tangent_lens.recording.passes import activations_only, record_activations, record_gradients
from tangent_lens.recording.reading import Texts, read_corpus
from tangent_lens.sites import Site, SiteSelection, resid_post, resolve


class Lens:
    """A model seen through its hook points.

    Args:
        model: a HuggingFace model, a TransformerLens ``HookedTransformer``, ``HookedEncoder`` or ``TransformerBridge``,
            or, with ``sites``, any torch module; it is not changed.
        tokenizer: needed for texts if the model does not bring its own; token ids need none.
        sites: for a module of another kind: by the name you give it, a submodule or its path; what comes out of it is
            the site. Texts are then a list of batches, each what the module is called with, and ``loss`` is yours.
        name, revision: what reports call the model.

    Raises:
        UnsupportedModel: an object or an architecture that is not known.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        sites: Mapping[str, nn.Module | str] | None = None,
        name: str | None = None,
        revision: str | None = None,
    ) -> None:
        if sites is not None and tokenizer is not None:
            raise ValueError("with sites= the module is called with your batches as they are; leave the tokenizer out")
        named = {"name": name, "revision": revision}
        self.model: Model = wrap(model, tokenizer, **named) if sites is None else ModuleModel(model, sites, **named)

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
        """Load a model by hub id, folder, or the name of a packaged real model: ``smollm2-135m``, a causal one, or
        ``rxnfp-pretrained``, ``rxnfp-finetuned``, ``rxnfp-finetuned-10k``, masked ones that read reactions.

        Raises: as :func:`tangent_lens.models.loading.load`.
        """
        options = {"backend": backend, "revision": revision, "dtype": dtype, "device": device}
        return cls(load(name, **options, progress=chosen_progress(progress)))

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
        return resolve(sites, self.model.sites, self.model.absent, self.model.misleading_names)

    def width(self, site: Site) -> int | None:
        """Numbers a row of this site holds: d_model, or heads * d_head for queries, keys and values; None if unknown."""
        return width_of(self.description, site)

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

    def corpus(
        self,
        texts: Texts,
        *,
        sequence_length: int | None = None,
        pack: bool = False,
        max_sequences: int | None = None,
        prepend_bos: bool | None = None,
        name: str = "texts",
    ) -> Corpus | InputCorpus:
        """Texts or token ids as sequences for this model.

        Args:
            texts: a text, texts, token ids, or a :class:`Corpus`.
            sequence_length: longest window: 128 tokens for texts; token ids stay as they are unless it is given.
            pack, prepend_bos: of texts only; see :meth:`Corpus.from_texts`.
            max_sequences: no more than these.
            name: what a report calls them.

        Raises:
            ValueError: nothing to read, texts without a tokenizer, or options that token ids cannot follow.
        """
        options = {"max_sequences": max_sequences, "name": name}
        if isinstance(self.model, ModuleModel):
            refuse_text_options(sequence_length=sequence_length, pack=pack or None, prepend_bos=prepend_bos)
            return InputCorpus.of(texts, **options)  # pyright: ignore[reportArgumentType]
        options |= {"sequence_length": sequence_length, "pack": pack, "prepend_bos": prepend_bos}
        return read_corpus(texts, self.model.tokenizer, **options)

    def record(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        gradients: bool = True,
        cross: bool = False,
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        seed: int = 0,
        batch_size: int = 8,
        padding_side: str = "right",
        skip_first: bool = False,
        skip_special: bool = False,
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> dict[Site, Moments]:
        """Stream a whole corpus into moments, one :class:`Moments` a site; nothing else is kept.

        Args:
            gradients: of the summed loss, too; otherwise the passes are forward only and nothing is masked.
            cross: the cross moment of gradients and activations, too.
            loss, seed: as in :meth:`measure`.

        Raises: as :func:`record_gradients`.
        """
        corpus = self.corpus(texts, **corpus_options)
        chosen = self._chosen(sites)
        self._check_padding(padding_side)
        skips = {"skip_first": skip_first, "skip_special": skip_special}
        batches = corpus.batches(batch_size, padding_side=padding_side, pad_id=self._pad_id(), **skips)
        shown = {"progress": chosen_progress(progress), "tokens": corpus.tokens}
        if gradients or cross:
            wanted = {"loss": choose_loss(loss, self.model, seed), "activations": True, "cross": cross}
            return record_gradients(self.model, batches, chosen, **wanted, **shown).moments
        records = record_activations(self.model, batches, chosen, **shown)
        return {site: activations_only(site, record.moments) for site, record in records.items()}

    def measure(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        rank: int | float = 16,
        gradients: Sequence[str] = ("residual", "weight"),
        maps: Sequence[str] = (*ATTENTION_MAPS, *MLP_MAPS),
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        controls: int = 20,
        seed: int = 0,
        fit_site: str = "input",
        center: bool = True,
        shrinkage: float = 0.0,
        fit_fraction: float = 0.5,
        sequence_length: int | None = None,
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
            loss: None for the one the model was trained with (next-token, or masked-token), a :class:`MaskedLoss`, or your
                own function ``(output, batch) -> scalar``: a sum, never a mean. A masked-token loss masks the
                sequences of both passes.
            controls: random normal subspaces to draw.
            seed: of the split, of the controls and of the masks.
            fit_site: where the proxy of a weight gradient is fitted: the map's own ``input`` (after the norm), or
                the ``residual`` stream before it.
            center: PCA about the mean (False: about zero).
            shrinkage: of the covariances in IsoScore*.
            fit_fraction: share of the sequences that the proxies are fitted on.
            sequence_length, pack, max_sequences, prepend_bos: see :meth:`corpus`.
            skip_first, skip_special: leave first positions, or special tokens, out of every statistic.
            batch_size, padding_side: change no number beyond rounding.
            name: what the report calls the texts.
            progress: show bars where the output is a terminal.

        Raises:
            ValueError: settings that do not fit the model or the corpus, in a sentence.
            SiteNeverFired, GradientNeverCame, NonFiniteRows: what went wrong inside the model.
        """
        gradients = (gradients,) if isinstance(gradients, str) else tuple(gradients)
        maps = (maps,) if isinstance(maps, str) else tuple(maps)
        objective = choose_loss(loss, self.model, seed)
        settings = Settings(
            rank=rank,
            loss=objective.name,
            controls=controls,
            seed=seed,
            gradients=gradients,
            maps=maps,
            fit_site=fit_site,
            center=center,
            shrinkage=shrinkage,
            fit_fraction=fit_fraction,
            sequence_length=sequence_length,
            pack=pack,
            max_sequences=max_sequences,
            prepend_bos=prepend_bos,
            skip_first=skip_first,
            skip_special=skip_special,
            batch_size=batch_size,
            padding_side=padding_side,
        )
        self._check_padding(padding_side)
        plan = plan_measurement(self.model, self._chosen(sites), settings)
        corpus = self.corpus(
            texts,
            sequence_length=sequence_length,
            pack=pack,
            max_sequences=max_sequences,
            prepend_bos=prepend_bos,
            name=name,
        )
        fit, test = corpus.split(fit_fraction, seed)
        shown = chosen_progress(progress)
        activations = record_activations(
            self.model, self._batches(fit, settings), plan.fit_sites, loss=objective, progress=shown, tokens=fit.tokens
        )
        proxies = fit_proxies(activations, settings)
        check_proxies(proxies)
        recorded = record_gradients(
            self.model,
            self._batches(test, settings),
            plan.residual_sites,
            plan.maps,
            loss=objective,
            input_bases={reads: proxies[site].basis for reads, site in plan.fit_site_of.items()},
            progress=shown,
            tokens=test.tokens,
        )
        spaces = tuple(summarise_space(site, record, proxies[site]) for site, record in activations.items())
        return Report(
            model=self.description,
            corpus=CorpusDescription(
                name=corpus.name,
                fit_sequences=len(fit.sequences),
                test_sequences=len(test.sequences),
                fit_tokens=fit.tokens,
                test_tokens=test.tokens,
                fit_rows=next(iter(activations.values())).moments.count,
                test_rows=recorded.rows,
                loss=recorded.loss,
                loss_unit=objective.unit,
                left_out=corpus.left_out,
            ),
            settings=settings,
            spaces=spaces,
            measurements=measure_gradients(recorded, proxies, plan.fit_site_of, settings, shown),
            warnings=(*corpus.warnings(prepend_bos), *plan.warnings, *concentration_warnings(spaces)),
            versions=library_versions(),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            subspaces={site.name: proxy for site, proxy in proxies.items()},
        )

    def attention(
        self,
        texts: Texts,
        layers: Sequence[int] | None = None,
        *,
        batch_size: int = 8,
        padding_side: str = "right",
        progress: bool | Progress = True,
        name: str = "texts",
        **settings: Any,
    ) -> AttentionReport:
        """How far tangent terms dominate the attention scores of every head, against random normals.

        Two forward passes: over the fit sequences for the tangent proxies of the residual stream that each layer's attention
        reads, over the test sequences for the scores. Only sums stay.

        Args:
            layers: which; None for all.
            settings: any field of :class:`AttentionSettings`: ``rank``, ``controls``, ``seed``, ``distance_edges``,
                ``frequency_buckets``, ``scaling``, and how texts become sequences, as in :meth:`measure`.

        Raises:
            ValueError: settings or layers that do not fit the model or the corpus.
            UnsupportedModel: a model whose scores cannot be split.
        """
        chosen = AttentionSettings(batch_size=batch_size, padding_side=padding_side, **settings)
        self._check_padding(padding_side)
        reading = {
            option: getattr(chosen, option) for option in ("sequence_length", "pack", "max_sequences", "prepend_bos")
        }
        corpus = self.corpus(texts, name=name, **reading)
        if isinstance(corpus, InputCorpus):
            raise ValueError("a module of unknown structure has no attention scores that could be split")
        shown = {"pad_id": self._pad_id(), "progress": chosen_progress(progress)}
        return measure_attention(self.model, corpus, chosen, layers=layers, **shown)

    def _chosen(self, sites: SiteSelection | None) -> tuple[Site, ...]:
        if sites is None:
            return self.model.sites if isinstance(self.model, ModuleModel) else self.resolve(resid_post())
        return self.resolve(sites)

    def _check_padding(self, side: str) -> None:
        if side in ("left", "right") and side not in self.model.padding_sides:
            raise ValueError(
                f"padding_side {side!r}: {self.description.library} gives other numbers, or none, to sequences padded there; "
                f"use {self.model.padding_sides[0]!r}, which changes no result"
            )

    def _batches(self, corpus: Corpus | InputCorpus, settings: Settings):
        return corpus.batches(
            settings.batch_size,
            padding_side=settings.padding_side,
            pad_id=self._pad_id(),
            skip_first=settings.skip_first,
            skip_special=settings.skip_special,
        )

    def _pad_id(self) -> int:
        pad = getattr(self.model.tokenizer, "pad_token_id", None)
        return 0 if pad is None or pad >= self.description.vocabulary else pad

    def __repr__(self) -> str:
        shape = self.description
        return (
            f"Lens({shape.name}, {shape.library}: {shape.n_layers} layers, d_model {shape.d_model}, "
            f"{len(self.sites)} sites, {len(self.maps)} maps)"
        )
