"""Three lines to a table, a fourth to a plot.

python examples/measure_in_three_lines.py [MODEL]
"""

import sys

import tangent_lens as tln

lens = tln.Lens.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
report = lens.measure(tln.reference_prose(), rank=8, max_sequences=16, pack=True, name="Python reference manual")
report.show()

figure = report.plot()  # figure.savefig("lift.png") keeps it
print(report.to_pandas()[["name", "energy", "lift", "signal_lift", "p_value"]].head(12).to_string(index=False))
