"""A saved report of training dynamics comes back whole, and is never taken for one of another kind."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from dynamics_examples import run_report

import tangent_lens as tln
from tangent_lens.storage import FileProblem

FIELDS = (
    "model", "corpus", "settings", "windows", "points", "early", "late", "updates", "warnings", "versions", "created",
)  # fmt: skip


@pytest.fixture(scope="module")
def dynamics():
    return run_report()


def test_it_comes_back_equal_to_the_last_digit(dynamics, tmp_path):
    dynamics.save(tmp_path)
    again = tln.DynamicsReport.load(tmp_path)
    assert {one.name for one in dataclasses.fields(again)} == {*FIELDS, "subspaces"}
    for name in FIELDS:
        assert getattr(again, name) == getattr(dynamics, name), name
    assert again.points[3].refitted and again.points[3].overlaps and again.points[3].dimensions and again.updates
    assert again.subspaces.keys() == dynamics.subspaces.keys() >= {"embedding", "resid_post.2"}
    for name, subspace in dynamics.subspaces.items():
        assert torch.equal(again.subspaces[name].basis, subspace.basis)
        assert dict(again.subspaces[name].origin) == dict(subspace.origin)


def test_the_loaded_report_shows_the_same(dynamics, tmp_path):
    dynamics.save(tmp_path)
    again = tln.DynamicsReport.load(tmp_path)
    assert repr(again) == repr(dynamics)
    assert again.to_pandas().equals(dynamics.to_pandas())
    assert again.summary() == dynamics.summary()


def test_what_is_not_finite_survives_in_valid_json(dynamics, tmp_path):
    first = dynamics.points[0]
    endless = dataclasses.replace(
        first.measurements[0], energy=dataclasses.replace(first.measurements[0].energy, lift=math.inf)
    )
    points = (dataclasses.replace(first, measurements=(endless, *first.measurements[1:])), *dynamics.points[1:])
    dataclasses.replace(dynamics, points=points).save(tmp_path)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert tln.DynamicsReport.load(tmp_path).points == points


def test_reports_of_other_kinds_are_refused_with_the_way_out(dynamics, report, tmp_path):
    dynamics.save(tmp_path / "dynamics")
    report.save(tmp_path / "gradients")
    with pytest.raises(
        FileProblem, match=r"a report of training dynamics; load it with DynamicsReport\.load, or .*show"
    ):
        tln.Report.load(tmp_path / "dynamics")
    with pytest.raises(FileProblem, match=r"holds a report of gradients; load it with Report\.load, or .*show"):
        tln.DynamicsReport.load(tmp_path / "gradients")


def test_a_report_of_another_kind_is_not_overwritten(dynamics, report, tmp_path):
    report.save(tmp_path)
    with pytest.raises(FileProblem, match="holds a report of gradients, which would be lost; name another folder"):
        dynamics.save(tmp_path)
    assert tln.Report.load(tmp_path).measurements == report.measurements


def test_none_and_damaged_ones_are_said_so(dynamics, tmp_path):
    with pytest.raises(FileNotFoundError, match="no report at"):
        tln.DynamicsReport.load(tmp_path)
    dynamics.save(tmp_path)
    path = tmp_path / "report.json"
    document = json.loads(path.read_text())
    for damaged in ({**document, "windows": {"early": []}}, {k: v for k, v in document.items() if k != "points"}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(FileProblem, match="damaged or was cut short"):
            tln.DynamicsReport.load(tmp_path)
