"""The summed masked-token loss: which tokens are masked depends on the seed and the sequence alone."""

from __future__ import annotations

import hashlib
import numbers
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from jaxtyping import Float
from torch import Tensor

from tangent_lens.models.protocol import Batch, logits_of

_NOTHING = -100
_STYLES = ("80/10/10", "plain")


@dataclass(frozen=True)
class MaskedLoss:
    """Negative log-likelihood of masked tokens in nats, **summed** over all of them (Devlin et al. 2019).

    In every sequence ``share`` of the tokens that are not special, at least one, are to be predicted. Which these are, and
    what stands in their place, is drawn from ``seed`` and the token ids of the sequence: never from its neighbours in a
    batch, nor from its place in the corpus. Equal sequences are masked alike.

    Attributes:
        share: of the tokens of a sequence, in (0, 1).
        style: ``80/10/10``: of the tokens to be predicted each becomes the mask token with probability 0.8, a random token
            with 0.1, and stays with 0.1; ``plain``: every one becomes the mask token.
        seed: of the choice.
        mask_id: the mask token; None takes the tokenizer's.
        special_ids: tokens that are never masked and never stand in; None takes the tokenizer's.
    """

    share: float = 0.15
    style: str = "80/10/10"
    seed: int = 0
    mask_id: int | None = None
    special_ids: frozenset[int] | None = None
    _vocabulary: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.share, numbers.Real) or not 0 < self.share < 1:
            raise ValueError(f"share {self.share!r} of masked tokens must lie between 0 and 1, for example 0.15")
        if self.mask_id is not None and not isinstance(self.mask_id, numbers.Integral):
            raise ValueError(f"mask_id {self.mask_id!r} must be a token id; tokenizer.mask_token_id is one")
        if self.style not in _STYLES:
            raise ValueError(f"style {self.style!r} must be one of {', '.join(_STYLES)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, numbers.Integral) or self.seed < 0:
            raise ValueError(f"seed {self.seed!r} must be a whole number, 0 or more")

    @property
    def name(self) -> str:
        """``masked-token (15% of tokens, 80/10/10, seed 0)``."""
        return f"masked-token ({self.share:.4g} of the tokens, {self.style}, seed {self.seed})"

    @property
    def unit(self) -> str:
        """What the mean is taken over."""
        return "masked token"

    def for_model(self, tokenizer: Any, vocabulary: int) -> MaskedLoss:
        """The same loss with the mask token and the special tokens of a tokenizer, where it names none.

        Raises:
            ValueError: no mask token is known, or it is outside the vocabulary.
        """
        mask_id = self.mask_id if self.mask_id is not None else getattr(tokenizer, "mask_token_id", None)
        if mask_id is None:
            raise ValueError(
                "no mask token is known: the model came without a tokenizer, or its tokenizer has none; "
                "pass loss=MaskedLoss(mask_id=...), or Lens(model, tokenizer=...)"
            )
        if not 0 <= mask_id < vocabulary:
            raise ValueError(
                f"mask_id {mask_id} is outside this model's vocabulary of {vocabulary}; pass the id of its own mask token"
            )
        special = self.special_ids if self.special_ids is not None else getattr(tokenizer, "all_special_ids", ())
        return replace(self, mask_id=mask_id, special_ids=frozenset({*special, mask_id}), _vocabulary=vocabulary)

    def prepare(self, batch: Batch) -> Batch:
        """The batch with some tokens masked, and what they were as its targets."""
        if batch.targets is not None:
            return batch
        tokens, targets = batch.tokens.cpu().long(), torch.full(batch.tokens.shape, _NOTHING, dtype=torch.long)
        tokens = tokens.clone()
        for row, mask in enumerate(batch.attention_mask.cpu()):
            ids = tokens[row, mask].numpy()
            places = torch.nonzero(mask).flatten()
            chosen, replacements = self._mask(ids)
            targets[row, places[chosen]] = torch.from_numpy(ids[chosen])
            tokens[row, places[chosen]] = torch.from_numpy(replacements)
        return replace(batch, tokens=tokens.to(batch.tokens), targets=targets.to(batch.tokens.device))

    def _mask(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places to be predicted, in order, and the tokens that stand there instead."""
        if self.mask_id is None or not self._vocabulary:
            raise ValueError("this MaskedLoss knows no mask token yet; hand it to lens.measure or lens.record")
        special = np.fromiter(self.special_ids or (), dtype=np.int64)
        candidates = np.flatnonzero(~np.isin(ids, special))
        if not len(candidates):
            return candidates, candidates
        bits = self._bits(ids)
        count = max(1, round(self.share * len(candidates)))
        chosen = np.sort(candidates[np.argsort(bits.random_raw(len(candidates)), kind="stable")[:count]])
        if self.style == "plain":
            return chosen, np.full(count, self.mask_id)
        words = np.setdiff1d(np.arange(self._vocabulary), special)
        fate, word = bits.random_raw(count) / 2.0**64, words[bits.random_raw(count) % np.uint64(len(words))]
        return chosen, np.where(fate < 0.8, self.mask_id, np.where(fate < 0.9, word, ids[chosen]))

    def _bits(self, ids: np.ndarray) -> np.random.BitGenerator:
        # Raw bits: NumPy promises that these stay the same from version to version, of its distributions it does not.
        content = f"{self.seed}/".encode() + np.ascontiguousarray(ids, dtype="<i8").tobytes()
        return np.random.PCG64(int.from_bytes(hashlib.blake2b(content, digest_size=16).digest(), "little"))

    def __call__(self, output: Any, batch: Batch) -> tuple[Float[Tensor, ""], int]:
        """The summed loss of the masked tokens, and how many these are (0 where a batch holds special tokens only)."""
        logits = logits_of(output)
        assert batch.targets is not None, "prepare() comes first"
        wanted = (batch.targets != _NOTHING).to(logits.device)
        chosen = logits[wanted]
        wide = chosen if chosen.dtype == torch.float64 else chosen.float()
        targets = batch.targets.to(logits.device)[wanted]
        return functional.cross_entropy(wide, targets, reduction="sum"), int(wanted.sum())
