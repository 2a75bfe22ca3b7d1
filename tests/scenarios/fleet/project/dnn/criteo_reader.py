import numpy as np
from paddle.io import IterableDataset


class RecDataset(IterableDataset):
    """Slot text for serving: C1 ... C26 and the dense values, without the label."""

    def __init__(self, file_list, config):
        super(RecDataset, self).__init__()
        self.file_list = file_list

    def __iter__(self):
        for file in self.file_list:
            with open(file, "r") as rf:
                for line in rf:
                    found = {}
                    for token in line.strip().split(" "):
                        name, value = token.split(":")
                        found.setdefault(name, []).append(value)
                    output = [np.array(found[str(slot)]).astype("int64") for slot in range(1, 27)]
                    yield [*output, np.array(found["dense_feature"]).astype("float32")]
