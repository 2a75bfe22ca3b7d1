"""Read lines such as `2026-01-01 clicked=1 user=ann tags=a,b price=3.5`, inside clickfleet or as a command.

cat log.txt | python pairs_reader.py
"""

from clickfleet.paddlerec.generator import Generator

USERS = {"ann": 1, "bob": 2, "eve": 3}


class Pairs(Generator):
    def generate_sample(self, line):
        def samples():
            _, *pairs = line.split()
            row = dict(pair.split("=", 1) for pair in pairs)
            yield [
                ("price", [float(row["price"])]),
                ("user", [USERS[row["user"]]]),
                ("tags", [ord(tag) for tag in row["tags"].split(",")]),
                ("label", [int(row["clicked"])]),
            ]

        return samples


if __name__ == "__main__":
    Pairs().run_from_stdin()
