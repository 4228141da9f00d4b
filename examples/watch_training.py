"""Watch a model while your own loop trains it, and then ask the paper's question: early against late.

python examples/watch_training.py [MODEL]
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tangent_lens as tln

STEPS = 30
name = sys.argv[1] if len(sys.argv) > 1 else "EleutherAI/pythia-14m"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
corpus = tln.Corpus.from_texts(tln.reference_prose(), tokenizer, pack=True, sequence_length=32, max_sequences=128)
probe, trained_on = corpus.split(0.5, seed=0)

with tempfile.TemporaryDirectory() as folder:
    recorder = tln.TangentRecorder(
        probe, tokenizer, rank=4, keep_states=folder, last_step=STEPS, budget=None, steps=range(0, STEPS + 1, 5)
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder.step(model, 0)
    for step in range(1, STEPS + 1):
        batch = torch.stack([torch.as_tensor(trained_on.sequences[(8 * step + row) % 64]).long() for row in range(8)])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        recorder.step(model, step)  # the one line more

    for point in recorder.points:
        print(point)
    report = tln.measure_checkpoints(recorder.source(model), probe, rank=4, refit=True, folder=folder)

report.show()
