"""Click logs as files: make them, fetch them, split and fit them, describe them, convert them.

A log is read piece by piece (source), described or rewritten (target, encode), and written to files that appear when
they are whole (sink).
"""
