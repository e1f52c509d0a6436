from pathlib import Path

import pytest
from starts import compile_something, start


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A root with one whole entry that nobody is using."""
    root = tmp_path / "compiled"
    cache, environ = start(root)
    compile_something(environ)
    cache.publish()
    cache.close()
    return root
