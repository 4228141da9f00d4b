"""A model whose weights are on NDIF: the same three lines, and only sums travel. Your key is in NDIF_API_KEY.

python examples/remote_on_ndif.py [MODEL]
"""

import sys

import tangent_lens as tln

lens = tln.Lens.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "meta-llama/Llama-3.1-70B", backend="nnsight")
report = lens.measure(
    tln.reference_prose(),
    sites="resid_post.*",
    rank=8,
    max_sequences=16,
    sequence_length=64,
    pack=True,
    name="Python reference manual",
    remote=tln.Remote(batches_per_job=4),  # remote=True is the same with 8
)
report.show()
print(lens.traffic)
