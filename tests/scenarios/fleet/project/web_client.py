"""Sends the lines of dataset_generator.py to the web service in one request."""

import json
import sys
import urllib.request

lines = [line.split() for line in sys.stdin]
feed = {"dense_input": [[float(value) for value in line[1:14]] for line in lines]}
for i in range(26):
    feed["C%d" % (i + 1)] = [[int(line[15 + 2 * i])] for line in lines]
data = json.dumps({"feed": [feed], "fetch": ["sigmoid_0.tmp_0"]}).encode()
headers = {"Content-type": "application/json"}
request = urllib.request.Request("http://" + sys.argv[1] + "/rec/prediction", data, headers)
for score in json.load(urllib.request.urlopen(request))["result"]["sigmoid_0.tmp_0"]:
    print(score[0])
