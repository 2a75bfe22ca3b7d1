import sys

from dataset_generator import CriteoDataset


class Reader(CriteoDataset):
    """The samples of the classic reader in the order of the network's inputs: label, C1 ... C26, dense_input."""

    def init(self, config):
        self.count = config.get("hyper_parameters.sparse_inputs_slots") - 1

    def generate_sample(self, line):
        def reader():
            for dense, *sparse, label in CriteoDataset.generate_sample(self, line)():
                assert len(sparse) == self.count
                yield [label, *sparse, dense]

        return reader


if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    import common_ps

    r = Reader()
    r.init(common_ps.YamlHelper().load_yaml(sys.argv[1]))
    r.run_from_stdin()
