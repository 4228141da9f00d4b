"""A saved report comes back whole, or not at all."""

import dataclasses
import json
import math

import pytest
import torch

import tangent_lens as tln
from tangent_lens.storage import FileProblem


def test_a_report_comes_back_equal(report, tmp_path):
    report.save(tmp_path / "run")
    again = tln.Report.load(tmp_path / "run")
    assert again.to_dict() == report.to_dict()
    assert again.measurements == report.measurements
    assert again.settings == report.settings
    assert set(again.subspaces) == set(report.subspaces)
    for site, subspace in report.subspaces.items():
        assert torch.equal(again.subspaces[site].basis, subspace.basis)
        assert again.subspaces[site].origin == subspace.origin
        assert all(torch.equal(again.subspaces[site].rivals[name], rival) for name, rival in subspace.rivals.items())


def test_an_infinite_lift_survives_in_valid_json(report, tmp_path):
    first = report.measurements[0]
    infinite = dataclasses.replace(first, energy=dataclasses.replace(first.energy, lift=math.inf))
    dataclasses.replace(report, measurements=(infinite,)).save(tmp_path)
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert tln.Report.load(tmp_path).measurements[0].energy.lift == math.inf


def test_saving_again_replaces_the_report_and_leaves_no_old_file(report, tmp_path):
    report.save(tmp_path)
    changed = dataclasses.replace(report, subspaces={"resid_post.0": report.subspaces["resid_post.0"]})
    changed.save(tmp_path)
    assert sorted(tln.Report.load(tmp_path).subspaces) == ["resid_post.0"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_crash_before_the_last_step_leaves_the_old_report(report, tmp_path, monkeypatch):
    report.save(tmp_path)
    from tangent_lens.reports import files

    def crash_on_json(path, content):
        if path.name == "report.json":
            raise KeyboardInterrupt
        write(path, content)

    write = files.write_bytes_atomically
    monkeypatch.setattr(files, "write_bytes_atomically", crash_on_json)
    changed = dataclasses.replace(report, subspaces={})
    with pytest.raises(KeyboardInterrupt):
        changed.save(tmp_path)
    assert tln.Report.load(tmp_path).to_dict() == report.to_dict()


def test_no_report_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no report at"):
        tln.Report.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.999])
def test_a_truncated_report_is_refused(report, tmp_path, kept):
    report.save(tmp_path)
    path = tmp_path / "report.json"
    text = path.read_text()
    path.write_text(text[: kept if isinstance(kept, int) else int(kept * len(text))])
    with pytest.raises(FileProblem, match="damaged or was cut short"):
        tln.Report.load(tmp_path)


def test_a_newer_format_is_refused_with_the_way_out(report, tmp_path):
    report.save(tmp_path)
    document = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(document | {"format": 99}))
    with pytest.raises(FileProblem, match=r"format 99, newer than the 1 .* pip install --upgrade tangent-lens"):
        tln.Report.load(tmp_path)


def test_subspaces_of_another_run_are_refused(report, tmp_path):
    report.save(tmp_path)
    path = next(tmp_path.glob("subspaces-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileProblem, match="missing or was changed"):
        tln.Report.load(tmp_path)
    path.unlink()
    with pytest.raises(FileProblem, match="missing or was changed"):
        tln.Report.load(tmp_path)


def test_a_report_of_another_kind_is_refused(report, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(FileProblem, match="not a 'report'"):
        tln.Report.load(tmp_path)
