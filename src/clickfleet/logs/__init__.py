"""Click logs as files: make them, fetch them, split and fit them, describe them, convert them.

Between these, a log travels as Arrow record batches in its own columns: the label, one column per dense value, one per slot.
"""
