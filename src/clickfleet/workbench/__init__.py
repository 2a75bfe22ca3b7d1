"""Tools around training. They call the library like any user.

compare.py       models and settings side by side
tune.py          search for settings
runner.py        processes that train the runs of both
inference.py     how fast a model scores
mode_advisor.py  which training mode to choose
inspection.py    the contents of a model; diff.py: the changes between two; explain.py: the parts of a score
parity.py        a model's files against a server
dashboard.py     a page that follows runs
tables.py        tables for terminal, Markdown, CSV and HTML
"""
