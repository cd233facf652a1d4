"""Store URLs and sizes: what they mean, and that a mistake says what was expected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidArgumentError, UrlError
from headwater.stores.url import DEFAULT_URL, SCHEMES, StoreUrl, format_size, parse_size, parse_url


# ---- sizes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512MiB", 512 << 20),
        ("512 MiB", 512 << 20),
        (" 4 KiB ", 4096),
        ("2TiB", 2 << 40),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
        ("0.1GB", 100_000_000),
        ("3kb", 3000),
        ("3MB", 3_000_000),
        ("1TB", 10**12),
        ("8gib", 8 << 30),
        ("8GIB", 8 << 30),
        ("1000000", 1_000_000),
        ("7b", 7),
        ("0", 0),
        ("1.9", 1),
        ("99999999999999999999", 99999999999999999999),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "8G",
        "8 G iB",
        "8PiB",
        "-1",
        "+1",
        "1e3",
        "0x10",
        "1.",
        ".5GiB",
        "1,5GB",
        "1_000",
        "8GiBs",
        "nan",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UrlError, match="is not a size; write it like 8GiB, 512MiB or 1000000"):
        parse_size(text)


def test_a_size_of_absurd_length_is_refused_and_not_repeated() -> None:
    with pytest.raises(UrlError) as caught:
        parse_size("9" * 10_000)
    assert len(str(caught.value)) < 200


@given(st.integers(0, 2**60), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"]))
def test_a_whole_number_of_units_is_exact(number: int, unit: str) -> None:
    power, base = "KMGT".find(unit[:1]) + 1 if unit[:1] in "KMGT" and unit else 0, 1024 if "i" in unit else 1000
    assert parse_size(f"{number}{unit}") == number * base**power


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (8 << 30, "8.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


# ---- URLs -------------------------------------------------------------------------------------------------------
def test_a_url_is_taken_apart() -> None:
    url = parse_url("file:///var/lib/head%20water?capacity=200GiB&index=2GiB&policy=fifo&deadline=0.5")
    assert (url.scheme, url.path) == ("file", "/var/lib/head water")
    assert (url.size("capacity"), url.size("index"), url.size("segment")) == (200 << 30, 2 << 30, None)
    assert dict(url.options)["policy"] == "fifo"
    assert url.seconds("deadline", 1.0) == 0.5


@pytest.mark.parametrize(
    "text", ["memory://", "memory:///", "memory://?capacity=2GiB", "shm:///headwater", "file:///d"]
)
def test_urls_of_every_kind(text: str) -> None:
    url = parse_url(text)
    assert url.scheme in SCHEMES
    assert str(url) == text
    assert parse_url(str(url)) == url


def test_the_default_is_a_url() -> None:
    assert parse_url(DEFAULT_URL) == StoreUrl("shm", "/headwater")


def test_what_a_url_does_not_say_is_left_open() -> None:
    url = parse_url("shm:///x")
    assert (url.size("capacity"), url.seconds("deadline", 2.5)) == (None, 2.5)


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True),
    st.dictionaries(st.sampled_from(["capacity", "index", "segment"]), st.integers(1, 2**50).map(lambda n: f"{n}KiB")),
)
def test_a_url_reads_back_as_itself(name: str, options: dict[str, str]) -> None:
    url = parse_url("shm:///" + name + "?" + "&".join(f"{key}={value}" for key, value in options.items()))
    assert (url.path, dict(url.options)) == ("/" + name, options)
    assert parse_url(str(url)) == url


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "unknown store scheme ''"),
        ("headwater", "unknown store scheme ''"),
        ("/dev/shm/x", "unknown store scheme ''"),
        ("http://host/x", "unknown store scheme 'http' in 'http://host/x'; known are memory://, shm://, file://"),
        ("shm://headwater", "names a host; write three slashes, as in shm:///headwater"),
        ("file://var/lib", "names a host; write three slashes"),
        ("file://localhost/var", "names a host"),
        ("shm://[x", "is not a URL"),
        ("shm:///x#y", "has a fragment (#…)"),
        ("shm:///x?size=1GiB", "unknown option 'size'"),
        ("shm:///x?Capacity=1GiB", "unknown option 'Capacity'"),
        ("shm:///x?size=1", "known are capacity, index, segment, policy, deadline"),
        ("shm:///x?capacity=1GiB&capacity=1GiB", "option 'capacity' is given twice"),
        ("shm:///x?capacity=0", "option capacity in 'shm:///x?capacity=0' must be more than zero"),
        ("shm:///x?capacity=0.4", "option capacity in 'shm:///x?capacity=0.4' must be more than zero"),
        ("shm:///x?index=0KiB", "option index in"),
        ("shm:///x?segment=0", "option segment in"),
        ("shm:///x?capacity=", "'' is not a size"),
        ("shm:///x?capacity", "'' is not a size"),
        ("shm:///x?capacity=lots", "'lots' is not a size"),
        ("shm:///x?index=-1", "'-1' is not a size"),
        ("shm:///x?deadline=0", "option deadline='0' must be a positive number of seconds"),
        ("shm:///x?deadline=-1", "positive number of seconds"),
        ("shm:///x?deadline=nan", "positive number of seconds"),
        ("shm:///x?deadline=inf", "positive number of seconds"),
        ("shm:///x?deadline=soon", "positive number of seconds"),
        ("memory:///name", "memory:// has no path"),
        ("shm:///", "expected shm:///NAME, NAME being letters, digits, '.', '_' and '-'"),
        ("shm:", "expected shm:///NAME"),
        ("shm:///a/b", "expected shm:///NAME"),
        ("shm:///..", "expected shm:///NAME"),
        ("shm:///.hidden", "expected shm:///NAME"),
        ("shm:///a%2Fb", "expected shm:///NAME"),
        ("shm:///a b", "expected shm:///NAME"),
        ("shm:///größe", "expected shm:///NAME"),
        ("shm:///" + "x" * 129, "expected shm:///NAME"),
        ("file:///", "expected file:///absolute/directory"),
        ("file:", "expected file:///absolute/directory"),
        ("file:relative/path", "expected file:///absolute/directory"),
        ("shm:///x\0", "at most 4096 printable characters"),
        ("shm:///" + "x" * 4096, "at most 4096 printable characters"),
        (None, "a store URL is a string"),
        (b"shm:///x", "a store URL is a string"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_url_says_what_is_wrong(text: Any, fragment: str) -> None:
    with pytest.raises(UrlError) as caught:
        parse_url(text)
    assert fragment in str(caught.value)
    assert isinstance(caught.value, InvalidArgumentError)


def test_options_cannot_be_changed_afterwards() -> None:
    url = parse_url("shm:///x?capacity=1GiB")
    with pytest.raises(TypeError):
        url.options["capacity"] = "2GiB"  # type: ignore[index]


# ---- bugs that were ---------------------------------------------------------------------------------------------
def test_an_encoded_nul_in_a_path_is_refused() -> None:
    """Opening it was a ValueError of the operating system's."""
    with pytest.raises(UrlError, match="control characters in its path"):
        parse_url("file:///var/lib%00/x")


@pytest.mark.parametrize("text", ["file:////", "file:///.", "file:///x/.."])
def test_the_root_directory_is_refused_however_it_is_written(text: str) -> None:
    with pytest.raises(UrlError, match="expected file:///absolute/directory"):
        parse_url(text)


def test_a_line_end_in_a_name_is_refused() -> None:
    """urllib drops tabs and line ends, so that another store was opened than was named."""
    with pytest.raises(UrlError, match="printable characters"):
        parse_url("shm:///head\nwater")


@pytest.mark.parametrize(
    "text", ["file:///a%3Fb", "file:///a%23b", "file:///a%2541", "file:///a%20b", "file:///gr%C3%B6%C3%9Fe"]
)
def test_a_quoted_path_reads_back_as_itself(text: str) -> None:
    """str() did not quote."""
    url = parse_url(text)
    assert parse_url(str(url)) == url


@pytest.mark.parametrize("url", ["redis://u:SEC/RET@h/0", "redis://u:SEC@RET@h:x/0", "redis://u:SECRET@h:port/0"])
def test_what_is_wrong_is_said_without_the_password(url: str) -> None:
    with pytest.raises(UrlError) as caught:
        parse_url(url)
    assert "SEC" not in str(caught.value)
    assert "RET" not in str(caught.value)
