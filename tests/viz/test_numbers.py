"""How numbers are written: three significant digits, all digits before the point, one way for shares."""

from __future__ import annotations

import pytest

from viz.numbers import PLACE_DIGITS, percent, short, signed, signed_percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.272727, "0.273"),
        (33.25, "33.2"),
        (33.0, "33"),
        (999.6, "1000"),
        (12345.6, "12346"),
        (0.0, "0"),
        (2e-7, "2e-07"),
    ],
)
def test_an_amount_has_three_significant_digits_and_all_before_the_point(value: float, text: str) -> None:
    assert short(value) == text


def test_a_place_keeps_what_tells_it_from_its_neighbours() -> None:
    assert (short(12.3456, PLACE_DIGITS), short(123456.7, PLACE_DIGITS)) == ("12.3456", "123457")


@pytest.mark.parametrize(("share", "text"), [(3 / 11, "27.3 %"), (1.0, "100 %"), (0.0, "0 %"), (0.00123, "0.123 %")])
def test_a_share_is_written_one_way(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_difference_has_its_sign() -> None:
    assert [signed(value) for value in (1.5, -0.25, 0.0, 1234.5)] == ["+1.5", "-0.25", "0", "+1234"]
    assert signed_percent(-0.0512) == "-5.12 %"
