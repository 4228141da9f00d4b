"""What a token's frequency has to do with its geometry: spread over contexts, travel over training, gradient energy.

The paper (Bernas, Jourdan, Poché, Hudelot 2026) correlates log frequency with the first two; see ``MEASUREMENTS``, section 7.
Pure functions of sums; the passes that leave these are in ``recording/token_passes.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangent_lens.recording.corpus import Corpus
from tangent_lens.recording.token_sums import TokenDistances, TokenSums
from tangent_lens.showing import Shown

if TYPE_CHECKING:
    import pandas

# Tokens seen more rarely have means that are mostly noise.
FEWEST_OCCURRENCES = 10
SpreadNumber = Literal["mean_distance", "distance_variance", "mean_square", "corrected_distance", "corrected_square"]


@dataclass(frozen=True, eq=False)
class TokenFrequencies:
    """How often each token of a vocabulary occurs.

    Attributes:
        counts: occurrences, or any numbers in proportion to them (vocabulary,), float64; 0 for tokens never seen.
    """

    counts: np.ndarray

    def __post_init__(self) -> None:
        """Refuse what is no list of frequencies.

        Raises:
            ValueError: not one number a token, negative or not finite numbers, or nothing but zeros.
        """
        counts = np.asarray(self.counts, dtype=np.float64)
        if counts.ndim != 1 or not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError(
                f"frequencies must be finite numbers of 0 or more, one a token, not of shape {counts.shape}"
            )
        if not counts.sum() > 0:
            raise ValueError(f"all {len(counts)} frequencies are zero; give a corpus in which some token occurs")
        object.__setattr__(self, "counts", counts)

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return len(self.counts)

    @property
    def shares(self) -> np.ndarray:
        """f(w): the counts divided by their sum (vocabulary,)."""
        return self.counts / self.counts.sum()

    def seen(self, min_count: float = FEWEST_OCCURRENCES) -> np.ndarray:
        """The tokens with a count of at least ``min_count``, in order.

        Raises:
            ValueError: there are none.
        """
        found = np.flatnonzero((self.counts >= min_count) & (self.counts > 0))
        if not len(found):
            raise ValueError(
                f"no token has a count of {min_count} or more (the largest is {self.counts.max():g}); use a smaller "
                "min_count or more text"
            )
        return found

    def log(self, tokens: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        """log f(w), natural, of these tokens.

        Raises:
            ValueError: a token outside the vocabulary, or one that never occurs.
        """
        places = np.asarray(tokens, dtype=np.int64)
        if places.size and not 0 <= places.min() <= places.max() < self.vocabulary:
            raise ValueError(
                f"tokens {places.min()} to {places.max()} are not all among the {self.vocabulary} that have a frequency"
            )
        shares = self.shares[places]
        if (shares == 0).any():
            missing = int(places[shares == 0][0])
            raise ValueError(f"token {missing} has frequency 0, and 0 has no logarithm; leave it out")
        return np.log(shares)

    def __repr__(self) -> str:
        return f"TokenFrequencies({int((self.counts > 0).sum())} of {self.vocabulary} tokens occur)"


def token_frequencies(
    source: TokenFrequencies | Corpus | Mapping[int, float] | Sequence[float] | np.ndarray | Tensor,
    vocabulary: int | None = None,
    *,
    skip_special: bool = False,
) -> TokenFrequencies:
    """Token frequencies, counted over a corpus or given.

    Args:
        source: a corpus; or frequencies or counts by token id, as a mapping or as an array over the vocabulary; or what this
            function returned.
        vocabulary: number of tokens; by default, up to the highest one that is named.
        skip_special: do not count the special tokens of a corpus.

    Raises:
        ValueError: a token outside the vocabulary, or numbers that are no frequencies.
    """
    if isinstance(source, Corpus):
        return TokenFrequencies(_counted(source, vocabulary, skip_special))
    if skip_special:
        raise ValueError(
            "skip_special=True, but only a corpus knows its special tokens; set their frequencies to 0 instead"
        )
    if isinstance(source, Mapping):
        highest = max(source, default=-1)
        size = highest + 1 if vocabulary is None else vocabulary
        _check_inside(min(source, default=0), highest, size)
        counts = np.zeros(size)
        counts[list(source)] = list(source.values())
        return TokenFrequencies(counts)
    source = source.counts if isinstance(source, TokenFrequencies) else source
    counts = np.asarray(source.detach().cpu() if isinstance(source, Tensor) else source, dtype=np.float64)
    if vocabulary is not None and len(counts) != vocabulary:
        raise ValueError(f"{len(counts)} frequencies do not fit a vocabulary of {vocabulary}; give one a token")
    return TokenFrequencies(counts)


def _counted(corpus: Corpus, vocabulary: int | None, skip_special: bool) -> np.ndarray:
    highest = max(int(sequence.max()) for sequence in corpus.sequences)
    size = highest + 1 if vocabulary is None else vocabulary
    _check_inside(0, highest, size)
    counts = np.zeros(size)
    for sequence in corpus.sequences:
        counts += np.bincount(sequence, minlength=size)
    if skip_special:
        counts[[token for token in corpus.special_ids if token < size]] = 0
    return counts


def _check_inside(lowest: int, highest: int, size: int) -> None:
    if lowest < 0 or highest >= size:
        raise ValueError(
            f"token ids {lowest} to {highest} do not fit a vocabulary of {size}; use the model's own tokenizer"
        )


@dataclass(frozen=True, eq=False)
class TokenSpread:
    """How far rows of each token lie from the token's own mean.

    Attributes:
        name: what the rows are.
        tokens: ids (w,); occurrences: rows of each (w,).
        mean_square: mean of |x - mu_w|^2 (w,), divided by the number of rows.
        mean_distance: mean of |x - mu_w| (w,); None where the rows passed only once.
    """

    name: str
    tokens: np.ndarray
    occurrences: np.ndarray
    mean_square: np.ndarray
    mean_distance: np.ndarray | None = None

    @property
    def distance_variance(self) -> np.ndarray | None:
        """Variance of |x - mu_w| (w,), divided by the number of rows."""
        return None if self.mean_distance is None else np.maximum(self.mean_square - self.mean_distance**2, 0)

    @property
    def corrected_square(self) -> np.ndarray:
        """Unbiased: mu_w is fitted to the same n rows, which shortens squares by (n-1)/n, most for rare tokens."""
        return self.mean_square * self._factor

    @property
    def corrected_distance(self) -> np.ndarray | None:
        """Mean distance times sqrt(n/(n-1)): exact where the rows of a token are normally distributed."""
        return None if self.mean_distance is None else self.mean_distance * np.sqrt(self._factor)

    @property
    def _factor(self) -> np.ndarray:
        return self.occurrences / (self.occurrences - 1)

    def correlation(
        self, frequencies: TokenFrequencies, number: SpreadNumber = "mean_distance", level: float = 0.95
    ) -> FrequencyCorrelation:
        """Pearson and Spearman of log f with one of the numbers above.

        Raises:
            ValueError: distances that were not measured, a token of frequency 0, or what :func:`frequency_correlation` refuses.
        """
        values = getattr(self, number)
        if values is None:
            raise ValueError(
                f"{self.name}: {number} needs a second pass over the rows, which was not made; give distances, or a list or "
                "function instead of an iterator, or use mean_square"
            )
        return frequency_correlation(frequencies.log(self.tokens), values, level=level)

    def to_pandas(self) -> pandas.DataFrame:
        """One row a token."""
        import pandas

        columns = {"token": self.tokens, "occurrences": self.occurrences, "mean_square": self.mean_square}
        columns |= {"corrected_square": self.corrected_square}
        for name in ("mean_distance", "distance_variance", "corrected_distance"):
            values = getattr(self, name)
            columns[name] = np.full(len(self.tokens), np.nan) if values is None else values
        return pandas.DataFrame(columns)

    def __repr__(self) -> str:
        return f"TokenSpread({self.name}: {len(self.tokens)} tokens, {int(self.occurrences.sum())} rows)"


def contextual_spread(
    sums: TokenSums, distances: TokenDistances | None = None, *, min_count: int = FEWEST_OCCURRENCES
) -> TokenSpread:
    """How far the rows of each token lie from the token's own mean at one site (``contextual_spread`` of section 7).

    Args:
        sums: what the first pass left: exact mean squares.
        distances: what the second pass left: exact mean distances; None leaves these out.
        min_count: tokens with fewer rows are left out.

    Raises:
        ValueError: min_count below 2, no token with as many rows, or passes over different rows.
    """
    if min_count < 2:
        raise ValueError(f"min_count {min_count} must be 2 or more: one row lies on its own mean")
    if distances is not None and not (distances.sums is sums and torch.equal(distances.count, sums.count)):
        raise ValueError(f"{sums.name}: the second pass saw other rows than the first; give both the same batches")
    kept = (sums.count >= min_count).nonzero().flatten()
    if not len(kept):
        most = int(sums.count.max())
        raise ValueError(f"{sums.name}: no token has {min_count} rows (the most is {most}); use a smaller min_count")
    count = sums.count[kept].double()
    return TokenSpread(
        name=sums.name,
        tokens=sums.tokens[kept].numpy(),
        occurrences=sums.count[kept].numpy(),
        mean_square=(sums.square[kept] / count).numpy(),
        mean_distance=None if distances is None else (distances.distance[kept] / count).numpy(),
    )


def trajectory_spread(
    embeddings: Iterable[Float[Tensor, "vocabulary d"]] | Callable[[], Iterable[Float[Tensor, "vocabulary d"]]],
    tokens: Int[Tensor, " w"] | Sequence[int] | None = None,
    *,
    name: str = "embedding rows over checkpoints",
) -> TokenSpread:
    """How far each embedding row travels: its distance to its own mean over checkpoints.

    Memory is that of one matrix of means, however many checkpoints pass. Mean distances need a second pass: an iterator,
    which can be read only once, leaves mean squares alone.

    Args:
        embeddings: one embedding matrix a checkpoint; or a function that begins anew, such as one that opens the
            checkpoints one after another.
        tokens: which rows; all by default.

    Raises:
        ValueError: fewer than two checkpoints, or matrices of different shapes.
    """
    once = not callable(embeddings) and isinstance(embeddings, Iterator)
    begin = embeddings if callable(embeddings) else lambda: embeddings
    sums: TokenSums | None = None
    shape = None
    for matrix in begin():
        if sums is None:
            shape = matrix.shape
            chosen = torch.arange(len(matrix)) if tokens is None else tokens
            sums = TokenSums(chosen, matrix.shape[-1], name=name)
        if matrix.shape != shape:
            raise ValueError(f"{name}: a matrix of shape {tuple(matrix.shape)} follows one of {tuple(shape or ())}")
        sums.update(matrix, torch.arange(len(matrix)))
    if sums is None or int(sums.count.max()) < 2:
        raise ValueError(f"{name}: a trajectory needs 2 checkpoints or more")
    distances = None if once else TokenDistances(sums)
    for matrix in () if distances is None else begin():
        assert distances is not None
        distances.update(matrix, torch.arange(len(matrix)))
    return contextual_spread(sums, distances, min_count=2)


@dataclass(frozen=True)
class Correlation:
    """One correlation with its interval.

    Attributes:
        method: ``pearson`` or ``spearman``.
        n: number of tokens.
        estimate: r or rho.
        low, high: confidence interval at ``level``.
        p_value: two-sided, of no correlation (SciPy's t distribution).
    """

    method: str
    n: int
    estimate: float
    low: float
    high: float
    p_value: float
    level: float


@dataclass(frozen=True, repr=False)
class FrequencyCorrelation(Shown):
    """How log frequency goes with a number of each token: along a line (Pearson), and in order (Spearman)."""

    pearson: Correlation
    spearman: Correlation

    def to_pandas(self) -> pandas.DataFrame:
        """One row a method."""
        import pandas

        return pandas.DataFrame([vars(self.pearson), vars(self.spearman)])


def frequency_correlation(
    log_frequency: Float[np.ndarray, " n"], values: Float[np.ndarray, " n"], *, level: float = 0.95
) -> FrequencyCorrelation:
    """Pearson and Spearman, each with an interval on Fisher's scale: tanh(atanh(r) +- z s).

    s = 1 / sqrt(n-3) for Pearson (Fisher 1915) and sqrt((1 + rho^2/2) / (n-3)) for Spearman (Bonett and Wright 2000).
    Tokens count as independent draws.

    Raises:
        ValueError: fewer than 4 tokens, lengths that differ, numbers that are not finite, all equal, or a level outside (0, 1).
    """
    from scipy.stats import pearsonr, spearmanr

    x, y = np.asarray(log_frequency, dtype=np.float64), np.asarray(values, dtype=np.float64)
    _check_pairs(x, y, level)
    n, found = len(x), []
    for method, (raw, p_value) in (("pearson", tuple(pearsonr(x, y))), ("spearman", tuple(spearmanr(x, y)))):
        estimate = float(np.clip(raw, -1, 1))
        spread = math.sqrt((1 if method == "pearson" else 1 + estimate**2 / 2) / (n - 3))
        low, high = _fisher_interval(estimate, spread, level)
        found.append(Correlation(method, n, estimate, low, high, float(p_value), level))
    return FrequencyCorrelation(*found)


def _fisher_interval(estimate: float, spread: float, level: float) -> tuple[float, float]:
    from scipy.special import ndtri

    if abs(estimate) == 1:
        return estimate, estimate
    half = float(ndtri((1 + level) / 2)) * spread
    return math.tanh(math.atanh(estimate) - half), math.tanh(math.atanh(estimate) + half)


def _check_pairs(x: np.ndarray, y: np.ndarray, level: float) -> None:
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(
            f"log frequencies of shape {x.shape} and numbers of shape {y.shape} are no pairs; give one a token"
        )
    if len(x) < 4:
        raise ValueError(f"{len(x)} tokens give no interval; use 4 or more (a smaller min_count, or more text)")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("some numbers are NaN or infinite; leave their tokens out")
    for what, numbers in (("frequency", x), ("number", y)):
        if np.ptp(numbers) == 0:
            raise ValueError(f"every token has the same {what}, so nothing can go with it")
    if not 0 < level < 1:
        raise ValueError(f"level {level} must lie between 0 and 1, for example 0.95")
