"""A run file: every mistake is named with key, value and remedy; what is printed reads back equal."""

import tomllib

import pytest

from coterie.core.choice import Choice
from coterie.core.errors import ConfigError
from coterie.core.run_config import RunConfig


def load(**overrides):
    return RunConfig.load(overrides={key.replace("__", "."): value for key, value in overrides.items()})


def test_printing_shows_defaults_and_reads_back_equal():
    config = load(strategy="trimmed_mean").resolve(num_clients=200)
    text = config.to_toml()
    assert RunConfig.from_dict(tomllib.loads(text)) == config
    for key in (
        "lr = 0.1",
        "batch_size = 10",
        "epochs = 5",
        "size = 20",
        "min_replies = 11",
        "deadline = inf",
        "f = 5",
    ):
        assert key in text


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('rounds = 3\n[simulation]\nclients = 9\npartition = "iid"\n')
    config = RunConfig.load(file, {"rounds": 5, "simulation.partition.alpha": 0.1, "task.name": "heart"})
    assert (config.rounds, config.simulation.clients) == (5, 9)
    assert config.simulation.partition == Choice(name="iid", alpha=0.1)
    assert config.task == Choice(name="heart")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cohort__sise": 3}, r"unknown key cohort\.sise = 3: did you mean 'size'\?"),
        ({"roundz": 3}, r"unknown key roundz = 3: did you mean 'rounds'\?"),
        ({"simulation__zzz": 1}, r"unknown key simulation\.zzz = 1: the keys here are clients, partition"),
        ({"rounds": "many"}, r"rounds = 'many': Input should be a valid integer"),
        ({"rounds": 0}, r"rounds = 0: Input should be greater than or equal to 1"),
        ({"local__lr": -1.0}, r"local\.lr = -1\.0: Input should be greater than 0"),
        ({"local__epochs": 2, "local__steps": 5}, r"local: epochs = 2 and steps = 5 contradict each other"),
        ({"strategy": "fedsgd"}, r"strategy = 'fedsgd': choose one of fedavg, fedprox, trimmed_mean"),
        ({"simulation__attackers": 0.2}, r"attackers = 0\.2 without an attack: set attack"),
        ({"simulation__attack": "sign_flip"}, r"attack = 'sign_flip' without attackers: set attackers"),
        ({"simulation__attackers": 1.5, "simulation__attack": "nan"}, r"attackers = 1\.5 is no share"),
        ({"rounds": 2**63}, r"rounds = 9223372036854775808: Input should be less than or equal to 1000000000"),
        ({"seed": 2**63}, r"seed = 9223372036854775808: Input should be less than"),
        ({"name": "\udc80"}, r"name = '\\udc80' holds bytes that are no text"),
        ({"cohort": 3}, r"cohort = 3: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_key_is_named_with_its_value_and_what_would_be_right(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(**overrides)


def test_a_broken_file_is_named(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        RunConfig.load(file)
    for text in ("rounds = " + "9" * 5000, "name = " + "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
            RunConfig.load(file)
    with pytest.raises(ConfigError, match=r"cannot read the run file .*absent\.toml: No such file"):
        RunConfig.load(tmp_path / "absent.toml")


def test_a_cohort_larger_than_the_clients_is_refused():
    with pytest.raises(
        ConfigError, match=r"cohort\.size = 30 is more than the 10 clients there are: lower cohort\.size or raise"
    ):
        load(cohort__size=30).resolve(num_clients=10)


def test_the_default_cohort_is_everyone_when_there_are_few():
    assert load().resolve(num_clients=4).cohort.size == 4
    assert load().resolve(num_clients=400).cohort.size == 20


def test_a_strategy_fills_only_what_is_not_set():
    config = load(strategy="fedprox", aggregator={"name": "trimmed_mean", "f": 3}).resolve(20)
    assert config.local.algorithm == Choice(name="fedprox")
    assert config.aggregator == Choice(name="trimmed_mean", f=3)
    assert config.server_optimizer == Choice(name="sgd")


def test_the_quorum_covers_what_the_trimmed_mean_needs():
    config = load(aggregator={"name": "trimmed_mean", "f": 8}).resolve(20)
    assert config.cohort.min_replies == 17


def test_a_quorum_above_the_cohort_is_refused():
    with pytest.raises(ConfigError, match=r"cohort\.min_replies = 6 is more than cohort\.size = 5"):
        load(cohort__size=5, cohort__min_replies=6).resolve(10)


def test_resolving_twice_changes_nothing():
    once = load(strategy="trimmed_mean").resolve(50)
    assert once.resolve(50) == once


def test_options_without_a_name_belong_to_the_strategys_choice():
    config = load(strategy="fedprox", local__algorithm__mu=0.5, local__optimizer__momentum=0.9)
    assert config.local.algorithm == Choice(name="fedprox", mu=0.5)
    assert config.local.optimizer == Choice(name="sgd", momentum=0.9)
    assert load(strategy="trimmed_mean", aggregator__f=2).aggregator == Choice(name="trimmed_mean", f=2)


def test_another_strategy_over_a_complete_file_takes_its_choices_with_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(load(strategy="trimmed_mean", local__lr=0.3).resolve(50).to_toml())
    other = RunConfig.load(file, {"strategy": "fedprox", "server_optimizer.momentum": 0.5}).resolve(50)
    assert other.local.algorithm == Choice(name="fedprox")
    assert other.aggregator == Choice(name="mean")
    assert other.server_optimizer == Choice(name="sgd", momentum=0.5)
    assert other.local.lr == 0.3
    assert RunConfig.load(file, {"strategy": "trimmed_mean"}).aggregator == Choice(name="trimmed_mean", f=5)


def test_a_file_without_a_strategy_keeps_its_choices(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('aggregator = { name = "trimmed_mean", f = 2 }')
    assert RunConfig.load(file).aggregator == Choice(name="trimmed_mean", f=2)
    assert RunConfig.load(file, {"rounds": 3}).aggregator == Choice(name="trimmed_mean", f=2)
    assert RunConfig.load(file, {"strategy": "fedavg"}).aggregator == Choice(name="trimmed_mean", f=2)
