"""Training on many processes: shards hold the table and the dense weights, workers train, Ray places and watches them.

    driver.py    one run: epochs over the data; its parts are
      crew.py      who takes part: created, put into a state, connected, felt for a pulse (fleet.py: the same as Ray sees it)
      cuts.py      when to cut, and an evaluation at that instant; cutting.py: the parts of a cut become a checkpoint
      exams.py     evaluation and scores by all workers
      recovery.py  what follows a loss
    shard_actor.py, worker_actor.py: what Ray starts, processes with a shard or a worker; process.py: what both have
    worker.py    a mode over a share of the files (streams.py); examined.py: the shards' model where it evaluates
    shard.py     one part of the table and of the dense weights: learns what is pushed, answers pulls, takes cuts
    cut_files.py the cuts of a shard on their way to files, slowly while nobody waits for them
    wire.py      messages between the two over ZeroMQ; sockets.py: their files on one host
    remote.py    the same for a worker: requests to all shards at once, and the verbs of Table
    roles.py     who a process is, by its environment; nodes.py: its node of one Ray cluster; joining.py: how it takes part
    launching.py a user's program in every role; process_tree.py: what ends with whom
    ray_runtime.py  Ray itself: its token, the loopback, an address where it should be
    simulate.py  the same without processes: logical workers in one, in an order that a seed decides

Only this package imports Ray and ZeroMQ, and only when a cluster is started.
"""

from __future__ import annotations

from clickfleet.checkpoint import MAX_FILES
from clickfleet.config import Config
from clickfleet.errors import ConfigError


def check(config: Config) -> None:
    """Refuses what a cluster cannot do, before any process starts."""
    mode = config.mode.name
    if config.cluster.shards > MAX_FILES:
        raise ConfigError(f"cluster.shards is {config.cluster.shards}, and there are at most {MAX_FILES}")
    places = config.cluster.endpoints
    if places and len(places) != config.cluster.shards:
        raise ConfigError(f"cluster.endpoints names {len(places)} places for {config.cluster.shards} shards")
    if config.train.deterministic and mode != "sync":
        raise ConfigError(f"train.deterministic does not go with mode {mode}", "use mode sync or local")
    if config.train.device != "cpu" or config.train.profile:
        what = "train.profile" if config.train.profile else "train.device"
        raise ConfigError(f"{what} does not go with mode {mode}", "workers compute on CPUs; profile in mode local")
    if config.train.hogwild is not None:
        raise ConfigError(f"train.hogwild does not go with mode {mode}", "set cluster.threads")
