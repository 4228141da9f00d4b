"""A model seen through its hook points: taps, corpora, recordings, fits. What is measured there stands in ``lens``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tangent_lens.measures.activation_shape import ShapeReport, shapes_of
from tangent_lens.measures.analysis import fit_proxies
from tangent_lens.measures.attention_report import AttentionSettings
from tangent_lens.measures.report import Settings
from tangent_lens.models.loading import plain_module, with_weights, wrap
from tangent_lens.models.modules import ModuleModel
from tangent_lens.models.protocol import LinearMap, Model, ModelDescription, pad_id_of, runs_remotely, width_of
from tangent_lens.models.remote_jobs import Remote, Traffic
from tangent_lens.models.state import frozen_parameters
from tangent_lens.progress import Progress, chosen_progress
from tangent_lens.recording.attach import HostHook, Taps
from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.inputs import InputCorpus, refuse_text_options
from tangent_lens.recording.losses import Loss, choose_loss
from tangent_lens.recording.moments import Moments
from tangent_lens.recording.passes import ActivationRecord, activations_only, record_activations, record_gradients
from tangent_lens.recording.reading import Texts, read_corpus
from tangent_lens.recording.row_sample import RowSample
from tangent_lens.sites import Site, SiteSelection, resid_post, resolve
from tangent_lens.subspaces.methods import check_method, needs_rows
from tangent_lens.subspaces.subspace import Subspace


class ModelView:
    """What :class:`~tangent_lens.lens.Lens` can do without measuring.

    Attributes:
        traffic: jobs and bytes of the last run on a server; None before one.
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
        self.traffic: Traffic | None = None
        self._structure: Model = (
            wrap(model, tokenizer, **named) if sites is None else ModuleModel(plain_module(model), sites, **named)
        )

    @property
    def model(self) -> Model:
        """The model, with its weights: one that nnsight has not loaded yet is loaded when it is first needed here."""
        self._structure = with_weights(self._structure)
        return self._structure

    def _runner(self, remote: bool | Remote) -> Any:
        """The model where it shall run: here, or on a server."""
        options = Remote.of(remote)
        if options is None:
            return self.model
        from tangent_lens.models.ndif import remotely

        return remotely(self._structure, options)

    def _complete(self, model: Any) -> None:
        """What a run on a server kept, in case it was interrupted, is not needed any more."""
        if runs_remotely(model):
            self.traffic = model.jobs.complete()

    @property
    def description(self) -> ModelDescription:
        """Name, library, shapes of the model."""
        return self._structure.description

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site of the model, in the order of the forward pass."""
        return self._structure.sites

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        """Every linear map that reads a site."""
        return self._structure.maps

    def resolve(self, sites: SiteSelection) -> tuple[Site, ...]:
        """The sites of this model that a selection names.

        Raises:
            ValueError: a site it does not have, with the nearest names.
        """
        known = self._structure
        return resolve(sites, known.sites, known.absent, known.misleading_names)

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
        if isinstance(self._structure, ModuleModel):
            refuse_text_options(sequence_length=sequence_length, pack=pack or None, prepend_bos=prepend_bos)
            return InputCorpus.of(texts, **options)  # pyright: ignore[reportArgumentType]
        options |= {"sequence_length": sequence_length, "pack": pack, "prepend_bos": prepend_bos}
        return read_corpus(texts, self._structure.tokenizer, **options)

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
        remote: bool | Remote = False,
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> dict[Site, Moments]:
        """Stream a whole corpus into moments, one :class:`Moments` a site; nothing else is kept.

        Args:
            gradients: of the summed loss, too; otherwise the passes are forward only and nothing is masked.
            cross: the cross moment of gradients and activations, too.
            loss, seed, remote: as in :meth:`measure`.

        Raises: as :func:`record_gradients`.
        """
        corpus, model = self.corpus(texts, **corpus_options), self._runner(remote)
        chosen = self._chosen(sites)
        self._check_padding(padding_side)
        skips = {"skip_first": skip_first, "skip_special": skip_special}
        batches = corpus.batches(batch_size, padding_side=padding_side, pad_id=pad_id_of(self._structure), **skips)
        shown = {"progress": chosen_progress(progress), "tokens": corpus.tokens}
        if gradients or cross:
            wanted = {"loss": choose_loss(loss, model, seed), "activations": True, "cross": cross}
            found = record_gradients(model, batches, chosen, **wanted, **shown).moments
        else:
            records = record_activations(model, batches, chosen, **shown)
            found = {site: activations_only(site, record.moments) for site, record in records.items()}
        self._complete(model)
        return found

    def sample(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        rows: int = 20_000,
        seed: int = 0,
        skip_first: bool = False,
        batch_size: int = 8,
        remote: bool | Remote = False,
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> dict[Site, RowSample]:
        """Some activation rows of each site, kept as they are, for fits that need more than moments.

        Args:
            rows: at most this many of each site; which ones depends on ``seed`` and the sequences alone.
            skip_first: leave first positions out; the largest activations often stand there.
            corpus_options: as of :meth:`corpus`.
        """
        passing = {"batch_size": batch_size, "skip_first": skip_first}
        corpus, model = self.corpus(texts, **corpus_options), self._runner(remote)
        records = self._activations(model, corpus, sites, rows, seed, progress, passing)
        return {site: record.sample for site, record in records.items() if record.sample is not None}

    def fit(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        method: str = "pca",
        *,
        rank: int | float | str = 16,
        rows: int = 20_000,
        seed: int = 0,
        skip_first: bool = False,
        batch_size: int = 8,
        remote: bool | Remote = False,
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> dict[Site, Subspace]:
        """A subspace of each site, fitted on all of these texts, without measuring anything.

        Args:
            method, rank, rows: as ``fit``, ``rank`` and ``fit_rows`` of :meth:`measure`.
            corpus_options: as of :meth:`corpus`.

        Raises:
            ValueError: an unknown method, or a rank that a site does not allow.
        """
        settings = Settings(rank=rank, fit=check_method(method), fit_rows=rows, seed=seed)
        kept = rows if needs_rows(method) else 0
        passing = {"batch_size": batch_size, "skip_first": skip_first}
        corpus, model = self.corpus(texts, **corpus_options), self._runner(remote)
        return fit_proxies(self._activations(model, corpus, sites, kept, seed, progress, passing), settings)

    def shape(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        rows: int = 2000,
        dimensions: Sequence[str] = ("two_nn", "mle"),
        seed: int = 0,
        skip_first: bool = False,
        batch_size: int = 8,
        remote: bool | Remote = False,
        progress: bool | Progress = True,
        name: str = "texts",
        **corpus_options: Any,
    ) -> ShapeReport:
        """The shape of the activations: isotropy, spectrum, cosines, intrinsic dimension, one row a site.

        Args:
            rows: of each site for the numbers that need rows; their cost grows with the square.
            dimensions: intrinsic dimensions to estimate (the ``dimension`` extra); () for none.

        Raises:
            ImportError: dimensions were asked for and scikit-dimension is not installed.
        """
        corpus = self.corpus(texts, name=name, **corpus_options)
        passing = {"batch_size": batch_size, "skip_first": skip_first}
        model = self._runner(remote)
        records = self._activations(model, corpus, sites, rows, seed, progress, passing)
        return ShapeReport(model.description, corpus.name, shapes_of(records, dimensions))

    def _activations(
        self,
        model: Any,
        corpus: Corpus | InputCorpus,
        sites: SiteSelection | None,
        rows: int,
        seed: int,
        progress: bool | Progress,
        batching: Mapping[str, Any],
    ) -> dict[Site, ActivationRecord]:
        batches = corpus.batches(pad_id=pad_id_of(self._structure), **batching)
        shown = {"progress": chosen_progress(progress), "tokens": corpus.tokens}
        records = record_activations(model, batches, self._chosen(sites), sample=rows, seed=seed, **shown)
        self._complete(model)
        return records

    def _corpus_of(self, texts: Texts, settings: Settings | AttentionSettings, name: str) -> Corpus | InputCorpus:
        reading = {
            option: getattr(settings, option) for option in ("sequence_length", "pack", "max_sequences", "prepend_bos")
        }
        return self.corpus(texts, name=name, **reading)

    def _chosen(self, sites: SiteSelection | None) -> tuple[Site, ...]:
        if sites is None:
            return self.sites if isinstance(self._structure, ModuleModel) else self.resolve(resid_post())
        return self.resolve(sites)

    def _check_padding(self, side: str) -> None:
        if side in ("left", "right") and side not in self._structure.padding_sides:
            raise ValueError(
                f"padding_side {side!r}: {self.description.library} gives other numbers, or none, to sequences padded there; "
                f"use {self._structure.padding_sides[0]!r}, which changes no result"
            )

    def __repr__(self) -> str:
        shape = self.description
        return (
            f"Lens({shape.name}, {shape.library}: {shape.n_layers} layers, d_model {shape.d_model}, "
            f"{len(self.sites)} sites, {len(self.maps)} maps)"
        )
