from tests.unit.engine.conftest import (  # noqa: F401  # fixtures
    _one_thread,
    heads,
    make_config,
    target,
)
