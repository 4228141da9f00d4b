"""Several models early and late in training, as the paper's Table 1: ``python table_1.py FOLDER...`` of saved reports."""

import sys

import tangent_lens as tln

reports = [tln.DynamicsReport.load(folder) for folder in sys.argv[1:]]
tln.dynamics_table(reports).show()
