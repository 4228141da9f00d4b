"""A model seen token by token: how frequency goes with geometry, and the geometry about the mean of one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from tangent_lens.dynamics.trajectory import trajectory_for
from tangent_lens.measures.frequency import TokenFrequencies, token_frequencies
from tangent_lens.measures.frequency_measure import measure_frequency
from tangent_lens.measures.frequency_report import FrequencyReport, FrequencySettings
from tangent_lens.measures.geometry_measure import measure_geometry
from tangent_lens.measures.geometry_report import GeometryReport, GeometrySettings
from tangent_lens.model_view import ModelView
from tangent_lens.models.checkpoints import CheckpointSource
from tangent_lens.models.protocol import pad_id_of
from tangent_lens.models.remote_jobs import Remote
from tangent_lens.progress import Progress, chosen_progress
from tangent_lens.recording.inputs import InputCorpus
from tangent_lens.recording.losses import CausalLoss, Loss, choose_loss
from tangent_lens.recording.reading import Texts
from tangent_lens.sites import SiteSelection


class TokenView(ModelView):
    """What is measured token by token."""

    def frequency(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        rank: int | float | str = 16,
        min_count: int = 10,
        buckets: int = 5,
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        seed: int = 0,
        fit_fraction: float = 0.5,
        frequencies: TokenFrequencies | Mapping[int, float] | Sequence[float] | Tensor | None = None,
        checkpoints: CheckpointSource | None = None,
        skip_first: bool = False,
        skip_special: bool = False,
        batch_size: int = 8,
        padding_side: str = "right",
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> FrequencyReport:
        """How the frequency of tokens goes with the spread of their rows over contexts, and with their gradients' energy.

        Two forward passes over all sequences for the spreads, one over the fit sequences for the tangent proxies, one with
        gradients over the test sequences. Memory is width float64 numbers a site and token of ``min_count`` rows or more.

        Args:
            sites: resid_post of every layer by default.
            rank, loss, fit_fraction: as of :meth:`measure`. A masked-token loss masks nothing in the passes for the spreads.
            min_count: occurrences that a token needs; means of rarer ones are mostly noise.
            buckets: of about equal mass, in which gradient energy is measured.
            seed: of the split, of the masks, and of the tokens kept for the plot.
            frequencies: counts or shares by token id, for example of the training data; by default counted over the texts.
            checkpoints: also how far the embedding rows travel over these; each is opened twice, one at a time. Of tokens of
                ``min_count`` occurrences or, with frequencies given, of all that have one.
            corpus_options: as of :meth:`corpus`.

        Raises:
            ValueError: too few tokens, a site where context plays no part, or settings that do not fit.
        """
        corpus = self.corpus(texts, **corpus_options)
        if isinstance(corpus, InputCorpus):
            raise ValueError("a module of unknown structure reads no tokens, and only tokens have a frequency")
        self._check_padding(padding_side)
        objective, shown = choose_loss(loss, self.model, seed), chosen_progress(progress)
        settings = FrequencySettings(
            rank=rank,
            min_count=min_count,
            buckets=buckets,
            loss=objective.name,
            seed=seed,
            fit_fraction=fit_fraction,
            skip_first=skip_first,
            skip_special=skip_special,
            batch_size=batch_size,
            padding_side=padding_side,
            frequencies="corpus" if frequencies is None else "given",
        )
        known = None if frequencies is None else token_frequencies(frequencies)
        travelled = None if checkpoints is None else trajectory_for(checkpoints, corpus, known, min_count, shown)
        return measure_frequency(
            self.model,
            corpus,
            self._chosen(sites),
            settings,
            objective,
            frequencies=known,
            trajectory=travelled,
            pad_id=pad_id_of(self._structure),
            progress=shown,
        )

    def geometry(
        self,
        texts: Texts,
        sites: SiteSelection | None = None,
        *,
        m: int | float | str = "participation_ratio",
        nearest: float = 1.0,
        occurrences: int = 100,
        buckets: int = 3,
        tokens: int = 15,
        sensitivity: bool = True,
        gradient_layers: int = 4,
        maps: Sequence[str] = ("query", "mlp_in"),
        depth: bool = True,
        neighbours: int = 30,
        rows: int = 2000,
        linear_m: int = 16,
        loss: str | Loss | Callable[[Any, Any], Tensor] | None = None,
        level: float = 0.95,
        seed: int = 0,
        skip_first: bool = True,
        skip_special: bool = True,
        batch_size: int = 8,
        padding_side: str = "right",
        remote: bool | Remote = False,
        progress: bool | Progress = True,
        **corpus_options: Any,
    ) -> GeometryReport:
        """The theory's claims about local geometry, measured on the occurrences of single tokens.

        Do the tangent and the normal part grow as t and t^2 with the distance t from a token's mean? How much does a token's
        cloud bend? Does its weight gradient follow? How do dimensions and neighbourhoods change along depth?
        One forward pass, and one forward and backward for the gradients. Kept are ``occurrences`` rows of at most ``buckets`` x
        ``tokens`` tokens at every site, as float32; the report says how many megabytes that was.

        Args:
            sites: resid_post of every layer by default.
            m: dimension of the tangent spaces: a whole number, a variance share in (0, 1), or a rule as for the rank of
                :meth:`measure`, whose median over tokens counts. With ``sensitivity`` also at 1, half and twice of it.
            nearest: share of a token's rows that a tangent space is fitted to, weighted by nearness.
            occurrences: rows of each token. Tokens with fewer are left out, of those with more so many are drawn, so that no
                bucket's numbers rest on more rows a token than another's.
            buckets, tokens: of frequency, and tokens of each.
            gradient_layers: layers, evenly apart, in which the weight gradients of ``maps`` are split; 0 for none.
            depth: intrinsic dimensions, linearity (along ``linear_m`` directions) and overlaps of ``neighbours`` neighbours at
                every site, on at most ``rows`` rows (the ``dimension`` extra).
            loss: as of :meth:`measure`. A masked-token loss hides some occurrences; their rows at the maps are those of what
                stands there instead.
            level: of the intervals.
            seed: of the choice of tokens and rows, and of every cut.
            skip_first, skip_special: leave first positions and special tokens out; one massive activation would be a token's
                whole geometry.
            remote: as of :meth:`measure`, with ``gradient_layers=0``: gradient rows do not travel.
            corpus_options: as of :meth:`corpus`.

        Raises:
            ValueError: too few tokens, a site where context plays no part, or settings that do not fit.
            ImportError: ``depth`` was asked for and scikit-dimension is not installed.
        """
        corpus = self.corpus(texts, **corpus_options)
        if isinstance(corpus, InputCorpus):
            raise ValueError("a module of unknown structure reads no tokens, and only tokens have occurrences")
        self._check_padding(padding_side)
        model = self._runner(remote)
        objective = choose_loss(loss, model, seed) if gradient_layers else CausalLoss()
        settings = GeometrySettings(
            m=m,
            nearest=nearest,
            occurrences=occurrences,
            buckets=buckets,
            tokens=tokens,
            sensitivity=sensitivity,
            gradient_layers=gradient_layers,
            maps=(maps,) if isinstance(maps, str) else tuple(maps),
            loss=objective.name if gradient_layers else "none",
            depth=depth,
            neighbours=neighbours,
            rows=rows,
            linear_m=linear_m,
            level=level,
            seed=seed,
            skip_first=skip_first,
            skip_special=skip_special,
            batch_size=batch_size,
            padding_side=padding_side,
        )
        report = measure_geometry(
            model,
            corpus,
            self._chosen(sites),
            settings,
            objective,
            pad_id=pad_id_of(self._structure),
            progress=chosen_progress(progress),
        )
        self._complete(model)
        return report
