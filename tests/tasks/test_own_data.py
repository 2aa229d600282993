"""Own records without code: tables, arrays and image folders train; every mistake names the file, the column and the
row."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from coterie.core.choice import Choice
from coterie.core.errors import CoterieError, DataError
from coterie.core.run_config import RunConfig
from coterie.simulations import simulate
from coterie.tasks import load_task
from coterie.tasks.own_data import encode_labels


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
    result = simulate(RunConfig.load(overrides={"task": task, "rounds": 10}), home)
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
        ({}, {"test_fraction": 1.5}, r"task\.test_fraction = 1\.5: it must lie between 0 and 1"),
        ({}, {"scale": {"age": [1, 0]}, "features": ["age"]}, r"scale = \[1\.0, 0\.0\]: write \[centre, width\]"),
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
        ("sheet.xlsx", b"", r"sheet\.xlsx: tables are read from \.csv, \.tsv or \.parquet"),
    ],
)
def test_files_that_are_no_table_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        table_task(str(tmp_path / name))


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
        ({"x": np.array([[0.0], [np.nan], [0], [0]]), "y": [0, 1, 0, 1]}, {}, "array 'x' is not finite in row 1"),
        ({"x": np.array(["a", "b", "c", "d"]), "y": [0, 1, 0, 1]}, {}, "inputs must be numbers"),
        ({"x": np.zeros((4, 2)), "y": np.zeros((4, 2))}, {}, r"array 'y' has shape \[4, 2\]"),
        ({"x": np.array([{}, {}, {}, {}]), "y": [0, 1, 0, 1]}, {}, "cannot read .*allow_pickle"),
    ],
)
def test_mistakes_in_arrays_are_named(tmp_path, arrays, options, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_task(Choice(name="arrays", path=str(tmp_path / "a.npz"), **options))


def paint(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (value, 255 - value, 0)).save(path)


def test_folders_of_images_train_with_batch_norm_and_folders_as_clients(tmp_path, home):
    for client in ("north", "south"):
        for i in range(12):
            paint(tmp_path / "p" / client / "red" / f"{i}.png", 255 - i)
            paint(tmp_path / "p" / client / "green" / f"{i}.jpg", i)
    task = {"name": "images", "path": str(tmp_path / "p"), "clients": True, "size": 8, "batch_norm": True}
    result = simulate(RunConfig.load(overrides={"task": task, "rounds": 4}), home)
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
