"""A saved report of attention scores comes back whole, and is never taken for one of gradients."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from attention_examples import layer_of, report_of, unknown_head

import tangent_lens as tln
from tangent_lens.measures.attention_report import AttentionReport
from tangent_lens.storage import FileProblem


@pytest.fixture(scope="module")
def attention_report():
    return report_of([layer_of(0), layer_of(1, axes=False), layer_of(5, heads=2, variance_baseline=None)])


def test_it_comes_back_equal(attention_report, tmp_path):
    attention_report.save(tmp_path)
    again = AttentionReport.load(tmp_path)
    assert again.to_dict() == attention_report.to_dict()
    for name in ("model", "corpus", "settings", "layers", "spaces", "worst_sum", "warnings", "versions", "created"):
        assert getattr(again, name) == getattr(attention_report, name), name
    assert torch.equal(again.subspaces["resid_pre.0"].basis, attention_report.subspaces["resid_pre.0"].basis)


def test_what_is_not_a_number_survives_in_valid_json(tmp_path):
    known = layer_of(0)
    report_of([unknown_head(known)], worst_sum=math.nan).save(tmp_path)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = AttentionReport.load(tmp_path)
    (one,) = again.layers
    assert math.isnan(again.worst_sum)
    assert math.isnan(one.dominance[0]) and one.dominance[1:] == known.dominance[1:]
    assert all(math.isnan(value) for value in one.random[0])
    assert math.isnan(one.scaling.exponent["mixed"][0]) and math.isnan(one.shares["centre_tangent"][0])
    assert math.isnan(one.flat_rows()[0]["dominance"])


def test_the_loaded_report_shows_the_same(attention_report, tmp_path):
    attention_report.save(tmp_path)
    again = AttentionReport.load(tmp_path)
    assert repr(again) == repr(attention_report)
    assert again.to_pandas().equals(attention_report.to_pandas())


def test_reports_of_the_other_kind_are_refused_with_the_way_out(attention_report, report, tmp_path):
    attention_report.save(tmp_path / "attention")
    report.save(tmp_path / "gradients")
    with pytest.raises(
        FileProblem, match=r"a report of attention scores; load it with AttentionReport\.load, or .*show"
    ):
        tln.Report.load(tmp_path / "attention")
    with pytest.raises(FileProblem, match=r"holds a report of gradients; load it with Report\.load, or .*show"):
        AttentionReport.load(tmp_path / "gradients")


def test_a_report_of_the_other_kind_is_not_overwritten(attention_report, report, tmp_path):
    attention_report.save(tmp_path)
    with pytest.raises(
        FileProblem, match="holds a report of attention scores, which would be lost; name another folder"
    ):
        report.save(tmp_path)
    assert AttentionReport.load(tmp_path).to_dict() == attention_report.to_dict()
    dataclasses.replace(attention_report, warnings=("changed",)).save(tmp_path)
    assert AttentionReport.load(tmp_path).warnings == ("changed",)


def test_no_report_and_damaged_ones_are_said_so(attention_report, tmp_path):
    with pytest.raises(FileNotFoundError, match="no report at"):
        AttentionReport.load(tmp_path)
    attention_report.save(tmp_path)
    path = tmp_path / "report.json"
    document = json.loads(path.read_text())
    for damaged in ({**document, "layers": [{"layer": 0}]}, {k: v for k, v in document.items() if k != "worst_sum"}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(FileProblem, match="damaged or was cut short"):
            AttentionReport.load(tmp_path)
    path.write_text("[]")
    with pytest.raises(FileProblem, match="damaged or was cut short"):
        AttentionReport.load(tmp_path)
    attention_report.save(tmp_path)


def test_pandas_has_a_row_a_head_and_the_same_numbers(attention_report):
    frame = attention_report.to_pandas()
    assert len(frame) == 4 + 4 + 2
    row = frame[(frame.layer == 1) & (frame["head"] == 2)].iloc[0]
    one = attention_report.layer(1)
    assert row.dominance == one.dominance[2]
    assert row.share_centre_tangent == one.shares["centre_tangent"][2]
    assert row.p_value == one.p_value[2]
