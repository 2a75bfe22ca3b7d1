"""Online learning: days and passes of a stream are scored, trained on, aged and published, for ever or to a last day.

from clickfleet.online.learn import learn

learn("config.yaml")                     # as `clickfleet online config.yaml`
learn("config.yaml", source=my_stream)   # any iterable of (data, day, pass)
"""
