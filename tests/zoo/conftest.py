"""What is marked `zoo` runs in `make zoo` only (pytest --zoo): the whole field where other tests take a part of it."""


def pytest_addoption(parser):
    parser.addoption("--zoo", action="store_true", help="run the tests of the whole conformance field too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--zoo", default=False):
        return
    whole = [item for item in items if item.get_closest_marker("zoo")]
    if whole:
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if item not in whole]
