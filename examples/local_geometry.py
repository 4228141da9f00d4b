"""How rows lie about their mean: first where the answer is known, then the occurrences of tokens that you choose.

python examples/local_geometry.py [MODEL]

``lens.geometry(texts)`` chooses the tokens itself, at every site, and splits weight gradients, too.
"""

import sys

import tangent_lens as tln

# Twelve patches of a torus in 40 dimensions, with noise: theory says 1 for the tangent part, 2 for the normal one above noise.
torus = tln.Manifold.torus()
patches = {number: torus.sample(120, 0.5, d=40, noise=0.005, seed=number).rows for number in range(12)}
tln.tangent_order(patches, name="torus").show()
print("principal curvatures", torus.principal_curvatures, "found", tln.principal_curvatures(patches[0], m=2).tolist())

lens = tln.Lens.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
corpus = lens.corpus(tln.reference_prose(), pack=True, max_sequences=64, name="Python reference manual")
(sample,) = lens.sample(corpus, "resid_post.-1", skip_first=True).values()

# Any rows will do, in any number of dimensions, by any key: here those of the most frequent token.
token = int(sample.tokens.mode().values)
occurrences = {token: sample.rows[sample.tokens == token]}
tln.tangent_order(occurrences, name=f"occurrences of token {token}").show()
tln.curvature_summary(occurrences, m=3).show()
