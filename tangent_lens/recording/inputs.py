"""What a module that is no language model is called with: batches made by the person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tangent_lens.models.protocol import Inputs
from tangent_lens.recording.corpus import split_places


@dataclass(frozen=True)
class InputCorpus:
    """Batches as the person made them; the counterpart of :class:`~tangent_lens.recording.corpus.Corpus`.

    Attributes:
        sequences: one batch each.
    """

    sequences: tuple[Inputs, ...]
    name: str = "inputs"
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, batches: Iterable[Any], *, max_sequences: int | None = None, name: str = "inputs") -> InputCorpus:
        """One entry a batch: a tensor, a tuple of positional arguments, or a mapping of named ones.

        Raises:
            ValueError: no batch, a limit that leaves none, or a single tensor where a list of batches belongs.
        """
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences {max_sequences} asks for nothing; use 1 or more, or None for all")
        if isinstance(batches, InputCorpus):
            return replace(batches, sequences=batches.sequences[:max_sequences])
        if isinstance(batches, (str, Tensor, Mapping)):
            raise ValueError(
                f"a {type(batches).__name__} is one batch; pass a list of batches, for example [inputs[:8], inputs[8:]]"
            )
        found = tuple(Inputs(batch, size=_examples(batch)) for batch in batches)[:max_sequences]
        if not found:
            raise ValueError("no batch was given; pass a list of what the module is called with")
        return cls(found, name)

    @property
    def tokens(self) -> int:
        """Number of examples in all batches."""
        return sum(batch.size for batch in self.sequences)

    def warnings(self, prepend_bos: bool | None) -> tuple[str, ...]:
        """Nothing is left out, and nothing put in."""
        return self.left_out

    def split(self, fit_fraction: float = 0.5, seed: int = 0) -> tuple[InputCorpus, InputCorpus]:
        """Disjoint fit and test batches, chosen by the seed alone.

        Raises:
            ValueError: a fraction outside (0, 1), or one batch only.
        """
        parts = split_places(len(self.sequences), fit_fraction, seed, "batch", "cut it into two or more")
        fit, test = (tuple(self.sequences[index] for index in part) for part in parts)
        return replace(self, sequences=fit), replace(self, sequences=test)

    def batches(
        self, batch_size: int = 1, *, skip_first: bool = False, skip_special: bool = False, **padding: Any
    ) -> Iterator[Inputs]:
        """The batches as they came: what is in one is the person's choice, so ``batch_size`` and padding have no say.

        Raises:
            ValueError: positions or special tokens are to be skipped, and nothing is known of either.
        """
        if skip_first or skip_special:
            raise ValueError(
                "skip_first and skip_special are for token sequences; leave rows out of your batches instead"
            )
        return iter(self.sequences)


def _examples(batch: Any) -> int:
    """How many examples a batch holds: the first dimension of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else (batch,)
    return next((len(one) for one in values if isinstance(one, Tensor) and one.ndim), 1)


def refuse_text_options(**options: Any) -> None:
    """Options that cut texts into windows mean nothing to a module that is called with batches as they are.

    Raises:
        ValueError: any of them was given.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: these cut texts into windows; your module is called with your batches as they are"
        )
