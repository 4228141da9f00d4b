"""Training checkpoints: found by name in step order, one in memory at a time, downloads deleted where asked."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from explicit import PROPERTY
from hypothesis import given
from hypothesis import strategies as some
from loopback_hub import LoopbackHub, serve_in_this_process
from plain_reference import random_tokens

from tangent_lens.lens import Lens
from tangent_lens.measures.frequency import trajectory_spread
from tangent_lens.models.checkpoint_opening import HubCache
from tangent_lens.models.checkpoints import (
    REVISION_NAMES,
    Checkpoint,
    CheckpointProblem,
    CheckpointSource,
    folder_checkpoints,
    hub_checkpoints,
    spread_places,
    state_checkpoints,
    step_of,
)
from tangent_lens.models.huggingface import HuggingFaceModel

REPOSITORY = "tiny/run"
SEEDS = {"main": 9, "step1000": 1, "step0": 2, "step64": 3, "notes": 9}
REAL_NAMES = {
    "Pythia": ["main", "step0", "step1000", "step143000"],
    "OLMo": ["main", "step1000-tokens4B", "step2000-tokens8B", "step556000-tokens2460B"],
    "OLMo 2": ["main", "stage1-step150-tokens1B", "stage1-step1000-tokens5B", "stage2-ingredient1-step1000-tokens3B"],
    "SmolLM2": ["main", "step-125000", "step-250000"],
    "SmolLM3": ["main", "stage1-step-40000", "stage2-step-3480000"],
    "FineWeb ablations": ["main", "step-001000-2BT", "step-002000-4BT"],
    "BLOOM": ["main", "global_step1000", "global_step5000"],
    "": ["main", "seed_2-step_0k", "seed_2-step_20k"],
}


@pytest.fixture(scope="module")
def revisions(tmp_path_factory):
    """Folders of saved models, each of its own random weights, by the revision that they are served as."""
    folders = {}
    for name, seed in SEEDS.items():
        folders[name] = tmp_path_factory.mktemp("served") / name
        tiny_model("llama", torch.float32, seed=seed).save_pretrained(folders[name])
    return folders


@pytest.fixture
def hub(revisions, monkeypatch, tmp_path):
    """A hub with the revisions of one model, and an empty cache for what comes from it."""
    with LoopbackHub({REPOSITORY: revisions}, tags=("step64",)) as hub:
        serve_in_this_process(monkeypatch, hub, tmp_path / "cache")
        yield hub


@pytest.fixture
def trainer_folder(tmp_path):
    """What a Trainer leaves: checkpoints, and the final model beside them."""
    for name, seed in {"checkpoint-1000": 1, "checkpoint-50": 2, "final": 3}.items():
        tiny_model("llama", torch.float32, seed=seed).save_pretrained(tmp_path / "run" / name)
    (tmp_path / "run" / "logs7").mkdir()
    return tmp_path / "run"


def query_weight(model):
    return model.state_dict()["model.layers.1.self_attn.q_proj.weight"]


def weight_of(seed):
    return query_weight(tiny_model("llama", torch.float32, seed=seed))


def cached_files(tmp_path):
    return {path for path in HubCache(tmp_path / "cache" / "models--tiny--run").files()}


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def source_of(*steps):
    return CheckpointSource(
        "mine", tuple(Checkpoint(step, f"step{step}") for step in steps), lambda checkpoint: checkpoint
    )


class TestNames:
    @pytest.mark.parametrize(("family", "names"), REAL_NAMES.items())
    def test_of_every_known_family_are_read(self, family, names, revisions, monkeypatch, tmp_path):
        served = dict.fromkeys(reversed(names), revisions["main"])
        with LoopbackHub({"some/model": served}) as hub:
            serve_in_this_process(monkeypatch, hub, tmp_path)
            source = hub_checkpoints("some/model")
        kept = [name for name in names if name != "main" and not name.startswith("stage2-ingredient")]
        assert [one.name for one in source] == kept
        assert family in REVISION_NAMES or source.steps == (0, 20_000)
        assert {one.source for one in source} == {"some/model"}

    def test_every_known_family_is_tried(self):
        assert set(REVISION_NAMES) == set(REAL_NAMES) - {""}

    @pytest.mark.parametrize(
        ("name", "pattern", "step"),
        [
            ("a12b7", r"a(?P<step>\d+)b7", 12),
            ("a12b8", r"a(?P<step>\d+)b7", None),
            ("it30K", r"it(?P<step>.*)", 30_000),
        ],
    )
    def test_match_as_a_whole_or_not_at_all(self, name, pattern, step):
        assert step_of(name, re.compile(pattern)) == step

    def test_a_pattern_needs_a_step_that_is_a_number(self, hub):
        with pytest.raises(ValueError, match=r"pattern 'step\.\*' has no group named step"):
            hub_checkpoints(REPOSITORY, r"step.*")
        with pytest.raises(ValueError, match=r"the step 'ain' of 'main' is no number"):
            hub_checkpoints(REPOSITORY, r"m(?P<step>.*)")


class TestHub:
    def test_lists_branches_and_tags_in_the_order_of_their_steps(self, hub):
        source = hub_checkpoints(REPOSITORY)
        assert [(one.step, one.name) for one in source] == [(0, "step0"), (64, "step64"), (1000, "step1000")]
        assert repr(source) == "CheckpointSource(tiny/run: 3 checkpoints, steps 0, 64, 1000)"
        assert not hub.downloads()

    def test_each_revision_has_its_own_weights_and_its_name(self, hub):
        for checkpoint in hub_checkpoints(REPOSITORY):
            with hub_checkpoints(REPOSITORY).open(checkpoint) as model:
                assert isinstance(model, HuggingFaceModel)
                assert (model.description.name, model.description.revision) == (REPOSITORY, checkpoint.name)
                assert torch.equal(query_weight(model.module), weight_of(SEEDS[checkpoint.name]))
        assert len(hub.downloads("model.safetensors")) == 3

    def test_a_model_runs_inside_its_block_and_its_weights_are_gone_afterwards(self, hub):
        with hub_checkpoints(REPOSITORY, dtype="float64").open(64) as model:
            taken = model.module.get_input_embeddings().weight
            with Lens(model).attach("resid_post.1") as taps:
                model.module(random_tokens(2, 5))
            released = weakref.ref(model.module.lm_head.weight)
        assert taps[1].activations.dtype == torch.float64
        assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}
        assert released() is None
        assert taken.device.type == "cpu" and bool(torch.isfinite(taken).all())

    def test_weights_are_gone_after_an_error_too(self, hub):
        with pytest.raises(ZeroDivisionError), hub_checkpoints(REPOSITORY).open(0) as model:
            1 / 0  # noqa: B018
        assert next(model.module.parameters()).device.type == "meta"

    def test_downloads_stay_unless_they_are_to_be_deleted(self, hub, tmp_path):
        with hub_checkpoints(REPOSITORY).open(0):
            pass
        kept = cached_files(tmp_path)
        assert any(path.name == "model.safetensors" for path in kept)
        with hub_checkpoints(REPOSITORY, delete_downloads=True).open(1000):
            assert cached_files(tmp_path) > kept
        assert cached_files(tmp_path) == kept
        assert all(path.exists() for path in kept)

    def test_nothing_is_left_of_a_deleted_download(self, hub, tmp_path):
        source = hub_checkpoints(REPOSITORY, delete_downloads=True)
        for checkpoint in source:
            with source.open(checkpoint) as model:
                assert torch.equal(query_weight(model.module), weight_of(SEEDS[checkpoint.name]))
                assert cached_files(tmp_path)
        assert not (tmp_path / "cache" / "models--tiny--run").exists()
        with pytest.raises(ZeroDivisionError), source.open(0):
            1 / 0  # noqa: B018
        assert not cached_files(tmp_path)

    def test_what_was_in_the_cache_before_is_not_deleted(self, hub, tmp_path):
        with hub_checkpoints(REPOSITORY).open(0):
            pass
        before, sent = cached_files(tmp_path), len(hub.downloads())
        with hub_checkpoints(REPOSITORY, delete_downloads=True).open(0):
            pass
        assert cached_files(tmp_path) == before
        assert len(hub.downloads()) == sent

    def test_of_a_revision_that_was_there_in_part_the_rest_is_deleted(self, hub, tmp_path):
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(REPOSITORY, "config.json", revision="step0"))
        before = cached_files(tmp_path)
        with hub_checkpoints(REPOSITORY, delete_downloads=True).open(0):
            assert cached_files(tmp_path) > before
        assert cached_files(tmp_path) == before
        assert path.read_bytes() == (hub.folder(REPOSITORY, "step0") / "config.json").read_bytes()

    def test_contents_that_another_revision_shares_stay(self, hub, tmp_path):
        """All configs are one content, which the cache keeps once; here the deleted revision comes first."""
        source = hub_checkpoints(REPOSITORY, delete_downloads=True)
        with source.open(0), hub_checkpoints(REPOSITORY).open(64):
            pass
        links = [path for path in cached_files(tmp_path) if path.name == "config.json" and "snapshots" in path.parts]
        assert links and all(path.exists() for path in links)
        folders = {path.parent.name for path in links}
        assert hub.commit(REPOSITORY, "step64") in folders and hub.commit(REPOSITORY, "step0") not in folders

    def test_a_revision_that_is_missing_is_a_sentence(self, hub, revisions):
        source = hub_checkpoints(REPOSITORY, delete_downloads=True)
        hub.repositories = {REPOSITORY: {name: folder for name, folder in revisions.items() if name != "step64"}}
        with (
            pytest.raises(CheckpointProblem, match=r"step 64 \(step64 of tiny/run\) could not be loaded: .*step64"),
            source.open(64),
        ):
            pass
        with source.open(0):
            pass

    def test_a_step_that_is_not_there_is_a_sentence(self, hub):
        with pytest.raises(ValueError, match=r"tiny/run has no checkpoint of step 7; it has steps 0, 64, 1000"):
            hub_checkpoints(REPOSITORY).open(7)

    def test_a_repository_that_is_missing_is_a_sentence(self, hub):
        with pytest.raises(CheckpointProblem, match=r"the hub has no model repository 'no/where'"):
            hub_checkpoints("no/where")

    def test_a_repository_without_steps_says_what_it_has(self, hub, revisions):
        hub.repositories = {REPOSITORY: {name: revisions["main"] for name in ("main", "notes")}}
        with pytest.raises(ValueError, match=r"none of its 2 branches and tags .* \(main, notes\); give a pattern"):
            hub_checkpoints(REPOSITORY)

    def test_two_names_of_one_step_are_refused(self, hub, revisions):
        hub.repositories = {REPOSITORY: dict.fromkeys(("a-step5", "b-step5"), revisions["main"])}
        with pytest.raises(ValueError, match=r"'a-step5' and 'b-step5' are both step 5; give a pattern"):
            hub_checkpoints(REPOSITORY)
        assert hub_checkpoints(REPOSITORY, r"b-step(?P<step>\d+)").checkpoints == (
            Checkpoint(5, "b-step5", REPOSITORY),
        )

    def test_a_network_that_is_down_is_a_sentence(self, revisions, monkeypatch, tmp_path):
        with LoopbackHub({REPOSITORY: revisions}) as hub:
            serve_in_this_process(monkeypatch, hub, tmp_path / "cache")
            source = hub_checkpoints(REPOSITORY)
        # huggingface_hub asks again and again, and waits longer each time.
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        with pytest.raises(
            CheckpointProblem, match=r"branches and tags of tiny/run could not be listed .* check the network"
        ):
            hub_checkpoints(REPOSITORY)
        with (
            pytest.raises(CheckpointProblem, match=r"step 0 \(step0 of tiny/run\) could not be loaded"),
            source.open(0),
        ):
            pass

    def test_another_process_finds_the_hub_by_its_environment(self, revisions, tmp_path):
        code = (
            "from tangent_lens.models.checkpoints import hub_checkpoints\n"
            f"source = hub_checkpoints({REPOSITORY!r}, delete_downloads=True)\n"
            "with source.open(1000) as model:\n"
            "    print(source.steps, float(model.module.lm_head.weight.detach().sum()))\n"
        )
        with LoopbackHub({REPOSITORY: revisions}) as hub:
            environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
            environment.pop("HF_HUB_OFFLINE", None)
            ran = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
        expected = float(tiny_model("llama", torch.float32, seed=1).lm_head.weight.detach().sum())
        assert ran.stdout == f"(0, 64, 1000) {expected}\n"
        assert not list(tmp_path.rglob("model.safetensors"))


class TestFolders:
    def test_of_a_trainer_are_in_order_and_the_rest_is_left_alone(self, trainer_folder):
        before = contents(trainer_folder)
        source = folder_checkpoints(trainer_folder)
        assert [(one.step, one.name) for one in source] == [(50, "checkpoint-50"), (1000, "checkpoint-1000")]
        for checkpoint, seed in zip(source, (2, 1), strict=True):
            with source.open(checkpoint.step) as model:
                assert torch.equal(query_weight(model.module), weight_of(seed))
                assert model.description.revision == checkpoint.name
                assert model.description.name == str(trainer_folder / checkpoint.name)
        assert contents(trainer_folder) == before

    def test_are_found_by_a_glob_and_the_last_number_of_their_names(self, tmp_path):
        for name in ("run2-at30", "run2-at4", "other"):
            tiny_model("llama", torch.float32).save_pretrained(tmp_path / "a" / name)
        assert folder_checkpoints(f"{tmp_path}/*/run*").steps == (4, 30)
        assert folder_checkpoints(str(tmp_path / "a")).steps == (4, 30)
        assert folder_checkpoints(tmp_path / "a", r"run(?P<step>\d+)-at4").steps == (2,)

    def test_that_are_not_there_say_what_is(self, tmp_path, trainer_folder):
        with pytest.raises(ValueError, match=r"nothing holds no folders; give the folder that holds the checkpoints"):
            folder_checkpoints(tmp_path / "nothing")
        with pytest.raises(
            ValueError, match=r"no folder is named by a training step; there are checkpoint-1000, .*logs7"
        ):
            folder_checkpoints(trainer_folder, r"epoch(?P<step>\d+)")

    def test_without_a_model_are_refused(self, trainer_folder):
        (trainer_folder / "checkpoint-7").mkdir()
        with pytest.raises(ValueError, match=r"checkpoint-7 holds no config.json, so it is no saved HuggingFace model"):
            folder_checkpoints(trainer_folder)

    def test_of_one_step_are_refused(self, tmp_path):
        for name in ("a5", "b5"):
            tiny_model("llama", torch.float32).save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=r"'a5' and 'b5' are both step 5"):
            folder_checkpoints(tmp_path)

    def test_that_broke_are_a_sentence(self, trainer_folder):
        (trainer_folder / "checkpoint-50" / "model.safetensors").unlink()
        message, source = r"step 50 \(checkpoint-50 of .*could not be loaded", folder_checkpoints(trainer_folder)
        with pytest.raises(CheckpointProblem, match=message), source.open(50):
            pass


class TestStates:
    def states(self):
        return [(step, tiny_model("llama", seed=seed).state_dict()) for step, seed in ((30, 1), (4, 2))]

    def test_are_loaded_in_turn_and_the_model_comes_back(self):
        model = tiny_model("llama", seed=5)
        before, parameters = query_weight(model).clone(), list(model.parameters())
        source = state_checkpoints(model, iter(self.states()), name="mine")
        assert [(one.step, one.name, one.source) for one in source] == [(4, "step 4", "mine"), (30, "step 30", "mine")]
        for checkpoint, seed in zip(source, (2, 1), strict=True):
            with source.open(checkpoint) as opened:
                assert torch.equal(query_weight(opened.module), query_weight(tiny_model("llama", seed=seed)))
                assert (opened.description.name, opened.description.revision) == ("mine", checkpoint.name)
                assert opened.module is model
            assert torch.equal(query_weight(model), before)
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))

    def test_the_model_comes_back_after_an_error(self):
        model = tiny_model("llama", seed=5)
        before = query_weight(model).clone()
        with pytest.raises(ZeroDivisionError), state_checkpoints(model, self.states()).open(4):
            assert not torch.equal(query_weight(model), before)
            1 / 0  # noqa: B018
        assert torch.equal(query_weight(model), before)

    def test_may_be_functions_called_when_opened_and_kept_no_longer(self):
        called, held = [], []

        def load(seed):
            called.append(seed)
            state = {name: tensor.clone() for name, tensor in tiny_model("llama", seed=seed).state_dict().items()}
            held.append(weakref.ref(query_weight_of(state)))
            return state

        source = state_checkpoints(tiny_model("llama"), [(8, lambda: load(8)), (2, lambda: load(2))])
        assert not called
        with source.open(2) as model:
            gc.collect()
            assert called == [2] and held[0]() is None
            assert torch.equal(query_weight(model.module), query_weight(tiny_model("llama", seed=2)))

    def test_of_tied_weights_may_name_them_once(self):
        model, other = (tiny_model("llama", seed=seed, tie_word_embeddings=True) for seed in (0, 1))
        state = {name: tensor for name, tensor in other.state_dict().items() if name != "lm_head.weight"}
        assert model.lm_head.weight is model.get_input_embeddings().weight
        with state_checkpoints(model, [(1, state)]).open(1) as opened:
            assert torch.equal(opened.module.lm_head.weight, other.get_input_embeddings().weight)

    def test_into_a_model_that_is_wrapped_already(self):
        wrapped = Lens(tiny_model("llama", seed=5), name="mine").model
        with state_checkpoints(wrapped, self.states()).open(4) as opened:
            assert opened is wrapped
            assert torch.equal(query_weight(wrapped.module), query_weight(tiny_model("llama", seed=2)))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("model.norm.weight"), r"lacks \['model.norm.weight'\] and has nothing"),
            (lambda state: state.update(more=torch.ones(1)), r"lacks nothing and has \['more'\]"),
            (
                lambda state: state.update({"model.norm.weight": torch.ones(1)}),
                r"weight is \(1,\) in this state and \(32,\)",
            ),
        ],
    )
    def test_that_do_not_fit_change_nothing(self, change, message):
        model, state = tiny_model("llama", seed=5), tiny_model("llama", seed=1).state_dict()
        change(state)
        before = query_weight(model).clone()
        with pytest.raises(ValueError, match=message), state_checkpoints(model, [(1, state)]).open(1):
            pass
        assert torch.equal(query_weight(model), before)

    def test_that_are_no_states_are_refused(self):
        model = tiny_model("llama")
        with pytest.raises(ValueError, match="no states were given"):
            state_checkpoints(model, [])
        with pytest.raises(ValueError, match="two states are both step 3"):
            state_checkpoints(model, [(3, {}), (3, {})])
        source = state_checkpoints(model, [(3, [1])])
        with pytest.raises(ValueError, match=r"a state must be a state dict .*, not list"), source.open(3):
            pass


def query_weight_of(state):
    return state["model.layers.1.self_attn.q_proj.weight"]


@pytest.mark.parametrize("kind", ["folders", "states"])
def test_embeddings_of_checkpoints_make_a_trajectory(kind, trainer_folder):
    model = tiny_model("llama", torch.float32, seed=5)
    states = [(step, tiny_model("llama", torch.float32, seed=step).state_dict()) for step in (1, 2)]
    source = folder_checkpoints(trainer_folder) if kind == "folders" else state_checkpoints(model, states)

    def embeddings():
        for checkpoint in source:
            with source.open(checkpoint) as opened:
                yield opened.module.get_input_embeddings().weight

    one, other = (tiny_model("llama", torch.float64, seed=seed).get_input_embeddings().weight for seed in (1, 2))
    half = torch.linalg.vector_norm(one - other, dim=1).detach().numpy() / 2
    assert trajectory_spread(embeddings).mean_distance == pytest.approx(half, rel=1e-5)


class TestChoosing:
    PYTHIA = (0, *(2**power for power in range(10)), *range(1000, 144_000, 1000))

    @pytest.mark.parametrize(
        ("rule", "steps"),
        [
            ({"first": 2}, (0, 1)),
            ({"last": 2}, (8, 16)),
            ({"every": 2}, (0, 2, 8)),
            ({"steps": [8, 1]}, (1, 8)),
            ({"first": 99}, (0, 1, 2, 4, 8, 16)),
            ({"at_most": 1}, (16,)),
            ({"at_most": 3, "spacing": "linear"}, (0, 8, 16)),
            ({"at_most": 3}, (0, 4, 16)),
        ],
    )
    def test_by_one_rule(self, rule, steps):
        source = source_of(4, 1, 16, 0, 8, 2)
        chosen = source.choose(**rule)
        assert chosen.steps == steps
        assert chosen.opener is source.opener and chosen.name == source.name

    def test_spreads_over_a_real_run(self):
        source = source_of(*self.PYTHIA)
        log, linear = (source.choose(at_most=20, spacing=spacing).steps for spacing in ("log", "linear"))
        assert log[0] == linear[0] == 0 and log[-1] == linear[-1] == 143_000
        assert 15 <= len(log) <= 20 and len(linear) == 20
        assert sum(step < 1000 for step in log) >= 9 and sum(step < 1000 for step in linear) == 1

    @PROPERTY
    @given(
        some.lists(some.integers(0, 10**6), min_size=1, max_size=40, unique=True),
        some.integers(2, 50),
        some.sampled_from(["log", "linear"]),
    )
    def test_spread_places_are_few_different_and_hold_both_ends(self, steps, at_most, spacing):
        places = spread_places(sorted(steps), at_most, spacing)
        assert places == sorted(set(places)) and len(places) <= at_most
        assert {0, len(steps) - 1} <= set(places) <= set(range(len(steps)))

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ({}, "choose takes one of steps, first, last, every, at_most at a time, not none"),
            ({"first": 1, "last": 1}, r"not \['first', 'last'\]; chain the calls"),
            ({"every": 0}, "every=0 chooses nothing"),
            ({"steps": [1, 3]}, r"no checkpoints of steps \[3\]; it has steps 0, 1, 2"),
            ({"steps": []}, r"no checkpoints of steps \[\]"),
            ({"at_most": 2, "spacing": "cubic"}, "spacing 'cubic' must be 'log' or 'linear'"),
        ],
    )
    def test_refuses_what_chooses_nothing(self, rule, message):
        with pytest.raises(ValueError, match=message):
            source_of(0, 1, 2).choose(**rule)

    def test_many_steps_are_shown_shortly(self):
        assert repr(source_of(*range(20))) == "CheckpointSource(mine: 20 checkpoints, steps 0, 1, 2, 3, 4, 5, ..., 19)"
