"""Makes 02_hooked_transformer, which tutorial 02 reads where TransformerLens 4 has no HookedTransformer.

    python3 packaging/matrix.py --only 3 -- python tutorials/data/make_02.py

It runs the tutorial's own cells, those with the tag "hooked", and saves the report that they make. Of the subspaces only
those of the residual stream stay, without their rivals, which keeps the folder small.
"""

import json
from dataclasses import replace
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parent.parent
FOLDER = TUTORIALS / "data" / "02_hooked_transformer"


def run_cells(notebook: Path, tag: str) -> dict:
    """The names that the cells with this tag define."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    names: dict = {}
    for cell in cells:
        if tag in cell["metadata"].get("tags", ()):
            exec("".join(cell["source"]), names)
    return names


def main() -> None:
    FOLDER.mkdir(exist_ok=True)  # the first cell looks for it, to find the clone
    names = run_cells(TUTORIALS / "02_every_model.ipynb", "hooked")
    report = names["reports"]["HookedTransformer"]
    if "hooked" not in names:
        raise SystemExit("This TransformerLens has no HookedTransformer; run it beside version 3, as shown above.")
    kept = {site: replace(one, rivals={}) for site, one in report.subspaces.items() if site.startswith("resid_post")}
    replace(report, subspaces=kept).save(FOLDER)
    places = json.dumps(names["places"]["HookedTransformer"], indent=1)
    (FOLDER / "places.json").write_text(places + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{report.model.library}: {len(report.measurements)} measurements, {size / 1e3:.0f} kB in {FOLDER.name}")


if __name__ == "__main__":
    main()
