"""Any torch module: name the places, bring the batches and a summed loss. Here a small network, before and after training.

python examples/any_module.py
"""

import torch
from torch import nn

import tangent_lens as tln

torch.manual_seed(0)
plane = torch.linalg.qr(torch.randn(30, 2))[0]


class Network(nn.Module):
    """Thirty numbers to one; it takes the target as well and returns it, so that the loss finds it in the output."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(30, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, points, target):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(points))))).squeeze(-1), target


def batch(size):
    """Points in 30 dimensions; the target is a wave over a plane hidden in them."""
    points = torch.randn(size, 30)
    along, across = (points @ plane).unbind(-1)
    return points, torch.sin(along) * across


def squared_error(output, batch):
    """A sum, never a mean: so no number depends on how the data were cut into batches."""
    guess, target = output
    return (guess - target).square().sum()


network = Network()
lens = tln.Lens(network, sites={"first": network.first, "second": "second"}, name="network")
batches = [batch(64) for _ in range(60)]


def measure():
    """Each batch is what the module is called with: a tuple goes in by place, a mapping by name."""
    return lens.measure(batches, loss=squared_error, rank=4, name="random points")


before = measure()
optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(400):
    optimiser.zero_grad()
    fresh = batch(256)
    (squared_error(network(*fresh), fresh) / 256).backward()
    optimiser.step()
after = measure()

after.show()
tln.compare(before, after, names=["before training", "after training"]).show()

# The low-level way works as well: run the module yourself, read rows.
with lens.attach("second", gradients=True) as taps:
    points, target = batches[0]
    squared_error(network(points, target), None).backward()
network.zero_grad()
print(f"activations at 'second': {tuple(taps['second'].activations.shape)}; its gradients alike")
