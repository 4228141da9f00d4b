"""A training run of forty steps, its checkpoints, and a corpus: the same in every process."""

from __future__ import annotations

import copy
import os
import signal
import sys

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tangent_lens.dynamics.protocol import Choices, measure_dynamics
from tangent_lens.measures.report import Settings
from tangent_lens.models.checkpoints import state_checkpoints
from tangent_lens.recording.corpus import Corpus

STEPS = (0, 5, 10, 15, 20, 25, 30, 35, 40)
SETTINGS = Settings(rank=3, controls=5, batch_size=4)


def tokens():
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(0, 100, (32, 12), generator=generator)
    found[:, ::2] = found[:, :1]
    return found


def corpus():
    return Corpus.from_tokens([row.tolist() for row in tokens()[:20]], name="toy tokens")


def trained():
    """The model, and its states by step."""
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=100, max_position_embeddings=16, **shape))
    optimiser, data = torch.optim.AdamW(model.parameters(), 1e-2), tokens()
    states = {0: copy.deepcopy(model.state_dict())}
    for step in range(1, max(STEPS) + 1):
        loss = model(input_ids=data, labels=data).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step in STEPS:
            states[step] = copy.deepcopy(model.state_dict())
    return model, states


def source(model, states):
    return state_checkpoints(model, sorted(states.items()), name="toy")


class KilledOnTheWay:
    """A display that kills this very process, without a chance to tidy up, once so many passes have begun."""

    def __init__(self, after):
        self.left = after

    def start(self, description, total=None, unit=""):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def advance(self, amount=1.0, note=""):
        pass

    def finish(self):
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, passes = sys.argv[1], int(sys.argv[2])
    measure_dynamics(
        source(*trained()), corpus(), SETTINGS, Choices(refit=True), folder=place, progress=KilledOnTheWay(passes)
    )
