"""Tools around training: compare, tune, bench, inspect, explain, dashboard. They call the library like any user.

compare.py    models and settings side by side        plan.py, outcome.py, tables.py
tune.py       a search for settings                   space.py
infer.py      how fast a model scores, by engine      machine.py
inspection.py what a model is made of                 row.py, movers.py, explain.py
dashboard.py  a page that follows runs                tail.py, panels.py
crew.py       processes that train                    trainee.py
"""
