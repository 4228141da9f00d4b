"""Any torch module at places a person names: every number against plain autograd, and the module comes back as it was."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from explicit import array, cross, scatter
from explicit import energy as explicit_energy
from model_snapshot import GraphMemory, Snapshot, unusual_state
from torch import Tensor, nn

import tangent_lens as tln
from tangent_lens.lens import Lens
from tangent_lens.models.modules import ModuleModel
from tangent_lens.models.protocol import UnsupportedModel
from tangent_lens.recording.inputs import InputCorpus
from tangent_lens.recording.taps import GradientNeverCame, SiteNeverFired
from tangent_lens.reports.console import as_text
from tangent_lens.sites import Site

BATCHES = 6
TOLERANCE = 1e-10


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second, self.last = (
            nn.Linear(6, 9),
            nn.Dropout(0.5),
            nn.Linear(9, 8),
            nn.Linear(8, 3),
        )
        self.never = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.drop(torch.tanh(self.first(x))))))


class Branches(nn.Module):
    """Two arguments, two branches side by side, and a skip around both."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.together = nn.Linear(5, 7), nn.Linear(5, 6), nn.Bilinear(7, 6, 4)

    def forward(self, x, y, scale=1.0):
        left, right = self.left(x), self.right(y)
        return self.together(torch.tanh(left), right * scale) + left[..., :4]


class Recurrent(nn.Module):
    """Its tapped module hands over a tuple."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def cnn() -> nn.Module:
    """After the first convolution a ReLU writes into the very tensor that was tapped."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(72, 5),
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), 2)


def normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A module, what it is called with, and where it is looked at.

    Attributes:
        places: path by label; ``row_shapes``: of the tensors that pass there.
        call: how plain Python calls the module with one batch.
        overwritten: labels of the sites into whose tensor the module writes afterwards.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    places: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    call: Callable[[nn.Module, Any], Tensor]
    overwritten: tuple[str, ...] = ()


CASES = {
    "mlp called with a tensor": Case(
        Mlp,
        normal(8, 6),
        {"first": "first", "after the second": "second"},
        {"first": (8, 9), "after the second": (8, 8)},
        lambda module, batch: module(batch),
    ),
    "cnn with in-place ReLUs": Case(
        cnn,
        normal(4, 2, 6, 9),
        {"conv": "0", "rectified": "3", "flat": "4"},
        {"conv": (4, 3, 4, 7), "rectified": (4, 4, 3, 6), "flat": (4, 72)},
        lambda module, batch: module(batch),
        overwritten=("conv",),
    ),
    "transformer encoder": Case(
        encoder,
        normal(3, 5, 8),
        {"block": "layers.0", "mlp": "layers.0.linear1", "attention": "layers.1.self_attn", "all": ""},
        {"block": (3, 5, 8), "mlp": (3, 5, 16), "attention": (3, 5, 8), "all": (3, 5, 8)},
        lambda module, batch: module(batch),
    ),
    "branches called with a tuple": Case(
        Branches,
        lambda generator: (normal(4, 3, 5)(generator), normal(4, 3, 5)(generator)),
        {"left": "left", "right": "right"},
        {"left": (4, 3, 7), "right": (4, 3, 6)},
        lambda module, batch: module(batch[0], batch[1]),
    ),
    "branches called with a dict": Case(
        Branches,
        lambda generator: {"y": normal(6, 5)(generator), "x": normal(6, 5)(generator), "scale": 0.5},
        {"right": "right", "left": "left"},
        {"left": (6, 7), "right": (6, 6)},
        lambda module, batch: module(batch["x"], batch["y"], scale=batch["scale"]),
    ),
    "recurrent with a tuple inside": Case(
        Recurrent,
        normal(4, 6, 5),
        {"states": "rnn"},
        {"states": (4, 6, 7)},
        lambda module, batch: module(batch),
    ),
}


def made(case: Case) -> nn.Module:
    """The same module at every call, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return case.make().double().train()


def batches_of(case: Case, count: int = BATCHES) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [case.batch(generator) for _ in range(count)]


def loss_sum(output: Tensor, batch: Any = None) -> Tensor:
    """Of no site is the gradient zero or constant."""
    return (output.sin() + 0.1 * output.square()).sum()


@dataclass(frozen=True)
class Plain:
    """Rows of activations and gradients by label, and the loss, of plain forward and backward passes."""

    x: dict[str, Tensor]
    g: dict[str, Tensor]
    loss: float


def plain_pass(case: Case, batches: list[Any]) -> Plain:
    """Each tapped output is copied before it goes on, so that nothing can write into what is kept."""
    module = made(case).eval()
    x: dict[str, list[Tensor]] = {label: [] for label in case.places}
    g: dict[str, list[Tensor]] = {label: [] for label in case.places}
    total = 0.0
    for batch in batches:
        kept: dict[str, Tensor] = {}

        def keep(label: str, output: Any, kept: dict[str, Tensor] = kept) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            tensor.retain_grad()
            kept[label] = tensor
            return (tensor.clone(), *output[1:]) if isinstance(output, tuple) else tensor.clone()

        handles = [
            module.get_submodule(path).register_forward_hook(
                lambda _, __, output, label=label, keep=keep: keep(label, output)
            )
            for label, path in case.places.items()
        ]
        loss = loss_sum(case.call(module, batch))
        for handle in handles:
            handle.remove()
        loss.backward()
        total += float(loss.detach())
        for label, tensor in kept.items():
            assert tuple(tensor.shape) == case.shapes[label]
            x[label].append(tensor.detach().reshape(-1, tensor.shape[-1]))
            g[label].append(tensor.grad.reshape(-1, tensor.shape[-1]))
    return Plain(*({label: torch.cat(parts) for label, parts in rows.items()} for rows in (x, g)), total)


def assert_near(found: Any, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    values = array(found) if isinstance(found, Tensor) else np.asarray(found)
    scale = np.abs(expected).max()
    assert values.shape == expected.shape and scale > 0
    assert np.abs(values - expected).max() <= tolerance * scale


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture
def mlp() -> Mlp:
    return made(CASES["mlp called with a tensor"])


MLP_BATCHES = batches_of(CASES["mlp called with a tensor"])
ASKED = {"loss": loss_sum, "progress": False}
MEASURED = {"rank": 2, "controls": 5, **ASKED}


class TestAgainstPlainAutograd:
    def test_moments_of_activations_and_gradients(self, case):
        batches, expected = batches_of(case), plain_pass(case, batches_of(case))
        found = Lens(made(case), sites=case.places).record(batches, **ASKED)
        assert [site.name for site in found] == list(case.places)
        for site, moments in found.items():
            x, g = expected.x[site.name], expected.g[site.name]
            assert moments.activations.count == moments.gradients.count == len(x)
            for one, rows in ((moments.activations, x), (moments.gradients, g)):
                assert_near(one.mean, array(rows).mean(axis=0))
                assert_near(one.scatter, scatter(rows))

    def test_cross_moments_or_a_sentence_where_the_tensor_is_overwritten(self, case):
        batches, lens = batches_of(case), Lens(made(case), sites=case.places)
        expected = plain_pass(case, batches)
        for label in case.places:
            if label in case.overwritten:
                with pytest.raises(RuntimeError, match=rf"{label}: the tensor that passed here was changed in place"):
                    lens.record(batches, label, cross=True, **ASKED)
            else:
                (moments,) = lens.record(batches, label, cross=True, **ASKED).values()
                assert_near(moments.cross_moment(), cross(expected.g[label], expected.x[label]))

    def test_activations_alone_need_no_loss(self, case):
        batches, expected = batches_of(case), plain_pass(case, batches_of(case))
        found = Lens(made(case), sites=case.places).record(batches, gradients=False, progress=False)
        for site, moments in found.items():
            assert moments.gradients.count == 0
            assert_near(moments.activations.scatter, scatter(expected.x[site.name]))

    def test_a_whole_measurement(self, case):
        batches = batches_of(case)
        report = Lens(made(case), sites=case.places).measure(batches, name="mine", **MEASURED)
        fit, test = ([batch.value for batch in half.sequences] for half in InputCorpus.of(batches).split(0.5, 0))
        fitted, tested = plain_pass(case, fit), plain_pass(case, test)
        assert [one.name for one in report.measurements] == list(case.places)
        for label in case.places:
            one = report.of(label)
            _, directions = np.linalg.eigh(np.cov(array(fitted.x[label]).T))
            tangent, moment = torch.from_numpy(directions[:, -2:].copy()), tested.g[label].T @ tested.g[label]
            assert one.energy.energy == pytest.approx(explicit_energy(moment, tangent), rel=1e-8)
            assert one.energy.d == case.shapes[label][-1]
            assert (one.gradient, one.kind, one.layer, one.site, one.fit_site, one.pooled) == (
                "residual", "named", None, label, label, False,
            )  # fmt: skip
        examples = 3 * case.shapes[next(iter(case.places))][0]
        assert report.corpus.loss == pytest.approx(tested.loss / examples, rel=1e-12)
        assert report.corpus.loss_unit == "sequence" and report.corpus.name == "mine"
        assert (report.corpus.fit_sequences, report.corpus.test_sequences) == (3, 3)
        first = next(iter(case.places))
        assert (report.corpus.fit_rows, report.corpus.test_rows) == (len(fitted.x[first]), len(tested.g[first]))
        assert report.model.architecture == type(made(case)).__name__
        assert report.settings.loss == "loss_sum (your own)"

    def test_the_module_comes_back_as_it_was(self, case):
        module, batches = made(case), batches_of(case)
        unusual_state(module)
        with torch.no_grad():
            case.call(module, batches[0])
        before = Snapshot.of(module)
        lens = Lens(module, sites=case.places)
        lens.record(batches, **ASKED)
        lens.record(batches, gradients=False, progress=False)
        lens.measure(batches, **MEASURED)
        before.assert_unchanged(module)

    def test_a_batch_of_the_person_is_not_written_into(self, case):
        batches, untouched = batches_of(case), batches_of(case)
        Lens(made(case), sites=case.places).measure(batches, **MEASURED)
        for batch, same in zip(batches, untouched, strict=True):
            pairs = (
                [(batch, same)] if isinstance(batch, Tensor) else zip(values_of(batch), values_of(same), strict=True)
            )
            for one, other in pairs:
                if isinstance(one, Tensor):
                    assert torch.equal(one, other) and not one.requires_grad and one.grad is None

    def test_wholly_frozen_parameters_change_nothing(self, case):
        batches, frozen = batches_of(case), made(case).requires_grad_(False)
        expected = Lens(made(case), sites=case.places).record(batches, **ASKED)
        found = Lens(frozen, sites=case.places).record(batches, **ASKED)
        for site, moments in found.items():
            assert torch.equal(moments.gradients.scatter, expected[site].gradients.scatter)
        assert not any(parameter.requires_grad for parameter in frozen.parameters())

    def test_no_graph_outlives_its_batch(self, case):
        with GraphMemory() as memory:
            Lens(made(case), sites=case.places).record(batches_of(case), **ASKED)
            assert memory.peak > 0 and memory.live == 0


def values_of(batch: Any) -> list[Any]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


class TestNamingPlaces:
    def test_a_submodule_and_its_path_are_the_same_place(self, mlp):
        by_path, by_module = Lens(mlp, sites={"x": "second"}), Lens(mlp, sites={"x": mlp.second})
        found = [lens.record(MLP_BATCHES, **ASKED)[Site("named", label="x")] for lens in (by_path, by_module)]
        assert torch.equal(found[0].gradients.scatter, found[1].gradients.scatter)
        assert by_path.model.tap_point(Site("named", label="x")).name == "second"
        assert by_module.model.tap_point(Site("named", label="x")).name == "second"

    def test_the_whole_module_is_a_place(self, mlp):
        for place in ("", mlp):
            lens = Lens(mlp, sites={"logits": place})
            (moments,) = lens.record(MLP_BATCHES, gradients=False, progress=False).values()
            assert moments.width == 3 and lens.model.tap_point(lens.sites[0]).name == "Mlp"

    def test_one_place_can_have_two_names(self, mlp):
        found = Lens(mlp, sites={"a": "first", "b": mlp.first}).record(MLP_BATCHES, **ASKED)
        one, other = found.values()
        assert torch.equal(one.gradients.scatter, other.gradients.scatter) and one.gradients.count == 48

    def test_a_submodule_with_two_paths_is_found_under_both(self, mlp):
        mlp.alias = mlp.first
        for path in ("first", "alias"):
            (moments,) = Lens(mlp, sites={"x": path}).record(MLP_BATCHES, **ASKED).values()
            assert moments.gradients.count == 48

    def test_the_order_is_the_persons(self, mlp):
        lens = Lens(mlp, sites={"z": "second", "a": "first"})
        assert [site.name for site in lens.sites] == ["z", "a"]
        assert [site.name for site in lens.resolve(["a", "z"])] == ["z", "a"]

    def test_names_select_and_unknown_ones_list_what_there_is(self, mlp):
        lens = Lens(mlp, sites={"z": "second", "resid_post.3": "first"})
        assert lens.resolve("resid_post.3") == (Site("named", label="resid_post.3"),)
        assert lens.resolve("*") == lens.resolve(lens.sites) == lens.resolve("z, resid_post.3") == lens.sites
        with pytest.raises(
            ValueError, match=r"'first' is no site of this module; the sites you named: z, resid_post\.3"
        ):
            lens.resolve("first")
        with pytest.raises(ValueError, match=r"'resid_post\.2' is no site of this module"):
            lens.attach("resid_post.2")
        with pytest.raises(ValueError, match=r"no site selected"):
            lens.resolve([])

    @pytest.mark.parametrize("label", [" x ", "a,b", "x[/b]", "a/b", "50%", "§ 3"])
    def test_a_name_is_usable_everywhere_or_refused_at_once(self, mlp, label, tmp_path):
        try:
            lens = Lens(mlp, sites={label: "first", "other": "second"})
        except ValueError as refusal:
            assert repr(label) in str(refusal)
            return
        assert lens.resolve(lens.sites) == lens.sites
        assert lens.resolve(label) == lens.sites[:1]
        report = lens.measure(MLP_BATCHES, lens.sites, **MEASURED)
        report.save(tmp_path)
        assert tln.Report.load(tmp_path).of(label) == report.of(label)
        assert label in as_text(report, width=100)

    @pytest.mark.parametrize("label", [1, "", None, ("a", "b")], ids=repr)
    def test_what_is_no_name_is_refused_at_once(self, mlp, label):
        with pytest.raises((ValueError, TypeError), match=r"name"):
            Lens(mlp, sites={label: "first"})

    @pytest.mark.parametrize(
        ("sites", "sentence"),
        [
            ({"x": "third"}, r"site 'x': Mlp has no submodule 'third'; see named_modules\(\)"),
            ({"x": "first.weight"}, r"site 'x': Mlp has no submodule 'first\.weight'"),
            ({"fine": "first", "x": nn.Linear(6, 9)}, r"site 'x': this Linear is no submodule of Mlp"),
            ({"x": 0}, r"site 'x': this int is no submodule of Mlp"),
            ({}, r"no site was named; pass sites=\{'a name': submodule or path\}"),
        ],
    )
    def test_places_that_are_not_there(self, mlp, sites, sentence):
        with pytest.raises(ValueError, match=sentence):
            Lens(mlp, sites=sites)

    def test_a_twin_of_a_submodule_is_foreign(self, mlp):
        twin = made(CASES["mlp called with a tensor"])
        with pytest.raises(ValueError, match=r"site 'x': this Linear is no submodule of Mlp"):
            Lens(mlp, sites={"x": twin.first})

    def test_a_tokenizer_has_nothing_to_do_here(self, mlp):
        with pytest.raises(
            ValueError, match=r"with sites= the module is called with your batches.*leave the tokenizer out"
        ):
            Lens(mlp, tokenizer=object(), sites={"x": "first"})

    def test_without_sites_the_sentence_names_them(self, mlp):
        with pytest.raises(UnsupportedModel, match=r"Lens\(module, sites=\{'middle': 'path\.of\.submodule'\}\)"):
            Lens(mlp)


class TestWhatGoesWrong:
    """A sentence each, and the module as it was."""

    def refused(self, module, error, sentence, batches=MLP_BATCHES, place="first", act="record", **options):
        before = Snapshot.of(module)
        lens = Lens(module, sites={"x": place})
        with pytest.raises(error, match=sentence):
            getattr(lens, act)(batches, **{**(MEASURED if act == "measure" else ASKED), **options})
        before.assert_unchanged(module)

    @pytest.mark.parametrize("act", ["record", "measure"])
    def test_a_site_of_a_part_that_never_runs(self, mlp, act):
        self.refused(mlp, SiteNeverFired, r"x: the model ran, but no tensor passed here", place="never", act=act)

    @pytest.mark.parametrize("act", ["record", "measure"])
    def test_a_part_that_runs_twice_a_call(self, act):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = nn.Linear(6, 6)

            def forward(self, x):
                return self.part(torch.tanh(self.part(x)))

        module = Twice().double()
        self.refused(module, SiteNeverFired, r"x: 2 tensors passed in 1 forward passes", place="part", act=act)
        with Lens(module, sites={"x": "part"}).attach("x", gradients=True) as taps:
            loss_sum(module(MLP_BATCHES[0])).backward()
        assert taps["x"].fired == 2

    def test_a_loss_that_does_not_depend_on_the_site(self):
        class Aside(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.aside = nn.Linear(6, 4), nn.Linear(6, 4)

            def forward(self, x):
                return self.used(x), self.aside(x)

        module, loss = Aside().double(), lambda output, batch: output[0].square().sum()
        self.refused(module, ValueError, r"depends on none of the measured places", place="aside", loss=loss)
        with pytest.raises(
            GradientNeverCame, match=r"y: 0 gradients came for 1 forward passes; the loss does not depend"
        ):
            Lens(module, sites={"x": "used", "y": "aside"}).record(MLP_BATCHES, loss=loss, progress=False)

    @pytest.mark.parametrize("loss", [None, "causal", "masked", tln.MaskedLoss(mask_id=1)], ids=str)
    @pytest.mark.parametrize("act", ["record", "measure"])
    def test_no_loss_of_its_own(self, mlp, loss, act):
        sentence = r"Mlp .*pass loss=, a function of \(output, batch\) that returns a summed scalar"
        self.refused(mlp, ValueError, sentence, act=act, loss=loss)

    @pytest.mark.parametrize("batches", [MLP_BATCHES[0], {"x": MLP_BATCHES[0]}, "text"], ids=["tensor", "dict", "text"])
    @pytest.mark.parametrize("act", ["record", "measure"])
    def test_one_batch_instead_of_a_list(self, mlp, batches, act):
        self.refused(mlp, ValueError, r"is one batch; pass a list of batches", batches=batches, act=act)

    def test_rows_without_a_width(self):
        module = nn.Sequential(nn.Linear(6, 4), nn.Flatten(0)).double()
        self.refused(module, ValueError, r"a site carries rows \(\.\.\., width\); here \(32,\) passed", place="1")

    def test_whole_numbers_are_no_activations(self):
        module = nn.Sequential(nn.Identity(), nn.Embedding(9, 8)).double()
        tokens = [torch.randint(9, (4, 5)) for _ in range(2)]
        self.refused(module, ValueError, r"rows must be floating point numbers", batches=tokens, place="0")

    def test_what_passes_is_no_tensor(self):
        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = _Handing(lambda x: {"x": x})

            def forward(self, x):
                return self.part(x)["x"]

        self.refused(Named().double(), TypeError, r"a tensor should pass here, but dict does", place="part")

    def test_only_weight_gradients_are_none(self, mlp):
        sentence = r"no linear map reads x, so it has no weight gradient"
        self.refused(mlp, ValueError, sentence, act="measure", gradients="weight")

    def test_a_rank_too_large_for_a_normal_control(self, mlp):
        """The width is not known before the module runs."""
        self.refused(mlp, ValueError, r"2\*rank <= d = 9", act="measure", rank=5)

    def test_values_that_are_not_finite(self, mlp):
        bad = [batch.clone() for batch in MLP_BATCHES]
        bad[-1][3, 2] = float("nan")
        self.refused(mlp, ValueError, r"activations at x: .*NaN or infinite", batches=bad)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_padded_sequences_in_torchs_own_encoder(self):
        """In evaluation mode it packs them into nested tensors, unless told not to."""
        case = CASES["transformer encoder"]
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
        batches = [{"src": batch, "src_key_padding_mask": mask} for batch in batches_of(case)]
        loss = lambda output, batch: (output * ~batch["src_key_padding_mask"][..., None]).sin().sum()  # noqa: E731
        for way_out in ("enable_nested_tensor=False", r"use_nested_tensor = False"):
            self.refused(made(case), TypeError, rf"nested tensor.*{way_out}", batches, "layers.0.linear1", loss=loss)
        plain = made(case)
        plain.use_nested_tensor = False
        (found,) = Lens(plain, sites={"x": "layers.0.linear1"}).record(batches, loss=loss, progress=False).values()
        module, rows = made(case).eval(), []
        for batch in batches:
            kept = []
            handle = module.layers[0].linear1.register_forward_hook(
                lambda _, __, output, kept=kept: kept.append(output)
            )
            output = module(**batch)
            handle.remove()
            kept[0].retain_grad()
            loss(output, batch).backward()
            rows.append(kept[0].grad.reshape(-1, 16))
        assert_near(found.gradients.scatter, scatter(torch.cat(rows)))


class _Handing(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inside, self.make = nn.Linear(6, 6), make

    def forward(self, x):
        return self.make(self.inside(x))


Pair = namedtuple("Pair", "hidden extra")


@pytest.mark.parametrize(
    "make",
    [lambda x: (x, None), lambda x: [x, None], lambda x: Pair(x, None)],
    ids=["tuple", "list", "namedtuple"],
)
def test_whatever_kind_of_tuple_passes_goes_on_as_that_kind(make):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.head = _Handing(make), nn.Linear(6, 2)
            self.kinds = []

        def forward(self, x):
            pair = self.part(x)
            self.kinds.append(type(pair))
            return self.head(torch.tanh(pair[0]))

    torch.manual_seed(0)
    module = Outer().double()
    (found,) = Lens(module, sites={"x": "part"}).record(MLP_BATCHES, **ASKED).values()
    assert set(module.kinds) == {type(make(1))}
    rows = []
    for batch in MLP_BATCHES:
        hidden = module.part.inside(batch)
        hidden.retain_grad()
        loss_sum(module.head(torch.tanh(hidden))).backward()
        rows.append(hidden.grad)
    assert_near(found.gradients.scatter, scatter(torch.cat(rows)))


def test_running_statistics_stay_and_are_used(mlp):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    module[1].running_mean.copy_(torch.arange(4.0))
    module[1].running_var.copy_(torch.arange(1.0, 5.0))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = Lens(module, sites={"x": "1"}).record(MLP_BATCHES, **ASKED)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    rows = torch.cat([module.eval()[:2](batch) for batch in MLP_BATCHES]).detach()
    assert_near(found[Site("named", label="x")].activations.scatter, scatter(rows))


def test_float32_modules_have_float64_moments(mlp):
    mlp.float()
    (moments,) = Lens(mlp, sites={"x": "second"}).record([batch.float() for batch in MLP_BATCHES], **ASKED).values()
    assert moments.gradients.scatter.dtype == torch.float64
    expected = plain_pass(CASES["mlp called with a tensor"], MLP_BATCHES).g["after the second"]
    assert_near(moments.gradients.scatter, scatter(expected), 1e-5)


class TestByHand:
    """The person runs the module."""

    def test_attached_taps_see_what_passes_and_what_comes_back(self, case):
        module, batches = made(case).eval(), batches_of(case, 1)
        expected, before = plain_pass(case, batches), Snapshot.of(module).hooks
        with Lens(module, sites=case.places).attach("*", gradients=True) as taps:
            loss_sum(case.call(module, batches[0])).backward()
        assert Snapshot.of(module).hooks == before
        for label, tap in ((site.name, tap) for site, tap in taps.items()):
            assert tuple(tap.activations.shape) == tuple(tap.gradients.shape) == case.shapes[label]
            assert_near(tap.activations.reshape(-1, tap.activations.shape[-1]), array(expected.x[label]), 1e-12)
            assert_near(tap.gradients.reshape(-1, tap.activations.shape[-1]), array(expected.g[label]), 1e-12)
            assert taps[label] is tap

    def test_kept_sums_are_those_of_kept_rows(self, case):
        module, batches = made(case).eval(), batches_of(case, 3)
        expected = plain_pass(case, batches)
        with Lens(module, sites=case.places).attach("*", gradients=True, keep="moments") as taps:
            for batch in batches:
                loss_sum(case.call(module, batch)).backward()
        for site, tap in taps.items():
            found = tap.moments()
            assert_near(found.activations.scatter, scatter(expected.x[site.name]))
            assert_near(found.gradients.scatter, scatter(expected.g[site.name]))

    def test_frozen_modules_need_the_lens_around_both_passes(self, case):
        module, batches = made(case).eval().requires_grad_(False), batches_of(case, 1)
        lens, expected = Lens(module, sites=case.places), plain_pass(case, batches)
        with pytest.raises(GradientNeverCame, match=r"`with lens\.gradients\(\):`"), lens.attach("*", gradients=True):
            case.call(module, batches[0])
        with lens.gradients(), lens.attach("*", gradients=True) as taps:
            loss_sum(case.call(module, batches[0])).backward()
        for site, tap in taps.items():
            assert_near(tap.gradients.reshape(-1, tap.gradients.shape[-1]), array(expected.g[site.name]), 1e-12)

    def test_a_hook_registers_itself_and_goes(self, mlp):
        before = Snapshot.of(mlp.eval()).hooks
        hooks = Lens(mlp, sites={"a": "first", "b": "second"}).hooks("b, a", gradients=True)
        assert [hook.name for hook in hooks] == ["first", "second"]
        handle = hooks[0].register()
        loss_sum(mlp(MLP_BATCHES[0])).backward()
        handle.remove()
        assert Snapshot.of(mlp).hooks == before
        mlp(MLP_BATCHES[1])
        expected = plain_pass(CASES["mlp called with a tensor"], MLP_BATCHES[:1])
        assert_near(hooks[0].tap.gradients, array(expected.g["first"]), 1e-12)
        assert hooks[0].tap.fired == 1 and hooks[1].tap.fired == 0

    def test_its_function_registers_as_a_torch_hook(self, mlp):
        ((name, function),) = hooks = Lens(mlp, sites={"a": "first"}).hooks("a")
        handle = mlp.get_submodule(name).register_forward_hook(function)
        mlp(MLP_BATCHES[0])
        handle.remove()
        assert torch.equal(hooks[0].tap.activations, mlp.first(MLP_BATCHES[0]).detach())

    def test_a_tap_that_nothing_passed(self, mlp):
        with (
            pytest.raises(SiteNeverFired, match=r"no tensor passed x; run"),
            Lens(mlp, sites={"x": "never"}).attach("x"),
        ):
            mlp(MLP_BATCHES[0])
        with pytest.raises(KeyError, match=r"y is not tapped; tapped: x"):
            Lens(mlp, sites={"x": "first"}).attach("x")["y"]


@pytest.fixture(scope="module")
def report():
    module = made(CASES["mlp called with a tensor"])
    lens = Lens(module, sites={"first": "first", "encoder.layers.11.second": "second"}, name="[my] net", revision="7")
    return lens.measure(MLP_BATCHES, name="inputs of mine", **MEASURED)


class TestItsReport:
    def test_it_comes_back_from_its_folder(self, report, tmp_path):
        report.save(tmp_path)
        again = tln.Report.load(tmp_path)
        assert again.to_dict() == report.to_dict()
        assert again.measurements == report.measurements
        assert torch.equal(
            again.subspaces["encoder.layers.11.second"].basis, report.subspaces["encoder.layers.11.second"].basis
        )

    @pytest.mark.parametrize("width", [80, 100])
    def test_its_table_has_a_row_a_site_and_nothing_is_cut(self, report, width):
        text = as_text(report, width=width)
        assert all(len(line.rstrip()) <= width for line in text.splitlines())
        for label in ("first", "encoder.layers.11.second"):
            one = report.of(label)
            rows = [line for line in text.splitlines() if re.match(rf"\s+{re.escape(label)}\s", line)]
            assert len(rows) == 2, "one row in the energy table, one in the isotropy table"
            assert "…" not in "".join(rows)
            assert f"{one.energy.energy:.1%}" in rows[0]

    def test_its_header_speaks_of_no_layers(self, report):
        header = " ".join(as_text(report, width=160).split())
        assert "[my] net, revision 7; Mlp" in header and "inputs of mine: proxies from 3" in header
        assert "d_model" not in header and "0 layers" not in header
        assert "loss_sum (your own) loss" in header and "nats" not in header

    def test_it_makes_a_frame_and_says_why_it_cannot_be_drawn(self, report):
        assert list(report.to_pandas().name) == ["first", "encoder.layers.11.second"]
        with pytest.raises(ValueError, match=r"no layers to draw over; read its table, or to_pandas\(\)"):
            report.plot()

    def test_repeated_measurements_are_equal(self, report):
        module = made(CASES["mlp called with a tensor"])
        lens = Lens(module, sites={"first": "first", "encoder.layers.11.second": "second"})
        assert lens.measure(MLP_BATCHES, **MEASURED).measurements == report.measurements

    def test_a_massive_dimension_is_told_under_the_sites_own_name(self):
        module = made(CASES["mlp called with a tensor"])
        module.first.weight.data[3] *= 100
        warnings = Lens(module, sites={"mid.one": "first"}).measure(MLP_BATCHES, **MEASURED).warnings
        (sentence,) = [one for one in warnings if "dimension 3" in one]
        assert "mid.one" in sentence and "layer" not in sentence


def test_the_model_behind_the_lens_says_what_it_is():
    module = made(CASES["mlp called with a tensor"])
    model = ModuleModel(module, {"x": "first"})
    assert model.description.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert (model.description.name, model.description.revision) == ("Mlp", "unknown")
    assert (model.description.dtype, model.objective, model.maps) == ("float64", "", ())
    assert Lens(module, sites={"x": "first"}).width(model.sites[0]) is None
