"""Lens: the front door. It composes the rooms and does no mathematics of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tangent_lens.measures.ablation import AblationReport, measure_ablation
from tangent_lens.measures.attention_measure import measure_attention
from tangent_lens.measures.attention_report import AttentionReport, AttentionSettings
from tangent_lens.measures.measure import measure_model
from tangent_lens.measures.plan import plan_measurement
from tangent_lens.measures.report import Report, Settings
from tangent_lens.models.loading import load
from tangent_lens.models.protocol import ATTENTION_MAPS, MLP_MAPS, pad_id_of
from tangent_lens.models.remote_jobs import Remote
from tangent_lens.progress import Progress, chosen_progress
from tangent_lens.recording.inputs import InputCorpus
from tangent_lens.recording.losses import Loss, choose_loss
from tangent_lens.recording.reading import Texts
from tangent_lens.sites import SiteSelection
from tangent_lens.subspaces.subspace import Subspace
from tangent_lens.token_view import TokenView


class Lens(TokenView):
    """A model seen through its hook points, and what can be measured there.

    Args:
        model: a HuggingFace model, a TransformerLens ``HookedTransformer``, ``HookedEncoder`` or ``TransformerBridge``, an
            nnsight ``TransformersModel``, ``LanguageModel`` or ``NNsight``, or, with ``sites``, any torch module; it is not
            changed. Of an nnsight model whose weights are on NDIF, ``remote=True`` measures without them.
        tokenizer: needed for texts if the model does not bring its own; token ids need none.
        sites: for a module of another kind: by the name you give it, a submodule or its path; what comes out of it is
            the site. Texts are then a list of batches, each what the module is called with, and ``loss`` is yours.
        name, revision: what reports call the model.

    Raises:
        UnsupportedModel: an object or an architecture that is not known.
    """

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

    def measure(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        rank: int | float | str = 16,
        fit: str = "pca",
        subspaces: Mapping[Any, Subspace] | None = None,
        gradients: Sequence[str] = ("residual", "weight"),
        maps: Sequence[str] = (*ATTENTION_MAPS, *MLP_MAPS),
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        controls: int = 20,
        seed: int = 0,
        fit_site: str = "input",
        center: bool = True,
        shrinkage: float = 0.0,
        bootstrap: int = 0,
        statistics: str = "auto",
        fit_rows: int = 20_000,
        fit_fraction: float = 0.5,
        sequence_length: int | None = None,
        pack: bool = False,
        max_sequences: int | None = None,
        prepend_bos: bool | None = None,
        skip_first: bool = False,
        skip_special: bool = False,
        batch_size: int = 8,
        padding_side: str = "right",
        remote: bool | Remote = False,
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
            rank: k of the tangent proxy, a variance share in (0, 1), or a rule: ``effective_rank``, ``participation_ratio``,
                ``marchenko_pastur``, ``gavish_donoho``, ``parallel_analysis``.
            fit: how the subspaces are fitted: ``pca``, or on a sample of ``fit_rows`` rows ``semi_nmf``, ``nmf``, ``ica``,
                ``kmeans``, ``dictionary``.
            subspaces: your own, by site, instead of fitting any.
            bootstrap: resampled corpora behind an interval of every energy and lift; 0 for none. Keeps all test rows meanwhile.
            statistics: ``exact`` sums whole d x d matrices a site. ``sketch`` keeps O(d (rank * controls)) numbers a site and
                reads the fit sequences twice: residual energies and controls stay exact, totals of weight gradients and
                isotropy are estimated, with standard errors. ``auto`` sketches where whole sums would take more than half of
                the free memory; the report says which it was.
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
            remote: run where an nnsight model's weights are, on NDIF: True, or a :class:`Remote` that says how.
            name: what the report calls the texts.
            progress: show bars where the output is a terminal.

        Raises:
            ValueError: settings that do not fit the model or the corpus, in a sentence.
            SiteNeverFired, GradientNeverCame, NonFiniteRows: what went wrong inside the model.
        """
        gradients = (gradients,) if isinstance(gradients, str) else tuple(gradients)
        maps = (maps,) if isinstance(maps, str) else tuple(maps)
        model = self._runner(remote)
        objective = choose_loss(loss, model, seed)
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
            fit=fit if subspaces is None else "given",
            fit_rows=fit_rows,
            bootstrap=bootstrap,
            statistics=statistics,
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
        plan = plan_measurement(model, self._chosen(sites), settings)
        corpus = self._corpus_of(texts, settings, name)
        report = measure_model(
            model,
            corpus,
            settings,
            plan,
            objective,
            subspaces=None if subspaces is None else {str(site): one for site, one in subspaces.items()},
            pad_id=pad_id_of(self._structure),
            progress=chosen_progress(progress),
        )
        self._complete(model)
        return report

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
        corpus = self._corpus_of(texts, chosen, name)
        if isinstance(corpus, InputCorpus):
            raise ValueError("a module of unknown structure has no attention scores that could be split")
        shown = {"pad_id": pad_id_of(self._structure), "progress": chosen_progress(progress)}
        return measure_attention(self.model, corpus, chosen, layers=layers, **shown)

    def ablate(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        rank: int | float | str = 16,
        fit: str = "pca",
        subspaces: Mapping[Any, Subspace] | None = None,
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        controls: int = 20,
        seed: int = 0,
        fit_fraction: float = 0.5,
        skip_first: bool = False,
        batch_size: int = 8,
        padding_side: str = "right",
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> AblationReport:
        """How much the loss on the test sequences rises when a site's subspace is removed, against random normals.

        Args: as of :meth:`measure`; one forward pass over the test sequences for each site and removal. ``skip_first`` leaves
            first positions out of the fit; removed is at every position.

        Raises:
            ValueError: a rank too large for a normal control, or a site that cannot be changed.
        """
        objective = choose_loss(loss, self.model, seed)
        self._check_padding(padding_side)
        corpus = self.corpus(texts, **corpus_options)
        fitted, test = corpus.split(fit_fraction, seed)
        if subspaces is None:
            options = {"seed": seed, "skip_first": skip_first, "batch_size": batch_size, "progress": progress}
            found = self.fit(fitted, sites, fit, rank=rank, **options)  # pyright: ignore[reportArgumentType]
        else:
            found = {self.resolve(site)[0]: one for site, one in subspaces.items()}
        return measure_ablation(
            self.model,
            test,
            found,
            controls=controls,
            seed=seed,
            loss=objective,
            batch_size=batch_size,
            padding_side=padding_side,
            pad_id=pad_id_of(self._structure),
            progress=chosen_progress(progress),
        )
