"""Options of URLs and pipelines: unknown names, unreadable values and `env:` references."""

from __future__ import annotations

import pytest

from penstock.config import units
from penstock.config.options import query_options, read_options, resolve_env, suggest
from penstock.errors import ConfigError

KNOWN = {"region": units.texts(".+", "a region"), "poll": units.counts(1, 20)}
SECRETS = {"password": units.texts("[a-z]+", "letters"), "key_password": units.counts(1)}


def test_an_unknown_option_is_an_error_with_the_closest_name_or_all_names() -> None:
    with pytest.raises(ConfigError, match=r"sqs://: there is no option 'regoin'") as e:
        read_options("sqs://", query_options("poll=3&regoin=x"), KNOWN)
    assert e.value.hint == "did you mean region?"
    with pytest.raises(ConfigError) as e:
        read_options("sqs://", {"zzz": "1"}, KNOWN, unchecked=("x.",))
    assert e.value.hint == "options: region, poll, x.NAME"


def test_options_with_an_unchecked_prefix_are_returned_unchanged() -> None:
    given = query_options("poll=3&x.any=thing&poll=4")
    assert read_options("sqs://", given, KNOWN, unchecked=("x.",)) == {"poll": 4, "x.any": "thing"}


@pytest.mark.parametrize("name", SECRETS)
def test_an_invalid_value_is_shown_unless_it_is_a_password(name: str) -> None:
    with pytest.raises(ConfigError, match=r"poll is '21'") as e:
        read_options("sqs://", {"poll": "21"}, KNOWN)
    assert e.value.hint == "use a whole number above 0 and at most 20"
    with pytest.raises(ConfigError, match=rf"{name} is not valid") as e:
        read_options("sqs://", {name: "hunter2"}, SECRETS)
    assert "hunter2" not in e.value.message + e.value.hint


def test_a_reference_to_a_variable_is_replaced_and_an_unset_variable_is_an_error() -> None:
    environment = {"TOKEN": "abc", "EMPTY": ""}
    assert resolve_env("source a: password", "env:TOKEN", environment) == "abc"
    assert resolve_env("source a: password", "plain", environment) == "plain"
    for variable in ("EMPTY", "UNSET"):
        expected = f"source a: password uses the variable {variable}, which is not set"
        with pytest.raises(ConfigError, match=expected) as e:
            resolve_env("source a: password", f"env:{variable}", environment)
        assert e.value.hint == f"export {variable}=…"


def test_a_suggestion_needs_a_similar_name() -> None:
    assert suggest("statsu", ["status", "run"], command="penstock ") == (
        "did you mean penstock status?"
    )
    assert suggest("xyz", ["status"], "see --help") == "see --help"
