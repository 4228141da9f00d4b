"""The low-level way: tap two layers, run your own forward and backward pass, read rows, test one subspace.

python examples/attach_by_hand.py [MODEL]        a hub id, a folder, or smollm2-135m (the default)
"""

import sys

import torch

import tangent_lens as tln

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
lens = tln.Lens.from_pretrained(name)
model, tokenizer = lens.model.module, lens.model.tokenizer

texts = [text[:600] for text in tln.reference_prose()[:16]]
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64)
tokens, mask = batch["input_ids"], batch["attention_mask"].bool()

# Inside lens.gradients() no parameter asks for a gradient and the token embedding does: cheaper, and the same
# gradients at every site. Leave it out and your own .backward() fills parameter gradients as usual.
first, last = 1, lens.description.n_layers - 1
with lens.gradients(), lens.attach(tln.resid_post(first, last), gradients=True) as taps:
    taps.use_mask(mask)  # padding stays out of moments()
    logits = model(input_ids=tokens, attention_mask=mask.long()).logits
    loss, targets = tln.causal_loss_sum(logits, tokens, mask)
    loss.backward()

print(f"loss {loss.item() / targets:.3f} nats a token over {targets} tokens")
print(f"activations at {taps[first].site}: {tuple(taps[first].activations.shape)}")
print(f"gradients at {taps[first].site}:   {tuple(taps[first].gradients.shape)}")
norms = taps[first].gradients[0].norm(dim=-1)
print(f"gradient norm by position, first text: {[round(float(norm), 2) for norm in norms[:8]]} ...")

for layer in (first, last):
    moments = taps[layer].moments()
    rank = min(8, moments.width // 4)
    tangent = tln.fit_pca(moments, rank=rank)
    print(f"\n{taps[layer].site}: {tangent}, {tangent.origin['variance_share']:.1%} of the variance")
    # Fitted and tested on the same rows, to keep the example short; Lens.measure splits the sequences.
    tln.energy_test(moments, tangent, controls=20).show()

with torch.no_grad():
    inside = tangent.project(taps[last].activations[0])
    outside = tangent.reject(taps[last].activations[0])
print(f"one text split: {float(inside.norm()):.1f} inside the tangent proxy, {float(outside.norm()):.1f} outside")
