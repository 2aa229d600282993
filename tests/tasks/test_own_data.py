"""Own records without code: tables, arrays and image folders train; every mistake names the file, the column and the
row."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from coterie.core.choice import Choice
from coterie.core.errors import ConfigError, CoterieError, DataError
from coterie.core.run_config import RunConfig
from coterie.simulations import simulate
from coterie.tasks import load_task
from coterie.tasks.labels import encode_labels

ONE_WORKER = {"simulation.workers": 1}
"""The numbers are the same for any number of workers, and one starts sooner."""


def rows(n=60):
    rng = np.random.default_rng(0)
    age, sex = rng.integers(20, 90, n), rng.choice(["f", "m"], n)
    ill = np.where(age + 10 * (sex == "m") > 60, "yes", "no")
    return {"age": age.tolist(), "sex": sex.tolist(), "site": [f"s{i % 3}" for i in range(n)], "ill": ill.tolist()}


def write_csv(path, table, **change):
    table = table | change
    lines = [",".join(table)]
    lines += [
        ",".join("" if value is None else str(value) for value in row) for row in zip(*table.values(), strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def table_task(path, **options):
    return load_task(Choice(name="table", path=path, **({"target": "ill"} | options)))


def test_a_table_trains_with_a_column_as_client_key(tmp_path, home):
    path = write_csv(tmp_path / "patients.csv", rows(300))
    task = {"name": "table", "path": path, "target": "ill", "client": "site"}
    result = simulate(RunConfig.load(overrides={"task": task, "rounds": 10} | ONE_WORKER), home)
    assert result.config.simulation.clients == 3
    assert result.outcome.metrics["accuracy"] > 0.85
    assert set(result.outcome.metrics) == {"accuracy", "balanced_accuracy", "auc", "loss"}


def test_csv_and_parquet_give_the_same_records(tmp_path):
    path = write_csv(tmp_path / "t.csv", rows())
    parquet.write_table(pa.table(rows()), tmp_path / "t.parquet")
    one, other = table_task(path), table_task(str(tmp_path / "t.parquet"))
    assert torch.equal(one.train.inputs, other.train.inputs)
    assert one.label_names == other.label_names == ("no", "yes")


def test_missing_numbers_and_texts_raise_flags(tmp_path):
    table = rows()
    path = write_csv(tmp_path / "t.csv", table, age=[None, *table["age"][1:]], sex=[*table["sex"][:-1], None])
    task = table_task(path, features=["age", "sex"])
    inputs = torch.cat([task.train.inputs, task.test.inputs])
    assert inputs.shape == (60, 2 + 3)
    assert inputs[:, 1].sum() == 1
    assert inputs[:, 4].sum() == 1
    assert (inputs[inputs[:, 1] == 1, 0] == 0).all()


def test_numbers_are_scaled_by_the_file_or_by_declared_constants(tmp_path):
    path = write_csv(tmp_path / "t.csv", rows())
    scaled = table_task(path, features=["age"])
    everyone = torch.cat([scaled.train.inputs, scaled.test.inputs])
    assert abs(float(everyone.mean())) < 1e-5
    assert float(everyone.std(correction=0)) == pytest.approx(1, abs=1e-5)
    declared = table_task(path, features=["age"], scale={"age": [50, 10]})
    ages = torch.cat([declared.train.inputs, declared.test.inputs]) * 10 + 50
    assert sorted(ages[:, 0].round().tolist()) == sorted(rows()["age"])


def test_whole_number_classes_keep_their_order():
    labels, names = encode_labels(np.array([10.0, 9.0, 2.0, 2.0, 9.0, 10.0]), "here")
    assert names == ("2", "9", "10")
    assert labels.tolist() == [2, 1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"ill": ["yes", None, "no", None, *["yes"] * 56]}, {}, r"column 'ill': 2 labels are missing \(record 2, 4\)"),
        ({"ill": list(range(60))}, {}, r"column 'ill' has 60 different values in 60 records: is it the right column"),
        ({"ill": [0.5 + i for i in range(60)]}, {}, r"column 'ill' holds fractions: it looks like a measurement"),
        ({"ill": ["yes"] * 60}, {}, r"column 'ill' has only the class 'yes'"),
        ({"ill": ["yes"] * 59 + ["no"]}, {}, r"class 'no' has a single record"),
        ({"site": [None, *["s"] * 59]}, {"client": "site"}, r"column 'site': record 1 has no client"),
        ({"age": [None] * 60}, {"features": ["age"]}, r"column 'age'.* is empty in every record"),
        ({"age": ["inf", *range(59)]}, {"features": ["age"]}, r"column 'age': record 1 is infinite"),
        ({"sex": [f"x{i}" for i in range(60)] }, {"features": ["agee"]}, r"no column 'agee': the columns are age, sex"),
        ({}, {"target": "il"}, r"there is no column 'il': the columns are age, sex, site, ill"),
        ({"ill": ["yes", " ", *["no", "yes"] * 29]}, {}, r"column 'ill': 1 labels are missing \(record 2\)"),
        ({"ill": ["yes"] * 59 + ["no"]}, {}, r"single record \(record 60\): two are needed to hold one out: drop it"),
        ({"ill": ["inf", *[1, 2] * 29, 1]}, {}, r"column 'ill' holds fractions"),
        ({"site": [0.5, *range(59)]}, {"client": "site"}, r"column 'site' holds fractions: a client is named by"),
        ({"age": ["?", *range(59)]}, {}, r"column 'age': record 1 is '\?' where all but 1 of 60 records are numbers"),
        ({"age": [1e300, *range(59)]}, {}, r"column 'age': record 1 is 1e\+300, too large"),
    ],
)  # fmt: skip
def test_mistakes_in_a_table_are_named(tmp_path, change, options, message):
    path = write_csv(tmp_path / "t.csv", rows(), **change)
    with pytest.raises(DataError, match=message):
        table_task(path, **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, r"cannot read the table .*absent\.csv"),
        ("empty.csv", b"", r"cannot read the table .*empty\.csv"),
        ("bare.csv", b"a,ill\n", r"bare\.csv has no rows"),
        ("ragged.csv", b"a,ill\n1,yes\n2\n", r"cannot read the table .*ragged\.csv.*[Ee]xpected 2 columns"),
        ("twice.csv", b"a,a,ill\n1,2,yes\n1,2,no\n", r"twice\.csv has two columns named 'a'"),
        ("broken.parquet", b"PAR0", r"cannot read the table .*broken\.parquet"),
        ("wide.csv", "a,ill\n1,yes\n2,no\n".encode("utf-16"), r"wide\.csv is UTF-16 or binary: save it as UTF-8"),
        ("bare.csv", "a,ill\n1,yes\n2,no\n".encode("utf-16-le"), r"bare\.csv is UTF-16 or binary: save it as UTF-8"),
        ("excel.csv", b"a;ill\n1,5;yes\n2,5;no\n", r"excel\.csv is separated by semicolons, .*: save it .* by commas"),
        ("tabs.csv", b"a\till\n1\tyes\n2\tno\n", r"tabs\.csv is separated by tabs, it seems"),
        ("commas.tsv", b"a,ill\n1,yes\n2,no\n", r"commas\.tsv is separated by commas, it seems"),
        ("sheet.xlsx", b"", r"sheet\.xlsx: tables are read from \.csv, \.tsv or \.parquet"),
    ],
)
def test_files_that_are_no_table_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        table_task(str(tmp_path / name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_fraction": 1.5}, r"task\.test_fraction = 1\.5: it must lie between 0 and 1"),
        ({"test_fraction": 0.001}, r"task\.test_fraction = 0\.001: of 60 records it holds out 0"),
        ({"scale": {"age": [1, 0]}}, r"scale = \[1\.0, 0\.0\]: write \[centre, width\]"),
        ({"scale": {"sex": [1, 1]}}, r"column 'sex' is text: it has no scale"),
        ({"scale": {"sex": [1, 1]}, "features": ["age"]}, r"task\.scale has 'sex', which is none of the features"),
        ({"features": []}, r"task\.features: no column of .*t\.csv is left to learn from"),
        ({"features": ["age", "ill"]}, r"task\.features has 'ill', which is the target"),
        ({"features": ["age", "age"]}, r"task\.features has 'age' twice"),
        ({"client": "ill"}, r"task\.client = 'ill': that is the target"),
        ({"hidden": [8, 0]}, r"task\.hidden = \[8, 0\]: a layer is at least 1 and at most 65536 wide"),
        ({"hidden": [10**12]}, r"task\.hidden = \[1000000000000\]: a layer is at least 1 and at most 65536 wide"),
        ({"hidden": [1] * 33}, r"task\.hidden has 33 layers: 32 are the most"),
        ({"hiden": [8]}, r"task\.hiden: 'table' has no such option"),
    ],
)
def test_wrong_options_of_a_table_are_named(tmp_path, options, message):
    path = write_csv(tmp_path / "t.csv", rows())
    with pytest.raises(ConfigError, match=message):
        table_task(path, **options)


def test_whole_numbers_name_clients_and_classes_digit_by_digit(tmp_path):
    table = rows() | {"site": [2**60 + i % 2 for i in range(60)], "ill": [10, 9] * 30}
    parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    task = table_task(str(tmp_path / "t.parquet"), client="site")
    assert set(task.train.keys) == {str(2**60), str(2**60 + 1)}
    assert task.label_names == ("9", "10")


def test_columns_of_other_kinds_only_matter_when_they_are_used(tmp_path):
    parquet.write_table(pa.table(rows() | {"scan": [[1, 2]] * 60}), tmp_path / "t.parquet")
    assert table_task(str(tmp_path / "t.parquet"), features=["age"]).train.inputs.shape == (48, 1)
    with pytest.raises(DataError, match=r"column 'scan' holds list<.*>: only numbers and text can be used"):
        table_task(str(tmp_path / "t.parquet"))


@pytest.mark.parametrize("form", ["2024-05-{:02}", "2024-05-{:02} 10:30:00", "2024-05-{:02}T10:30:00Z", "10:{:02}:00"])
def test_dates_are_refused_as_features_and_serve_as_clients(tmp_path, form):
    path = write_csv(tmp_path / "t.csv", rows(), seen=[form.format(1 + i % 20) for i in range(60)])
    with pytest.raises(
        DataError, match=r"column 'seen' holds dates or times .*: make it a number \(days since .*leave"
    ):
        table_task(path)
    assert len(set(table_task(path, client="seen").train.keys)) == 20
    assert table_task(path, features=["age", "sex"]).train.inputs.shape == (48, 3)


@pytest.mark.parametrize(("column", "option"), [("site", {"client": "site"}), ("ill", {})])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_nul_characters_do_not_make_one_client_or_class_of_two(tmp_path, column, option, kind):
    path, table = tmp_path / f"t.{kind}", rows() | {column: ["yes", "no", "yes\0"] * 20}
    if kind == "csv":
        write_csv(path, table)
    else:
        parquet.write_table(pa.table(table), path)
    with pytest.raises(DataError, match=rf"column '{column}': record 3 is 'yes\\x00', which holds a NUL character"):
        table_task(str(path), **option)


def test_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"name,ill\n" + b"Ren\xe9,yes\nAnn,no\n" * 10)
    with pytest.raises(DataError, match=r"t\.csv.*UTF"):
        table_task(str(tmp_path / "t.csv"))


@given(st.lists(st.sampled_from(["a", "b", "10", "9", "-1"]), min_size=1, max_size=30))
def test_labels_lead_back_to_their_names(values):
    values = np.array(values * 2 + ["a", "b"] * 4)
    labels, names = encode_labels(values, "here")
    assert [names[label] for label in labels] == values.tolist()
    assert set(labels.tolist()) == set(range(len(names)))


def test_arrays_train_and_keep_their_clients(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3, 2)), rng.integers(0, 3, 40)
    np.savez(tmp_path / "a.npz", x=x, y=y, who=[f"c{i % 4}" for i in range(40)])
    task = load_task(Choice(name="arrays", path=str(tmp_path / "a.npz"), client="who", hidden=[8]))
    assert task.train.inputs.shape == (32, 3, 2)
    assert set(task.train.keys) == {"c0", "c1", "c2", "c3"}
    assert task.model()(task.test.inputs).shape == (8, 3)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"x": np.zeros((4, 2)), "z": np.zeros(4)}, {}, "there is no array 'y': the arrays are x, z"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(5)}, {}, "'y' has 5 rows, 'x' has 4"),
        ({"x": np.array([[0.0], [np.nan], [0], [0]]), "y": [0, 1, 0, 1]}, {}, "array 'x': record 2 is not finite"),
        ({"x": np.array(["a", "b", "c", "d"]), "y": [0, 1, 0, 1]}, {}, "inputs must be numbers"),
        ({"x": np.zeros((4, 2)), "y": np.zeros((4, 2))}, {}, r"array 'y' has shape \[4, 2\]"),
        ({"x": np.full((4, 2), 1e300), "y": [0, 1, 0, 1]}, {}, "record 1 is not finite in float32"),
        ({"x": np.zeros(()), "y": np.zeros(4)}, {}, r"array 'x' has no records \(its shape is \[\]\)"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, {}, r"array 'x' has no records"),
        ({"x": np.zeros((4, 0)), "y": np.zeros(4)}, {}, r"array 'x' of shape \[4, 0\] holds no numbers"),
        ({"x": np.zeros((4, 2)), "y": np.array([0, 1j, 0, 1j])}, {}, "array 'y' is complex128: class labels are"),
        (
            {"x": np.zeros((4, 2)), "y": [0, 1, 0, 1], "c": np.zeros((4, 2))},
            {"client": "c"},
            "client keys are one value",
        ),
        ({"x": np.array([{}, {}, {}, {}]), "y": [0, 1, 0, 1]}, {}, "cannot read .*allow_pickle"),
    ],
)
def test_mistakes_in_arrays_are_named(tmp_path, arrays, options, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_task(Choice(name="arrays", path=str(tmp_path / "a.npz"), **options))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*a\.npz: .*No such file"),
        (b"", r"a\.npz is not an NPZ file: write one with numpy\.savez"),
        (b"\x93NUMPY", r"a\.npz is not an NPZ file"),
        (b"PK\x03\x04 and nothing more", r"cannot read .*a\.npz: File is not a zip file"),
    ],
)
def test_files_that_are_no_arrays_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_task(Choice(name="arrays", path=str(tmp_path / "a.npz")))


def test_one_number_per_record_is_enough(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20), y=[0, 1] * 10)
    assert load_task(Choice(name="arrays", path=str(tmp_path / "a.npz"))).train.inputs.shape == (16, 1)


def paint(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (value, 255 - value, 0)).save(path)


def test_folders_of_images_train_with_batch_norm_and_folders_as_clients(tmp_path, home):
    for client in ("north", "south"):
        for i in range(12):
            paint(tmp_path / "p" / client / "red" / f"{i}.png", 255 - i)
            paint(tmp_path / "p" / client / "green" / f"{i}.jpg", i)
    task = {"name": "images", "path": str(tmp_path / "p"), "clients": True, "size": 8, "batch_norm": True}
    result = simulate(RunConfig.load(overrides={"task": task, "rounds": 4} | ONE_WORKER), home)
    assert result.outcome.metrics["accuracy"] == 1.0
    assert result.config.simulation.clients == 2
    assert load_task(Choice(**task)).train.inputs.dtype == torch.uint8


def test_mistakes_in_a_folder_of_images_are_named(tmp_path):
    def load(**options):
        return load_task(Choice(name="images", path=str(tmp_path / "p"), **options))

    with pytest.raises(DataError, match="p is not a folder"):
        load()
    (tmp_path / "p" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no images at CLASS/IMAGE"):
        load()
    paint(tmp_path / "p" / "cat" / "1.png", 1)
    with pytest.raises(DataError, match="holds no images at CLIENT/CLASS/IMAGE"):
        load(clients=True)
    (tmp_path / "p" / "cat" / "2.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cannot read the image .*cat/2\.png"):
        load()
    with pytest.raises(CoterieError, match=r"task\.size = 2"):
        load(size=2)
    (tmp_path / "p" / "cat" / "2.png").unlink()
    (tmp_path / "p" / "dog").mkdir()
    (tmp_path / "p" / "dog" / "1.heic").write_bytes(b"of no known kind")
    with pytest.raises(DataError, match=r"p/dog holds no images \(known kinds are .*\.png"):
        load()


def test_greys_of_16_bits_keep_their_range_and_hidden_files_are_passed_over(tmp_path):
    for kind, brightness in (("dark", 0x1000), ("light", 0xF000)):
        (tmp_path / kind).mkdir()
        for i in range(5):
            Image.fromarray(np.full((9, 9), brightness, np.uint16)).save(tmp_path / kind / f"{i}.png")
        (tmp_path / kind / "._0.png").write_bytes(b"what a file manager left")
    task = load_task(Choice(name="images", path=str(tmp_path), size=8, grey=True))
    assert task.label_names == ("dark", "light")
    assert sorted(set(task.train.inputs.flatten().tolist())) == [0x10, 0xF0]
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "dark" / "0.tiff")
    with pytest.raises(DataError, match=r"cannot read the image .*0\.tiff.*mode F.*are not of 8 or 16 bits"):
        load_task(Choice(name="images", path=str(tmp_path), size=8))
