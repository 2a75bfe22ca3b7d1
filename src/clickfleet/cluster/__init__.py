"""Training on many processes: shards hold the table and the dense weights, workers train, Ray places and watches them.

    driver.py    one run: places shards and workers, epochs, cuts, recovery
    actors.py    what Ray starts: a process with a shard, a process with a worker
    worker.py    a mode over a share of the files
    shard.py     one part of the table and of the dense weights: learns what is pushed, answers pulls, takes cuts
    wire.py      messages between the two over ZeroMQ
    remote.py    the same for a worker: requests to all shards at once, and the verbs of Table
    simulate.py  the same without processes: logical workers in one, in an order that a seed decides

Only this package imports Ray and ZeroMQ, and only when a cluster is started.
"""
