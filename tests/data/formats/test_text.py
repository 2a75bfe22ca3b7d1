"""Each grammar, rule by rule."""

import numpy as np
import pytest
import torch

from clickfleet import _core
from clickfleet.data.schema import Bucket, Dense, KeyRule, Schema, Slot, Transform, preset
from clickfleet.errors import ConfigError, DataError
from lines import GOLDEN_DENSE, GOLDEN_IDS, GOLDEN_LINE, MULTISLOT_LINE, SLOTS_LINE, criteo_line, read

RAW = KeyRule("raw")


def keys_of(batch, slot: int) -> list[list[int]]:
    starts = batch.offsets[:-1].reshape(-1, batch.slots)[:, slot]
    ends = batch.offsets[1:].reshape(-1, batch.slots)[:, slot]
    return [batch.keys[start:end].tolist() for start, end in zip(starts, ends, strict=True)]


class TestCriteo:
    def test_golden_line(self, write):
        (batch,) = read(write("a", GOLDEN_LINE + "\n"), "criteo", preset("criteo-paddle"))
        assert batch.keys.tolist() == GOLDEN_IDS
        np.testing.assert_allclose(batch.dense[0], GOLDEN_DENSE, rtol=1e-6)
        assert batch.labels.tolist() == [0]

    def test_our_transform_and_keys(self, write):
        (batch,) = read(write("a", f"{GOLDEN_LINE}\n{GOLDEN_LINE}\n"), "criteo")
        fields = GOLDEN_LINE.split("\t")
        for row in range(2):  # the first line is read by another loop than those in the middle
            assert batch.keys[26 * row : 26 * row + 26].tolist() == [
                _core.hash64(f"C{i}", value.encode()) for i, value in enumerate(fields[14:], 1)
            ]
            np.testing.assert_array_equal(
                batch.dense[row], np.log1p([float(x or 0) for x in fields[1:14]]).astype(np.float32)
            )

    def test_every_loop_reads_alike(self, write):
        """Lines in the middle of a block, at its edges, with a carriage return, without a newline at the end."""
        lines = [criteo_line(i) for i in range(40)]
        whole = read(write("a", "\n".join(lines) + "\n"), "criteo")[0]
        windows = read(write("b", "\r\n".join(lines)), "criteo")[0]
        single = [read(write(f"c{i}", line), "criteo")[0] for i, line in enumerate(lines)]
        for other in (windows, *single):
            rows = slice(0, 40) if len(other) == 40 else slice(single.index(other), single.index(other) + 1)
            assert (whole[rows].keys == other.keys).all()
            assert (whole[rows].dense == other.dense).all()
            assert (whole[rows].labels == other.labels).all()

    def test_a_blank_is_a_missing_value(self, write):
        lines = [criteo_line(i) for i in range(20)]
        fields = [line.split("\t") for line in lines]
        for line in fields:
            line[3], line[5], line[20], line[39] = "", "", "", ""
        empty = read(write("a", "".join("\t".join(line) + "\n" for line in fields)), "criteo")[0]
        for line in fields:
            line[3], line[5], line[20], line[39] = " ", "   ", " ", " "
        blank = read(write("b", "".join("\t".join(line) + "\n" for line in fields)), "criteo")[0]
        assert (blank.dense == empty.dense).all()
        assert (blank.keys == empty.keys).all()
        fields[7][4] = "1 2"
        with pytest.raises(DataError, match="b:8"):
            read(write("b", "".join("\t".join(line) + "\n" for line in fields)), "criteo")

    def test_negative_and_fractional_counts(self, write):
        line = GOLDEN_LINE.split("\t")
        line[1:6] = ["-3", "0.5", "1e3", "16383", "16384.0"]
        (batch,) = read(write("a", "\t".join(line)), "criteo")
        expected = [-np.log1p(3), np.log1p(0.5), np.log1p(1000), np.log1p(16383), np.log1p(16384)]
        np.testing.assert_array_equal(batch.dense[0, :5], np.array(expected, np.float32))

    def test_without_a_label(self, write):
        unlabelled = GOLDEN_LINE.partition("\t")[2]
        (batch,) = read(write("a", f"{unlabelled}\n{unlabelled}\n"), "criteo", preset("criteo-paddle"))
        assert batch.labels is None
        assert batch.keys.tolist() == GOLDEN_IDS * 2
        with pytest.raises(DataError, match=r"the rows have no label \(click\)"):
            read(write("a", unlabelled), "criteo", require_labels=True)

    def test_a_file_is_labelled_or_not(self, write):
        with pytest.raises(
            DataError, match=r"a:2: expected 39 tab-separated fields \(the first line has no label\), found 40"
        ):
            read(write("a", GOLDEN_LINE.partition("\t")[2] + "\n" + GOLDEN_LINE), "criteo")

    def test_a_schema_may_leave_columns_out(self, write):
        schema = Schema((Dense("I5"),), (Slot("C22"), Slot("C1")), label="click")
        (batch,) = read(write("a", GOLDEN_LINE), "criteo", schema)
        assert batch.dense.tolist() == [[1382]]
        assert batch.keys.tolist() == [_core.hash64("C22", b""), _core.hash64("C1", b"68fd1e64")]

    def test_a_schema_of_other_columns_is_refused(self, write):
        path = write("a", GOLDEN_LINE)
        with pytest.raises(DataError, match="there is no column 'C27' for the slot C27; did you mean C7"):
            read(path, "criteo", Schema(slots=(Slot("C27"),), label="click"))
        with pytest.raises(ConfigError, match="no column 'label' for the label"):
            read(path, "criteo", Schema(slots=(Slot("C1"),)))


class TestSlots:
    def test_tabs_between_tokens(self, write):
        (spaces,) = read(write("a", SLOTS_LINE + "\n"), "slots")
        for text in (SLOTS_LINE.replace(" ", "\t"), SLOTS_LINE.replace(" ", "\t", 5)):
            (tabs,) = read(write("b", f"{text}\n{SLOTS_LINE}\n"), "slots")
            assert tabs.labels.tolist() == spaces.labels.tolist() * 2
            assert (tabs[:1].keys == spaces.keys).all()
            assert (tabs[:1].dense == spaces.dense).all()
        with pytest.raises(DataError, match="b:1"):
            read(write("b", SLOTS_LINE.replace(" ", "\t\t", 1) + "\n"), "slots")

    def test_the_published_line(self, write):
        (batch,) = read(write("a", SLOTS_LINE), "slots")
        assert batch.keys.tolist() == GOLDEN_IDS
        np.testing.assert_allclose(batch.dense[0], GOLDEN_DENSE, rtol=1e-6)
        assert batch.labels.tolist() == [0]

    def test_any_order_unknown_names_and_blank_ends(self, write):
        tokens = SLOTS_LINE.split(" ")
        shuffled = " ".join(["other:9", *tokens[20:], *tokens[:20]])
        (batch,) = read(write("a", f"  {shuffled} \t\n{SLOTS_LINE}\n"), "slots")
        assert batch.keys.tolist() == GOLDEN_IDS * 2
        assert (batch.dense[0] == batch.dense[1]).all()

    def test_missing_repeated_and_empty(self, write):
        schema = Schema(
            (Dense("d1", missing=-1.0, source="d"), Dense("d2", source="d")), (Slot("s"), Slot("m", multi=True))
        )
        (batch,) = read(write("a", "label:1 m:b s:x m:a\nlabel:0 d:1 d:2 m:\n"), "slots", schema)
        assert batch.dense.tolist() == [[-1, 0], [1, 2]]
        assert keys_of(batch, 0) == [[_core.hash64("s", b"x")], [_core.hash64("s", b"")]]
        assert keys_of(batch, 1) == [[_core.hash64("m", b"b"), _core.hash64("m", b"a")], []]

    def test_the_second_colon_ends_the_value(self, write):
        (batch,) = read(write("a", "label:1 s:5:9"), "slots", Schema(slots=(Slot("s"),), keys=RAW))
        assert batch.keys.tolist() == [5]

    def test_side_columns(self, write):
        schema = Schema(slots=(Slot("s"),), show="show", click="clicks", weight="w", time="t", group="u")
        (batch,) = read(write("a", "label:1 s:x show:3 clicks:2 w:0.5 t:-7 u:ann\nlabel:1 s:x t:8\n"), "slots", schema)
        assert batch.shows.tolist() == [3, 1]
        assert batch.clicks.tolist() == [2, 1]
        assert batch.weights.tolist() == [0.5, 1]
        assert batch.times.tolist() == [-7, 8]
        assert batch.groups.tolist() == [_core.hash64("u", b"ann"), _core.hash64("u", b"")]
        for array in (batch.keys, batch.offsets, batch.times, batch.groups, batch.shows):
            torch.from_numpy(array)

    def test_without_a_label(self, write):
        (batch,) = read(write("a", SLOTS_LINE.removeprefix("click:0 ")), "slots")
        assert batch.labels is None
        assert batch.keys.tolist() == GOLDEN_IDS

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("click:1 1:5 nonsense", "token 3: 'nonsense' is not name:value"),
            ("click:1  1:5", "token 2: '' is not name:value"),
            ("click:1 1:x", "token 2: 'x' is not an unsigned 64-bit integer"),
            ("click:1 1:18446744073709551616", "is not an unsigned 64-bit integer"),
            ("click:1 1:5 1:6", "token 3: '6' is a second value, but the slot is single-valued"),
            ("click:1 click:1", "is a second value"),
            ("click:1 dense_feature:1", "dense_feature: 1 values do not match the number of columns in the schema"),
            ("click:1" + " dense_feature:1" * 14, "14 values do not match"),
            ("click:1 dense_feature:x", "'x' is not a number"),
            ("click:x", "'x' is not a number"),
            ("click:1\n1:5", "a:2: the label is missing"),
            ("1:5\nclick:1", "a:2: token 1: '1' is a label, but the first line of the file has none"),
        ],
    )
    def test_refuses(self, write, text, message):
        with pytest.raises(DataError) as refusal:
            read(write("a", text), "slots")
        assert message in str(refusal.value)


class TestFeasign:
    def test_value_first_after_an_optional_id(self, write):
        text = "0:1 4351255118977467729:3 16543128959394097760:29 10003478084564939135:29 7:999\nsome id\t1:1 5:2\n"
        (batch,) = read(write("a", text), "feasign")
        assert batch.labels.tolist() == [0, 1]
        assert batch.slots == 300
        assert keys_of(batch, 1) == [[4351255118977467729], []]
        assert keys_of(batch, 27) == [[16543128959394097760, 10003478084564939135], []]
        assert keys_of(batch, 0) == [[], [5]]

    def test_without_a_label(self, write):
        (batch,) = read(write("a", "5:2 6:3"), "feasign")
        assert batch.labels is None

    def test_refuses(self, write):
        with pytest.raises(DataError, match="token 2: '5' is not value:slot"):
            read(write("a", "0:1 5"), "feasign")


class TestLibffm:
    SCHEMA = Schema(slots=(Slot("0", multi=True), Slot("1", multi=True), Slot("2")), keys=RAW, values=True)

    def test_values_per_key(self, write):
        (batch,) = read(write("a", "1 1:7:0.5 0:3:-2 1:8:1e1\n0 2:9:1\n"), "libffm", self.SCHEMA)
        assert batch.labels.tolist() == [1, 0]
        assert batch.keys.tolist() == [3, 7, 8, 0, 9]
        assert batch.values.tolist() == [-2, 0.5, 10, 1, 1]
        assert batch.offsets.tolist() == [0, 1, 3, 4, 4, 4, 5]

    def test_without_a_label(self, write):
        (batch,) = read(write("a", "1:7:0.5 0:3:2"), "libffm", self.SCHEMA)
        assert batch.labels is None

    @pytest.mark.parametrize(
        ("text", "message"),
        [("1 1:7", "is not field:feature:value"), ("1 1:7:x", "'x' is not a number"), ("1 1:7:1e300", "out of range")],
    )
    def test_refuses(self, write, text, message):
        with pytest.raises(DataError) as refusal:
            read(write("a", text), "libffm", self.SCHEMA)
        assert message in str(refusal.value)


class TestMultislot:
    def test_the_published_sample(self, write):
        assert MULTISLOT_LINE.startswith("13 0.05 0.00663349917081 ")
        assert MULTISLOT_LINE.endswith(" 0.04 1 715353 1 817085" + MULTISLOT_LINE.partition(" 1 817085")[2])
        (batch,) = read(write("a", MULTISLOT_LINE), "multislot")
        assert batch.keys.tolist() == GOLDEN_IDS
        np.testing.assert_allclose(batch.dense[0], GOLDEN_DENSE, rtol=1e-6)
        assert batch.labels.tolist() == [0]

    def test_order_id_content_and_lists(self, write):
        schema = Schema((Dense("d"),), (Slot("s"), Slot("m", multi=True)), keys=RAW, show="show")
        form = {"name": "multislot", "order": ["show", "label", "m", "d", "s"], "ins_id": True, "content": True}
        (batch,) = read(write("a", "1 abc 1 text 1 2 1 1 3 7 8 9 1 0.5 1 5\n"), form, schema)
        assert batch.labels.tolist() == [1]
        assert batch.shows.tolist() == [2]
        assert keys_of(batch, 1) == [[7, 8, 9]]
        assert batch.dense.tolist() == [[0.5]]

    def test_without_a_label(self, write):
        (batch,) = read(write("a", MULTISLOT_LINE.removesuffix(" 1 0")), "multislot")
        assert batch.labels is None

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0 1 1", "m: '0' is not a number of values"),
            ("-1 5 1 1", "m: '-1' is not a number of values"),
            ("x 5 1 1", "m: 'x' is not a number of values"),
            ("3 5 6", "m: the line ends too early"),
            ("1 5", "label: the line ends too early"),
            ("1 5 2 1 0", "label: 2 values"),
            ("1 x 1 1", "m: 'x' is not an unsigned 64-bit integer"),
            ("1 5 1 1 9", "'9' comes after the last field"),
            ("99999999999999999999999 5 1 1", "is not a number of values"),
            ("1 18446744073709551616 1 1", "is not an unsigned 64-bit integer"),
        ],
    )
    def test_refuses(self, write, text, message):
        schema = Schema(slots=(Slot("m", multi=True),), keys=RAW)
        with pytest.raises(DataError) as refusal:
            read(write("a", "1 5 1 1\n" + text), "multislot", schema)
        assert message in str(refusal.value)

    def test_the_order_must_be_complete(self, write):
        with pytest.raises(ConfigError, match="missing: m"):
            read(write("a", "1 1"), {"name": "multislot", "order": ["label"]}, Schema(slots=(Slot("m"),)))
        with pytest.raises(ConfigError, match="the schema has no 'lable'; did you mean label"):
            read(write("a", "1 1"), {"name": "multislot", "order": ["lable", "m"]}, Schema(slots=(Slot("m"),)))


class TestCsv:
    SCHEMA = Schema((Dense("age"),), (Slot("city"), Slot("tags", multi=True)), label="clicked")

    def test_by_header(self, write):
        text = '\ufeffid,tags,city,clicked,age\n1,a|b,"Bern, ""old"" town",1,30\n2,,Oslo,0,\n'
        (batch,) = read(write("a", text), "csv", self.SCHEMA)
        assert batch.labels.tolist() == [1, 0]
        assert batch.dense.tolist() == [[30], [0]]
        assert keys_of(batch, 0) == [[_core.hash64("city", b'Bern, "old" town')], [_core.hash64("city", b"Oslo")]]
        assert keys_of(batch, 1) == [[_core.hash64("tags", b"a"), _core.hash64("tags", b"b")], []]

    def test_columns_given_and_other_separators(self, write):
        form = {"name": "csv", "columns": ["clicked", "age", "city", "tags"], "separator": ";", "list_separator": " "}
        (batch,) = read(write("a", "1;5;x;a b\n"), form, self.SCHEMA)
        assert batch.dense.tolist() == [[5]]
        assert len(keys_of(batch, 1)[0]) == 2

    def test_without_a_label(self, write):
        (batch,) = read(write("a", "tags,city,age\na,b,1\n"), "csv", self.SCHEMA)
        assert batch.labels is None

    def test_a_header_alone_is_no_rows(self, write):
        assert read(write("a", "tags,city,clicked,age\n"), "csv", self.SCHEMA) == []
        assert read(write("b", ""), "csv", self.SCHEMA) == []

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("tags,city,clicked\n", "there is no column 'age' for the dense column age"),
            ("tags,city,age,clicked,city\n", "two columns are named 'city'"),
            ("tags,city,clicked,age\na,b,1\n", "a:2: expected 4 comma-separated fields"),
            ('tags,city,clicked,age\na,"b,1,2\n', "a:2: city: '\"b,1,2' has a quotation mark that is not closed"),
            ('tags,city,clicked,age\na,"b"c,1,2\n', "quotation mark"),
            ("tags,city,clicked,age\na,b,,2\n", "clicked: the label is missing"),
            ('tags,city,clicked,age\n"x",b,1,"two"\n', "age: '\"two\"' is not a number"),
        ],
    )
    def test_refuses(self, write, text, message):
        with pytest.raises(DataError) as refusal:
            read(write("a", text), "csv", self.SCHEMA)
        assert message in str(refusal.value)


def test_transforms(write):
    names = ("none", "minmax(2, 4)", "standard(1, 2)", "log1p")
    schema = Schema(tuple(Dense(name, Transform.parse(name), missing=9.0) for name in names))
    form = {"name": "csv", "columns": ["label", *names]}
    (batch,) = read(write("a", "0,5,5,5,5\n0,-5,-5,-5,-5\n0,,,,\n"), form, schema)
    expected = np.array([[5, 1.5, 2, np.log1p(5)], [-5, -3.5, -3, -np.log1p(5)], [9] * 4], np.float32)
    np.testing.assert_array_equal(batch.dense, expected)


def test_bucketed_slots(write):
    def schema(rule):
        fine = Bucket("x", buckets=100_000, offset=1_000_002)
        coarse = Bucket("y", boundaries=(0.0, 10.0))
        slots = (Slot("fine", bucket=fine), Slot("word"), Slot("coarse", bucket=coarse))
        return Schema((Dense("x"), Dense("y")), slots, keys=rule)

    path = write("a", "label,x,y,word\n1,0.5,-1,7\n1,2,0,7\n1,-1,10,7\n1,,5,7\n")
    (batch,) = read(path, "csv", schema(RAW))
    assert batch.keys.reshape(-1, 3).tolist() == [[1050002, 7, 0], [1100002, 7, 1], [1000002, 7, 2], [1000002, 7, 1]]
    (batch,) = read(path, "csv", schema(KeyRule()))
    assert batch.keys.reshape(-1, 3)[0].tolist() == [
        _core.hash64("fine", b"50000"),
        _core.hash64("word", b"7"),
        _core.hash64("coarse", b"0"),
    ]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("slots", "label:1 user:5 n:6"),
        ("csv", "n,label,user\r\n6,1,5\r\n"),
        ("csv", '"user",label,n\n"5",1,"6"'),
        ("feasign", "1:label 5:user 6:n"),
        ("multislot", "1 6 1 5 1 1"),
    ],
)
def test_a_column_may_have_several_uses(write, form, text):
    """A user is a slot and the group, a number is dense and a slot."""
    schema = Schema((Dense("count", source="n"),), (Slot("user"), Slot("n2", source="n")), click="label", group="user")
    options = {"name": "multislot", "order": ["n", "user", "label"]} if form == "multislot" else form
    (batch,) = read(write("a", text), options, schema)
    assert batch.keys.tolist() == [_core.hash64("user", b"5"), _core.hash64("n2", b"6")]
    assert batch.groups.tolist() == [_core.hash64("user", b"5")]
    assert batch.dense.tolist() == [[6]]
    assert batch.labels.tolist() == batch.clicks.tolist() == [1]


@pytest.mark.parametrize("form", ["slots", "csv", "multislot"])
def test_formats_without_values_have_ones(write, form):
    schema = Schema(slots=(Slot("a"), Slot("b")), keys=RAW, values=True)
    text = {"slots": "label:1 a:5 b:6", "csv": "label,a,b\n1,5,6", "multislot": "1 5 1 6 1 1"}[form]
    (batch,) = read(write("a", text), form, schema)
    assert batch.keys.tolist() == [5, 6]
    assert batch.values.tolist() == [1, 1]


def test_adding_a_slot_changes_no_other_key(write):
    path = write("a", "label,a,b\n1,x,y\n")
    (one,) = read(path, "csv", Schema(slots=(Slot("b"),)))
    (two,) = read(path, "csv", Schema(slots=(Slot("a"), Slot("b"))))
    assert one.keys[0] == two.keys[1]
