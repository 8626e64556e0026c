"""The page of all functions agrees with the analysis of rows."""

import pytest

from tests.helpers.oracles import split_table


@pytest.mark.parametrize(
    "places", [split_table.places_of_functions, split_table.places_of_layers]
)
def test_every_name_has_its_place_on_the_page(places):
    page = split_table.read(split_table.PAGE.read_text())
    for section, answers in places().items():
        of_page = {name: page[section].get(name) for name in answers}
        assert of_page == answers, f"type python -m {split_table.__name__}"
