"""The same inside a HuggingFace Trainer: one callback.

python examples/trainer_callback.py [MODEL]
"""

import sys
import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import tangent_lens as tln

name = sys.argv[1] if len(sys.argv) > 1 else "EleutherAI/pythia-14m"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
corpus = tln.Corpus.from_texts(tln.reference_prose(), tokenizer, pack=True, sequence_length=32, max_sequences=64)
probe, trained_on = corpus.split(0.25, seed=0)
rows = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in trained_on.sequences]

recorder = tln.TangentRecorder(probe, tokenizer, rank=4, budget=None)
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder, max_steps=8, per_device_train_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model, settings, train_dataset=rows, callbacks=[tln.TangentCallback(recorder)]).train()

for point in recorder.points:
    print(point)
