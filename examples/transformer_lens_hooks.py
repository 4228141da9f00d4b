"""The same hook points in TransformerLens's own style: pass them to run_with_hooks, or to `with bridge.hooks(...)`.

python examples/transformer_lens_hooks.py [MODEL]
"""

import sys

import tangent_lens as tln

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
lens = tln.Lens.from_pretrained(name, backend="transformer_lens")
bridge = lens.model.bridge  # a TransformerBridge; you would have your own: tln.Lens(bridge)
tokens = bridge.to_tokens("The tangent space of a curve at a point is the line that touches it there.")

# Forward only: a hook is a name and a function, and remembers what passed.
hooks = lens.hooks(tln.resid_post(0, -1))
bridge.run_with_hooks(tokens, fwd_hooks=hooks, return_type="logits")
for hook in hooks:
    print(f"{hook.name}: activations {tuple(hook.take().activations.shape)}")

# With gradients: run forward and backward inside the host's own context manager, as often as you like.
hooks = lens.hooks(tln.resid_post(), gradients=True, keep="moments")
with bridge.hooks(fwd_hooks=hooks):
    for _ in range(2):
        bridge(tokens, return_type="loss").backward()
        bridge.zero_grad()
for hook in hooks[:: max(1, len(hooks) // 4)]:
    moments = hook.tap.moments()
    scale = (moments.gradients.second_moment().trace() / moments.gradients.count).sqrt()
    print(f"{hook.name}: {moments.gradients.count} gradient rows, root mean square {float(scale):.2e}")
