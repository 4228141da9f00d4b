"""What recording costs, as ratios to a plain forward and backward pass of the same model on the same batches.

    python benchmarks/recording.py                    10k and 100k tokens; about half an hour on 2 cores
    python benchmarks/recording.py --tokens 10000     the short form

Every variant runs in a process of its own, so that its peak memory is its own. The time is that of the passes after a
warm-up batch; the memory is the process's peak less what it held once the model was loaded. Rounds are interleaved
(every variant once, then again), and each variant keeps its fastest round.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

VOCABULARY, LENGTH, BATCH = 8192, 256, 8
WARM_UP = 1


def main() -> None:
    """Run every variant at every size and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, help="rounds of each size; by default 3 at up to 20,000 tokens, else 1")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--run", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run_here(options.run, options.tokens[0])))
        return
    results = {}
    for tokens in options.tokens:
        for round_number in range(options.rounds or (3 if tokens <= 20_000 else 1)):
            for variant in options.variants:
                print(f"{tokens:,} tokens, round {round_number + 1}: {variant}", file=sys.stderr, flush=True)
                results.setdefault((tokens, variant), []).append(run_apart(variant, tokens))
    print_table(options.tokens, options.variants, results)


def run_apart(variant: str, tokens: int) -> dict[str, float]:
    """One variant in a fresh process."""
    command = [sys.executable, __file__, "--run", variant, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{variant} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run_here(variant: str, tokens: int) -> dict[str, float]:
    """Warm up, then time the passes of one variant over its batches."""
    model = make_model()
    job = VARIANTS[variant](model)
    held = resident_bytes()
    job(batches(WARM_UP))
    count = max(1, round(tokens / (LENGTH * BATCH)))
    started = time.perf_counter()
    job(batches(count))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": count * LENGTH * BATCH, "peak": peak_bytes() - held}


def make_model():
    """A Llama of 6 layers and d_model 512 with random weights, sdpa attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **shape)).eval()
    model.config.architectures = ["LlamaForCausalLM"]
    return model


def batches(count: int) -> Iterator[Tensor]:
    """The same random tokens for every variant."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """What every variant differentiates."""
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


Job = Callable[[Iterator[Tensor]], None]


def plain_frozen(model) -> Job:
    """Forward and backward with frozen parameters; the embedding asks for the gradient."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.detach().requires_grad_(True))

    def job(stream: Iterator[Tensor]) -> None:
        for tokens in stream:
            summed_loss(model(input_ids=tokens, use_cache=False).logits, tokens).backward()

    return job


def plain_trainable(model) -> Job:
    """Forward and backward as most people write it: parameters ask for gradients."""

    def job(stream: Iterator[Tensor]) -> None:
        for tokens in stream:
            summed_loss(model(input_ids=tokens, use_cache=False).logits, tokens).backward()
            model.zero_grad(set_to_none=True)

    return job


def ours_moments(model) -> Job:
    """(a) activation and gradient moments at resid_post of every layer."""
    return _ours(model, weights=False)


def ours_weights(model) -> Job:
    """(b) the same and the weight gradients of all query, key, value and MLP input maps."""
    return _ours(model, weights=True)


def _ours(model, weights: bool) -> Job:
    import tangent_lens as tln
    from tangent_lens.recording.passes import record_gradients

    lens = tln.Lens(model, name="benchmark")

    # As Lens.measure does: the proxies are known by then, and their bases spare the inputs a full second moment.
    basis = torch.linalg.qr(torch.randn(512, 16, dtype=torch.float64)).Q
    maps = lens.maps if weights else ()
    bases = {one.reads: basis for one in maps}

    def job(stream: Iterator[Tensor]) -> None:
        cut = (batch for tokens in stream for batch in tln.Corpus.from_tokens(tokens).batches(BATCH))
        record_gradients(lens.model, cut, lens.resolve("resid_post.*"), maps, activations=True, input_bases=bases)

    return job


def transformer_lens_cache(model) -> Job:
    """(c) TransformerLens caches the same sites with gradients; NumPy makes the moments at the end."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers("benchmark", hf_model=model, tokenizer=some_tokenizer(), device="cpu")
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(len(bridge.blocks))]
    wanted = [name + end for name in names for end in ("", "_grad")]

    def job(stream: Iterator[Tensor]) -> None:
        kept: dict[str, list] = {name: [] for name in wanted}
        for tokens in stream:
            _, cache = bridge.run_with_cache(tokens, names_filter=names, incl_bwd=True, return_type="loss")
            for name in wanted:
                kept[name].append(cache[name].detach().flatten(0, 1).numpy().copy())
            bridge.zero_grad(set_to_none=True)
        numpy_moments(kept)

    return job


def some_tokenizer():
    """A bridge does not start without a saved tokenizer; no text is read here."""
    import tempfile

    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", eos_token="1").save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)


def nnsight_save(model) -> Job:
    """(d) nnsight saves the same sites with gradients; NumPy makes the moments at the end."""
    import nnsight

    traced = nnsight.NNsight(model)

    def job(stream: Iterator[Tensor]) -> None:
        kept: dict[str, list] = {}
        for tokens in stream:
            with traced.trace(tokens):
                hidden = [layer.output for layer in traced.model.layers]
                loss = summed_loss(traced.lm_head.output, tokens)
                activations = nnsight.save([one.detach() for one in hidden])
                gradients = nnsight.save([])
                with loss.backward():
                    for one in reversed(hidden):
                        gradients.append(one.grad)
            for layer, (activation, gradient) in enumerate(zip(activations, reversed(gradients), strict=True)):
                for name, tensor in ((f"{layer}", activation), (f"{layer}_grad", gradient)):
                    kept.setdefault(name, []).append(tensor.detach().flatten(0, 1).numpy().copy())
            model.zero_grad(set_to_none=True)
        numpy_moments(kept)

    return job


def numpy_moments(kept: dict[str, list]) -> None:
    """Mean and second moment of all rows of each name, as a person would write it."""
    import numpy

    for parts in kept.values():
        rows = numpy.concatenate(parts)
        centred = rows - rows.mean(axis=0)
        _ = centred.T @ centred


VARIANTS: dict[str, Callable[..., Job]] = {
    "plain, frozen": plain_frozen,
    "plain, trainable": plain_trainable,
    "(a) ours, moments": ours_moments,
    "(b) ours, and weight gradients": ours_weights,
    "(c) TransformerLens cache": transformer_lens_cache,
    "(d) nnsight save": nnsight_save,
}


def resident_bytes() -> float:
    """What the process holds now (Linux), or its peak so far elsewhere."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_bytes()


def peak_bytes() -> float:
    """The most that the process ever held."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def print_table(sizes: list[int], variants: list[str], results: dict) -> None:
    """Seconds, ratios to the frozen plain pass, and memory."""
    table = Table(
        title=f"recording, {torch.get_num_threads()} threads, torch {torch.__version__}; Llama 6 layers, d_model 512"
    )
    for heading in ("variant", "tokens", "seconds", "tokens/s", "time ratio", "peak MB"):
        table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
    for size in sizes:
        base = min(one["seconds"] for one in results[size, variants[0]])
        for variant in variants:
            rounds = results[size, variant]
            seconds, tokens = min(one["seconds"] for one in rounds), rounds[0]["tokens"]
            peak = min(one["peak"] for one in rounds)
            ratio = f"{seconds / base:.2f}"
            table.add_row(
                variant, f"{tokens:,}", f"{seconds:.1f}", f"{tokens / seconds:,.0f}", ratio, f"{peak / 1e6:,.0f}"
            )
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
