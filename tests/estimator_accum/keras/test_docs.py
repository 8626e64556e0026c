"""The Keras example of docs/ runs as printed."""

from tests.helpers import documents
from tests.helpers.keras_kinds import dense_data


def test_the_lines_of_the_page_train(kind):
    (code,) = documents.blocks(documents.PAGES["keras"], "python")
    x, y = dense_data(40)
    names = {"keras": kind.keras, "model": kind.dense_model(), "x": x, "y": y}
    exec(code, names)  # noqa: S102, the page is this project's own
    assert int(names["optimizer"].iterations.numpy()) == 2
    assert int(names["optimizer"].micro_steps.numpy()) == 0
