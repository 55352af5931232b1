"""The configuration: origins of values, error messages, and masked passwords."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.config import units
from penstock.config.files import OPTIONS, Config, Loaded, load, show
from penstock.config.schema import BY_PATH
from penstock.errors import CONFIGURATION, ConfigError
from penstock.rules.masking import mask

TOML_VALUES = st.recursive(
    st.text(max_size=20) | st.integers() | st.floats() | st.booleans() | st.datetimes(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def loaded(
    cwd: Path,
    *,
    toml: str = "",
    env: Mapping[str, str] | None = None,
    cli: Mapping[str, str] | None = None,
) -> Loaded:
    if toml:
        (cwd / "penstock.toml").write_text(toml, "utf-8")
    return load(cli or {}, env or {}, cwd)


def refused(cwd: Path, **given: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(cwd, **given)
    assert caught.value.hint
    assert caught.value.exit_code == CONFIGURATION
    return caught.value


# -- where values come from ------------------------------------------------------------------------


def test_without_settings_every_option_has_its_documented_default(tmp_path: Path) -> None:
    config = loaded(tmp_path).config
    assert config.state.dir == tmp_path / ".penstock"
    assert (
        config.broker.url
        == config.ledger.url
        == config.claims.url
        == f"sqlite:{tmp_path}/.penstock/penstock.db"
    )
    assert config.pages.url == f"file:{tmp_path}/.penstock/pages"
    assert (config.lease, config.grace, config.durability, config.robots) == (
        30,
        25,
        "full",
        "obey",
    )
    assert (config.retry.base, config.retry.max, config.retry.budget) == (10, 900, 3)
    assert (config.dedup.window, config.dedup.settle, config.dedup.mode) == (60, 2, "delay")
    assert (config.follow.window, config.follow.depth, config.follow.same_domain) == (
        86400,
        10,
        True,
    )
    assert (
        config.breaker.dead_share,
        config.breaker.min,
        config.breaker.window,
        config.breaker.alert,
    ) == (0.2, 50, 60, 0.02)
    assert (config.fetch.concurrency, config.fetch.prefetch, config.fetch.bytes) == (
        256,
        1024,
        64 * 2**20,
    )
    assert (config.pace.rate, config.intake.max_pending, config.output.unchanged) == (
        1,
        10_000_000,
        "skip",
    )


def test_the_command_line_overrides_the_environment_which_overrides_the_file(
    tmp_path: Path,
) -> None:
    toml = 'lease = "1m"\ngrace = "1m"\nrobots = "ignore"'
    found = loaded(
        tmp_path,
        toml=toml,
        env={"PENSTOCK_LEASE": "2m", "PENSTOCK_GRACE": "2m"},
        cli={"lease": "3m"},
    )
    assert (found.config.lease, found.config.grace, found.config.robots) == (180, 120, "ignore")
    assert [found.origins[path] for path in ("lease", "grace", "robots", "retry.base")] == [
        "command line",
        "PENSTOCK_GRACE",
        "penstock.toml",
        "default",
    ]


def test_every_option_can_be_set_in_all_three_places_and_shows_its_origin(tmp_path: Path) -> None:
    for option in OPTIONS:
        quoted = f'"{option.example}"' if option.kind.quoted else option.example
        places: list[tuple[str, dict[str, Any]]] = [
            ("penstock.toml", {"toml": f"{option.path} = {quoted}"}),
            ("command line", {"cli": {option.path: option.example}}),
            *((variable, {"env": {variable: option.example}}) for variable in option.variables),
        ]
        for origin, place in places:
            (tmp_path / "penstock.toml").unlink(missing_ok=True)
            found = {row.path: row for row in show(loaded(tmp_path, **place))}
            assert found[option.path].origin == origin
            assert found[option.path].value


def test_shown_values_can_be_set_again_and_give_the_same_configuration(tmp_path: Path) -> None:
    before = loaded(
        tmp_path,
        env={
            "PENSTOCK_PACE_RATE": "30/m",
            "PENSTOCK_NET_ALLOW": "127.0.0.1:8000",
            "PENSTOCK_RETRY_BASE": "1500ms",
        },
    )
    after = loaded(tmp_path, cli={row.path: row.value for row in show(before) if row.value})
    assert after.config == before.config


def test_every_option_has_a_line_of_help_and_a_unique_variable() -> None:
    variables = [variable for option in OPTIONS for variable in option.variables]
    assert len(set(variables)) == len(variables)
    assert all(option.help and "\n" not in option.help and option.example for option in OPTIONS)
    assert BY_PATH["net.timeout.first_byte"].env == "PENSTOCK_NET_TIMEOUT_FIRST_BYTE"
    assert BY_PATH["state.dir"].variables == ("PENSTOCK_STATE_DIR", "PENSTOCK_STATE")


def test_every_value_is_of_the_type_its_field_declares(tmp_path: Path) -> None:
    for option in OPTIONS:
        config = loaded(tmp_path, cli={option.path: option.example}).config
        assert (
            msgspec.convert(
                msgspec.to_builtins(config, enc_hook=str),
                Config,
                dec_hook=lambda kind, value: kind(value),
            )
            == config
        )


def test_a_file_named_by_option_or_variable_replaces_penstock_toml(
    tmp_path: Path,
) -> None:
    (tmp_path / "other.toml").write_text('lease = "5m"')
    for place in ({"cli": {"config": "other.toml"}}, {"env": {"PENSTOCK_CONFIG": "other.toml"}}):
        found = loaded(tmp_path, toml='grace = "1m"', **place)
        assert (found.config.lease, found.config.grace, found.file) == (
            300,
            25,
            tmp_path / "other.toml",
        )


def test_a_file_in_a_parent_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('lease = "5m"')
    (tmp_path / "inner").mkdir()
    assert loaded(tmp_path / "inner").config.lease == 30


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    assert (
        loaded(tmp_path, env={"PENSTOCK_LEASE": "", "PENSTOCK_NO_SUCH_THING": ""}).config.lease
        == 30
    )


def test_relative_stores_follow_the_working_directory_and_the_state_directory(
    tmp_path: Path,
) -> None:
    config = loaded(
        tmp_path,
        env={
            "PENSTOCK_STATE": "state",
            "PENSTOCK_LEDGER_URL": "sqlite:./ledger.db",
            "PENSTOCK_CLAIMS_URL": "redis://host/1",
        },
    ).config
    assert config.broker.url == f"sqlite:{tmp_path}/state/penstock.db"
    assert config.ledger.url == f"sqlite:{tmp_path}/ledger.db"
    assert config.claims.url == "redis://host/1"
    assert (
        loaded(tmp_path, cli={"ledger.url": "sqlite::memory:"}).config.ledger.url
        == "sqlite::memory:"
    )


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        loaded(tmp_path).config.fetch.concurrency = 1  # type: ignore[misc]


# -- secrets ---------------------------------------------------------------------------------------


def test_a_dsn_can_come_from_a_file_without_its_last_newline(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("amqp://me:hunter2@host/\n")
    found = loaded(tmp_path, env={"PENSTOCK_BROKER_URL_FILE": "dsn"})
    assert found.config.broker.url == "amqp://me:hunter2@host/"
    assert found.origins["broker.url"] == "PENSTOCK_BROKER_URL_FILE"


def test_a_variable_and_its_file_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("amqp://host/")
    error = refused(
        tmp_path, env={"PENSTOCK_BROKER_URL_FILE": "dsn", "PENSTOCK_BROKER_URL": "amqp://host/"}
    )
    assert "PENSTOCK_BROKER_URL_FILE" in error.message
    assert "PENSTOCK_BROKER_URL " in error.message


def test_the_error_of_a_missing_or_invalid_secret_file_names_the_variable(tmp_path: Path) -> None:
    assert (
        "PENSTOCK_BROKER_URL_FILE"
        in refused(tmp_path, env={"PENSTOCK_BROKER_URL_FILE": "nowhere"}).message
    )
    (tmp_path / "dsn").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(tmp_path, env={"PENSTOCK_BROKER_URL_FILE": "dsn"}).message


def test_only_secrets_can_be_read_from_a_file(tmp_path: Path) -> None:
    assert "PENSTOCK_LEASE_FILE" in refused(tmp_path, env={"PENSTOCK_LEASE_FILE": "dsn"}).message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://me:hunter2@host/vhost", "amqp://me:***@host/vhost"),
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("amqp://me:hun/t?e@r2@host/", "amqp://me:***@host/"),
        (
            "postgres://me@host/db?password=hunter2&sslmode=require",
            "postgres://me@host/db?password=***&sslmode=require",
        ),
        ("kafka://host?sasl.password=hunter2&acks=all", "kafka://host?sasl.password=***&acks=all"),
        ("sqs://KEY:hunter2@eu-west-1", "sqs://KEY:***@eu-west-1"),
        ("postgres:host=db password=hunter2 user=me", "postgres:host=db password=*** user=me"),
        ("sqlite:/data/a@b.db", "sqlite:/data/a@b.db"),
    ],
)
def test_passwords_are_masked_when_the_configuration_is_shown(
    url: str, shown: str, tmp_path: Path
) -> None:
    assert mask(url) == shown
    rows = {row.path: row.value for row in show(loaded(tmp_path, env={"PENSTOCK_BROKER_URL": url}))}
    assert rows["broker.url"] == shown


@given(st.text(st.characters(exclude_characters="*"), min_size=1))
def test_masking_removes_any_password(password: str) -> None:
    assert mask(f"amqp://me:{password}@host/") == "amqp://me:***@host/"


def test_an_error_about_a_dsn_does_not_contain_it(tmp_path: Path) -> None:
    error = refused(tmp_path, env={"PENSTOCK_BROKER_URL": "me:hunter2 at host\n"})
    assert "PENSTOCK_BROKER_URL" in error.message
    assert "hunter2" not in error.message + error.hint


# -- errors ----------------------------------------------------------------------------------------


def test_a_wrong_type_names_the_path_and_gives_an_example(tmp_path: Path) -> None:
    error = refused(tmp_path, toml='[fetch]\nconcurrency = "many"')
    assert (
        error.message
        == 'fetch.concurrency: expected a whole number above 0 and at most 10000, got "many"'
    )
    assert error.hint == "concurrency = 256"


def test_an_invalid_variable_is_named_with_its_option(tmp_path: Path) -> None:
    error = refused(tmp_path, env={"PENSTOCK_LEASE": "soon"})
    assert error.message.startswith(
        "lease (PENSTOCK_LEASE): expected a duration of at least 1s and at most 12h (500ms, 30s, "
        '5m, 1h, 2d), got "soon"'
    )
    assert error.hint == "PENSTOCK_LEASE=30s"


@pytest.mark.parametrize(
    ("toml", "message", "hint"),
    [
        (
            "[fetch]\nconcurency = 3",
            "fetch.concurency: there is no such option",
            "did you mean fetch.concurrency?",
        ),
        ("max_body = 3", "max_body: there is no such option", "did you mean net.max_body?"),
        ("[fetc]\nconcurrency = 3", "fetc: there is no such option", "did you mean fetch"),
        (
            "[net.timeout]\nconect = 3",
            "net.timeout.conect: there is no such option",
            "did you mean net.timeout.connect?",
        ),
        ("fetch = 3", "fetch: is a section", "[fetch] concurrency = 256"),
        ('[pipeline]\nname = "shop"', "pipeline: expected a path", 'pipeline = "shop.py"'),
        ("xyzzy = 1", "xyzzy: there is no such option", "penstock config show"),
        ("lease = ", "penstock.toml: is not valid TOML", 'lease = "30s"'),
        ("lease = true", "lease: expected a duration", 'lease = "30s"'),
        ("lease = nan", "lease: expected a duration", 'lease = "30s"'),
        (
            "[fetch]\nconcurrency = 0",
            "fetch.concurrency: expected a whole number above 0",
            "concurrency = 256",
        ),
        (
            "[fetch]\nconcurrency = true",
            "fetch.concurrency: expected a whole number above 0",
            "concurrency = 256",
        ),
        (
            "[breaker]\ndead_share = 20",
            "breaker.dead_share: expected a share between 0 and 1, got 20",
            "dead_share = 0.2",
        ),
        (
            '[net]\nports = [80, "web"]',
            "net.ports: expected port numbers",
            'ports = "80,443,8080,8443"',
        ),
        (
            '[net]\nuser_agent = "a\\r\\nHost: b"',
            "net.user_agent: expected printable ASCII",
            "user_agent =",
        ),
        (
            '[pages]\ninline_max = "1MiB"',
            'pages.inline_max: expected a size of at most 512KiB (0, 512KiB), got "1MiB"',
            'inline_max = "0B"',
        ),
        ('robots = "obay"', 'robots: expected "obey" or "ignore", got "obay"', 'robots = "obey"'),
        (
            '[retry]\nbase = "1h"',
            (
                "retry.base: the first back-off is longer than the longest (retry.base = 1h, "
                "retry.max = 15m)"
            ),
            "set retry.max as well",
        ),
        (
            "[fetch]\nconcurrency = 10\nprefetch = 5",
            "fetch.concurrency: a worker cannot have more requests in flight than it holds events",
            "raise fetch.prefetch",
        ),
    ],
)
def test_each_mistake_in_the_file_is_named_with_a_hint(
    toml: str, message: str, hint: str, tmp_path: Path
) -> None:
    error = refused(tmp_path, toml=toml)
    assert message in error.message
    assert hint in error.hint


def test_a_default_is_lowered_to_a_smaller_limit_that_was_set(tmp_path: Path) -> None:
    config = loaded(
        tmp_path, cli={"net.timeout.total": "5s", "fetch.prefetch": "8", "retry.max": "2s"}
    ).config
    assert (
        config.net.timeout.connect,
        config.net.timeout.first_byte,
        config.fetch.concurrency,
        config.retry.base,
    ) == (5, 5, 8, 2)


def test_an_unknown_variable_or_option_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    assert (
        refused(tmp_path, env={"PENSTOCK_FETCH_CONCURENCY": "3"}).hint
        == "did you mean PENSTOCK_FETCH_CONCURRENCY?"
    )
    assert (
        refused(tmp_path, env={"PENSTOCK_BROKER_URL_FIL": "3"}).hint
        == "did you mean PENSTOCK_BROKER_URL_FILE?"
    )
    assert refused(tmp_path, cli={"retry.bas": "3"}).hint == "did you mean retry.base?"


def test_an_invalid_value_is_refused_even_if_a_valid_one_overrides_it(tmp_path: Path) -> None:
    assert "lease" in refused(tmp_path, toml='lease = "soon"', cli={"lease": "30s"}).message


def test_variables_of_kubernetes_and_of_the_dev_script_are_ignored(tmp_path: Path) -> None:
    service = {
        "PENSTOCK_PORT": "tcp://10.0.0.1:80",
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    other = {
        "PENSTOCK_REDIS_SERVICE_PORT_TLS": "6379",
        "PENSTOCK_VENV": "x",
        "HOME": "/",
        "penstock_x": "1",
    }
    assert loaded(tmp_path, env={**service, **other}).config == loaded(tmp_path).config


def test_a_missing_or_binary_file_or_a_directory_is_an_error_with_its_name(
    tmp_path: Path,
) -> None:
    assert (
        "nowhere.toml: there is no such file"
        in refused(tmp_path, cli={"config": "nowhere.toml"}).message
    )
    (tmp_path / "binary.toml").write_bytes(b"\x00\xff")
    assert "binary.toml: is not UTF-8" in refused(tmp_path, cli={"config": "binary.toml"}).message
    (tmp_path / "penstock.toml").mkdir()
    assert "penstock.toml: cannot be read" in refused(tmp_path).message


@given(st.sampled_from([option.kind for option in OPTIONS]), TOML_VALUES)
@example(units.RATE, 5e-5)
@example(units.RATE, 5.65138e-99)
@example(units.durations(), 5e-05)
@example(units.durations(), 1234567.89)
def test_any_value_is_refused_or_can_be_written_and_read_again(
    kind: units.Kind, value: object
) -> None:
    try:
        found = kind.read(value)
    except (ValueError, OverflowError):
        return
    again = kind.read(kind.write(found)) if found != () else found
    # Fractions of a microsecond are not written.
    assert again == found or math.isclose(again, found, rel_tol=1e-5, abs_tol=1e-6)


# -- units -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("500ms", 0.5),
        ("5m", 300),
        ("1h", 3600),
        ("2d", 172800),
        ("1h30m", 5400),
        ("1.5 h", 5400),
        ("0", 0),
        (7, 7),
        ("7", 7),
        (0.5, 0.5),
    ],
)
def test_durations_are_read_in_seconds(text: object, seconds: float) -> None:
    assert units.duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "30 parsecs",
        "-5s",
        "5s-",
        "1e9d",
        "1,5s",
        True,
        None,
        [],
        math.inf,
        math.nan,
        "٣s",
        "9" * 400,
    ],
)
def test_an_invalid_duration_is_refused(text: object) -> None:
    with pytest.raises((ValueError, OverflowError)):
        units.duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64MiB", 64 * 2**20),
        ("10 GiB", 10 * 2**30),
        ("1kB", 1000),
        ("1.5KiB", 1536),
        ("7", 7),
        (7, 7),
        ("7B", 7),
    ],
)
def test_sizes_are_read_in_bytes(text: object, count: int) -> None:
    assert units.size(text) == count


@pytest.mark.parametrize("text", ["64Mib", "64iB", "-1", "lots", 1.5, True, ""])
def test_an_invalid_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        units.size(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1", 1), (2, 2), ("0.1", 0.1), ("30/m", 0.5), ("3600/h", 1), ("unlimited", math.inf)],
)
def test_rates_are_read_in_requests_per_second(text: object, rate: float) -> None:
    assert units.rate(text) == rate


@pytest.mark.parametrize("text", ["0", 0, -1, "1/fortnight", "/m", "1/", "inf", "fast"])
def test_an_invalid_rate_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        units.rate(text)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:8000",
        "127.0.0.1:*",
        "[::1]:8000",
        "[fd00::/8]:80",
        "10.0.0.0/8:80",
        "shop.internal:80",
        "localhost:8000",
    ],
)
def test_a_private_target_is_an_address_a_network_or_a_name_with_its_port(text: str) -> None:
    assert units.TARGETS.read(text) == (text,)
    assert units.TARGETS.read([text]) == (text,)


@pytest.mark.parametrize(
    "text",
    [
        "127.1:80",
        "0x7f.1:80",
        "127.0.0.1",
        "::1",
        "::1:80",
        "[::1%lo]:80",
        "[shop]:80",
        "127.0.0.1:0",
        "127.0.0.1:70000",
        "10.0.0.1/8:80",
        "http://a:80",
        "a b:80",
        "*:80",
        5,
        [5],
    ],
)
def test_an_ambiguous_or_invalid_target_is_refused(text: object) -> None:
    with pytest.raises(ValueError):
        units.TARGETS.read(text)
