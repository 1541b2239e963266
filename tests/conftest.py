"""Fixtures that several test files share."""

import pytest

from treepass.models import LoadedModel, load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def default_model() -> LoadedModel:
    """The default model in float32. Without its wheel this fails and says how to install it: it never skips."""
    return load(dtype="float32", device="cpu")
