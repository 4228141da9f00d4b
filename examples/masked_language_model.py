"""Three states of one masked language model: the BERT of rxnfp, pretrained on chemical reactions, and two fine-tunes of it.

python examples/masked_language_model.py
"""

from pathlib import Path

import tangent_lens as tln
from tangent_lens.models.packaged import PackagedModelUnavailable

STATES = {"pretrained": "rxnfp-pretrained", "fine-tuned": "rxnfp-finetuned", "on 10,000": "rxnfp-finetuned-10k"}

lines = (Path(__file__).parent / "data" / "reactions.rsmi").read_text(encoding="utf-8").splitlines()
reactions = [line.split(" ", 1)[0] for line in lines]
print(f"{len(reactions)} reactions, the first: {lines[0]}")

# Which tokens are masked depends on the seed and the reaction alone, so all three states guess the same ones.
loss = tln.MaskedLoss(share=0.15, seed=0)
options = {"sites": tln.resid_post(0, 5, 11), "rank": 16, "max_sequences": 64, "name": "reactions"}

try:
    reports = {
        title: tln.Lens.from_pretrained(name).measure(reactions, loss=loss, **options) for title, name in STATES.items()
    }
except PackagedModelUnavailable as problem:
    print(f"The models are not here and could not be fetched: {problem}", "Run this again with a connection.", sep="\n")
    print("With a masked language model of your own the lines are the same:")
    print('    lens = tln.Lens.from_pretrained("google-bert/bert-base-uncased")')
    print("    lens.measure(texts, loss=tln.MaskedLoss(share=0.15, seed=0)).show()")
else:
    reports["pretrained"].show()
    tln.compare(*reports.values(), names=list(reports)).show()
