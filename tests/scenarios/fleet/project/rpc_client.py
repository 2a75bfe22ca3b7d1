"""Sends the lines of dataset_generator.py to the RPC service in batches of 5."""

import sys

import numpy as np
from paddle_serving_client import Client

client = Client()
client.load_client_config("serving_client/serving_client_conf.prototxt")
client.connect([sys.argv[1]])
lines = [line.split() for line in sys.stdin]
for begin in range(0, len(lines), 5):
    batch = lines[begin : begin + 5]
    feed = {"dense_input": np.array([line[1:14] for line in batch], dtype="float32")}
    for i in range(26):
        feed["C%d" % (i + 1)] = np.array([[line[15 + 2 * i]] for line in batch], dtype="int64")
    fetch_map = client.predict(feed=feed, fetch=["sigmoid_0.tmp_0"], batch=True, log_id=begin // 5)
    for score in fetch_map["sigmoid_0.tmp_0"]:
        print(score[0])
